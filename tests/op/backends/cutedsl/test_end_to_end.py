# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The fused op on a Hopper GPU in bf16: Transformer Engine's ops over the native kernels.

Where Transformer Engine's extension is absent it runs standalone.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from te_grouped_mlp.op import explain
from te_grouped_mlp.op.backends.cutedsl import arguments, launch
from te_grouped_mlp.op.backends.cutedsl import compile as kernels
from tests.op.backends.cutedsl.test_gpu import checksums
from tests.support import step
from tests.support.gpu import no_waiting
from tests.support.step import StepCase

# Read when Transformer Engine is first imported; where its extension is there it has no effect.
os.environ.setdefault("NVTE_GROUPED_MLP_STANDALONE", "1")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.usefixtures("fused_switch", "poisoned_memory"),
]

# Three products in a row with bf16 between them; a clamp's derivative jumps with the last bit.
BOUND, CLAMPED_BOUND = 0.03, 0.12
ODD = StepCase(
    splits=(0, 129, 1, 300, 0, 127, 32),
    buffer_rows=640,
    hidden=256,
    ffn=192,
    fill=float("nan"),
    grad="fused",
    mxfp8=False,
    device="cuda",
)
BIASES = {"nobias": {}, "bias": {"bias": True}, "scaled": {"bias": True, "scale_bias": True}}


def run(case, model=None, inputs=None):
    """Run one step in our fused op over the native backend; results by name."""
    model = step.make_model(case) if model is None else model
    inputs = step.make_inputs(case) if inputs is None else inputs
    y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
    assert explain.explain()[-1].path == "cutedsl", explain.explain()
    return step.collect(case, model, inputs, y)


def on_host(found):
    """Results on the CPU."""
    return {name: None if value is None else value.cpu() for name, value in found.items()}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
def test_a_step_against_float64(activation, bias):
    case = ODD.but(activation=activation, **BIASES[bias])
    found = run(case)
    for name in ("y", "dx", "dprob"):
        assert not found[name][case.live :].any(), name
    wanted, bound = step.reference(case.but(device="cpu")), BOUND
    if activation == "qgeglu":
        # Jumps add up over the rows while the sum cancels: nothing useful can be said of db1.
        wanted["db1"], bound = None, CLAMPED_BOUND
    step.assert_close(case, on_host(found), wanted, bound)


@pytest.mark.parametrize("weight", ["discrete", "grouped"])
@pytest.mark.parametrize("grad", ["grad", "fused"])
@pytest.mark.parametrize("interleave", [32, None])
def test_parameters_as_users_have_them(weight, grad, interleave):
    case = ODD.but(weight=weight, bias_weight="discrete", grad=grad, interleave=interleave)
    wanted = step.reference(case.but(device="cpu"))
    found = on_host(run(case))
    step.assert_close(case, found, wanted, BOUND)


def in_one_buffer(model, *, weights, grads):
    """Move the weights and the main_grads of each linear to buffers; True for the last one first.

    Megatron's buffers of parameters and of gradients are filled from the end; without its
    distributed optimizer the parameters stay where they were.
    """
    for op in (model[0], model[2]):
        found = [value for name, value in op.named_parameters() if name.startswith("weight")]
        order = {True: slice(None, None, -1), False: slice(None)}
        places = torch.empty(len(found), *found[0].shape, dtype=found[0].dtype, device="cuda")
        held = torch.empty(places.shape, dtype=torch.float32, device="cuda")
        for parameter, place, grad in zip(
            found, places.unbind(0)[order[weights]], held.unbind(0)[order[grads]], strict=True
        ):
            parameter.data = place.copy_(parameter.data)
            parameter.main_grad = grad.copy_(parameter.main_grad)
    return model


@pytest.mark.parametrize("grads", [False, True], ids=["grads up", "grads down"])
@pytest.mark.parametrize("weights", [False, True], ids=["weights up", "weights down"])
def test_experts_in_a_buffer_are_read_and_written_in_place(weights, grads, monkeypatch):
    case = ODD.but(grad="fused")
    want = run(case)
    found = []
    original = arguments.addressable_view

    def watched(experts):
        found.append(original(experts))
        return found[-1]

    monkeypatch.setattr(arguments, "addressable_view", watched)
    step.assert_same(
        run(case, in_one_buffer(step.make_model(case), weights=weights, grads=grads)), want
    )
    # FC1, FC2, and back: FC2 and its gradient, FC1 and its gradient.
    assert [each.reversed_experts for each in found] == [
        *[weights] * 3, grads, weights, grads,
    ]  # fmt: skip


