# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The native kernels on a Hopper GPU against the mathematics in float64.

`cases.expected` is the oracle to which the reference backend is equal bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.cutedsl import keys
from te_grouped_mlp.op.backends.cutedsl.compile import compile_ahead
from te_grouped_mlp.op.formats import UNQUANTIZED, DType
from te_grouped_mlp.op.tensors import memory
from tests.op.backends.reference import cases
from tests.op.backends.reference.cases import ACTIVATIONS, Case
from tests.support.gpu import no_waiting

gpu_step = pytest.importorskip("tests.op.backends.cutedsl.gpu_step")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

ODD = (1, 0, 31, 32, 127, 128, 129, 255, 257, 0)
BIASES = {
    "nobias": {},
    "bias1": {"fc1_bias": True},
    "scaled2": {"fc1_bias": True, "fc2_bias": True, "scale_bias": True},
}
BOUNDS = {"y": 4e-3, "dx": 5e-3, "dprob": 2e-3, "dw1": 4e-3, "dw2": 3e-3, "db1": 4e-3}
# The backward makes FC2's input from the pre-activation in bf16, so that a last bit counts twice.
RECOMPUTED = {**BOUNDS, "dw2": 8e-3}
LIVE = ("y", "dx", "dprob")
OUTPUTS = ("y", "dx", "dprob", "dw1", "dw2", "db1")
SPECS = {
    **ACTIVATIONS,
    "swiglu_halves": ActivationSpec(Activation.SWIGLU, None),
    "srelu_recompute": ActivationSpec(Activation.SRELU, recompute=True),
}


def case_of(spec, splits=ODD, extra=128, **changes):
    rows = sum(splits) + extra
    return Case(spec, splits, rows, fmt=UNQUANTIZED, **changes)


def checksums(tensor):
    """Two sums of a tensor's bits, left on the GPU."""
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).long()
    return torch.stack([bits.sum(), (bits * bits).sum()])


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    wanted = []
    for spec in SPECS.values():
        for bias in BIASES.values():
            problem = gpu_step.problem_of(case_of(spec, **bias))
            wanted += keys.of_problem(problem, 9)
    compile_ahead(wanted)


def assert_close(case, got, want):
    """Relative error of every expert by itself, so that no expert hides behind another."""
    bounds = RECOMPUTED if case.activation.recomputes_input else BOUNDS
    for name in OUTPUTS:
        if got[name] is None:
            continue
        left, right = got[name].double().cpu(), want[name].double()
        if name in LIVE:
            parts = zip(left[: case.live].split(case.splits), right.split(case.splits), strict=True)
        else:
            parts = zip(left, right, strict=True)
        for index, (one, other) in enumerate(parts):
            if not one.numel():
                continue
            scale = other.norm()
            error = (one - other).norm() / scale if scale else (one - other).norm()
            assert error <= bounds[name], f"{name}[{index}]: {error}"


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("activation", SPECS)
def test_every_activation_and_bias(activation, bias):
    case = case_of(SPECS[activation], accumulate=True, **BIASES[bias])
    with memory.poisoned(0xFF):
        got = gpu_step.run(case, gpu_step.state_of(case))
    assert_close(case, got, cases.expected(case))
    for name in LIVE:
        assert not got[name][case.live :].any(), name


@pytest.mark.parametrize(
    "splits",
    [(0, 300), (300, 0), (130, 0, 0, 70), (0, 0), (257,), (1,), (64,) * 8],
    ids=lambda splits: "-".join(map(str, splits)),
)
def test_splits(splits):
    case = case_of(SPECS["swiglu"], splits, accumulate=False)
    with memory.poisoned(0xFF):
        got = gpu_step.run(case, gpu_step.state_of(case))
    assert_close(case, got, cases.expected(case))
    for index, size in enumerate(splits):
        if not size:
            assert not got["dw1"][index].any()
            assert not got["db1"][index].any()


@pytest.mark.parametrize("rows", [0, 256])
def test_no_live_rows(rows):
    case = case_of(SPECS["swiglu"], (0, 0, 0), rows, accumulate=True)
    with memory.poisoned(0xFF):
        state = gpu_step.state_of(case)
        got = gpu_step.run(case, state)
    assert got["y"].shape == (rows, case.hidden)
    assert not got["y"].any()
    assert not got["dprob"].any()
    assert torch.equal(got["dw1"], state.main1)


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("discrete", [False, True], ids=["grouped", "discrete"])
def test_weights_and_gradients(discrete, grad_dtype, accumulate):
    case = case_of(SPECS["swiglu"], grad_dtype=grad_dtype, accumulate=accumulate)
    state = gpu_step.state_of(case, discrete=discrete)
    got = gpu_step.run(case, state, discrete_grads=discrete)
    assert_close(case, got, cases.expected(case))


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("prob", [DType.BFLOAT16, None], ids=["bf16", "unit"])
def test_probability_types(activation, prob):
    changes = {"unit_scale": True} if prob is None else {"prob_dtype": prob}
    case = case_of(SPECS[activation], accumulate=True, **changes)
    got = gpu_step.run(case, gpu_step.state_of(case))
    assert_close(case, got, cases.expected(case))


