# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP8 on a Hopper GPU against the reference backend on the same inputs, in seven ways.

The same bodies run on CPU tensors, where both sides are the reference backend: that proves the
comparisons and the cases, not the kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch

import te_grouped_mlp
from te_grouped_mlp.op.plan import Reason
from tests.op import fixtures
from tests.op.gpu import recorded
from tests.op.gpu.recorded import Recorded
from tests.support import step
from tests.support.gpu import no_waiting
from tests.support.prequantized import SENTINEL, buffers, run_prequantized
from tests.support.step import StepCase

# Read when Transformer Engine is first imported; where its extension is there it has no effect.
os.environ.setdefault("NVTE_GROUPED_MLP_STANDALONE", "1")

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory", "backend")

GPU = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.mxfp8]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
ON_GPU = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])

# More than one 128-column scale tile each way, and one that is not full.
SINGLE = StepCase(splits=(256,), hidden=256, ffn=192)
SEVERAL = StepCase(splits=(128, 0, 384, 128), buffer_rows=768, hidden=256, ffn=192, fill=math.nan)
BIAS, SCALED = {"bias": True}, {"bias": True, "scale_bias": True}

# Every choice occurs with every activation class at least once; a full product would say no more.
CASES: dict[str, StepCase] = {
    "swiglu": SEVERAL,
    "swiglu-bias-grouped": SEVERAL.but(weight="grouped", grad="fused", **BIAS),
    "swiglu-scaled-quantized": SEVERAL.but(weight="quantized", grad="main_grad", **SCALED),
    "qgeglu-scaled": SEVERAL.but(activation="qgeglu", **SCALED),
    "qgeglu-grouped-fused": SEVERAL.but(activation="qgeglu", weight="grouped", grad="fused"),
    "situ-bias": SEVERAL.but(activation="situ", grad="fused", **BIAS),
    "situ-quantized": SEVERAL.but(activation="situ", weight="quantized"),
    "srelu": SEVERAL.but(activation="srelu", grad="main_grad"),
    "srelu-scaled-grouped": SEVERAL.but(activation="srelu", weight="grouped", **SCALED),
    "srelu-recompute": SEVERAL.but(activation="srelu", recompute=True, grad="fused", **BIAS),
    "srelu-quantized": SEVERAL.but(activation="srelu", weight="quantized", grad="fused"),
    "tanh_srelu-bias": SEVERAL.but(activation="tanh_srelu", **BIAS),
    "tanh_srelu-scaled": SEVERAL.but(activation="tanh_srelu", weight="grouped", **SCALED),
    "one-group": SINGLE.but(grad="fused", **BIAS),
    "one-group-padded": SINGLE.but(buffer_rows=512, fill=math.nan, grad="fused", **SCALED),
    "one-group-padded-srelu": SINGLE.but(activation="srelu", buffer_rows=640, fill=3.0),
    "unit-scale": SINGLE.but(unit_scale=True, grad="fused", **BIAS),
    "no-live-rows": SEVERAL.but(splits=(0, 0, 0), grad="fused", **BIAS),
    "no-rows": SEVERAL.but(splits=(0, 0), buffer_rows=0),
    "bias-of-fc1": SEVERAL.but(bias=(True, False), weight=("quantized", "grouped")),
    "bias-of-fc2": SEVERAL.but(
        activation="srelu", bias=(False, True), scale_bias=True, grad=("grad", "fused")
    ),
    "one-delayed": SEVERAL.but(
        delay=(False, True), grad=("overwrite", "grad"), weight=("grouped", "discrete")
    ),
    "delayed": SEVERAL.but(delay=True, **BIAS),
    "delayed-fused": SEVERAL.but(activation="srelu", delay=True, grad="fused"),
    "overwrite": SEVERAL.but(grad="overwrite", weight="grouped"),
    "bf16-probabilities": SEVERAL.but(prob_dtype=torch.bfloat16, **SCALED),
    "frozen-prob": SEVERAL.but(frozen=frozenset({"prob"})),
    "frozen-fc1": SEVERAL.but(frozen=frozenset({"fc1"}), **BIAS),
    "frozen-x": SEVERAL.but(frozen=frozenset({"x"}), grad="fused"),
    "narrow": SEVERAL.but(hidden=64, ffn=64, **BIAS),
    "wide": SEVERAL.but(hidden=320, ffn=576),
    "int32-splits": SEVERAL.but(split_dtype=torch.int32),
}

_shares: dict[str, dict[str, float]] = {}


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the backend that is tested on the test's device."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", recorded.BACKENDS[device])


@pytest.fixture(scope="module", autouse=True)
def _report(request: pytest.FixtureRequest) -> Iterator[None]:
    """Say how many codes of requantized copies differed, since a bound alone hides a drift."""
    yield
    worst: dict[str, tuple[float, str]] = {}
    for case, shares in _shares.items():
        for name, share in shares.items():
            worst[name] = max(worst.get(name, (0.0, "")), (share, case))
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if worst and capture is not None:
        with capture.global_and_fixture_disabled():
            print("\nlargest part of codes that differ from the reference backend's:")  # noqa: T201
            for name, (share, case) in sorted(worst.items()):
                print(f"  {name:18} {share:.1e}  {case}")  # noqa: T201