@pytest.mark.parametrize("prob", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_probabilities_keep_their_type(prob):
    case = ODD.but(prob_dtype=prob, **BIASES["scaled"])
    found = run(case)
    assert found["dprob"].dtype is prob
    bound = BOUND if prob is torch.float32 else 2 * BOUND
    step.assert_close(case, on_host(found), step.reference(case.but(device="cpu")), bound)


@pytest.mark.parametrize("bias", ["nobias", "scaled"])
def test_a_step_waits_for_nothing(bias):
    case = ODD.but(**BIASES[bias])
    model, inputs = step.make_model(case), step.make_inputs(case)
    run(case, model, inputs)
    with no_waiting():
        step.run_model(model, case, inputs)


@pytest.mark.parametrize("bias", ["nobias", "scaled"])
def test_deterministic_mode_changes_no_bit(bias, monkeypatch):
    case = ODD.but(**BIASES[bias])
    want = run(case)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    step.assert_same(run(case), want)
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    torch.use_deterministic_algorithms(True)
    try:
        step.assert_same(run(case), want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def compilations(monkeypatch):
    """What was compiled or read from disk since the list was last cleared.

    The kernels that earlier tests loaded are forgotten, so that the first call shows up.
    """
    import triton

    monkeypatch.setattr(kernels, "_loaded", {})
    for cached in (launch.launcher, launch._row_kernel):
        cached.cache_clear()
    launch._by_problem.clear()
    launch._prepared.clear()
    seen = []

    def counted(function, what):
        def call(key, *folder):
            seen.append((what, key))
            return function(key, *folder)

        return call

    monkeypatch.setattr(kernels, "_compile", counted(kernels._compile, "compiled"))
    monkeypatch.setattr(kernels, "_from_disk", counted(kernels._from_disk, "looked for on disk"))
    # Called before Triton makes a variant of a kernel, or finds it in its cache on disk.
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **found: seen.append(found["repr"])
    )
    return seen


def random_splits(generator, experts, most):
    """Uneven: some experts get nothing, some a few rows, and few get many."""
    total = generator.randrange(most) if generator.random() < 0.95 else 0
    weights = [generator.choice([0, 0, 1, 4, 30]) * generator.random() for _ in range(experts)]
    scale = total / (sum(weights) or 1.0)
    return tuple(int(weight * scale) for weight in weights)


@pytest.mark.parametrize("bias", ["nobias", "scaled"])
def test_no_split_compiles_anything_after_the_first_call(bias, compilations):
    case = ODD.but(grad="fused", **BIASES[bias])
    model = step.make_model(case)
    run(case, model)
    assert len(compilations) >= len(launch.EPILOGUES)
    compilations.clear()
    generator, sizes = random.Random(7), []
    for _ in range(200):
        splits = random_splits(generator, len(case.splits), 1500)
        padding = generator.choice([0, 0, 1, 7, 64, 200])
        sizes.append(sum(splits) + padding)
        for parameter in model.parameters():
            parameter.grad = None
        run(case.but(splits=splits, buffer_rows=sizes[-1]), model)
    assert len(set(sizes)) > 100
    assert compilations == []


def test_a_new_variant_of_a_triton_kernel_is_seen(compilations):
    from te_grouped_mlp.op.kernels import group_reductions_kernels

    values = torch.ones(32, device="cuda")
    out = torch.empty_like(values)
    # No caller asks for blocks of 32.
    group_reductions_kernels._join_parts[(1,)](values, out, 32, 1, 32, num_warps=4)
    assert torch.equal(out, values)
    assert any("_join_parts" in str(each) for each in compilations)


@pytest.mark.parametrize("deterministic", ["0", "1"], ids=["deterministic", "default"])
@pytest.mark.parametrize(("repeats", "grad"), [(12, "grad"), (50, "grad"), (50, "fused")])
def test_replay_of_a_layer_beside_a_loaded_stream(repeats, grad, deterministic, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", deterministic)
    splits = (517, 1023, 384, 129, 640, 31, 901, 471)
    case = ODD.but(splits=splits, buffer_rows=None, hidden=2048, ffn=4096, grad=grad)
    model, inputs = step.make_model(case), step.make_inputs(case)
    side, load = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    seen = {}
    for index in range(repeats):
        with torch.cuda.stream(side):
            for _ in range(index % 5):
                load = load @ load * 1e-3
        for tensor in (*model.parameters(), inputs.x, inputs.prob):
            tensor.grad = None
            if getattr(tensor, "main_grad", None) is not None:
                tensor.main_grad.fill_(3.0)
        for name, value in run(case, model, inputs).items():
            if value is not None:
                seen.setdefault(name, []).append(checksums(value.contiguous()))
    distinct = {name: len({str(each.tolist()) for each in found}) for name, found in seen.items()}
    assert distinct == dict.fromkeys(("y", "dx", "dprob", "dW1", "dW2"), 1)