@pytest.mark.parametrize("activation", ["swiglu", "situ_glu", "tanh_srelu"])
def test_dprob_is_summed_in_fp32_from_unrounded_products(activation):
    spec = SPECS[activation]
    case = case_of(spec, (300, 129), ffn=640, hidden=512, accumulate=True)
    state = gpu_step.state_of(case)
    got = gpu_step.run(case, state)
    pre = got["pre"][: case.live].double().cpu()
    if spec.is_gated:
        pre = pre.view(case.live, -1, spec.interleave, 2).transpose(2, 3).reshape(case.live, -1)
    from te_grouped_mlp.op import activations

    value = activations.evaluate(torch, spec, pre).value
    dy = state.dy.plain[: case.live].double().cpu()
    weights = [member.double().cpu() for member in state.w2.data]
    products = [a @ w for a, w in zip(dy.split(case.splits), weights, strict=True)]
    want = (torch.cat(products) * value).sum(1)
    left = got["dprob"][: case.live].double().cpu()
    assert (left - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_padding_and_fresh_memory_are_invisible(activation):
    exact = case_of(SPECS[activation], extra=0, accumulate=True)
    want = gpu_step.run(exact, gpu_step.state_of(exact))
    for extra in (128, 384):
        for tail in (0.0, float("nan"), float("inf"), 3.0, 1e30):
            case = case_of(SPECS[activation], extra=extra, accumulate=True)
            with memory.poisoned(0xFF):
                got = gpu_step.run(case, gpu_step.state_of(case, tail=tail))
            for name in OUTPUTS:
                live = slice(case.live) if name in LIVE else slice(None)
                assert torch.equal(got[name][live], want[name]), (name, extra, tail)
                if name in LIVE:
                    assert not got[name][case.live :].any(), (name, extra, tail)


def test_an_expert_does_not_depend_on_the_others():
    full = case_of(SPECS["swiglu"], (257, 129, 64), accumulate=True)
    alone = case_of(SPECS["swiglu"], (257, 0, 0), accumulate=True)
    want = gpu_step.run(full, gpu_step.state_of(full))
    got = gpu_step.run(alone, gpu_step.state_of(alone))
    for name in LIVE:
        assert torch.equal(got[name][:257], want[name][:257]), name
    for name in ("dw1", "dw2", "db1"):
        assert torch.equal(got[name][0], want[name][0]), name


@pytest.mark.parametrize("repeats", [12, 50])
def test_replay_beside_a_loaded_stream(repeats):
    sizes = (517, 0, 1023, 384, 129, 640, 31, 901)
    case = case_of(SPECS["swiglu"], sizes, hidden=1024, ffn=2048, accumulate=True)
    state = gpu_step.state_of(case)
    side, load = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in OUTPUTS}
    for index in range(repeats):
        with torch.cuda.stream(side):
            for _ in range(index % 5):
                load = load @ load * 1e-3
        got = gpu_step.run(case, state)
        for name in OUTPUTS:
            seen[name].append(checksums(got[name]))
    distinct = {name: len({str(each.tolist()) for each in found}) for name, found in seen.items()}
    assert distinct == dict.fromkeys(OUTPUTS, 1)


@pytest.mark.slow
def test_an_expert_past_two_to_the_31_elements():
    """Addresses of its rows do not fit 32 bits; its results are those of the expert alone."""
    rows, width = 599_936, {"hidden": 512, "ffn": 2048, "accumulate": False}
    far = case_of(SPECS["swiglu"], (rows, 64), extra=0, **width)
    assert rows * far.wide > 2**31
    near = case_of(SPECS["swiglu"], (0, 64), extra=0, **width)
    want = gpu_step.run(near, gpu_step.state_of(near))
    got = gpu_step.run(far, gpu_step.state_of(far))
    for name in LIVE:
        assert torch.equal(got[name][rows:], want[name]), name
    for name in ("dw1", "dw2", "db1"):
        assert torch.equal(got[name][1], want[name][1]), name


def test_in_segments_that_grow():
    """What PyTorch's allocator maps piece by piece has other addresses than one allocation."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-m", "gpu", "-k", "test_weights_and_gradients", __file__],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_a_step_does_not_synchronise():
    case = case_of(SPECS["swiglu"], accumulate=True, **BIASES["scaled2"])
    state = gpu_step.state_of(case)
    gpu_step.run(case, state)
    with no_waiting():
        gpu_step.run(case, state)


def test_capture_and_replay_with_new_splits():
    case = case_of(SPECS["swiglu"], (100, 0, 200, 84), extra=0, accumulate=False)
    state = gpu_step.state_of(case)
    gpu_step.run(case, state)
    other = case_of(SPECS["swiglu"], (64, 192, 1, 127), extra=0, accumulate=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gpu_step.run(case, state)
    fresh = gpu_step.state_of(other)
    gpu_step.copy_splits(fresh.x.splits, state.x.splits)
    for name in ("x", "dy"):
        getattr(state, name).plain.copy_(getattr(fresh, name).plain)
    state.prob.copy_(fresh.prob)
    graph.replay()
    want = gpu_step.run(other, fresh)
    for name in ("y", "dx", "dprob", "dw1", "dw2", "db1"):
        assert torch.equal(got[name], want[name]), name
