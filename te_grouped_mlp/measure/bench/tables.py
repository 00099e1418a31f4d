# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's report as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from te_grouped_mlp.cli import output
from te_grouped_mlp.measure.bench.interleaved import OURS

Report = dict[str, Any]


def sections(report: Report, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield (shape's label, result) of every section of a kind."""
    for name, result in report.items():
        found, _, label = name.partition(" ")
        if found == kind and label:
            yield label, result


def of(report: Report) -> Iterator[Any]:
    """Yield the tables that a report has rows for."""
    made = (table(report) for table in (_steps, _passes, _mxfp8, _kernels))
    yield from (each for each in made if each.rows)


def _steps(report: Report) -> Any:
    columns = ("E,H,I,T", "what", "ms", "spread", "ours is faster by", "+-", "peak GB")
    found = output.table(*columns)
    for label, result in sections(report, "check"):
        if not result["green"]:
            found.add_row(label, "RED CHECK", _cause(result), *[""] * (len(columns) - 3))
    timed = dict(sections(report, "steps"))
    for label, rows in timed.items():
        alone = dict(sections(report, "modes")).get(label, {})
        extra = {name: row for name, row in alone.items() if name != OURS}
        for what, row in (*rows.items(), *extra.items()):
            cells = [_cause(row), "", "", "", ""]
            if "median" in row:
                against = ("", "") if what == OURS else _ratio(row)
                peak = f"{row['peak_gb']:.2f}" if "peak_gb" in row else ""
                cells = [*_time(row), *against, peak]
            found.add_row(label, what, *cells)
    return found


def _passes(report: Report) -> Any:
    found = output.table("E,H,I,T", "fp32 main_grad +=", "ms", "host ms", "held GB")
    for label, result in sections(report, "passes"):
        for name in ("forward", "backward", "backward_without_dprob"):
            host = result.get(f"host_{name}")
            cells = (
                f"{result[name]['median']:.3f}",
                f"{host['median']:.3f}" if host else "",
                f"{result['held_gb']:.2f}" if name == "forward" else "",
            )
            found.add_row(label, name.replace("_", " "), *cells)
        held = f"{result['held_by_unit_probabilities_gb']:.2f}"
        found.add_row(label, "forward, unit probabilities", "", "", held)
    return found


def _mxfp8(report: Report) -> Any:
    columns = (
        "E,H,I,T", "through te.ops", "ms", "spread", "over bf16", "+-", "floor ms",
        "floor over bf16", "over floor", "held GB", "kept GB",
    )  # fmt: skip
    found = output.table(*columns)
    for label, rows in sections(report, "mxfp8"):
        for what, row in rows.items():
            if "median" not in row:
                found.add_row(label, what, _cause(row), *[""] * (len(columns) - 3))
                continue
            floor = ["", "", ""]
            if "floor_ms" in row:
                ratios = (f"{row[key]:.3f}x" for key in ("floor_ratio", "over_floor"))
                floor = [f"{row['floor_ms']:.3f}", *ratios]
            memory = [f"{row[key]:.2f}" for key in ("held_gb", "kept_gb")]
            found.add_row(label, what, *_time(row), *_ratio(row), *floor, *memory)
    return found


def _kernels(report: Report) -> Any:
    columns = ("E,H,I,T", "kernel", "variant", "ms", "operations", "bytes", "TFLOP/s")
    found = output.table(*columns)
    for label, rows in sections(report, "kernels"):
        for row in rows:
            floors = [
                f"{row[key]:.3f}" if key in row else "" for key in ("operations_ms", "bytes_ms")
            ]
            cells = (row["kernel"], row["variant"], f"{row['median']:.3f}", *floors)
            found.add_row(label, *cells, f"{row['tflops']:.0f}")
    return found


def _cause(row: Report) -> str:
    """Why there is no time."""
    return f"not there: {row['absent']}" if "absent" in row else row.get("error", "")


def _time(row: Report) -> list[str]:
    # Host time may be in a run for which the GPU did not wait.
    late = f" ({row['late']} late)" if row.get("late") else ""
    return [f"{row['median']:.3f}{late}", f"{row['spread']:.3f}"]


def _ratio(row: Report) -> list[str]:
    spread = f"{row['ratio_spread']:.3f}" if "ratio_spread" in row else ""
    return [f"{row['ratio']:.3f}x", spread]
