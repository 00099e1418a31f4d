# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Choosing a backend and planning a call: pure, bounded, overridden by name."""

from __future__ import annotations

import dataclasses
import operator
import random
import threading
import tracemalloc
from typing import Any

import pytest

from te_grouped_mlp.op import execution, selection
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import MXFP8, DType
from te_grouped_mlp.op.layout import GroupLayout, Kernel, Launch, Output, RowExtent
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Plan, Reason, Reject
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind

ENV = Environment(
    sm=Absent("no GPU"),
    versions={},
    wrappers=Absent("no frontend"),
    switches=Switches(fused=True),
    standalone=True,
)
PROBLEM = Problem(
    num_groups=4,
    fc1=LinearSpec(128, 256),
    fc2=LinearSpec(128, 128),
    activation=ActivationSpec(Activation.SWIGLU, 32),
    recipe=RecipeKind.MXFP8,
    recipe_detail="",
    device="cuda",
    dtype=DType.BFLOAT16,
)
ON_CPU = dataclasses.replace(PROBLEM, device="cpu")
"""For tests with the reference backend; the fake ones must not depend on who serves a CPU."""
CALL = Call(
    rows=512,
    dtype=DType.BFLOAT16,
    prob_dtype=DType.FLOAT32,
    rows_are_full=True,
    wanted=frozenset(Output) - {Output.DB1, Output.DB2},
    input_kind=TensorKind.PLAIN,
    unit_scale=False,
    deterministic=False,
    format=MXFP8,
)
BOTH = frozenset(RowExtent)


class FakeBackend:
    """Takes what it is told to take; counts how often it plans."""

    def __init__(self, name: str, refusal: Reject | None = None, cause: str = "") -> None:
        self.name = name
        self.planned = 0
        self._refusal = refusal
        self._cause = cause

    def refusal(self, problem: Problem, env: Environment) -> Reject | None:
        return self._refusal

    def plan(self, problem: Problem, call: Call, env: Environment) -> Plan | Reject:
        self.planned += 1
        if self._refusal is not None:
            return self._refusal
        # More than is wanted, as a launch that cannot leave an output out would say.
        outputs = frozenset(Output)
        held = outputs - {Output.DPROB} if self._cause else outputs
        launch = Launch(Kernel.DACT_DGRAD, BOTH, outputs, held, self._cause)
        layout = GroupLayout.decide(
            num_groups=problem.num_groups,
            buffer_rows=call.rows,
            rows_are_full=call.rows_are_full,
            launches=(launch,),
        )
        return Plan(self.name, problem, call, layout, (launch,))


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without plans, and leave none to others."""
    monkeypatch.setattr(selection, "_plans", type(selection._plans)())
    monkeypatch.setattr(selection, "_latest", None)
    monkeypatch.setattr(selection, "_reported", set())


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts backends in place of ours, in their order."""

    def install(*found: FakeBackend) -> None:
        by_name = {each.name: each for each in found}
        monkeypatch.setattr(selection, "NAMES", (*by_name, selection.UPSTREAM))
        monkeypatch.setattr(selection, "capability", by_name.__getitem__)

    return install


def named(name: str, env: Environment = ENV) -> Environment:
    return dataclasses.replace(env, switches=dataclasses.replace(env.switches, backend=name))


NO = Reject(Reason.ARCHITECTURE, "sm is 8.0; allowed: 9.0")
OTHER = Reject(Reason.PACKAGE, "quack-kernels is absent")


# Choosing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "chosen", "passed"),
    [
        (None, None, "one", []),
        (NO, None, "two", [("one", NO)]),
        (None, OTHER, "one", []),
        (NO, OTHER, None, [("one", NO), ("two", OTHER)]),
    ],
    ids=["both", "second", "first", "neither"],
)
def test_auto_takes_the_first_that_can(
    first: Reject | None, second: Reject | None, chosen: str | None, passed: list, backends: Any
) -> None:
    backends(FakeBackend("one", first), FakeBackend("two", second))
    assert selection.choose(PROBLEM, ENV) == chosen
    assert selection.passed_over(PROBLEM, ENV) == passed


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_named_backend_is_the_only_candidate(name: str, backends: Any) -> None:
    backends(FakeBackend("one"), FakeBackend("two"))
    assert selection.candidates(named(name)) == (name,)
    assert selection.choose(PROBLEM, named(name)) == name
    assert selection.make_plan(PROBLEM, CALL, named(name)).backend == name


