# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps to run in a child process, and what comes back. Plain values, so that they pickle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.step import StepCase, same_bits

OURS = "ours"


@dataclass(frozen=True)
class Setup:
    """What a process runs; it cannot change its mind.

    Attributes:
        module: OURS, or the TE release whose own module runs.
        te: The TE release around the module; None for the installed one.
        frontend: Arguments of `frontend_stand_in.install`, as pairs; None for no frontend.
        threads: Of torch.
    """

    module: str = OURS
    te: str | None = None
    frontend: tuple[tuple[str, Any], ...] | None = (("version", "1.32.0"),)
    threads: int = 1

    def on(self, **frontend: Any) -> Setup:
        """Return the setup with another frontend."""
        return dataclasses.replace(self, frontend=tuple(frontend.items()))


@dataclass(frozen=True)
class Job:
    """One step.

    Attributes:
        case: The step; its `fill` holds for all three tails unless `fills` names one.
        fills: ("x" | "dy" | "prob", value) of tails that differ from the case's.
        prequantized: "x", "dy" or "": which token tensor arrives in MXFP8.
        layout: Our op only: "packed" lays an exact-size call out PACKED, "dense" makes the old
            decision (one group is dense, whatever the kernels write), "" decides.
        memory: Byte in every fresh buffer.
        scale_memory: Byte in the fresh scale buffers of the frontend, None for `memory`.
        spill: Of `frontend_machine.Machine`.
    """

    case: StepCase
    fills: tuple[tuple[str, float], ...] = ()
    prequantized: str = ""
    layout: str = ""
    memory: int = 0xFF
    scale_memory: int | None = None
    spill: str | None = None

    def but(self, **changes: Any) -> Job:
        """Return the job with some fields replaced, those of the case among them."""
        own = {f.name for f in dataclasses.fields(self)}
        case = self.case.but(**{k: v for k, v in changes.items() if k not in own})
        mine = {key: value for key, value in changes.items() if key in own}
        return dataclasses.replace(self, **{"case": case, **mine})


@dataclass
class Result:
    """What a step gave.

    Attributes:
        outputs: y, dx, dprob, dW1, dW2, db1, db2; None where there is none.
        fused: File of the class that stood in the forward plan.
        te: File of the TE that ran.
        error: Type and text of what the step raised instead, or "".
        calls: Short names of the frontend's wrappers that were called, in order.
        out_of_bounds: Of the step's kernels, as `Machine.out_of_bounds`.
    """

    outputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    fused: str = ""
    te: str = ""
    error: str = ""
    calls: list[str] = field(default_factory=list)
    out_of_bounds: list[tuple[str, int]] = field(default_factory=list)

    def live(self, job: Job) -> dict[str, torch.Tensor | None]:
        """Return the outputs with token tensors cut to their live rows."""
        assert not self.error, self.error
        tokens = ("y", "dx", "dprob")
        return {
            name: each[: job.case.live] if each is not None and name in tokens else each
            for name, each in self.outputs.items()
        }


def differing(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """Return the names of outputs that are not the same bit by bit."""
    return {name for name in first if not same_bits(first[name], second[name])}


def relative(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Return the relative error in the 2-norm over the finite values of `actual`."""
    assert actual is not None
    assert expected is not None
    kept = actual.isfinite()
    a, e = actual.double()[kept], expected.double()[kept]
    return float((a - e).norm() / e.norm())


def non_finite(tensor: torch.Tensor | None) -> int:
    """Return how many values are infinite or NaN."""
    assert tensor is not None
    return int((~tensor.isfinite()).sum())
