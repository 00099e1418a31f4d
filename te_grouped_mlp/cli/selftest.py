# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp selftest`: does the op give right, padded and repeatable results here?"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from te_grouped_mlp.cli import arguments, output
from te_grouped_mlp.cli.output import CommandError
from te_grouped_mlp.cli.remedies import REMEDIES
from te_grouped_mlp.op.activations import Activation

if TYPE_CHECKING:
    from te_grouped_mlp.measure.selftest.cases import Case
    from te_grouped_mlp.measure.selftest.checks import Result
    from te_grouped_mlp.op.environment import Environment

    Results = dict[Case, Result | None]

SCHEMA = 1
"""Of the JSON report; counts up when a key changes its meaning."""

RUNS, QUICK_RUNS = 12, 3
_DRIVER_SECONDS = 20


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "selftest",
        help="whether the op is right on this machine",
        description="Runs every activation, with and without biases, with one expert and several, "
        "on each backend that runs here, and compares: with float64, with the reference backend on "
        "the CPU, a buffer with NaN padding with the exact-size call bit by bit, and replays with "
        "each other, while a second stream is busy. Leaves a note that doctor shows. Exit code 1 "
        "if anything is wrong.",
    )
    parser.add_argument(
        "--backend",
        type=arguments.backend,
        default=arguments.AUTO,
        metavar="NAME",
        help="the backend; default: what auto chooses here, and on SM 10x under MXFP8 cutedsl as "
        "well, which stands in where cudnn cannot be deterministic",
    )
    parser.add_argument(
        "--activation",
        type=arguments.activations,
        default=tuple(Activation),
        metavar="NAME[,NAME]",
        help="default: all; with fewer, no note is left",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"padded layouts alone, {QUICK_RUNS} replays"
    )
    parser.add_argument(
        "--runs",
        type=arguments.integer(minimum=2),
        help=f"replays of each case; default: {RUNS}, with --quick {QUICK_RUNS}",
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run every case and print the table."""
    from te_grouped_mlp.measure import step

    step.start()
    import torch

    from te_grouped_mlp.integration import standalone
    from te_grouped_mlp.measure.selftest import cases as catalogue
    from te_grouped_mlp.op import environment

    kinds = step.available(args.activation)
    devices = ["cuda"] if torch.cuda.is_available() else []
    if standalone.is_active():
        devices.append("cpu")
    cases, refused = catalogue.find(args.backend, devices, kinds, quick=args.quick)
    if not cases:
        raise CommandError(f"nothing to test: {_why_not(refused) or 'no device can be used'}")
    runs = args.runs or (QUICK_RUNS if args.quick else RUNS)
    results = _run_all(cases, runs)
    env = environment.current()
    good = all(result is None or result.good for result in results.values())
    facts = _machine(env)
    note = _leave_note(results, env, facts, args) if set(kinds) == set(Activation) else None
    if output.shows_text(args.json):
        _print(results, good, runs, facts)
    report = {
        "schema": SCHEMA,
        "machine": facts,
        "quick": args.quick,
        "runs": runs,
        "cases": [_row(case, result) for case, result in results.items()],
        "not_tested": [{"backend": name, "reason": str(reject)} for name, reject in refused],
        "note": note,
        "ok": good,
    }
    output.write_json(args.json, report)
    return 0 if good else 1


def _why_not(refused: Sequence[tuple[str, Any]]) -> str:
    return "; ".join(
        f"{name}: {reject}. Remedy: {REMEDIES[reject.reason]}" for name, reject in refused
    )


def _run_all(cases: Sequence[Case], runs: int) -> Results:
    from te_grouped_mlp.measure.selftest import checks

    _compile(cases)
    found: Results = {}
    with output.progress(len(cases), "selftest") as advance:
        for case in cases:
            advance(case.label)
            found[case] = checks.run(case, runs) if case.declined is None else None
    return found


def _compile(cases: Sequence[Case]) -> None:
    """Compile the native kernels several at a time; one after another takes minutes."""
    problems = [case.problem for case in cases if case.backend == "cutedsl" and not case.declined]
    if not problems:
        return
    from te_grouped_mlp.op.backends.cutedsl import compile as kernels
    from te_grouped_mlp.op.backends.cutedsl import keys

    arch = kernels.target_arch()
    wanted = {key: None for each in problems for key in keys.of_problem(each, arch)}
    missing = kernels.missing_of(wanted)
    if missing:
        print(f"selftest: compiling {len(missing)} kernels", file=sys.stderr, flush=True)
        kernels.compile_ahead(missing)


def _machine(env: Environment) -> dict[str, object]:
    """Return what a report from another machine must say."""
    import torch

    from te_grouped_mlp.measure.selftest import record

    visible = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if visible else None,
        "sm": record.sm(env),
        "driver": _driver() if visible else None,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "standalone": env.standalone,
        "versions": record.versions(env),
    }


def _driver() -> str | None:
    """Ask for the driver's version; None where there is no answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def _leave_note(
    results: Results, env: Environment, facts: dict[str, object], args: argparse.Namespace
) -> str | None:
    """Write the note for `doctor`; that it cannot be written is said and changes nothing."""
    from te_grouped_mlp.measure.selftest import record

    verdicts: dict[tuple[str, str, str], bool] = {}
    for case, result in results.items():
        if result is not None:
            key = (case.backend, case.format.name, case.device)
            verdicts[key] = verdicts.get(key, True) and result.good
    now = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    entries = [
        {
            "sm": record.sm(env) if device == "cuda" else None,
            "backend": backend,
            "format": name,
            "ok": good,
            "date": now,
            "quick": args.quick,
            "gpu": facts["gpu"],
            "driver": facts["driver"],
            "versions": facts["versions"],
        }
        for (backend, name, device), good in verdicts.items()
    ]
    try:
        return str(record.write(entries))
    except (OSError, RuntimeError) as error:
        print(f"selftest: no note for doctor was left: {error}", file=sys.stderr)
        return None


