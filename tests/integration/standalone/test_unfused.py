# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own unfused ops, forward and backward on the CPU, against float64."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.integration.standalone import naive

HIDDEN, FFN = 128, 64
SPLITS = [128, 0, 256]
LIVE = sum(SPLITS)
INTERLEAVE = 32
# Relative error (Frobenius) that the number format alone explains.
BOUNDS = {"mxfp8": 0.1, torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 2e-6}


# TE says so of features that are tested here on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:GroupedLinear is using single_grouped:UserWarning"),
    pytest.mark.filterwarnings("ignore:Quantizer is being updated:UserWarning"),
]


@pytest.fixture(autouse=True)
def _unfused(monkeypatch):
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0")
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")


def recipe():
    from transformer_engine.common.recipe import MXFP8BlockScaling

    return MXFP8BlockScaling()


def make_mlp(te, activation, dtype, bias=False, scale_bias=False, quantized=False, **options):
    """Return the three ops in a Sequential, seeded, built without naming a device."""
    torch.manual_seed(0)
    width = 2 * FFN if activation == "swiglu" else FFN
    context = te.quantized_model_init(recipe=recipe()) if quantized else contextlib.nullcontext()
    groups = len(SPLITS)
    options = {"bias": bias, "dtype": dtype, **options}
    with context:
        fc1 = te.ops.GroupedLinear(groups, HIDDEN, width, **options)
        fc2 = te.ops.GroupedLinear(groups, FFN, HIDDEN, scale_bias=scale_bias, **options)
    act = (
        te.ops.ScaledSwiGLU(glu_interleave_size=INTERLEAVE)
        if activation == "swiglu"
        else te.ops.ScaledSReLU()
    )
    with torch.no_grad():
        for op in (fc1, fc2):
            for parameter in biases_of(op):
                parameter.normal_()
    return te.ops.Sequential(fc1, act, fc2)


def weights_of(op):
    """Return the weights of a GroupedLinear, one for each group; quantized ones stay quantized."""
    if op.single_grouped_weight:
        members = op.weight.split_into_quantized_tensors()
    else:
        members = [getattr(op, f"weight{index}") for index in range(op.num_groups)]
    return members


def biases_of(op):
    if not op.has_bias:
        return []
    return [getattr(op, f"bias{index}") for index in range(op.num_groups)]


def make_inputs(dtype, tail=128):
    generator = torch.Generator().manual_seed(1)
    rows = LIVE + tail
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    probs = torch.rand(rows, generator=generator).to(dtype)
    dy = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    return x, probs, dy


def plain_weights(op):
    weights = []
    for member in weights_of(op):
        value = member.dequantize() if hasattr(member, "_rowwise_data") else member
        weights.append(value.detach().double().clone().requires_grad_())
    return weights


def reference(mlp, x, probs, dy):
    """Return y and every gradient of the live rows, by float64 autograd of the naive formula."""
    fc1, act, fc2 = mlp
    x = x[:LIVE].double().requires_grad_()
    p = probs[:LIVE].double().requires_grad_()
    w1, w2 = plain_weights(fc1), plain_weights(fc2)
    b1 = [b.detach().double().requires_grad_() for b in biases_of(fc1)]
    b2 = [b.detach().double().requires_grad_() for b in biases_of(fc2)]
    hidden = naive.grouped_linear(x, w1, SPLITS, b1 or None)
    is_glu = hasattr(act, "glu_interleave_size")
    middle = naive.swiglu(hidden, p, INTERLEAVE) if is_glu else naive.srelu(hidden, p)
    scale = p if fc2._scale_bias else None
    y = naive.grouped_linear(middle, w2, SPLITS, b2 or None, scale)
    y.backward(dy[:LIVE].double())
    zero = torch.zeros_like
    grads = {"dx": x.grad, "dp": p.grad}
    for name, tensors in (("w1", w1), ("w2", w2), ("b1", b1), ("b2", b2)):
        for index, tensor in enumerate(tensors):
            grads[f"{name}.{index}"] = zero(tensor) if tensor.grad is None else tensor.grad
    return y.detach(), grads


