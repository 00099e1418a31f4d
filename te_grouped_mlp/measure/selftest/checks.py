# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One case of the self-test: numbers, padding, replay."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from te_grouped_mlp.cli.replay import disturbance
from te_grouped_mlp.measure import step
from te_grouped_mlp.measure.selftest import exact
from te_grouped_mlp.measure.selftest.cases import Case
from te_grouped_mlp.measure.step import Batch, Model
from te_grouped_mlp.op import environment, selection
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.plan import Plan, Reject
from te_grouped_mlp.op.problem import Call, TensorKind
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.digest import digest

Outputs = dict[str, torch.Tensor]

TOKENS = ("y", "dx", "dprob")
"""Outputs with a row for each token; the others have an entry for each expert."""

_REFERENCE = "reference"
_HOSTILE_BYTE = 0xFF
# Of Transformer Engine's ops, where they differ from ours.


@dataclass
class Result:
    """What came of a case.

    Attributes:
        float64: Output -> largest relative error of a stripe against float64; None: not finite.
        reference: Output -> relative error against the reference backend; empty where that is the
            backend under test. None: not finite.
        padding: Output -> whether its live part is that of the exact-size call, bit by bit; empty
            without padding.
        distinct: Output -> number of values among the replays.
        varying: Output -> why the plan does not promise that it repeats.
        deterministic: Whether bit-identical results were demanded.
        failures: What is wrong, a sentence that starts with the output's name.
        error: The exception that ended the case, or None.
        seconds: How long it took.
    """

    float64: dict[str, float | None] = field(default_factory=dict)
    reference: dict[str, float | None] = field(default_factory=dict)
    padding: dict[str, bool] = field(default_factory=dict)
    distinct: dict[str, int] = field(default_factory=dict)
    varying: dict[str, str] = field(default_factory=dict)
    deterministic: bool = False
    failures: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the case passed."""
        return self.error is None and not self.failures


def run(case: Case, runs: int) -> Result:
    """Run one case; whatever goes wrong is in the result.

    Args:
        case: Not a declined one.
        runs: Number of replays.
    """
    result = Result()
    begin = time.perf_counter()
    try:
        with step.switches(case.backend):
            _run(case, runs, result)
    except Exception as error:  # a GPU that is new to us may raise anything
        text = " ".join(str(error).split())
        result.error = f"{type(error).__name__}: {text}"
    result.seconds = time.perf_counter() - begin
    return result


def _run(case: Case, runs: int, result: Result) -> None:
    model, given = _model(case), _batch(case)
    padded = given.padded(case.layout.padding, float("nan")) if case.layout.padding else given
    wanted = exact.step(model, given, case.spec, case.layout.splits)
    reference = None
    if case.backend != _REFERENCE:
        with step.switches(_REFERENCE):
            # A model of its own: an op is fused once, for the backend that is named then.
            reference = _live(_once(_model(case), padded, case), case)

    result.varying = varying(case, deterministic=True)
    result.deterministic = not result.varying
    modes = {"deterministic": True} if result.deterministic else {}
    if varying(case, deterministic=False):
        # Users train without the demand, and other kernels run then.
        modes = {"by default": False, **modes}
    for mode, demanded in modes.items():
        with _determinism(demanded):
            found = _once(model, padded, case)
            _judge_numbers(case, mode, _live(found, case), wanted, reference, result)
            _judge_tails(case, mode, found, result)
    with _determinism(result.deterministic):
        if case.layout.padding:
            with environment.override(treat_rows_as_full=False):
                expected = _live(_once(model, given, case), case)
            _judge_padding(_live(found, case), expected, result)
        _judge_replays(found, lambda: _once(model, padded, case), runs, case.device, result)


def _once(model: Model, given: Batch, case: Case) -> Outputs:
    with memory.poisoned(_HOSTILE_BYTE):
        found = model.run(given, mxfp8=case.format.is_block_scaled)
    model.require_fused()
    return found


def _live(found: Outputs, case: Case) -> Outputs:
    """Return copies on the CPU, cut to the live rows."""
    live = case.layout.live
    return {
        name: (value[:live] if name in TOKENS else value).detach().cpu().clone()
        for name, value in found.items()
    }


def _model(case: Case) -> Model:
    shape = step.Shape(len(case.layout.splits), case.hidden, case.ffn, case.layout.live)
    return Model.build(case.activation, shape, seed=0, device=case.device, bias=case.bias)


def _batch(case: Case) -> Batch:
    layout = case.layout
    given = step.batch(step.Shape(1, case.hidden, case.ffn, layout.live), 1, case.device)
    # The host must see the splits to know that the rows are full.
    given.splits = torch.tensor(layout.splits, device=case.device if layout.padding else "cpu")
    return given


def varying(case: Case, *, deterministic: bool) -> dict[str, str]:
    """Return the outputs that the plan does not promise to repeat, and why.

    Args:
        case: What is run.
        deterministic: Whether bit-identical results are demanded.

    Raises:
        ValueError: The backend refuses the call.
    """
    env = environment.current()
    outputs = set(Output) if case.bias else set(Output) - {Output.DB1, Output.DB2}
    call = Call(
        rows=case.layout.live + case.layout.padding,
        dtype=DType.BFLOAT16,
        prob_dtype=DType.FLOAT32,
        rows_are_full=not case.layout.padding,
        wanted=frozenset(outputs),
        input_kind=TensorKind.PLAIN,
        unit_scale=False,
        deterministic=deterministic,
        format=case.format,
    )
    plan = selection.capability(case.backend).plan(case.problem, call, env)
    if isinstance(plan, Reject):
        raise ValueError(f"backend {case.backend!r}: {plan}")
    assert isinstance(plan, Plan)
    return {each.value: launch.cause for each, launch in plan.not_deterministic().items()}


@contextlib.contextmanager
def _determinism(demanded: bool) -> Iterator[None]:
    """Demand bit-identical results by the switch; torch's own flag would concern torch too."""
    switches = environment.current_switches()
    wanted = dataclasses.replace(switches, allow_nondeterministic=not demanded)
    with environment.override(switches=wanted):
        yield


