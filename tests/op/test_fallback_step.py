# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""An op that was fused for the frontend's kernels runs the calls that must repeat on native ones.

On a CPU: stand-ins of the frontend's wrappers, and the reference kernels under the native backend's
name and rules. What is shown is who gets which call, and that the op hands either what it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from te_grouped_mlp.cli import determinism
from te_grouped_mlp.op import environment, selection
from te_grouped_mlp.op.backends.cutedsl import capability
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.environment import Environment
from te_grouped_mlp.op.plan import Plan, Reject, planned
from te_grouped_mlp.op.problem import Call, Problem
from tests.op.backends.cudnn.simulated import run_on, simulation
from tests.support import backends, step
from tests.support.frontend_stand_in import StandIn
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SEVERAL = StepCase(splits=(256, 0, 512), buffer_rows=1024, hidden=192, ffn=128, fill=float("nan"))
PADDED = SEVERAL.but(splits=(256,), buffer_rows=768)
FULL = PADDED.but(buffer_rows=None)
LAYOUTS = {"several": SEVERAL, "padded": PADDED, "full": FULL}
BOTH = {"bias": True, "scale_bias": True}


class Native(ReferenceBackend):
    """The reference kernels; refuses, accepts and lays out as the native backend does on a GPU."""

    def refusal(self, problem: Problem, env: Environment) -> Reject | None:
        return capability.refusal(dataclasses.replace(problem, device="cuda"), env)

    def plan(self, problem: Problem, call: Call, env: Environment) -> Plan | Reject:
        on_gpu = dataclasses.replace(problem, device="cuda")
        return planned(capability.NAME, problem, call, capability.plan_launches(on_gpu, call, env))


class Ran:
    """What ran: the backend of each new plan, and the names of the wrappers called."""

    def __init__(self, stand_in: StandIn) -> None:
        self.plans: list[Plan] = []
        self._stand_in = stand_in

    @property
    def wrappers(self) -> list[str]:
        return [name for name, _ in self._stand_in.calls]

    @property
    def backends(self) -> list[str]:
        return [plan.backend for plan in self.plans]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Ran]:
    """A Blackwell machine whose frontend is of the release in the test's parameter."""
    release = getattr(request, "param", "1.32.0")
    with simulation(monkeypatch, release) as stand_in, monkeypatch.context() as patch:
        make_plan, ran = selection.make_plan, Ran(stand_in)

        def spy(*args: Any) -> Plan:
            ran.plans.append(make_plan(*args))
            return ran.plans[-1]

        backends.install(patch, capability.NAME, Native(), Native())
        patch.setattr("te_grouped_mlp.op.backends.GPU_ONLY", frozenset())
        patch.setattr(selection, "_plans", type(selection._plans)())
        patch.setattr(selection, "_latest", None)
        patch.setattr(selection, "make_plan", spy)
        versions = {**environment.current().versions, **determinism.environment(True).versions}
        with environment.override(versions=versions):
            yield ran


def demanded() -> Any:
    return step.switches(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")


def packed_reference(case: StepCase, ran: Ran) -> dict[str, Any]:
    """Run the reference backend in the row layout of the native one."""
    with environment.override(treat_rows_as_full=False):
        found = step.live(case, run_on("reference", case))
    ran.plans.clear()
    return found


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_must_repeat(layout: str, activation: str, ran: Ran) -> None:
    """With FC1's bias: gated activations go to the native backend, unary ones stay."""
    case = LAYOUTS[layout].but(activation=activation, **BOTH)
    expected = packed_reference(case, ran)
    with demanded():
        found = step.run_step(case)
    unary = activation in ("srelu", "tanh_srelu")
    assert set(ran.backends) == {"cudnn" if unary else "cutedsl"}
    assert bool(ran.wrappers) is unary
    step.assert_same(step.live(case, found), expected)
    step.assert_present(case, found)


@pytest.mark.parametrize("ran", ["1.30.0"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frontend_without_the_argument(layout: str, ran: Ran) -> None:
    """That release has it for dSReLU alone."""
    for activation, backend in (("swiglu", "cutedsl"), ("srelu", "cudnn")):
        case = LAYOUTS[layout].but(activation=activation)
        expected = packed_reference(case, ran)
        with demanded():
            found = step.run_step(case)
        assert set(ran.backends) == {backend}
        step.assert_same(step.live(case, found), expected)


@pytest.mark.parametrize("weight", ["discrete", "grouped", "quantized"])
def test_one_op_changes_hands_from_call_to_call(weight: str, ran: Ran) -> None:
    """Also while the backward of a call on the other backend is outstanding."""
    case = SEVERAL.but(weight=weight, **BOTH)
    expected = packed_reference(case, ran)
    model, inputs = step.make_model(case), step.make_inputs(case)
    first = step.forward(model, case, inputs)
    with demanded():
        others = step.make_inputs(case)
        second = step.forward(model, case, others)
        second.backward(others.dy)
        assert ran.backends == ["cudnn", "cutedsl"]
        step.assert_same(step.live(case, step.collect(case, model, others, second)), expected)
    model.zero_grad(set_to_none=True)
    assert not any(name in ("dglu", "wgrad") for name in ran.wrappers)
    first.backward(inputs.dy)
    assert "dglu" in ran.wrappers
    step.assert_same(step.live(case, step.collect(case, model, inputs, first)), expected)


def test_by_default_the_frontend_runs_and_the_op_says_so(ran: Ran) -> None:
    import te_grouped_mlp

    step.run_step(SEVERAL.but(**BOTH))
    assert set(ran.backends) == {"cudnn"}
    assert "dglu" in ran.wrappers
    decision = te_grouped_mlp.explain()[-1]
    assert (decision.path, decision.refusals) == ("cudnn", ())


def test_a_demand_after_a_forward_on_the_frontend_raises(ran: Ran) -> None:
    """The call is planned once: the backward does not change hands."""
    case = SEVERAL.but(**BOTH)
    model, inputs = step.make_model(case), step.make_inputs(case)
    y = step.forward(model, case, inputs)
    before = len(ran.wrappers)
    with demanded(), pytest.raises(RuntimeError, match="demand it before the forward"):
        y.backward(inputs.dy)
    assert len(ran.wrappers) == before