def test_a_named_backend_that_cannot_is_not_replaced(backends: Any) -> None:
    backends(FakeBackend("one", NO), FakeBackend("two"))
    assert selection.choose(PROBLEM, named("one")) is None
    with pytest.raises(ValueError, match="backend 'one': .*sm is 8.0; allowed: 9.0") as raised:
        selection.make_plan(PROBLEM, CALL, named("one"))
    assert "two" not in str(raised.value)


def test_upstream_named_leaves_none_of_ours(backends: Any) -> None:
    backends(FakeBackend("one"))
    assert selection.candidates(named("upstream")) == ()
    assert selection.choose(PROBLEM, named("upstream")) is None


@pytest.mark.parametrize("name", ["fast", "One", "one ", "auto,one"])
def test_a_wrong_name_is_named(name: str, backends: Any) -> None:
    backends(FakeBackend("one"))
    allowed = "allowed: auto, one, upstream"
    with pytest.raises(ValueError, match=f"NVTE_GROUPED_MLP_BACKEND is '{name}'; {allowed}"):
        selection.candidates(named(name))


def test_every_name_can_be_asked_for() -> None:
    """Each of our backends imports, and its plans lead back to it."""
    for name in selection.NAMES:
        if name != selection.UPSTREAM:
            assert name == selection.capability(name).NAME
            assert execution.backend(name) is execution.backend(name)


def test_choosing_is_pure() -> None:
    before = (ON_CPU, CALL, ENV)
    first = selection.choose(ON_CPU, ENV), selection.refusals(ON_CPU, ENV)
    again = selection.choose(ON_CPU, ENV), selection.refusals(ON_CPU, ENV)
    assert first == again
    assert before == (ON_CPU, CALL, ENV)


# A call that the chosen backend does not take ---------------------------------------------------


def test_a_call_goes_to_the_next_backend(backends: Any) -> None:
    backends(FakeBackend("one", NO), FakeBackend("two"))
    assert selection.make_plan(PROBLEM, CALL, ENV).backend == "two"


def test_a_call_that_nobody_takes_raises_with_each_reason(backends: Any) -> None:
    backends(FakeBackend("one", NO), FakeBackend("two", OTHER))
    words = (
        f"no backend takes this call.*'one': {NO.reason.value}.*'two': .*quack-kernels is absent"
    )
    with pytest.raises(ValueError, match=words):
        selection.make_plan(PROBLEM, CALL, ENV)


def test_a_deterministic_call_goes_to_a_backend_that_is(backends: Any) -> None:
    backends(FakeBackend("one", cause="atomics; use two"), FakeBackend("two"))
    strict = dataclasses.replace(CALL, deterministic=True)
    assert selection.make_plan(PROBLEM, CALL, ENV).backend == "one"
    assert selection.make_plan(PROBLEM, strict, ENV).backend == "two"
    with pytest.raises(RuntimeError, match="dprob is computed by dact_dgrad, atomics; use two"):
        selection.make_plan(PROBLEM, strict, named("one"))
    unwanted = dataclasses.replace(strict, wanted=strict.wanted - {Output.DPROB})
    assert selection.make_plan(PROBLEM, unwanted, ENV).backend == "one"


def test_a_refusal_is_not_remembered(backends: Any) -> None:
    backend = FakeBackend("one", NO)
    backends(backend)
    for _ in range(2):
        with pytest.raises(ValueError, match="no backend takes"):
            selection.make_plan(PROBLEM, CALL, ENV)
    backend._refusal = None
    assert selection.make_plan(PROBLEM, CALL, ENV).backend == "one"


# Plans are shared and bounded -------------------------------------------------------------------

CHANGES: list[dict[str, Any]] = [
    {"rows": 640},
    {"dtype": DType.FLOAT16},
    {"prob_dtype": DType.BFLOAT16},
    {"rows_are_full": False},
    {"wanted": frozenset({Output.Y})},
    {"input_kind": TensorKind.PREQUANTIZED},
    {"unit_scale": True},
    {"deterministic": True},
    {"split_multiple": 128},
]


def test_the_table_has_every_fact_of_a_call() -> None:
    names = {name for change in CHANGES for name in change}
    assert names == {field.name for field in dataclasses.fields(Call)} - {"format"}


def test_equal_calls_share_a_plan(backends: Any) -> None:
    backend = FakeBackend("one")
    backends(backend)
    plan = selection.make_plan(PROBLEM, CALL, ENV)
    for _ in range(3):
        copies = (dataclasses.replace(each) for each in (PROBLEM, CALL, ENV))
        assert selection.make_plan(*copies) is plan
    assert backend.planned == 1


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize("kept", [False, True], ids=["latest", "earlier"])
def test_another_call_has_another_plan(change: dict, kept: bool, backends: Any) -> None:
    """Also where the plan in question is not that of the latest call."""
    backend = FakeBackend("one")
    backends(backend)
    other = dataclasses.replace(CALL, **change)
    first = selection.make_plan(PROBLEM, CALL, ENV)
    second = selection.make_plan(PROBLEM, other, ENV)
    assert (first.call, second.call) == (CALL, other)
    if kept:
        assert selection.make_plan(PROBLEM, CALL, ENV) is first
        assert selection.make_plan(PROBLEM, other, ENV) is second
    assert backend.planned == 2


