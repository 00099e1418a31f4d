# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""CTAs, and the addresses of their shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from te_grouped_mlp.emulator.clocks import Shadow
from te_grouped_mlp.emulator.faults import IllegalOperand, OutOfBounds
from te_grouped_mlp.emulator.formats import U8, U32, U64
from te_grouped_mlp.emulator.lanes import UNSIGNED, Value

if TYPE_CHECKING:
    from te_grouped_mlp.emulator.scheduler import Cluster
    from te_grouped_mlp.emulator.warp import Warp

# The first KiB of shared memory is the system's.
SHARED_BASE = 1024
# Shared memory in the generic address space; the rank in the cluster lies above bit 24.
SHARED_WINDOW = 1 << 48
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1


class Cta:
    """A CTA: shared memory, barriers and tensor memory, empty at start."""

    def __init__(self, cluster: Cluster, rank: int, coordinates: tuple[int, int, int]) -> None:
        self.cluster, self.rank, self.coordinates = cluster, rank, coordinates
        self.size, self.granule = cluster.shared_size, cluster.granule
        self.bytes = np.full(-(-self.size // 16) * 16, 0xFF, U8)
        self.shared = Shadow(
            cluster.clocks, len(self.bytes) // self.granule,
            lambda cell: f"shared memory {cell * self.granule:#x} of CTA {rank}",
        )  # fmt: skip
        self.views = {n: self.bytes.view(t) for n, t in UNSIGNED.items()}
        self.chunks = self.bytes.view(U64).reshape(-1, 2)
        self.barriers: dict[int, Any] = {}
        self.named: dict[int, Any] = {}
        self.tensor: Any = None
        self.running = 0

    def cells(self, offset: int, size: int) -> slice:
        """Return the shadow's cells of a range of bytes.

        Raises:
            OutOfBounds: It is not in the CTA's shared memory.
        """
        if offset < SHARED_BASE or offset + size > self.size:
            text = f"shared memory {offset:#x} to {offset + size:#x} of CTA {self.rank}"
            raise OutOfBounds(f"{text}, which has {SHARED_BASE:#x} to {self.size:#x}")
        if not self.running:
            raise OutOfBounds(f"shared memory of CTA {self.rank}, which has exited")
        return slice(offset // self.granule, -(-(offset + size) // self.granule))


def global_window(_: Warp, address: Value) -> Value:
    """`cvta.global`: global addresses are generic addresses."""
    return address


param_window = local_window = to_global = global_window


def shared_window(_: Warp, address: Value) -> Value:
    """`cvta.shared`."""
    return address + U64(SHARED_WINDOW)


def to_shared(_: Warp, address: Value) -> Value:
    """`cvta.to.shared`.

    Raises:
        IllegalOperand: It is no address of shared memory.
    """
    if (address < U64(SHARED_WINDOW)).any():
        raise IllegalOperand("a generic address outside of shared memory is taken for one inside")
    return address - U64(SHARED_WINDOW)


to_shared_cta = to_shared_cluster = to_shared


def map_to_rank(_: Warp, address: Value, rank: Value) -> Value:
    """`mapa`: the same offset in another CTA of the cluster."""
    return (address & U32(OFFSET_MASK)) | (rank << U32(RANK_SHIFT))