def sized(case: StepCase, device: str) -> StepCase:
    """Return a case on a device, small where it only proves the test."""
    if device == "cpu" and (case.hidden, case.ffn) == (SEVERAL.hidden, SEVERAL.ffn):
        case = case.but(hidden=128, ffn=64)
    return case.but(device=device)


def compare(
    label: str, case: StepCase, runner: recorded.Runner = recorded.plain_step
) -> tuple[Recorded, Recorded]:
    """Compare a step on the case's device with the reference backend's on the CPU."""
    actual, wanted = recorded.run(case, runner), recorded.reference(case, runner)
    shares = recorded.assert_same_copies(case, actual, wanted)
    if case.device == "cuda":
        _shares[label] = shares
    terms = recorded.terms_of_db1(case, wanted)
    recorded.assert_close(case, actual.found, wanted.found, terms)
    return actual, wanted


# Against the reference backend ------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_reference(name: str, device: str) -> None:
    case = sized(CASES[name], device)
    if (
        any(linear.weight == "quantized" for linear in case.linears)
        and device == "cpu"
        and torch.cuda.is_available()
    ):
        pytest.skip("Transformer Engine places quantized parameters on the GPU if there is one")
    compare(name, case)


def arrived(case: StepCase, x: bool | None, dy: bool | None) -> recorded.Found:
    return run_prequantized(case, x=x, dy=dy)


def x_compact(case: StepCase) -> recorded.Found:
    return arrived(case, False, None)


def x_ready(case: StepCase) -> recorded.Found:
    return arrived(case, True, None)


def dy_compact(case: StepCase) -> recorded.Found:
    return arrived(case, None, False)


def both_ready(case: StepCase) -> recorded.Found:
    return arrived(case, True, True)


@DEVICES
@pytest.mark.parametrize("base", ["SINGLE", "SEVERAL"])
@pytest.mark.parametrize("runner", [x_compact, x_ready, dy_compact, both_ready])
def test_quantized_tokens_equal_the_reference(
    runner: recorded.Runner, base: str, device: str
) -> None:
    """A GroupedTensor of the caller, which the step leaves as it is."""
    case = {"SINGLE": SINGLE.but(buffer_rows=512), "SEVERAL": SEVERAL}[base]
    case = sized(case.but(grad="fused", **SCALED), device)
    compare(f"{base} {runner.__name__}", case, runner_without_tail(runner))


def runner_without_tail(runner: recorded.Runner) -> recorded.Runner:
    """The grad-input buffer of `run_prequantized` is the caller's: its tail is kept."""
    if runner not in _WRAPPED:

        def wrapped(case: StepCase) -> recorded.Found:
            found = runner(case)
            assert (found["dx"][case.live :] == SENTINEL).all()
            dx = found["dx"].clone()
            dx[case.live :] = 0
            return {**found, "dx": dx}

        _WRAPPED[runner] = wrapped
    return _WRAPPED[runner]


_WRAPPED: dict[recorded.Runner, recorded.Runner] = {}


@DEVICES
def test_gate_and_linear_part_in_halves_are_refused(device: str) -> None:
    """MXFP8 has them interleaved by 32: what lies otherwise is not fused, and told so."""
    from transformer_engine.common.recipe import MXFP8BlockScaling

    model = step.make_model(SEVERAL.but(interleave=None, device=device))
    (decision,) = te_grouped_mlp.explain(model, recipe=MXFP8BlockScaling())
    assert decision.path == "unfused"
    assert dict(decision.refusals)[recorded.BACKENDS[device]].reason is Reason.INTERLEAVE


def with_buffers(case: StepCase) -> recorded.Found:
    """A step into the caller's buffers, whose tails stay."""
    model, inputs = step.make_model(case), step.make_inputs(case)
    out, dx = buffers(case)
    y = step.run_model(model, case, inputs, op_kwargs={2: {"output": out}, 0: {"grad_input": dx}})
    assert y.data_ptr() == out.data_ptr()
    found = {**step.collect(case, model, inputs, y), "y": out.clone(), "dx": dx.clone()}
    for name in ("y", "dx"):
        assert (found[name][case.live :] == SENTINEL).all(), name
        found[name][case.live :] = 0
    return found


@DEVICES
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_buffers_of_the_caller(activation: str, device: str) -> None:
    case = sized(SEVERAL.but(activation=activation, **SCALED), device)
    actual, _ = compare(f"{activation} buffers", case, with_buffers)
    # The same bits as in buffers of the op.
    step.assert_same(actual.found, recorded.run(case).found)


# 1, 2, 3: memory, padding, empty experts --------------------------------------------------------


@ON_GPU
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
def test_unwritten_memory_is_invisible(activation: str, device: str) -> None:
    weight = "quantized" if activation in ("situ", "tanh_srelu") else "discrete"
    case = SEVERAL.but(activation=activation, weight=weight, device=device, **SCALED)
    fixtures.assert_memory_invisible(case)