def run(te, mlp, x, probs, dy, mxfp8, splits=None):
    """Return y and every gradient as the ops give them."""
    splits = torch.tensor(SPLITS) if splits is None else splits
    x = x.clone().requires_grad_() if type(x) is torch.Tensor else x
    probs = probs.clone().requires_grad_()
    extra = (splits, probs) if mlp[2]._scale_bias else (splits,)
    with te.autocast(enabled=mxfp8, recipe=recipe()):
        y = mlp(x, splits, probs, *extra)
    y.backward(dy)
    return y.detach(), x, probs


def collect(mlp, x, probs, weight_grads=None):
    grads = {"dx": x.grad[:LIVE], "dp": probs.grad[:LIVE]}
    for name, op in (("1", mlp[0]), ("2", mlp[2])):
        if op.single_grouped_weight:
            weights = list(op.weight.grad)
        else:
            weights = [getattr(op, f"weight{i}").grad for i in range(op.num_groups)]
        for index, grad in enumerate(weight_grads[name] if weight_grads else weights):
            grads[f"w{name}.{index}"] = grad
        for index, bias in enumerate(biases_of(op)):
            grads[f"b{name}.{index}"] = bias.grad
    return grads


def assert_close(got, expected, bound):
    got = got.double()
    assert bool(torch.isfinite(got).all())
    error = (got - expected).norm() / expected.norm().clamp_min(1e-30)
    assert float(error) <= bound, f"relative error {float(error):.3g}, allowed {bound}"


