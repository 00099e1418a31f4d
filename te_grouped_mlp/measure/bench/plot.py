# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A report's times as bars in an SVG file; needs matplotlib, the extra `plot`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

from te_grouped_mlp.measure.bench.interleaved import OURS, Report
from te_grouped_mlp.measure.bench.mxfp8 import MODES
from te_grouped_mlp.measure.bench.shapes import Shape
from te_grouped_mlp.measure.bench.tables import sections

_WIDTH, _HEIGHT = 3.2, 3.4
"""Inches of one panel."""
_COLUMNS = 3
_OURS_COLOUR, _PEER_COLOUR, _FORMAT_COLOUR = "#1b6ca8", "#9aa5b1", "#5b8c5a"
_HEADINGS = {"steps": "beside the peers", "mxfp8": "MXFP8 and bf16, through te.ops"}
"""What a section's panels show, by the section's kind."""
_LINE_COLOUR, _STYLES = "#c0392b", ("--", ":", "-.")


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Panel:
    """What is drawn of one section.

    Attributes:
        kind, label: Of the section.
        times: Milliseconds by name; what has no time is left out.
        floors: The least milliseconds that the measured rate or bandwidth allows, by name.
    """

    kind: str
    label: str
    times: dict[str, float]
    floors: dict[str, float]


def panels(report: Report) -> list[Panel]:
    """Return a panel for every shape and kind of section that has times."""
    found = []
    for kind in _HEADINGS:
        for label, rows in sections(report, kind):
            times = {name: row["median"] for name, row in rows.items() if "median" in row}
            if times:
                found.append(Panel(kind, label, times, _floors(report, label, rows)))
    return found


def _floors(report: Report, label: str, rows: Report) -> dict[str, float]:
    found = {}
    if rate := report.get("ceilings", {}).get("bf16_tflops"):
        shape = Shape(*map(int, label.split(",")))
        # FC1 is twice as wide as FC2, and each has three products.
        operations = 3 * 2.0 * shape.tokens * shape.hidden * 3 * shape.ffn
        found["operations floor"] = operations / rate / 1e9
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

    rows: list[list[Panel]] = []
    for kind in dict.fromkeys(panel.kind for panel in wanted):
        mine = [panel for panel in wanted if panel.kind == kind]
        rows += [mine[start : start + _COLUMNS] for start in range(0, len(mine), _COLUMNS)]
    columns = max(map(len, rows))
    with matplotlib.rc_context(
        {"svg.hashsalt": "te-grouped-mlp", "svg.fonttype": "none", "font.size": 8}
    ):
        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * len(rows)), layout="constrained")
        axes = figure.subplots(len(rows), columns, squeeze=False)
        for row, places in zip(rows, axes, strict=True):
            for axis, panel in zip_longest(places, row):
                if panel is None:
                    axis.set_axis_off()
                else:
                    _draw_panel(axis, panel)
        device = report.get("device", "an unknown device")
        figure.suptitle(f"One step, forward and backward, SwiGLU, on {device}; less is better")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _draw_panel(axis: Any, panel: Panel) -> None:
    names, times = list(panel.times), list(panel.times.values())
    bars = axis.bar(range(len(names)), times, color=[_colour(name) for name in names])
    for name, bar in zip(names, bars, strict=True):
        bar.set_gid(f"bar {panel.kind} {panel.label} {name}")
    # A floor's line may pass just above a bar; the number stays readable before it.
    before = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=1.5, bbox=before)
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    for style, (name, value) in zip(cycle(_STYLES), panel.floors.items(), strict=False):
        line = axis.axhline(value, color=_LINE_COLOUR, linestyle=style, linewidth=1, label=name)
        line.set_gid(f"line {panel.kind} {panel.label} {name}")
    if panel.floors:
        axis.legend(fontsize=6, loc="upper left", frameon=False)
    heading = f"{_HEADINGS[panel.kind]}\nE, H, I, T = {panel.label.replace(',', ', ')}"
    axis.set_title(heading, fontsize=8)
    axis.set_ylabel("milliseconds")
    # Room for the legend above the bars.
    room = 1.15 + 0.1 * len(panel.floors)
    axis.set_ylim(0, room * max(*times, *panel.floors.values(), 0))
    axis.spines[["top", "right"]].set_visible(False)


def _colour(name: str) -> str:
    if name.startswith(OURS):
        return _OURS_COLOUR
    return _FORMAT_COLOUR if name in MODES else _PEER_COLOUR