@ON_GPU
@pytest.mark.parametrize("fill", fixtures.TAILS)
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "4g"])
def test_padding_is_invisible(base: StepCase, activation: str, fill: float, device: str) -> None:
    tiles = 1 if fill == 0.0 else 3
    case = base.but(activation=activation, buffer_rows=base.live + 128 * tiles, fill=fill)
    fixtures.assert_padding_invisible(case.but(device=device, **BIAS))


@ON_GPU
@pytest.mark.parametrize("place", fixtures.empty_expert_splits(8))
def test_empty_experts_change_nothing(place: str, device: str) -> None:
    """Their gradients are zero, and those of the others as in a model without them."""
    case = SEVERAL.but(splits=fixtures.empty_expert_splits(8)[place], device=device, **BIAS)
    case = case.but(buffer_rows=case.live + 128)
    model, inputs = step.make_model(case), step.make_inputs(case)
    found = step.collect(case, model, inputs, step.run_model(model, case, inputs))
    if case.live:
        step.assert_same(found, fixtures.without_empty_experts(model, case))
    for index, size in enumerate(case.splits):
        if not size:
            assert not any(found[name][index].any() for name in ("dW1", "dW2", "db1", "db2"))


@ON_GPU
def test_many_experts_most_of_them_empty(device: str) -> None:
    splits = tuple(128 if index % 5 == 2 else 0 for index in range(64))
    case = SEVERAL.but(splits=splits, buffer_rows=None, hidden=128, ffn=64, grad="fused")
    compare("64 experts", case.but(device=device))


# 4, 5: float64 on data of order one, repetition -------------------------------------------------


@ON_GPU
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
def test_a_step_against_float64(activation: str, device: str) -> None:
    """Tight against the same dequantized operands, the format's bound against plain ones."""
    case = SEVERAL.but(activation=activation, device=device, **SCALED)
    found = recorded.run(case).found
    host = case.but(device="cpu")
    step.assert_close(host, found, step.reference(host))
    if activation == "qgeglu":
        # The clamps' derivative jumps with the last bit, so only the format's bound holds.
        return
    tight = fixtures.emulated(host)
    step.assert_close(host, found, {"db1": tight.pop("db1")}, recorded.DB1_BOUND)
    step.assert_close(host, found, tight, recorded.BOUND)


@ON_GPU
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
def test_steps_are_bit_identical(activation: str, device: str) -> None:
    """A second stream moves the order of the tiles."""
    case = SEVERAL.but(activation=activation, device=device, hidden=512, ffn=1024, **SCALED)
    fixtures.assert_repeats_on_device(case.but(splits=(384, 0, 256, 128)), runs=6)


@ON_GPU
@pytest.mark.parametrize("bias", ["nobias", "scaled"])
def test_a_deterministic_step_has_the_same_bits(
    bias: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SEVERAL.but(device=device, **(SCALED if bias == "scaled" else {}))
    want = step.run_step(case)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    step.assert_same(step.run_step(case), want)


@ON_GPU
@pytest.mark.parametrize("weight", ["discrete", "grouped", "quantized"])
def test_a_step_waits_for_nothing(weight: str, device: str) -> None:
    case = SEVERAL.but(weight=weight, device=device, grad="fused", **SCALED)
    model, inputs = step.make_model(case), step.make_inputs(case)
    step.run_model(model, case, inputs)
    with no_waiting():
        step.run_model(model, case, inputs)


# Weights that change ----------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("reuse", ["0", "1"], ids=["new", "kept"])
@pytest.mark.parametrize("weight", ["discrete", "grouped", "quantized"])
def test_copies_of_weights_follow_the_weights(
    weight: str, reuse: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches, a change in place, another micro-batch: each as with a model of its own."""
    monkeypatch.setenv("NVTE_GROUPED_MLP_REUSE_WEIGHTS", reuse)
    case = sized(SEVERAL.but(weight=weight), device)
    sequence = [
        fixtures.Replayed(seed=1, splits=case.splits),
        fixtures.Replayed(seed=2, splits=case.splits),
        fixtures.Replayed(seed=2, splits=case.splits, shift=0.125),
        fixtures.Replayed(seed=3, splits=(0, 256, 128, 0)),
    ]
    fixtures.assert_order_invisible(case, sequence)


@DEVICES
def test_a_weight_may_change_behind_autograds_back(device: str) -> None:
    """Optimizers write through `.data`, which moves no version counter."""
    case = sized(SEVERAL, device)
    model, inputs = step.make_model(case), step.make_inputs(case)
    step.run_model(model, case, inputs)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
        parameter.grad = None
    inputs = step.make_inputs(case)
    found = step.collect(case, model, inputs, step.run_model(model, case, inputs))
    fresh = step.make_model(case)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(0.5)
    inputs = step.make_inputs(case)
    step.assert_same(found, step.collect(case, fresh, inputs, step.run_model(fresh, case, inputs)))
