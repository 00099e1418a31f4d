# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Determinism: bit-identical where it is asked for, or an error before any kernel runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import environment, selection
from te_grouped_mlp.op.backends.reference import capability
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.layout import Kernel, Output
from te_grouped_mlp.op.plan import Plan, Reject
from tests.op import fixtures
from tests.support import backends, step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SINGLE = StepCase(splits=(256,), hidden=128, ffn=64, bias=True)
SEVERAL = StepCase(
    splits=(128, 0, 256), buffer_rows=512, hidden=128, ffn=64, fill=3.0, bias=True, scale_bias=True
)
CAUSE = "which adds with float atomics; set NVTE_GROUPED_MLP_BACKEND=reference"


@contextlib.contextmanager
def demanded_by_torch() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def demanded_by_switch() -> Any:
    return step.switches(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")


def demanded_by_override() -> Any:
    """Demand it as `te-grouped-mlp replay --deterministic` does."""
    switches = dataclasses.replace(environment.read_switches(), allow_nondeterministic=False)
    return environment.override(switches=switches)


DEMANDS: dict[str, Callable[[], Any]] = {
    "torch": demanded_by_torch,
    "switch": demanded_by_switch,
    "override": demanded_by_override,
}
demands = pytest.mark.parametrize("demand", DEMANDS.values(), ids=DEMANDS)


class AtomicBackend(ReferenceBackend):
    """The reference backend with launches that say that some outputs vary; records its calls."""

    refusal = staticmethod(capability.refusal)

    def __init__(self, weak: dict[Kernel, Output]) -> None:
        self._weak = weak
        self.calls: list[str] = []

    def plan(self, problem: Any, call: Any, env: Any) -> Plan | Reject:
        plan = capability.plan(problem, call, env)
        assert isinstance(plan, Plan)
        launches = []
        for launch in plan.launches:
            weak = launch.deterministic & {self._weak.get(launch.kernel)}
            if weak:
                kept = launch.deterministic - weak
                launch = dataclasses.replace(launch, deterministic=kept, cause=CAUSE)
            launches.append(launch)
        return dataclasses.replace(plan, launches=tuple(launches))

    def fc1_act(self, *args: Any) -> Any:
        self.calls.append("fc1_act")
        return super().fc1_act(*args)

    def gemm(self, *args: Any) -> Any:
        self.calls.append("gemm")
        return super().gemm(*args)

    def dact_dgrad(self, *args: Any) -> Any:
        self.calls.append("dact_dgrad")
        return super().dact_dgrad(*args)

    def wgrad(self, *args: Any) -> Any:
        self.calls.append("wgrad")
        return super().wgrad(*args)


@pytest.fixture
def weaken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AtomicBackend]:
    """Return a function that lets outputs of launches vary, by default dprob as upstream's does."""

    def install(weak: dict[Kernel, Output] | None = None) -> AtomicBackend:
        backend = AtomicBackend(weak or {Kernel.DACT_DGRAD: Output.DPROB})
        monkeypatch.setattr(selection, "NAMES", (capability.NAME,))
        backends.install(monkeypatch, capability.NAME, backend, backend)
        monkeypatch.setattr(selection, "_plans", type(selection._plans)())
        monkeypatch.setattr(selection, "_latest", None)
        return backend

    return install


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the tex functions that prepare operands."""
    import transformer_engine.pytorch  # noqa: F401  (before anything asks for tex)

    from te_grouped_mlp.op.tensors import quantize

    called: list[str] = []
    for name in ("quantize", "group_quantize", "splits_to_offsets_multi"):
        original = getattr(quantize.tex, name)

        def record(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            called.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(quantize.tex, name, record)
    return called


# A launch that varies ---------------------------------------------------------------------------

# Everything that a step returns, and the launches that compute it.
WEAK = [
    (Kernel.FC1_ACT, Output.Y),
    (Kernel.FC2_FORWARD, Output.Y),
    (Kernel.FC2_BIAS_GRAD, Output.DB2),
    (Kernel.FC2_BIAS_GRAD, Output.DPROB),
    (Kernel.DACT_DGRAD, Output.DB1),
    (Kernel.DACT_DGRAD, Output.DPROB),
    (Kernel.FC2_WGRAD, Output.DW2),
    (Kernel.FC1_DGRAD, Output.DX),
    (Kernel.FC1_WGRAD, Output.DW1),
]


def test_every_output_is_in_the_table() -> None:
    assert {output for _, output in WEAK} == set(Output)


@demands
@pytest.mark.parametrize(
    ("kernel", "output"), WEAK, ids=[f"{kernel.value}-{output.value}" for kernel, output in WEAK]
)
def test_a_demand_that_a_launch_cannot_meet_raises_before_any_kernel(
    kernel: Kernel, output: Output, demand: Any, weaken: Any, quantized: list[str]
) -> None:
    """The error names the output, the launch, the cause and what to change."""
    backend = weaken({kernel: output})
    model, inputs = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
    words = f"{output.value} is computed by {kernel.value}, {CAUSE}"
    with demand(), pytest.raises(RuntimeError, match=f"cannot be deterministic here.*{words}"):
        step.forward(model, SEVERAL, inputs)
    assert backend.calls == []
    assert quantized == []
    assert type(step.fused_op(model)).__name__ == "GroupedMLP_CuTeGEMMGLU"


def test_every_output_that_varies_is_named(weaken: Any) -> None:
    weaken({Kernel.DACT_DGRAD: Output.DPROB, Kernel.FC1_DGRAD: Output.DX})
    model, inputs = step.make_model(SINGLE), step.make_inputs(SINGLE)
    with demanded_by_torch(), pytest.raises(RuntimeError, match="dprob is .*; dx is computed by"):
        step.forward(model, SINGLE, inputs)


def test_without_a_demand_nothing_is_asked_of_the_launches(weaken: Any) -> None:
    expected = step.run_step(SEVERAL)
    backend = weaken()
    step.assert_same(step.run_step(SEVERAL), expected)
    assert set(backend.calls) == {"fc1_act", "gemm", "dact_dgrad", "wgrad"}


@demands
def test_a_demand_that_became_stronger_raises_in_the_backward(
    demand: Any, weaken: Any, quantized: list[str]
) -> None:
    backend = weaken()
    case = SEVERAL.but(grad="main_grad")
    model, inputs = step.make_model(case), step.make_inputs(case)
    y = step.forward(model, case, inputs)
    forward = list(backend.calls), list(quantized)
    words = f"dprob: {CAUSE}.*before the forward"
    with demand(), pytest.raises(RuntimeError, match=words):
        y.backward(inputs.dy)
    assert (backend.calls, quantized) == forward
    assert inputs.x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    for index, op in enumerate((model[0], model[2])):
        held = torch.stack([getattr(op, f"weight{i}").main_grad for i in range(op.num_groups)])
        assert torch.equal(held, step.main_grad_start(case, index))


@demands
def test_a_stronger_demand_that_the_plan_meets_is_no_error(demand: Any) -> None:
    model, inputs = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
    y = step.forward(model, SEVERAL, inputs)
    with demand():
        y.backward(inputs.dy)
    step.assert_same(step.collect(SEVERAL, model, inputs, y), step.run_step(SEVERAL))


def test_a_demand_that_was_taken_back_is_no_error() -> None:
    model, inputs = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
    with demanded_by_torch():
        y = step.forward(model, SEVERAL, inputs)
    y.backward(inputs.dy)
    step.assert_same(step.collect(SEVERAL, model, inputs, y), step.run_step(SEVERAL))


# Where the output is not wanted -----------------------------------------------------------------

NO_DPROB = {
    "frozen probabilities": {"frozen": frozenset({"prob"})},
    "frozen probabilities and FC1": {"frozen": frozenset({"prob", "fc1"})},
}


@demands
@pytest.mark.parametrize("groups", [1, 3, 17])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("kind", NO_DPROB)
def test_without_dprob_nothing_raises(
    kind: str, activation: str, groups: int, demand: Any, weaken: Any
) -> None:
    """Whatever the number of groups; upstream asks only whether the activation scale is one."""
    case = StepCase(activation=activation, splits=(128,) * groups, hidden=64, ffn=64, bias=True)
    case = case.but(**NO_DPROB[kind])
    expected = step.run_step(case)
    backend = weaken()
    with demand():
        found = step.run_step(case)
    assert found["dprob"] is None
    assert backend.calls
    step.assert_same(found, expected)


@demands
def test_a_unit_activation_scale_wants_no_dprob(demand: Any, weaken: Any) -> None:
    case = SINGLE.but(unit_scale=True)
    expected = step.run_step(case)
    weaken()
    with demand():
        step.assert_same(step.run_step(case), expected)


@demands
def test_inference_wants_no_gradient(demand: Any, weaken: Any) -> None:
    expected = step.run_step(SEVERAL)["y"]
    weaken()
    model, inputs = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
    with demand(), torch.no_grad():
        assert step.same_bits(step.forward(model, SEVERAL, inputs), expected)


# What the demand changes, and what repeats ------------------------------------------------------


@demands
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "3g-pad"])
def test_the_demand_changes_no_bit(base: StepCase, activation: str, demand: Any) -> None:
    case = base.but(activation=activation)
    expected = step.run_step(case)
    with demand():
        step.assert_same(step.run_step(case), expected)


@pytest.mark.parametrize("fill", [True, False], ids=["filled", "not filled"])
@pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "3g-pad"])
def test_memory_that_torch_fills_is_invisible(
    base: StepCase, fill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the demand torch may fill fresh memory with NaN: no result is made of it."""
    from te_grouped_mlp.op.tensors import memory

    expected = step.run_step(base)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    with demanded_by_torch(), memory.poisoned(None):
        assert torch.empty(1000).isnan().all() == fill or not fill
        step.assert_same(step.run_step(base), expected)


