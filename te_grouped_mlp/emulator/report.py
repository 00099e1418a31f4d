# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What an execution did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class AllocationReport:
    """Bytes of one registered allocation after the launch.

    Attributes:
        bytes: Its size.
        unwritten: Bytes that nothing has written yet: no launch, and not who registered it.
        written: Bytes that this launch wrote.
        doubly_written: Bytes that this launch wrote more than once.
    """

    bytes: int
    unwritten: int = 0
    written: int = 0
    doubly_written: int = 0


@dataclass
class Report:
    """Counts of one launch.

    Attributes:
        entry: The kernel's name.
        instructions: Warp instructions.
        seconds: Of the execution, without translation.
        bytes_read, bytes_written: By space: "global", "shared", "local", "tensor".
        tma_loads, tma_stores, tma_bytes: Requests of the TMA and the bytes that they moved.
        mma: Instructions of the tensor cores.
        clusters: Clusters that ran; the rest of the grid was cancelled and taken over.
        allocations: By the name of the allocation.
        checked: What was watched, in words.
    """

    entry: str
    instructions: int = 0
    seconds: float = 0.0
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    tma_loads: int = 0
    tma_stores: int = 0
    tma_bytes: int = 0
    mma: int = 0
    clusters: int = 0
    allocations: dict[str, AllocationReport] = field(default_factory=dict)
    checked: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return it as what `json.dumps` takes."""
        return asdict(self)

    def __str__(self) -> str:
        """Describe it in a few lines."""
        speed = self.instructions / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.entry}: {self.instructions} warp instructions in {self.seconds:.2f} s"
            f" ({speed:.0f}/s), {self.clusters} clusters",
            f"  TMA: {self.tma_loads} loads, {self.tma_stores} stores, {self.tma_bytes} bytes;"
            f" MMA: {self.mma}",
        ]
        for way, counts in (("read", self.bytes_read), ("written", self.bytes_written)):
            text = ", ".join(f"{space} {count}" for space, count in counts.items())
            lines.append(f"  bytes {way}: {text or 'none'}")
        for name, each in self.allocations.items():
            if each.written or each.unwritten:
                lines.append(
                    f"  {name}: {each.written} of {each.bytes} bytes written,"
                    f" {each.doubly_written} more than once, {each.unwritten} never"
                )
        lines.append(f"  checked: {', '.join(self.checked)}")
        return "\n".join(lines)
