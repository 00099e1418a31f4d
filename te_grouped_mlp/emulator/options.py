# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How a launch is executed and what is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["eager", "late", "random"]


@dataclass(frozen=True)
class Options:
    """Settings of one execution.

    Attributes:
        seed: Of the order of warps and of asynchronous work in the schedule "random".
        schedule: When asynchronous work (TMA, tensor cores) takes effect: at issue ("eager"), when
            nothing else can run ("late"), or at a random time, with warps in random order.
        races: Track what happens before what, by vector clocks, and fault on conflicting accesses
            without order and on missing proxy fences. Costs about a quarter of the speed.
        max_instructions: Warp instructions after which the launch is taken for endless.
        trace: Called with (cluster coordinates of the CTA, warp, PTX line, source) before every
            instruction; slow.
        resident_clusters: Clusters that run side by side; the others start when one ends, or are
            cancelled by `clusterlaunchcontrol`.
    """

    seed: int = 0
    schedule: Schedule = "late"
    races: bool = True
    max_instructions: int = 1_000_000_000
    trace: Callable[[tuple[int, int, int], int, int, str], None] | None = None
    resident_clusters: int = 3

    def __post_init__(self) -> None:
        """Refuse what is not one of the choices.

        Raises:
            ValueError: Names the field, its value and what is allowed.
        """
        if self.schedule not in ("eager", "late", "random"):
            raise ValueError(f'schedule={self.schedule!r} is not "eager", "late" or "random"')
        for name in ("max_instructions", "resident_clusters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")
