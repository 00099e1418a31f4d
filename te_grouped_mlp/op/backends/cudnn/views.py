# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands in the shapes of the frontend's kernels, and their outputs as operands again.

Nothing is copied but scales that are not in tile order yet, or not aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op.backends.cudnn import alignment, checks, te_calls
from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.tensors import stacking
from te_grouped_mlp.op.tensors.operands import Axis, QuantizedCopy, WeightOperand
from te_grouped_mlp.op.tensors.scale_layout import (
    from_kernel_view,
    round_up,
    to_kernel_view,
)
from te_grouped_mlp.op.tensors.stacking import Experts, Stacked

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclass(frozen=True)
class Tokens:
    """A token operand in the kernels' shapes, sharing the operand's memory.

    Attributes:
        data: E4M3 (rows, K, 1), strides (K, 1, rows * K).
        scale: E8M0, the six-dimensional view of row scales.
        group_end_offsets: int32 (G,), end rows of the experts.
    """

    data: torch.Tensor
    scale: torch.Tensor
    group_end_offsets: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows of the buffer."""
        return int(self.data.shape[0])

    @property
    def groups(self) -> int:
        """Number of experts."""
        return int(self.group_end_offsets.numel())


@dataclass(frozen=True)
class WeightArguments:
    """Weights in the kernels' shapes: stacked in one buffer, or behind tables of addresses.

    Attributes:
        n: Output features of the product.
        major: "k" if the contracted columns lie together in memory, else "n".
        stacked: E4M3 (N, K, G) and the six-dimensional view of its scales; or None.
        tables: int64 (G,) addresses of the data and of the scales; or None.
        owners: Memory that the tables point at; this object must live until the launch is queued.
    """

    n: int
    major: str
    stacked: tuple[torch.Tensor, torch.Tensor] | None = None
    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    owners: tuple[Any, ...] = ()


def tokens(
    name: str, copy: QuantizedCopy, shape: tuple[int, int], group_end_offsets: torch.Tensor
) -> Tokens:
    """View the row copy of a token operand.

    Raises:
        ValueError: Of `checks.packed_scales`, or the width does not fit the kernels.
    """
    checks.features(f"columns of {name}", shape[1])
    checks.packed_scales(name, copy, shape)
    data = as_kernel_matrix(copy.data.view(E4M3))
    scale = to_kernel_view(copy.scale.view(E8M0), shape[0], -(-shape[1] // MXFP8.block))
    return Tokens(data, scale, group_end_offsets)


def weights(w: WeightOperand) -> WeightArguments:
    """Bring weights into the kernels' shapes; scales in tile order are made here if need be.

    Members that lie one after another are passed as one tensor, because such launches need no
    table of descriptors in a buffer that launches share.

    Raises:
        ValueError: A width does not fit the kernels, or a member is not contiguous.
    """
    forward = w.axis is Axis.ROW
    n, k = w.shape if forward else w.shape[::-1]
    checks.features("output columns of w", n)
    checks.features("contracted columns of w", k)
    major = "k" if forward else "n"
    data, device = stacking.packed_bytes(w.data), w.data[0].device
    # Members of whole tiles that begin where the one before ends are as aligned as the first.
    for index, member in enumerate(w.data if data is None else (w.data[0],)):
        if not member.is_contiguous():
            raise ValueError(f"w[{index}] has strides {member.stride()}; allowed: contiguous")
        checks.aligned(f"w[{index}]", member)
    if w.swizzled:
        scales = stacking.packed_bytes(w.scale)
        if data is None or scales is None:
            parts = _readable(w.scale)
            tables = te_calls.addresses(w.data, device), te_calls.addresses(parts, device)
            return WeightArguments(n, major, tables=tables, owners=(w.data, parts))
        scales = alignment.readable(scales)
    else:
        *both, scales = te_calls.swizzled_tables(w, device)
        if data is None:
            return WeightArguments(n, major, tables=(both[0], both[1]), owners=(w.data, scales))
    view = to_kernel_view(scales.view(-1).view(E8M0), n, -(-k // MXFP8.block), w.num_groups)
    order = (1, 2, 0) if forward else (2, 1, 0)
    matrices = data.view(E4M3).view(w.num_groups, *w.shape).permute(order)
    return WeightArguments(n, major, stacked=(matrices, view), owners=(scales,))


def _readable(scales: Experts) -> Experts:
    if isinstance(scales, Stacked):
        return tuple(map(alignment.readable, scales))
    stride = stacking.uniform_stride(scales)
    # Known of all of them at once, where they lie in steps.
    if stride and stride % alignment.BYTES == 0 and alignment.is_aligned(scales[0]):
        return scales
    return tuple(map(alignment.readable, scales))


def as_kernel_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """View a contiguous (rows, cols) matrix in the kernels' shape and strides."""
    rows, cols = matrix.shape
    return matrix.as_strided((rows, cols, 1), (cols, 1, rows * cols))


def quantized_copy(data: torch.Tensor, scale: torch.Tensor, axis: Axis) -> QuantizedCopy:
    """Take a kernel's output, (rows, cols, 1) and a view of scales, as a copy; nothing moves.

    Row scales of the columns that fill the last tile are set to zero: no kernel writes them, and
    the next product multiplies them with zeros, which a NaN would survive.
    """
    matrix = data.view(torch.uint8).squeeze(-1)
    blocks = -(-matrix.shape[1] // MXFP8.block)
    scales = scale.view(torch.uint8)
    if axis is Axis.ROW and blocks % 4 and matrix.shape[0]:
        scales[:, :, :, blocks % 4 :, -1, :] = 0
    return QuantizedCopy(matrix, from_kernel_view(scales), axis, swizzled=True)


def column_scales(copy: QuantizedCopy) -> torch.Tensor:
    """View the column scales of a copy as the weight gradient's kernel takes them."""
    return copy.scale.view(E8M0).view(round_up(copy.data.shape[1], 128), -1)
