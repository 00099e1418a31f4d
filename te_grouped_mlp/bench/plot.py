# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A report's times as bars in an SVG file; needs matplotlib, the extra `plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from te_grouped_mlp.bench.race import OURS, Report
from te_grouped_mlp.bench.shapes import Shape
from te_grouped_mlp.bench.tables import sections

_WIDTH, _HEIGHT = 3.2, 3.4
"""Inches of one panel."""
_OURS_COLOUR, _PEER_COLOUR, _FORMAT_COLOUR = "#1b6ca8", "#9aa5b1", "#5b8c5a"
_LINE_COLOUR = "#c0392b"


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def panels(report: Report) -> list[tuple[str, str, dict[str, float], dict[str, float]]]:
    """Return what is drawn: kind, shape's label, milliseconds by name, ceilings by name.

    What has no time is left out. A ceiling is the least time that the measured rate, or the
    measured bandwidth, allows.
    """
    found = []
    for kind in ("steps", "mxfp8"):
        for label, rows in sections(report, kind):
            times = {name: row["median"] for name, row in rows.items() if "median" in row}
            if times:
                found.append((kind, label, times, _ceilings(report, kind, label, rows)))
    return found


def _ceilings(report: Report, kind: str, label: str, rows: Report) -> dict[str, float]:
    rate = report.get("ceilings", {}).get("bf16_tflops")
    if rate is None:
        return {}
    shape = Shape(*map(int, label.split(",")))
    # Three products of FC1, twice as wide as FC2's three.
    operations = 3 * 2.0 * shape.tokens * shape.hidden * 3 * shape.ffn
    found = {"operations": operations / rate / 1e9}
    if kind == "mxfp8":
        found |= {
            f"floor of {name}": row["floor_ms"] for name, row in rows.items() if "floor_ms" in row
        }
    return found


def draw(report: Report, path: Path) -> None:
    """Write the bars of every shape to `path`, the same bytes for the same report.

    Args:
        report: As `te-grouped-mlp bench --json` writes it.
        path: An SVG file.

    Raises:
        ValueError: The report has no times.
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    wanted = panels(report)
    if not wanted:
        raise ValueError("the report has no times of steps")
    import matplotlib
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(kind for kind, *_ in wanted))
    columns = max(sum(each[0] == kind for each in wanted) for kind in kinds)
    settings = {"svg.hashsalt": "te-grouped-mlp", "svg.fonttype": "none", "font.size": 8}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * len(kinds)), layout="constrained")
        axes = figure.subplots(len(kinds), columns, squeeze=False)
        for row, kind in zip(axes, kinds, strict=True):
            mine = [each for each in wanted if each[0] == kind]
            for axis in row[len(mine) :]:
                axis.set_axis_off()
            for axis, panel in zip(row, mine, strict=False):
                _draw_panel(axis, *panel)
        device = report.get("device", "an unknown device")
        figure.suptitle(f"One step, forward and backward, SwiGLU, on {device}; less is better")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _draw_panel(
    axis: Any, kind: str, label: str, times: dict[str, float], lines: dict[str, float]
) -> None:
    names = list(times)
    bars = axis.bar(range(len(names)), list(times.values()), color=[_colour(n) for n in names])
    for name, bar in zip(names, bars, strict=True):
        bar.set_gid(f"bar {kind} {label} {name}")
    axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    styles = ("--", ":", "-.")
    for style, (name, value) in zip(styles, lines.items(), strict=False):
        line = axis.axhline(value, color=_LINE_COLOUR, linestyle=style, linewidth=1, label=name)
        line.set_gid(f"line {kind} {label} {name}")
    if lines:
        axis.legend(fontsize=6, loc="upper left", frameon=False)
    axis.set_title(f"E, H, I, T = {label.replace(',', ', ')}", fontsize=8)
    axis.set_ylabel("milliseconds")
    axis.set_ylim(0, 1.3 * max(*times.values(), *lines.values(), 0))
    axis.spines[["top", "right"]].set_visible(False)


def _colour(name: str) -> str:
    if name.startswith(OURS):
        return _OURS_COLOUR
    return _FORMAT_COLOUR if name.startswith(("bf16", "mxfp8")) else _PEER_COLOUR