WAYS: dict[str, dict[str, Any]] = {
    "main_grad": {"grad": "main_grad"},
    "fused accumulation": {"grad": "fused"},
    "delayed": {"delay": True},
    "grouped weights": {"weight": "grouped"},
    "quantized weights": {"weight": "quantized"},
    "bf16 probabilities": {"prob_dtype": torch.bfloat16},
    "recompute": {"activation": "srelu", "recompute": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_contract_holds_together_with(way: str) -> None:
    case = SEVERAL.but(**WAYS[way])
    expected = step.run_step(case)
    with demanded_by_torch():
        step.assert_same(step.run_step(case), expected)


@pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "3g-pad"])
def test_the_contract_holds_together_with_the_callers_buffers(base: StepCase) -> None:
    expected = step.live(base, step.run_step(base))
    model, inputs = step.make_model(base), step.make_inputs(base)
    out, dx = (torch.zeros(base.rows, base.hidden, dtype=base.dtype) for _ in range(2))
    with demanded_by_switch():
        y = step.run_model(
            model, base, inputs, op_kwargs={2: {"output": out}, 0: {"grad_input": dx}}
        )
    assert y.data_ptr() == out.data_ptr()
    found = {**step.collect(base, model, inputs, y), "dx": dx}
    step.assert_same(step.live(base, found), expected)