def _judge_numbers(
    case: Case, mode: str, found: Outputs, wanted: Outputs, reference: Outputs | None, out: Result
) -> None:
    limits = exact.bounds(case.format, case.activation)
    missing = sorted(wanted.keys() ^ found.keys())
    out.failures += [f"{name}: {mode}, missing or not asked for" for name in missing]
    for name, value in found.items():
        if name in missing:
            continue
        if value.shape != wanted[name].shape:
            shapes = f"{tuple(value.shape)}, allowed: {tuple(wanted[name].shape)}"
            out.failures.append(f"{name}: {mode}, shape {shapes}")
            continue
        error = exact.error(name, value, wanted[name], case.layout.splits)
        _note(out, out.float64, name, error, limits[name], f"{mode}, against float64")
        if reference is not None:
            error = exact.agreement(value, reference[name])
            _note(
                out,
                out.reference,
                name,
                error,
                exact.AGREEMENT,
                f"{mode}, against the reference backend",
            )


def _note(
    out: Result,
    errors: dict[str, float | None],
    name: str,
    error: float,
    limit: float | None,
    what: str,
) -> None:
    """Keep the larger of two modes' errors, and say where one is over the limit."""
    if error != error:
        errors[name] = None
        out.failures.append(f"{name}: {what}, not finite")
        return
    before = errors.get(name, 0.0)
    errors[name] = None if before is None else max(before, error)
    if limit is not None and error > limit:
        out.failures.append(f"{name}: {what}, relative error {error:.3g}, allowed {limit:.3g}")


def _judge_tails(case: Case, mode: str, found: Outputs, out: Result) -> None:
    for name in TOKENS:
        tail = found[name][case.layout.live :]
        if len(tail) != case.layout.padding:
            out.failures.append(f"{name}: {mode}, {len(found[name])} rows")
        elif tail.any():
            out.failures.append(f"{name}: {mode}, rows past the live ones are not zero")


def _judge_padding(found: Outputs, expected: Outputs, out: Result) -> None:
    for name, value in found.items():
        same = digest(value) == digest(expected[name])
        out.padding[name] = same
        if same:
            continue
        if name not in out.varying:
            out.failures.append(f"{name}: differs from the exact-size call")
        elif not exact.agreement(value, expected[name]) <= exact.AGREEMENT:
            out.failures.append(f"{name}: is far from the exact-size call")


def _judge_replays(
    first: Outputs, once: Callable[[], Outputs], runs: int, device: str, out: Result
) -> None:
    seen = {name: {digest(value)} for name, value in first.items()}
    for index in range(1, runs):
        with disturbance(index, device):
            found = once()
        for name, value in found.items():
            seen[name].add(digest(value))
    out.distinct = {name: len(values) for name, values in seen.items()}
    for name, count in out.distinct.items():
        if count > 1 and name not in out.varying:
            out.failures.append(f"{name}: {count} values in {runs} runs")
