# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Row counts of the groups of a matrix, as tex's functions are told them, and what they must be."""

from __future__ import annotations

import torch

from te_grouped_mlp.integration.standalone import on_gpu
from te_grouped_mlp.integration.standalone.tex.mxfp8 import BLOCK, TILE


def split_sizes(
    num_tensors: int,
    rows: int,
    first_dims: torch.Tensor | None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return the row count of each group.

    Args:
        num_tensors: Number of groups.
        rows: Of the buffer.
        first_dims: int64 (groups,) row counts, or None for equal groups.
        device: Where the result lies if the groups are equal.

    Returns:
        int64 (groups,); `first_dims` itself where it is given.
    """
    if first_dims is not None:
        return first_dims
    return torch.full((num_tensors,), rows // num_tensors, dtype=torch.int64, device=device)


def element_offsets(first_dims: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """Return int64 (groups + 1,) element offsets of packed groups; None for equal groups."""
    if first_dims is None:
        return None
    if on_gpu.serves(first_dims):
        found = on_gpu.running_sums(first_dims, [columns], [True], [False])
        if found is not None:
            return found[1][0]
    offsets = first_dims.new_zeros(first_dims.numel() + 1)
    torch.cumsum(first_dims * columns, dim=0, out=offsets[1:])
    return offsets


def table_problem(name: str, table: torch.Tensor | None, length: int) -> str | None:
    """Say what is wrong with an int64 table of counts or offsets of groups, or return None."""
    if table is None:
        return None
    if table.dtype != torch.int64 or table.dim() != 1 or table.numel() != length:
        return (
            f"{name} is {table.dtype} of shape {tuple(table.shape)}; allowed: int64 of shape "
            f"({length},)"
        )
    if not table.is_contiguous():
        return f"{name} has stride {table.stride()}; allowed: contiguous"
    return None


def counts_problem(
    num_tensors: int,
    shape: tuple[int, int],
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None,
    multiple: int,
) -> str | None:
    """Say what is wrong with the numbers in such tables, or return None.

    Args:
        num_tensors: Number of groups.
        shape: (rows, columns) of the buffer.
        first_dims, tensor_offsets: Tables of the right form. On a GPU they are not looked at: that
            would wait for it.
        multiple: What a row count must be a multiple of where counts are given.
    """
    rows, columns = shape
    if first_dims is None:
        counts = [rows // num_tensors] * num_tensors
    elif on_gpu.serves(first_dims):
        return None
    else:
        counts = first_dims.tolist()
        if min(counts) < 0 or any(count % multiple for count in counts):
            return f"first_dims is {counts}; allowed: multiples of {multiple} >= 0"
        if sum(counts) > rows:
            return f"first_dims is {counts}, {sum(counts)} rows in all; the buffer has {rows}"
    if tensor_offsets is None or on_gpu.serves(tensor_offsets):
        return None
    expected = [0]
    for count in counts:
        expected.append(expected[-1] + count * columns)
    found = tensor_offsets.tolist()
    if found != expected:
        return (
            f"tensor_offsets is {found}; the row counts {counts} of {columns} columns give "
            f"{expected}"
        )
    return None


def equal_groups_problem(num_tensors: int, rows: int, *, columnwise: bool) -> str | None:
    """Say why equal groups cannot share one matrix of scales, or return None.

    Groups of whole tiles can. Of others, the compact scales can as long as no block of 32 rows
    belongs to two groups.
    """
    each = rows // num_tensors
    if columnwise and each % BLOCK:
        return f"first_dims is None: {num_tensors} x {each} rows; allowed: multiples of {BLOCK}"
    return None


def whole_tiles(num_tensors: int, rows: int, first_dims: torch.Tensor | None) -> bool:
    """Return whether every group begins at a whole tile of scales."""
    return first_dims is not None or rows // num_tensors % TILE == 0