def test_the_contract_holds_together_with_a_quantized_gradient() -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    found = []
    for demand in (contextlib.nullcontext, *DEMANDS.values()):
        model, inputs = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
        dy = tex.group_quantize(
            tensor=inputs.dy,
            quantizer=MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False),
            num_tensors=len(SEVERAL.splits),
            first_dims=inputs.split_sizes,
        )
        with demand():
            y = step.run_model(model, SEVERAL, inputs, dy=dy)
        found.append(step.collect(SEVERAL, model, inputs, y))
    step.assert_same(found[1], found[0])
    step.assert_same(found[2], found[0])


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "3g-pad"])
def test_twelve_runs_have_one_hash(base: StepCase, activation: str) -> None:
    case = base.but(activation=activation)
    seen = []
    for count in (1, 2):
        with fixtures.threads(count):
            seen += [fixtures.hashes(step.run_step(case)) for _ in range(6)]
    assert all(each == seen[0] for each in seen)
    assert len(set(seen[0].values())) == len(seen[0]), "two outputs are equal: is one empty?"


@pytest.mark.parametrize("count", [2, 3])
def test_the_number_of_threads_changes_no_bit(count: int) -> None:
    """Rows and features large enough that every kernel uses its threads."""
    case = StepCase(splits=(640, 384, 1024), hidden=512, ffn=256, bias=True, scale_bias=True)
    with fixtures.threads(1):
        expected = step.run_step(case)
    with fixtures.threads(count):
        step.assert_same(step.run_step(case), expected)


def test_a_hash_sees_one_bit() -> None:
    tensor = torch.zeros(100, dtype=torch.bfloat16)
    other = tensor.clone()
    other[37] = -0.0
    assert fixtures.digest(tensor) != fixtures.digest(other)


def test_the_promise_to_clients() -> None:
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    assert grouped_mlp.DETERMINISTIC_DPROB is True


def test_the_demand_is_part_of_the_plan() -> None:
    """A plan made without the demand is not given to a call that makes it."""
    plans = []
    original = selection.make_plan

    def spy(*args: Any) -> Plan:
        plans.append(original(*args))
        return plans[-1]

    model, inputs = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "make_plan", spy)
        for demand in (contextlib.nullcontext, demanded_by_torch, demanded_by_switch):
            with demand():
                step.forward(model, SEVERAL, inputs)
    assert [plan.call.deterministic for plan in plans] == [False, True, True]
    assert environment.determinism_requested(environment.read_switches()) is False