def _print(results: Results, good: bool, runs: int, facts: dict[str, object]) -> None:
    from te_grouped_mlp.measure.selftest import exact

    print(f"{facts['gpu'] or 'CPU'}, SM {facts['sm'] or '-'}, driver {facts['driver'] or '-'}")
    columns = ("backend", "format", "activation", "bias", "experts", "float64", "reference")
    found = output.table(*columns, "padding", "replays", "result")
    for case, result in results.items():
        bias = "yes" if case.bias else "no"
        start = (case.backend, case.format.name, case.activation.value, bias, case.layout.name)
        if result is None:
            found.add_row(*start, "", "", "", "", "declined")
            continue
        cells = (
            _worst(result.float64, exact.bounds(case.format, case.activation)),
            _worst(result.reference, dict.fromkeys(result.reference, exact.AGREEMENT)),
            _padding(result),
            _replays(result, runs),
        )
        found.add_row(*start, *cells, "ok" if result.good else "FAILED")
    output.show(found)
    print(
        "float64, reference: the relative error that comes closest to what is allowed; against "
        "float64 of any 16 columns of an expert."
    )
    _print_failures(results)
    tested = [result for result in results.values() if result is not None]
    wrong = sum(not result.good for result in tested)
    seconds = sum(result.seconds for result in tested)
    verdict = "All is well" if good else f"{wrong} FAILED"
    print(f"{verdict}: {len(tested)} cases in {seconds:.0f} s.")


def _print_failures(results: Results) -> None:
    for refusal in dict.fromkeys(
        f"declined: {case.backend}, {case.format.name}, {case.activation.value}: {case.declined}"
        for case, result in results.items()
        if result is None
    ):
        print(refusal)
    for case, result in results.items():
        if result is None:
            continue
        for text in (*result.failures, *([result.error] if result.error else ())):
            print(f"FAILED {case.label}: {text}")


def _worst(errors: dict[str, float | None], allowed: dict[str, float | None]) -> str:
    """Return the error that comes closest to what is allowed, or goes furthest beyond it."""
    shares = {name: _share(error, allowed[name]) for name, error in errors.items()}
    if not shares:
        return ""
    name = max(shares, key=lambda each: shares[each])
    value, limit = errors[name], allowed[name]
    return f"{name} not finite" if value is None else f"{name} {value:.2g} of {limit:.2g}"


def _share(error: float | None, limit: float | None) -> float:
    if error is None:
        return float("inf")
    return -1.0 if limit is None else error / limit


def _padding(result: Result) -> str:
    if not result.padding:
        return ""
    differ = [name for name, same in result.padding.items() if not same]
    return f"{', '.join(differ)} differ" if differ else "equal"


def _replays(result: Result, runs: int) -> str:
    if not result.distinct:
        return ""
    differ = [name for name, count in result.distinct.items() if count != 1]
    if differ:
        return f"{', '.join(differ)} vary"
    return f"{runs} equal" + ("" if result.deterministic else ", not promised")


def _row(case: Case, result: Result | None) -> dict[str, object]:
    row: dict[str, object] = {
        "backend": case.backend,
        "device": case.device,
        "format": case.format.name,
        "activation": case.activation.value,
        "bias": case.bias,
        "layout": case.layout.name,
        "splits": list(case.layout.splits),
        "padding_rows": case.layout.padding,
        "hidden": case.hidden,
        "ffn": case.ffn,
        "declined": None if case.declined is None else str(case.declined),
    }
    if result is None:
        return {**row, "ok": None}
    names = dict.fromkeys((*result.float64, *result.distinct))
    return {
        **row,
        "deterministic": result.deterministic,
        "outputs": {name: _output(case, result, name) for name in names},
        "failures": result.failures,
        "error": result.error,
        "seconds": round(result.seconds, 3),
        "ok": result.good,
    }


def _output(case: Case, result: Result, name: str) -> dict[str, object]:
    from te_grouped_mlp.measure.selftest import exact

    return {
        "float64": result.float64.get(name),
        "float64_allowed": exact.bounds(case.format, case.activation)[name],
        "reference": result.reference.get(name),
        "reference_allowed": exact.AGREEMENT if result.reference else None,
        "padding_equal": result.padding.get(name),
        "distinct": result.distinct.get(name),
        "varies_because": result.varying.get(name),
    }