def test_another_machine_has_another_plan(backends: Any) -> None:
    backend = FakeBackend("one")
    backends(backend)
    wrappers = {"glu": frozenset({"a"})}
    machines = [
        ENV,
        dataclasses.replace(ENV, sm=(9, 0)),
        dataclasses.replace(ENV, wrappers=wrappers),
        dataclasses.replace(ENV, wrappers={"glu": frozenset({"b"})}),
        dataclasses.replace(ENV, single_group_is_always_dense=True),
        dataclasses.replace(ENV, switches=Switches(fused=True, check=True)),
    ]
    plans = [selection.make_plan(PROBLEM, CALL, env) for env in machines]
    assert len({id(plan) for plan in plans}) == len(machines)
    again = [selection.make_plan(PROBLEM, CALL, env) for env in machines]
    # The plans are equal: the machine is no part of one.
    assert all(map(operator.is_, again, plans))
    assert backend.planned == len(machines)


def test_the_number_of_plans_is_bounded(backends: Any) -> None:
    """The plan that was used last is kept, the one that was not used for longest is dropped."""
    backend = FakeBackend("one")
    backends(backend)
    calls = [dataclasses.replace(CALL, rows=128 * count) for count in range(1, 200)]
    for call in calls:
        selection.make_plan(PROBLEM, calls[0], ENV)
        selection.make_plan(PROBLEM, call, ENV)
        assert len(selection._plans) <= 64
    assert backend.planned == len(calls)
    selection.make_plan(PROBLEM, calls[0], ENV)
    selection.make_plan(PROBLEM, calls[-1], ENV)
    assert backend.planned == len(calls)
    selection.make_plan(PROBLEM, calls[1], ENV)
    assert backend.planned == len(calls) + 1


def test_random_row_counts_keep_no_memory() -> None:
    """500 calls with the reference backend after a first 500: what is kept does not grow."""
    draw = random.Random(1)

    def plan_many() -> None:
        for _ in range(500):
            rows = 128 * draw.randrange(1, 10_000)
            call = dataclasses.replace(CALL, rows=rows, rows_are_full=draw.random() < 0.5)
            assert selection.make_plan(ON_CPU, call, ENV).call.rows == rows

    plan_many()
    tracemalloc.start()
    plan_many()
    before = tracemalloc.get_traced_memory()[0]
    plan_many()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # A plan has about 3 kB; 500 of them would be far more.
    assert kept < 100_000
    assert len(selection._plans) == 64


def test_a_plan_is_reported_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="te_grouped_mlp")
    for rows in (512, 640, 768):
        selection.make_plan(ON_CPU, dataclasses.replace(CALL, rows=rows), ENV)
    assert len(caplog.records) == 1


def test_threads_get_their_own_plans(backends: Any) -> None:
    """Two threads that plan different calls at once: neither is given the other's plan."""
    backends(FakeBackend("one"))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(2000):
            call = dataclasses.replace(CALL, rows=128 * draw.randrange(1, 6))
            plan = selection.make_plan(PROBLEM, call, ENV)
            if plan.call != call:
                wrong.append((plan.call.rows, call.rows))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# The plan ---------------------------------------------------------------------------------------


def test_the_launch_of_a_kernel() -> None:
    plan = selection.make_plan(ON_CPU, CALL, ENV)
    assert plan.launch(Kernel.FC1_ACT).kernel is Kernel.FC1_ACT
    with pytest.raises(KeyError, match="no launch fc2_bias_grad"):
        plan.launch(Kernel.FC2_BIAS_GRAD)


def test_a_plan_is_frozen() -> None:
    plan = selection.make_plan(ON_CPU, CALL, ENV)
    for record in (plan, plan.layout, plan.launches[0], ON_CPU, CALL):
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.rows = 1  # type: ignore[attr-defined]


def test_a_reject_reads_as_a_sentence() -> None:
    assert str(NO) == f"{Reason.ARCHITECTURE.value}: sm is 8.0; allowed: 9.0"
    assert str(Reject(Reason.DEVICE, "")) == Reason.DEVICE.value


def test_reasons_differ() -> None:
    assert len({reason.value for reason in Reason}) == len(Reason)
