# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The layer in MXFP8 numerics on Hopper beside the same layer in bf16, both through the fused op.

Hopper has no MXFP8 products: operands are rounded to MXFP8 and multiplied as the bf16 values that
the codes stand for, which is exact. The rounding passes are what the format costs there, and
`floor_bytes` counts what they move.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from te_grouped_mlp.measure.bench.interleaved import (
    NotThere,
    Report,
    Results,
    cause,
    difference,
    errors,
)
from te_grouped_mlp.measure.bench.shapes import Inputs, Shape, inputs
from te_grouped_mlp.measure.bench.te_layer import Layer, Mode, require_own_quantizers
from te_grouped_mlp.measure.bench.timing import Clock
from te_grouped_mlp.op.backends.cutedsl import capability
from te_grouped_mlp.op.formats import MXFP8

SMALL = Shape(4, 256, 384, 1280)
"""Small enough for the reference backend on a CPU."""

BF16 = "bf16"
MODES = {
    BF16: Mode(mxfp8=False, backend=capability.NAME),
    "mxfp8": Mode(mxfp8=True, backend=capability.NAME),
    "mxfp8, weights kept": Mode(mxfp8=True, backend=capability.NAME, keep_weights=True),
}
BOUND = 6e-3
"""Relative error against the reference on the same codes: products are summed in another order,
results are rounded to bf16, and of the requantized intermediates one code in a thousand may be the
next one."""

FORMAT_ERROR = (0.05, 0.09)
"""What rounding three operands in a row to MXFP8 explains of a difference from bf16, 6 to 7 %; a
smaller one would mean that an operand was not rounded."""

_TILE = MXFP8.rows_multiple


def unfit(shape: Shape) -> str | None:
    """Return why a shape cannot run in MXFP8, or None."""
    for name in ("hidden", "ffn", "tokens"):
        value = getattr(shape, name)
        if value % _TILE:
            return f"{name} is {value}; allowed in MXFP8: multiples of {_TILE}"
    return None


def floor_bytes(shape: Shape, *, keep_weights: bool) -> float:
    """Return the bytes that separate rounding passes move above the bf16 step.

    * x and FC2's input: read in bf16, written as bf16 row values and as column codes with scales;
      in the backward the column codes are read and written as bf16 values.
    * dy and FC1's output gradient: read in bf16, written as row and as column values in bf16.
    * The weights, unless their copies are kept: read in bf16, written as row and column values.

    A bf16 value has two bytes; a code has one, and one byte of scale for each 32.
    """
    code = 1 + 1 / 32
    saved = (2 + 2 + code) + (code + 2)
    gradient = 2 + 2 + 2
    rows, hidden, ffn = shape.tokens, shape.hidden, shape.ffn
    moved = rows * ((hidden + ffn) * saved + (hidden + 2 * ffn) * gradient)
    if not keep_weights:
        moved += shape.experts * 3 * ffn * hidden * (2 + 2 + 2)
    return moved


def check(shape: Shape = SMALL, *, device: str = "cuda", replays: int = 12) -> Report:
    """Compare MXFP8 steps with the reference backend on a CPU, and with each other bit by bit."""
    given = inputs(shape, tile=_TILE, device=device)
    reference = Layer(given.to("cpu"), Mode(mxfp8=True, backend="reference"))
    want = reference.results()
    reference.require_path()
    found: Report = {"green": True, "errors": {}}
    for name, mode in MODES.items():
        if not mode.mxfp8:
            continue
        layer = Layer(given, mode)
        first = layer.results()
        layer.require_path()
        wrong = errors(first, want)
        same = all(_same(first, layer.results()) for _ in range(replays - 1))
        good = set(wrong) == set(want) and all(value <= BOUND for value in wrong.values())
        found[name] = {"bitwise": same, "errors": wrong}
        found["errors"].update({f"{name}: {output}": value for output, value in wrong.items()})
        found["green"] &= same and good
    return found


def _same(first: Results, again: Results) -> bool:
    return all(torch.equal(again[name], value) for name, value in first.items())


