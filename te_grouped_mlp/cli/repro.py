# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp repro`: a padded single group must give what the exact-size call gives."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_grouped_mlp.cli import arguments, output, repro_emulated
from te_grouped_mlp.cli.output import BadArgument, CommandError
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.environment import override
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS, WRAPPERS

if TYPE_CHECKING:
    import torch

    from te_grouped_mlp.measure.step import Batch, Model

    Outputs = dict[str, torch.Tensor]

FILLS = (0.0, 3.0, float("nan"), float("inf"), 1e30)
DENSE = "exact size"
"""In the place of a fill: the exact-size call as it is laid out without padding."""

EXTENTS = {"packed-only": (), "newest": ("glu", "dglu", "quant"), "buffer": tuple(WRAPPERS)}
"""Name of an extent capability, and the wrappers that can be told to compute every row."""
INSTALLED = "installed"

_DEFAULT = (Activation.SRELU, Activation.SWIGLU)
_HIDDEN = 1024
_HOSTILE_BYTE = 0xFF
_JSON_KEYS = ("activation", "extent", "fill", "rel_err", "non_finite", "bitwise_equal")
_REFERENCE = "reference"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "repro",
        help="the padded single-group case against the exact-size run",
        description="Runs one group of LIVE rows in a buffer with PADDING further rows that hold "
        "0, 3, NaN, Inf and 1e30 in the input, the output gradient and the probabilities, and "
        "compares every output and gradient bitwise with the call of LIVE rows alone. Every fresh "
        "buffer starts as 0xFF bytes. Exit code 0 only if every case is bitwise equal.",
    )
    features = arguments.integer(minimum=128, multiple=arguments.FEATURES)
    rows = arguments.integer(minimum=128, multiple=arguments.ROWS)
    parser.add_argument("--hidden", type=features, help=f"default: {_HIDDEN}")
    parser.add_argument("--ffn", type=features, help="default: the same as --hidden")
    parser.add_argument("--live", type=rows, default=512, help="default: %(default)s")
    parser.add_argument("--padding", type=rows, default=256, help="default: %(default)s")
    names = ", ".join(kind.value for kind in Activation)
    parser.add_argument(
        "--activation",
        type=arguments.activations,
        default=_DEFAULT,
        metavar="NAME[,NAME]",
        help=f"{arguments.ALL}, or some of {names}; "
        f"default: {','.join(kind.value for kind in _DEFAULT)}",
    )
    parser.add_argument(
        "--extent",
        choices=tuple(EXTENTS),
        help="which kernels can be told to compute every row: none, those of the newest cuDNN "
        "frontend, or all; default: each in turn",
    )
    parser.add_argument("--seed", type=arguments.seed, default=0)
    parser.add_argument(
        "--backend",
        type=arguments.backend,
        default=_REFERENCE,
        metavar="NAME",
        help="the backend to test; any but reference has the row extents of the installed "
        "frontend; default: %(default)s",
    )
    parser.add_argument(
        "--old-decision",
        action="store_true",
        help="decide by the group count alone, as Transformer Engine 2.19 does, to see the fault",
    )
    repro_emulated.add_arguments(parser)
    output.add_json(parser)


@dataclass(frozen=True)
class Case:
    """One row of the table: a run against the exact-size run in the same row layout.

    Attributes:
        activation, extent: What ran.
        fill: What the padding holds, as text; DENSE for the exact-size run without padding.
        rel_err: Output -> largest difference over largest exact value, among the live values that
            are finite; None where none is.
        non_finite: Output -> share of the live values that are NaN or infinite.
        bitwise_equal: Whether every byte of every output is right, tails included.
        clean_tail: Whether the rows of y, dx and dprob past the live ones are zero.
    """

    activation: str
    extent: str
    fill: str
    rel_err: dict[str, float | None]
    non_finite: dict[str, float]
    bitwise_equal: bool
    clean_tail: bool


def run(args: argparse.Namespace) -> int:
    """Run every case and print the table."""
    if args.te is not None and not args.emulate:
        raise BadArgument(f"--te {args.te} without --emulate; allowed: both")
    if args.hidden is None:
        args.hidden = repro_emulated.HIDDEN if args.emulate else _HIDDEN
    if args.emulate:
        return repro_emulated.run(args, compare)
    if args.old_decision and args.backend != _REFERENCE:
        raise BadArgument(
            f"--old-decision with --backend {args.backend}; allowed: --backend {_REFERENCE}, the "
            "only one that can be made to decide wrongly"
        )
    from te_grouped_mlp.measure import step

    step.start()
    if args.backend != _REFERENCE:
        extents: Sequence[str] = (INSTALLED,)
    else:
        extents = (args.extent,) if args.extent else tuple(EXTENTS)
    kinds = step.available(args.activation)
    cases: list[Case] = []
    total = len(kinds) * (1 + len(extents) * (len(FILLS) + 1))
    with output.progress(total, "repro") as advance, step.switches(args.backend):
        for kind in kinds:
            cases += _cases(kind, extents, args, advance)
    good = all(case.bitwise_equal for case in cases)
    if output.shows_text(args.json):
        _print(cases, good, args)
    rows = [{key: getattr(case, key) for key in _JSON_KEYS} for case in cases]
    output.write_json(args.json, {"cases": rows, "ok": good})
    return 0 if good else 1


