# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp bench`: our op beside its peers; no number on a red check."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from te_grouped_mlp.cli import arguments, output
from te_grouped_mlp.cli.output import BadArgument, CommandError

if TYPE_CHECKING:
    from te_grouped_mlp.bench.shapes import Shape

_TILE = 128
"""What the CPU's MXFP8 step needs rows and features to be multiples of."""

_OURS = "ours"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="time the op beside its peers",
        description="Checks our op against exact arithmetic and for bitwise repetition, then times "
        "forward and backward beside its peers. On a Hopper GPU the native bf16 kernels run beside "
        "torch._grouped_mm, QuACK and the rewrite with unit probabilities; on a CPU the reference "
        "backend runs small shapes beside Transformer Engine's unfused ops. Exit code 1 on a red "
        "check; such a shape is not timed.",
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
    parser.add_argument("--parts", action="store_true", help="each kernel, with its floors")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every shape and print a table."""
    import torch

    device = args.device or _default_device()
    shapes, work = _plan(args, device)
    begin = time.perf_counter()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    print(f"bench: {len(shapes)} shapes on {report['device']}", file=sys.stderr, flush=True)
    for name, result in work:
        report[name] = result
        print(f"bench: {name} after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    checks = {name: value for name, value in report.items() if name.startswith("check ")}
    green = all(value["green"] for value in checks.values())
    report["ok"] = green
    if output.shows_text(args.json):
        _print(report, green)
    output.write_json(args.json, report)
    return 0 if green else 1


def _default_device() -> str:
    from te_grouped_mlp.op.environment import current

    sm = current().sm
    return "cuda" if sm and sm[0] == 9 else "cpu"


def _plan(args: argparse.Namespace, device: str) -> tuple[list[Shape], Iterator[tuple[str, Any]]]:
    """Return the shapes and the work; everything that can be refused is refused here."""
    from te_grouped_mlp.bench.shapes import SHAPES, Shape

    asked = [Shape(*sizes) for sizes in args.shape or ()]
    if device == "cpu":
        from te_grouped_mlp.cli import step

        for shape in asked:
            _require_tiles(shape)
        step.start()
        from te_grouped_mlp.bench import cpu

        shapes = asked or list(cpu.SHAPES)
        return shapes, cpu.measure(shapes)
    shapes = asked or list(SHAPES)
    for shape in shapes:
        _require_taken(shape)
    from te_grouped_mlp.bench import gpu

    return shapes, gpu.measure(shapes, with_peers=not args.no_peers, parts=args.parts)


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

    from te_grouped_mlp.bench.layer import problem_of
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


def _print(report: dict[str, Any], green: bool) -> None:
    found = output.table("E,H,I,T", "what", "ms", "spread", "ours is faster by", "peak GB")
    for name, result in report.items():
        kind, _, label = name.partition(" ")
        if kind == "check" and not result["green"]:
            found.add_row(label, "RED CHECK", "", "", "", "")
        if kind != "steps":
            continue
        for what, row in result.items():
            if "error" in row:
                found.add_row(label, what, row["error"][:60], "", "", "")
                continue
            ratio = "" if what == _OURS else f"{row['ratio']:.3f}x"
            peak = f"{row['peak_gb']:.2f}" if "peak_gb" in row else ""
            found.add_row(label, what, f"{row['median']:.3f}", f"{row['spread']:.3f}", ratio, peak)
    print(f"Forward and backward, SwiGLU, on {report['device']}.")
    output.show(found)
    _print_parts(report)
    print("Every check is green." if green else "A check is red; that shape was not timed.")


def _print_parts(report: dict[str, Any]) -> None:
    columns = ("E,H,I,T", "kernel", "variant", "ms", "operations", "bytes", "TFLOP/s")
    found = output.table(*columns)
    for name, rows in report.items():
        kind, _, label = name.partition(" ")
        for row in rows if kind == "kernels" else ():
            floors = [
                f"{row[key]:.3f}" if key in row else "" for key in ("operations_ms", "bytes_ms")
            ]
            cells = (row["kernel"], row["variant"], f"{row['median']:.3f}", *floors)
            found.add_row(label, *cells, f"{row['tflops']:.0f}")
    if found.rows:
        output.show(found)