def measure(shape: Shape, clock: Clock, copy_tbs: float, runs: int) -> Report:
    """Time steps in bf16 and in MXFP8 in turns; splits are multiples of MXFP8's rows in all.

    Args:
        shape: Of the layer.
        clock: Times.
        copy_tbs: The measured copy bandwidth, for the floor.
        runs: Number of turns.

    Returns:
        By mode the times, "ratio" over bf16, "held_gb" between the passes, "kept_gb" between steps;
        in MXFP8 "floor_ms", "floor_ratio" and "over_floor", and "against_bf16". Or "absent" or
        "error"; a mode that gives wrong results has an "error".
    """
    reason = unfit(shape)
    if reason is not None:
        return {name: {"absent": reason} for name in MODES}
    given = inputs(shape, tile=_TILE, device=clock.place)
    layers: dict[str, Layer] = {}
    found: Report = {}
    want: Results | None = None
    for name, mode in MODES.items():
        try:
            layers[name], found[name], got = _first_steps(given, mode, clock)
        except Exception as error:
            found[name] = cause(error)
            continue
        want = want or got
        if wrong := _wrong(mode, got, want, found[name]):
            del layers[name]
            found[name]["error"] = wrong
    if BF16 not in layers:
        return found
    times = clock.compare({name: layer.step for name, layer in layers.items()}, runs)
    for name, taken in times.items():
        found[name].update(taken.as_dict(), **taken.over(times[BF16]))
        if MODES[name].mxfp8:
            moved = floor_bytes(shape, keep_weights=MODES[name].keep_weights)
            floor = times[BF16].median + moved / copy_tbs / 1e9
            ratio = floor / times[BF16].median
            found[name].update(
                floor_ms=floor, floor_ratio=ratio, over_floor=found[name]["ratio"] / ratio
            )
    return found


def _first_steps(given: Inputs, mode: Mode, clock: Clock) -> tuple[Layer, Report, Results]:
    """Run three steps: what stays after one, what is held within one, and whether bits repeat."""
    layer = Layer(given, mode)
    before = clock.memory()
    first = layer.step()
    layer.require_path()
    results = sum(value.numel() * value.element_size() for value in first.values())
    kept = clock.memory() - before - results
    before = clock.memory()
    y = layer.forward()
    held = clock.memory() - before - y.numel() * y.element_size()
    layer.backward(y)
    again = layer.step()
    report = {"bitwise": _same(first, again), "kept_gb": kept / 1e9, "held_gb": held / 1e9}
    return layer, report, first


def _wrong(mode: Mode, got: Results, want: Results, report: Report) -> str | None:
    """Return what is wrong with a mode's results, or None; notes the differences from bf16."""
    if not report["bitwise"]:
        return "two steps differ"
    if not mode.mxfp8:
        return None
    report["against_bf16"] = {name: float(difference(got[name], want[name])) for name in want}
    least, most = FORMAT_ERROR
    for name, value in report["against_bf16"].items():
        if not least <= value <= most:
            return f"{name} differs from bf16 by {value:.2g}; expected: {least} to {most}"
    return None


def sections(
    shapes: list[Shape], clock: Clock, copy_tbs: float, *, runs: int, replays: int
) -> Iterator[tuple[str, Report]]:
    """Yield the check, and each shape's times where it is green; a reason where MXFP8 is not there.

    Args:
        shapes: The layers.
        clock: Times.
        copy_tbs: The measured copy bandwidth.
        runs: Number of turns.
        replays: Number of steps that must give the same bits.
    """
    try:
        require_own_quantizers()
        found = check(device=clock.place, replays=replays)
    except NotThere as reason:
        yield "mxfp8", cause(reason)
        return
    except Exception as error:
        found = {"green": False, "errors": {}, **cause(error)}
    yield "check mxfp8", found
    for shape in shapes if found["green"] else ():
        yield f"mxfp8 {shape.label}", measure(shape, clock, copy_tbs, runs)