def _cases(
    kind: Activation,
    extents: Sequence[str],
    args: argparse.Namespace,
    advance: Callable[[str], None],
) -> Iterator[Case]:
    """Run one activation: per extent an exact run, the dense one, and one for every fill."""
    from te_grouped_mlp.measure import step

    device = step.default_device()
    shape = step.Shape(1, args.hidden, args.ffn or args.hidden, args.live)
    model = step.Model.build(kind, shape, seed=args.seed, device=device)
    exact = step.batch(shape, args.seed + 1, device)

    def once(what: str, given: Batch, extent: str, **forced: bool) -> Outputs:
        advance(f"{kind.value}, {extent}, {what}")
        return _run_once(model, given, extent, forced)

    # The layout of every padded call is PACKED, whatever the launches could be told.
    expected = once("packed exact size", exact, extents[0], treat_rows_as_full=False)
    _require_finite(expected)
    for extent in extents:
        yield compare(kind, extent, DENSE, once(DENSE, exact, extent), expected)
        for fill in FILLS:
            given = exact.padded(args.padding, fill)
            found = once(
                f"padding {fill:g}", given, extent, single_group_is_always_dense=args.old_decision
            )
            yield compare(kind, extent, f"{fill:g}", found, expected)


def _run_once(model: Model, given: Batch, extent: str, forced: dict[str, bool]) -> Outputs:
    from te_grouped_mlp.op.tensors import memory

    changes: dict[str, Any] = dict(forced)
    if extent != INSTALLED:
        able = EXTENTS[extent]
        changes["wrappers"] = {
            short: frozenset({RUNTIME_OFFSETS} if short in able else ()) for short in WRAPPERS
        }
    with override(**changes), memory.poisoned(_HOSTILE_BYTE):
        found = model.run(given)
    model.require_fused()
    return found


def compare(kind: Activation, extent: str, fill: str, found: Outputs, exact: Outputs) -> Case:
    """Compare a run's live rows with the exact-size run's, and its tails with zero."""
    import torch

    rel_err: dict[str, float | None] = {}
    non_finite: dict[str, float] = {}
    clean_tail = True
    equal = True
    for name, value in found.items():
        wanted = exact[name]
        live, tail = value[: len(wanted)], value[len(wanted) :]
        clean_tail &= not _bits(tail).any()
        # The exact run is finite, so equal bytes need no further look.
        rel_err[name], non_finite[name] = 0.0, 0.0
        if not torch.equal(_bits(live), _bits(wanted)):
            equal = False
            rel_err[name], non_finite[name] = _error(live, wanted)
    return Case(kind.value, extent, fill, rel_err, non_finite, equal and clean_tail, clean_tail)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float | None, float]:
    """Return rel_err and the share of non-finite values."""
    finite = found.isfinite()
    count = int(finite.sum())
    if not count:
        return None, 1.0
    difference = (found.double() - wanted.double())[finite].abs().max()
    scale = float(wanted.double().abs().max()) or 1.0
    return float(difference) / scale, 1 - count / found.numel()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers, so that NaN equals itself and -0 differs from 0."""
    import torch

    integers = {2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _require_finite(exact: Outputs) -> None:
    wrong = [name for name, value in exact.items() if not value.isfinite().all()]
    if wrong:
        raise CommandError(f"the exact-size run is not finite in {', '.join(wrong)}")


def _print(cases: Sequence[Case], good: bool, args: argparse.Namespace) -> None:
    names = list(cases[0].rel_err)
    title = (
        f"One group, hidden {args.hidden}, ffn {args.ffn or args.hidden}, {args.live} live rows, "
        f"{args.padding} padding rows, MXFP8, fp32 main_grad"
    )
    print(title)
    found = output.table("activation", "extents", "padding", *names, "bitwise")
    for case in cases:
        cells = [cell(case.rel_err[name], case.non_finite[name]) for name in names]
        verdict = "DIFFERS" if case.clean_tail else "tail is not 0"
        verdict = "equal" if case.bitwise_equal else verdict
        found.add_row(case.activation, case.extent, case.fill, *cells, verdict)
    output.show(found)
    wrong = sum(not case.bitwise_equal for case in cases)
    if good:
        print(f"{len(cases)} of {len(cases)} cases are bitwise equal to the exact-size run.")
    else:
        print(f"{wrong} of {len(cases)} cases differ from the exact-size run.")
        print("A cell holds rel_err of the finite values, and the share of non-finite ones.")


def cell(rel_err: float | None, non_finite: float) -> str:
    """Return rel_err, and the share of non-finite values if there are any."""
    error = "-" if rel_err is None else "0" if rel_err == 0 else f"{rel_err:.0e}"
    if not non_finite:
        return error
    share = "<0.1%" if non_finite < 0.001 else f"{100 * non_finite:.3g}%"
    return f"{error} {share}"
