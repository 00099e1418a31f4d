# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Several candidates that compute one layer: first run, agreement, and times in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_grouped_mlp.measure.bench.timing import Clock

Report = dict[str, Any]
Results = dict[str, torch.Tensor]
Step = Callable[[], Results]

OURS = "ours"


class NotThere(Exception):
    """A candidate needs something that this machine or process does not have; with the reason."""


def errors(got: Results, want: Results) -> dict[str, float]:
    """Relative errors of the outputs that are there, compared where `got` lies."""
    return {
        name: float(difference(got[name], want[name]))
        for name in want
        if got.get(name) is not None and got[name].shape == want[name].shape
    }


def difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Norm of the difference over the norm of `want`, in fp32."""
    wanted = want.to(got.device).float()
    return (got.float() - wanted).norm() / wanted.norm()


def cause(error: Exception) -> Report:
    """Say why a candidate has no time."""
    if isinstance(error, NotThere):
        return {"absent": str(error)}
    return {"error": repr(error)[:300]}


def is_green(report: Report) -> bool:
    """Whether no check of a report is red, and our op gave no wrong result or error in a format."""
    checks = (value["green"] for name, value in report.items() if name.startswith("check "))
    formats = (rows for name, rows in report.items() if name.startswith("mxfp8 "))
    return all(checks) and not any("error" in row for rows in formats for row in rows.values())


def time_interleaved(makers: Mapping[str, Callable[[], Step]], clock: Clock, runs: int) -> Report:
    """Time one step of every candidate, in turns.

    Args:
        makers: What builds a candidate; the first one is ours, against which the others' results
            and times are held. Where it fails, nothing is timed.
        clock: Times.
        runs: Number of turns.

    Returns:
        By name the times, "ratio" and "ratio_spread" over ours, "peak_gb" and "against_ours"; or
        "absent", the reason for which a candidate is not there; or "error", how it failed.
    """
    works: dict[str, Step] = {}
    found: Report = {}
    want: Results | None = None
    for name, make in makers.items():
        try:
            work = make()
            got, peak = clock.peak(work)
        except Exception as error:
            found[name] = cause(error)
            if want is None:
                return found
            continue
        works[name] = work
        if want is None:
            # FC1's rows lie in another order in some candidates.
            want = {key: value.float() for key, value in got.items() if key != "dw1"}
        found[name] = {"peak_gb": peak / 1e9, "against_ours": errors(got, want)}
        del got
    times = clock.compare(works, runs)
    ours = times[next(iter(makers))]
    for name, taken in times.items():
        found[name].update(taken.as_dict(), **taken.over(ours))
    return found
