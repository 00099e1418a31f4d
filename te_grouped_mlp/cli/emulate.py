# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp emulate`: launches of Blackwell kernels, executed on the CPU and checked."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import sys
from typing import Any

from te_grouped_mlp.cli import arguments, output
from te_grouped_mlp.cli.output import BadArgument, CommandError

SCHEDULES = ("eager", "late", "random")

_PACKAGES = ("torch", "cutlass", "quack", "cudnn", "numpy")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "emulate",
        help="launches of Blackwell kernels, executed on the CPU and checked",
        description="Compiles kernels for sm_100a, NVIDIA's of the cuDNN frontend and our own, "
        "executes their launches on the CPU, checks every access, and compares the results with "
        "the reference backend. Exit code 1 if a launch is at fault or a result is wrong.",
    )
    parser.add_argument(
        "launches",
        nargs="*",
        metavar="LAUNCH",
        help="names as --list prints them, or patterns such as 'cutedsl/fc1_act*'",
    )
    parser.add_argument("--list", action="store_true", help="print the names of all launches")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="late",
        help="when asynchronous work takes effect: at once, as late as possible, or at random "
        "times with warps in random order; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=arguments.seed, default=0, help="of the schedule 'random'; default: 0"
    )
    parser.add_argument(
        "--no-races", action="store_true", help="do not track what happens before what: faster"
    )
    parser.add_argument(
        "--trace", action="store_true", help="print every instruction on standard error"
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the launches that are named, or list them."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"missing: {', '.join(missing)}; pip install 'te-grouped-mlp[emulate]'")
    from te_grouped_mlp.emulator import launch_cases

    cases = launch_cases.every_case()
    if args.list:
        output.write_json(args.json, {"launches": list(cases)})
        if output.shows_text(args.json):
            print("\n".join(cases))
        return 0
    names = _named(args.launches, list(cases))
    results = []
    with output.progress(len(names), "emulate") as advance:
        launcher = _Launcher(args)
        for name in names:
            advance(name)
            results.append(launcher.run(name, cases[name]))
    good = all(result["ok"] for result in results)
    if output.shows_text(args.json):
        for result in results:
            _print(result)
        print(f"{sum(result['ok'] for result in results)} of {len(results)} launches are right.")
    for result in results:
        del result["text"]
    output.write_json(args.json, {"launches": results, "ok": good})
    return 0 if good else 1


def _named(patterns: list[str], known: list[str]) -> list[str]:
    if not patterns:
        raise BadArgument("no LAUNCH is named; allowed: names and patterns (--list prints them)")
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = fnmatch.filter(known, pattern)
        if not matching:
            raise BadArgument(f"LAUNCH {pattern} names none of {len(known)}; --list prints them")
        found |= dict.fromkeys(matching)
    return list(found)


class _Launcher:
    """Runs launches on the emulated GPU of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        from te_grouped_mlp.emulator import launches, process
        from te_grouped_mlp.emulator.options import Options

        # The numbers of a launch need no Transformer Engine, but its tables of addresses do.
        self._gpu = process.start()
        self._gpu.options = Options(
            seed=args.seed,
            schedule=args.schedule,
            races=not args.no_races,
            trace=_trace if args.trace else None,
        )
        self._launches = launches

    def run(self, name: str, case: Any) -> dict[str, Any]:
        """Run one launch; returns what to print and what goes into the JSON."""
        from te_grouped_mlp.emulator import EmulationFault, launch_results
        from te_grouped_mlp.op import execution

        launches, gpu = self._launches, self._gpu
        prepared = launches.Maker.of(case).prepare(case)
        before = len(gpu.reports)
        result: dict[str, Any] = {"name": name, "fault": "", "differences": []}
        try:
            found = prepared.run(execution.backend(case.backend))
        except (EmulationFault, NotImplementedError) as error:
            result["fault"] = f"{type(error).__name__}: {error}"
        else:
            wanted = prepared.run(execution.backend("reference"))
            result["differences"] = [
                {"name": each.name, "error": _finite(each.error), "bound": each.bound,
                 "ok": each.good}
                for each in launch_results.compare(found, wanted)
            ]  # fmt: skip
        reports = gpu.reports[before:]
        result["reports"] = [report.as_json() for report in reports]
        result["text"] = "\n".join(map(str, reports))
        result["ok"] = not result["fault"] and all(d["ok"] for d in result["differences"])
        return result


def _trace(cta: tuple[int, int, int], warp: int, line: int, source: str) -> None:
    print(f"cta {cta} warp {warp} line {line}: {source}", file=sys.stderr)


def _finite(error: float) -> float | None:
    """Return a number that JSON has; None for NaN and infinities."""
    return error if abs(error) < float("inf") else None


def _print(result: dict[str, Any]) -> None:
    print(f"{result['name']}: {'right' if result['ok'] else 'WRONG'}")
    if result["text"]:
        print(result["text"])
    if result["fault"]:
        print(f"  fault: {result['fault']}")
    for each in result["differences"]:
        error = "not finite" if each["error"] is None else f"{each['error']:.1e}"
        print(f"  {each['name']}: error {error}, allowed {each['bound']:g}")
