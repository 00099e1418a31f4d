# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiles. A choice depends on the architecture, the operation and the features, never on a token
count: the order of every sum is then the same for an exact and for a padded buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PERIOD = 64
"""Rows after which the blocks of 32 gate and 32 linear rows repeat."""


class Op(Enum):
    """The kernels of this backend."""

    __hash__ = object.__hash__  # as for layout.Output

    FC1_ACT = "fc1_act"
    FC2_FORWARD = "fc2_forward"
    FC1_DGRAD = "fc1_dgrad"
    DACT_DGRAD = "dact_dgrad"
    FC1_WGRAD = "fc1_wgrad"
    FC2_WGRAD = "fc2_wgrad"
    REDUCE_ROW_PARTIALS = "reduce_row_partials"
    ZERO_TAIL = "zero_tail"


ROW_OPS = (Op.REDUCE_ROW_PARTIALS, Op.ZERO_TAIL)
"""Kernels over rows; they have no tile."""


_VIEW_ON_TILE_N = frozenset({Op.FC1_ACT})
"""Kernels whose operand B is seen as pairs along n, so that its boxes must hold whole periods."""


@dataclass(frozen=True)
class Tile:
    """Shape and schedule of one kernel.

    Attributes:
        m, n: Output tile of a CTA (of a pair of CTAs on SM 10x with cluster_m 2).
        cluster_m, cluster_n: CTAs that share operands by multicast.
        pingpong: Two warpgroups alternate tiles, instead of sharing one.
    """

    m: int
    n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False

    @property
    def n_slice(self) -> int:
        """Columns of the tile that one TMA box loads: multicast divides them among CTAs."""
        return self.n // self.cluster_m

    @property
    def accumulators(self) -> int:
        """fp32 accumulator registers of a thread on SM 9.0."""
        warpgroups = 1 if self.pingpong else min(self.m // 64, 2)
        return self.m * self.n // (128 * warpgroups)


def refusal(op: Op, tile: Tile, arch: int) -> str:
    """Return why a kernel cannot use a tile, or an empty string.

    A box of 96 rows (128x192 with a cluster of 2) is loaded without an error and holds the wrong
    rows, since it is one and a half periods; hence the first rule.
    """
    if op in _VIEW_ON_TILE_N and tile.n_slice % PERIOD:
        return f"{tile.n} columns over {tile.cluster_m} CTAs is {tile.n_slice}; needs {PERIOD} x"
    if tile.n % 32:
        return f"tile n is {tile.n}; gated epilogues need multiples of 32"
    if arch == 9 and op is Op.DACT_DGRAD and tile.accumulators > 128:
        return f"{tile.accumulators} accumulator registers spill in this epilogue; at most 128"
    return ""


def choose(op: Op, arch: int, *, n: int, k: int, bias: bool = False) -> Tile:
    """Return the tile of a kernel.

    Args:
        op: The kernel.
        arch: Major compute capability, 9 or 10.
        n, k: Features of the output and of the contraction (for weight gradients, the columns of
            the gradient and 0, since the contraction runs over tokens).
        bias: The epilogue adds a bias, which takes registers.

    Raises:
        ValueError: There is no tile for `arch`.
    """
    if arch == 9:
        tile = _hopper(op, n, k, bias)
    elif arch == 10:
        tile = Tile(256, 128, 2, 1) if op is Op.DACT_DGRAD else Tile(256, 256, 2, 1)
    else:
        raise ValueError(f"arch is {arch}; allowed: 9, 10")
    if cause := refusal(op, tile, arch):
        raise ValueError(f"{op.value} cannot use {tile}: {cause}")
    return tile


def _hopper(op: Op, n: int, k: int, bias: bool) -> Tile:
    """Fastest on an H200, or within 2 % of it, over the shapes of the benchmark.

    Sharing A between two CTAs (a cluster of 1x2) beat sharing B in every forward and data-gradient
    kernel. Pingpong hides an epilogue behind the other tile's products; over a long contraction
    there is less to hide, and the wider tile reads less. Weight gradients that are added to need
    the shared memory for C that a 256-wide tile takes from its operands.
    """
    wide, square = Tile(128, 256, 1, 2), Tile(128, 128, 1, 2, pingpong=True)
    if op in (Op.FC1_WGRAD, Op.FC2_WGRAD):
        return Tile(128, 192, 2, 1, pingpong=True)
    if op is Op.DACT_DGRAD:
        return square
    if op is Op.FC1_DGRAD:
        return wide
    if k >= _LONG:
        return wide
    if op is Op.FC1_ACT:
        if bias:
            return wide
        # Two CTAs of 192 columns; the last pair may be mostly empty.
        if -n % 384 * 50 <= n:
            return Tile(128, 192, 1, 2, pingpong=True)
    return square


_LONG = 4096