def check(te, mlp, dtype, mxfp8, probs_dtype=None):
    x, probs, dy = make_inputs(dtype)
    probs = probs.to(probs_dtype or dtype)
    x[LIVE:], dy[LIVE:] = float("nan"), float("nan")
    if not mlp[0].num_groups or dtype == torch.float32:
        x, probs, dy = x[:LIVE], probs[:LIVE], dy[:LIVE]  # fp32 has no path for padded buffers
    expected_y, expected = reference(mlp, x, probs, dy)
    y, x, probs = run(te, mlp, x, probs, dy, mxfp8)
    bound = BOUNDS["mxfp8" if mxfp8 else dtype]
    assert_close(y[:LIVE], expected_y, bound)
    got = collect(mlp, x, probs)
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert_close(grad, expected[name], bound)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("bias", ["none", "plain", "scaled"])
@pytest.mark.parametrize("mxfp8", [True, False], ids=["mxfp8", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_forward_and_backward(te, activation, bias, mxfp8, dtype):
    mlp = make_mlp(te, activation, dtype, bias != "none", bias == "scaled")
    check(te, mlp, dtype, mxfp8)


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16-weights", "mxfp8-weights"])
@pytest.mark.parametrize("single", [False, True], ids=["discrete", "grouped"])
@pytest.mark.parametrize("mxfp8", [True, False], ids=["mxfp8", "plain"])
def test_weight_forms(te, quantized, single, mxfp8):
    mlp = make_mlp(te, "swiglu", torch.bfloat16, quantized=quantized, single_grouped_weight=single)
    check(te, mlp, torch.bfloat16, mxfp8)


def test_fp32_probabilities(te):
    mlp = make_mlp(te, "srelu", torch.bfloat16)
    check(te, mlp, torch.bfloat16, True, torch.float32)


@pytest.mark.parametrize("mxfp8", [True, False], ids=["mxfp8", "plain"])
@pytest.mark.parametrize("single", [False, True], ids=["discrete", "grouped"])
def test_main_grad_accumulates(te, mxfp8, single):
    mlp = make_mlp(
        te, "swiglu", torch.bfloat16, accumulate_into_main_grad=True, single_grouped_weight=single
    )
    for op in (mlp[0], mlp[2]):
        names = ["weight"] if single else [f"weight{i}" for i in range(op.num_groups)]
        for name in names:
            weight = getattr(op, name)
            weight.main_grad = torch.ones(tuple(weight.size()))
            weight.grad_added_to_main_grad = False
    x, probs, dy = make_inputs(torch.bfloat16)
    _, expected = reference(mlp, x, probs, dy)
    _, x, probs = run(te, mlp, x, probs, dy, mxfp8)
    for number, op in (("1", mlp[0]), ("2", mlp[2])):
        params = [op.weight] if single else [getattr(op, f"weight{i}") for i in range(3)]
        assert all(param.grad_added_to_main_grad for param in params)
        main = list(op.weight.main_grad) if single else [param.main_grad for param in params]
        for index, grad in enumerate(main):
            want = expected[f"w{number}.{index}"]
            assert_close(grad - 1, want, BOUNDS["mxfp8" if mxfp8 else torch.bfloat16])


@pytest.mark.parametrize("mxfp8", [True, False], ids=["mxfp8", "plain"])
def test_delayed_weight_gradients(te, mxfp8):
    now = make_mlp(te, "swiglu", torch.bfloat16)
    later = make_mlp(te, "swiglu", torch.bfloat16, delay_wgrad_compute=True)
    later.load_state_dict(now.state_dict())
    x, probs, dy = make_inputs(torch.bfloat16)
    run(te, now, x, probs, dy, mxfp8)
    run(te, later, x, probs, dy, mxfp8)
    for op in (later[2], later[0]):
        assert op.weight0.grad is None
        op.backward_dw()
    for one, other in ((now[0], later[0]), (now[2], later[2])):
        for index in range(len(SPLITS)):
            name = f"weight{index}"
            assert torch.equal(getattr(one, name).grad, getattr(other, name).grad)


def test_prequantized_input_equals_its_values(te, tex):
    """A row-wise MXFP8 GroupedTensor as input gives what its dequantized values give."""
    from tests.integration.standalone.test_quantize import make_quantizer

    x, probs, dy = make_inputs(torch.bfloat16)
    splits = torch.tensor(SPLITS)
    grouped = tex.group_quantize(x, make_quantizer(tex, columnwise=False), len(SPLITS), splits)
    values = torch.cat([naive.values_of(part, False) for part in naive.split_rows(x, SPLITS)])
    values = torch.cat([values, torch.zeros(x.shape[0] - LIVE, HIDDEN)]).bfloat16()
    one, other = (make_mlp(te, "swiglu", torch.bfloat16) for _ in range(2))
    y, _, p1 = run(te, one, grouped, probs, dy, True)
    z, _, p2 = run(te, other, values, probs, dy, True)
    assert torch.equal(y[:LIVE], z[:LIVE])
    assert torch.equal(p1.grad[:LIVE], p2.grad[:LIVE])
    for index in range(len(SPLITS)):
        name = f"weight{index}"
        assert torch.equal(getattr(one[0], name).grad, getattr(other[0], name).grad)


def test_two_steps_int32_splits_and_no_grad(te):
    mlp = make_mlp(te, "srelu", torch.bfloat16)
    x, probs, dy = make_inputs(torch.bfloat16)
    first, *_ = run(te, mlp, x, probs, dy, True)
    again, *_ = run(te, mlp, x, probs, dy, True, torch.tensor(SPLITS, dtype=torch.int32))
    assert torch.equal(first[:LIVE], again[:LIVE])
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe()):
        splits = torch.tensor(SPLITS)
        quiet = mlp(x, splits, probs, splits)
    assert torch.equal(first[:LIVE], quiet[:LIVE])


def test_autocast_of_the_cpu_is_heard(te):
    mlp = make_mlp(te, "swiglu", torch.float32)
    x, probs, dy = make_inputs(torch.float32, tail=0)
    splits = torch.tensor(SPLITS)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x, splits, probs, splits)
    assert y.dtype == torch.bfloat16
    assert_close(y.detach(), reference(mlp, x, probs, dy)[0], BOUNDS[torch.bfloat16])


def test_default_device_is_the_cpu(te):
    if torch.cuda.is_available():
        pytest.skip("the default is the CUDA device where there is one")
    assert te.ops.GroupedLinear(2, 64, 64).weight0.device.type == "cpu"
    assert te.MXFP8Quantizer(te.DType.kFloat8E4M3).make_empty((32, 32)).device.type == "cpu"


def test_odd_activations(te):
    """The other scaled activations, where this Transformer Engine has them."""
    x, probs, dy = make_inputs(torch.bfloat16, tail=0)
    x = x[:, : 2 * FFN]
    for name in ("ScaledClampedQGeGLU", "ScaledSiTUGLU", "ScaledTanhSReLU"):
        if not hasattr(te.ops, name):
            continue
        options = {"tanh_clamp_scale": 2.0} if name == "ScaledTanhSReLU" else {}
        op = getattr(te.ops, name)(**options)
        given, scales = x.clone().requires_grad_(), probs.clone().requires_grad_()
        y = op(given, scales)
        y.sum().backward()
        assert bool(torch.isfinite(y).all())
        assert bool(torch.isfinite(given.grad).all())
        assert bool(torch.isfinite(scales.grad).all())
