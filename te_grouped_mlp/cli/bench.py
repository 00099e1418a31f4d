# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp bench`: our op beside its peers; no number on a red check."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_grouped_mlp.cli import arguments, output
from te_grouped_mlp.cli.output import BadArgument, CommandError

if TYPE_CHECKING:
    from te_grouped_mlp.measure.bench.shapes import Shape

_TILE = 128
"""What the CPU's MXFP8 step needs rows and features to be multiples of."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="time the op beside its peers",
        description="Checks our op against exact arithmetic and for bitwise repetition, then times "
        "forward and backward beside its peers. On a Hopper GPU the native bf16 kernels run beside "
        "torch._grouped_mm, QuACK, the rewrite with unit probabilities and Transformer Engine's "
        "unfused ops, and the op in MXFP8 beside the op in bf16; on a CPU the reference backend "
        "runs small shapes beside Transformer Engine's unfused ops. Exit code 1 on a red check; "
        "what it judged is not timed.",
    )
    parser.add_argument(
        "--shape",
        type=arguments.sizes("EXPERTS", "HIDDEN", "FFN", "TOKENS"),
        action="append",
        metavar="E,H,I,T",
        help="experts, hidden size, FFN size, tokens; may be repeated",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: cuda where there is a Hopper GPU, else cpu",
    )
    parser.add_argument("--no-peers", action="store_true", help="time our op alone")
    parser.add_argument("--no-mxfp8", action="store_true", help="on a GPU, bf16 alone")
    parser.add_argument(
        "--parts", action="store_true", help="each pass, and each kernel with its floors"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="bars of the times; needs the extra `plot`"
    )
    parser.add_argument(
        "--from",
        dest="saved",
        type=Path,
        metavar="FILE",
        help="measure nothing; show a report that --json wrote",
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every shape, or read what was measured; print tables, and draw."""
    _require_plot(args.plot)
    report = _measured(args) if args.saved is None else _saved(args)
    if output.shows_text(args.json):
        _print(report)
    output.write_json(args.json, report)
    if args.plot is not None:
        _draw(report, args.plot)
    return 0 if report["ok"] else 1


def _print(report: dict[str, Any]) -> None:
    from te_grouped_mlp.measure.bench import tables

    print(f"Forward and backward, SwiGLU, on {report['device']}.")
    for made in tables.of(report):
        output.show(made)
    if absent := report.get("mxfp8", {}).get("absent"):
        print(f"MXFP8 is not there: {absent}.")
    print("Every check is green." if report["ok"] else "A check is red; that was not timed.")


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from te_grouped_mlp.measure.bench import interleaved

    device = args.device or _default_device()
    shapes, work = _plan(args, device)
    begin = time.perf_counter()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": 0.0,
    }
    say = functools.partial(print, file=sys.stderr, flush=True)
    say(f"bench: {len(shapes)} shapes on {report['device']}")
    for name, result in work:
        report[name] = result
        report["seconds"] = round(time.perf_counter() - begin, 1)
        say(f"bench: {name} after {report['seconds']:.0f} s")
    report["ok"] = interleaved.is_green(report)
    return report


def _saved(args: argparse.Namespace) -> dict[str, Any]:
    """Read a report.

    Raises:
        BadArgument: It goes with an argument that asks for measuring, or is no report.
    """
    asked = {"--shape": args.shape, "--device": args.device, "--quick": args.quick}
    for name, value in asked.items():
        if value:
            raise BadArgument(f"{name} and --from are both given; --from measures nothing")
    try:
        report = json.loads(args.saved.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadArgument(f"--from {args.saved}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadArgument(f"--from {args.saved}: not JSON: {error}") from error
    if not isinstance(report, dict) or not {"device", "ok"} <= report.keys():
        raise BadArgument(
            f"--from {args.saved}: no report; allowed: what te-grouped-mlp bench --json wrote"
        )
    return report


def _require_plot(path: Path | None) -> None:
    """Raise unless a plot can be drawn there, before anything is measured.

    Raises:
        BadArgument: The name is not an SVG file's.
        CommandError: matplotlib is absent, or there is no such folder.
    """
    if path is None:
        return
    if path.suffix != ".svg":
        raise BadArgument(f"--plot {path}: allowed: a name that ends in .svg")
    if not path.parent.is_dir():
        raise CommandError(f"--plot {path}: there is no folder {path.parent}")
    from te_grouped_mlp.measure.bench import plot

    if not plot.is_possible():
        raise CommandError(f"--plot {path}: matplotlib is not installed; the extra `plot` has it")


def _draw(report: dict[str, Any], path: Path) -> None:
    from te_grouped_mlp.measure.bench import plot

    try:
        plot.draw(report, path)
    except (OSError, ValueError) as error:
        raise CommandError(f"--plot {path}: {error}") from error


def _default_device() -> str:
    from te_grouped_mlp.op.environment import current
    from te_grouped_mlp.op.packages import Absent

    sm = current().sm
    return "cuda" if not isinstance(sm, Absent) and sm[0] == 9 else "cpu"


def _plan(args: argparse.Namespace, device: str) -> tuple[list[Shape], Iterator[tuple[str, Any]]]:
    """Return the shapes and the work; everything that can be refused is refused here."""
    from te_grouped_mlp.measure.bench.shapes import SHAPES, Shape

    asked = [Shape(*sizes) for sizes in args.shape or ()]
    if device == "cpu":
        from te_grouped_mlp.measure import step

        for shape in asked:
            _require_tiles(shape)
        step.start()
        from te_grouped_mlp.measure.bench import cpu

        shapes = asked or list(cpu.SHAPES)
        return shapes, cpu.measure(shapes, runs=cpu.QUICK_RUNS if args.quick else cpu.RUNS)
    shapes = asked or list(SHAPES)
    for shape in shapes:
        _require_taken(shape)
    from te_grouped_mlp.measure.bench import gpu

    return shapes, gpu.measure(
        shapes,
        with_peers=not args.no_peers,
        parts=args.parts,
        with_mxfp8=not args.no_mxfp8,
        effort=gpu.QUICK if args.quick else gpu.FULL,
    )


def _require_tiles(shape: Shape) -> None:
    for name in ("hidden", "ffn", "tokens"):
        value = getattr(shape, name)
        if value % _TILE:
            raise BadArgument(
                f"--shape {shape.label}: {name} is {value}; allowed on a CPU: multiples of {_TILE}"
            )


def _require_taken(shape: Shape) -> None:
    """Raise unless the native kernels run a shape here.

    Raises:
        BadArgument: The shape is refused.
        CommandError: The machine is: another GPU, or packages are absent.
    """
    from dataclasses import replace

    from te_grouped_mlp.measure.bench.layer import problem_of
    from te_grouped_mlp.op.backends.cutedsl import capability
    from te_grouped_mlp.op.environment import Switches, current
    from te_grouped_mlp.op.plan import Reason

    env = replace(current(), switches=Switches(backend=capability.NAME))
    refusal = capability.refusal(problem_of(shape), env)
    if refusal is None:
        return
    text = f"--shape {shape.label}: the native kernels do not take it: {refusal}"
    machine = (Reason.ARCHITECTURE, Reason.PACKAGE)
    raise CommandError(text) if refusal.reason in machine else BadArgument(text)
