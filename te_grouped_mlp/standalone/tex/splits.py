# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Row counts of the groups of a matrix, as tex's functions are told them."""

from __future__ import annotations

import torch

from te_grouped_mlp.standalone import on_gpu
from te_grouped_mlp.standalone.tex.mxfp8 import TILE


def split_sizes(
    function: str,
    num_tensors: int,
    shape: tuple[int, int],
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None,
    multiple: int = TILE,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return the row count of each group, checked against the buffer.

    Args:
        function: Named in errors.
        num_tensors: Number of groups.
        shape: (rows, columns) of the buffer.
        first_dims: (groups,) row counts, or None for equal groups.
        tensor_offsets: (groups + 1,) element offsets; they must agree with `first_dims`.
        multiple: What each count must be a multiple of.
        device: Where the result lies if the groups are equal.

    Returns:
        Contiguous int64 (groups,). Counts on a GPU are not looked at: that would wait for it.

    Raises:
        ValueError: A count is negative or not such a multiple, the sum exceeds the rows, or the
            number of groups is not positive.
    """
    rows, columns = shape
    if num_tensors < 1:
        raise ValueError(f"{function}: num_tensors is {num_tensors}; allowed: at least 1")
    if first_dims is not None:
        splits = first_dims.to(torch.int64).contiguous()
    elif tensor_offsets is not None and columns:
        splits = torch.diff(tensor_offsets.to(torch.int64)) // columns
    elif rows % num_tensors:
        raise ValueError(f"{function}: {rows} rows are not {num_tensors} equal groups")
    else:
        each = rows // num_tensors
        if each % multiple:
            raise ValueError(
                f"{function}: splits are {num_tensors} x {each}; allowed: multiples of {multiple}"
            )
        return torch.full((num_tensors,), each, dtype=torch.int64, device=device)
    if on_gpu.serves(splits):
        if splits.numel() != num_tensors:
            raise ValueError(f"{function}: {splits.numel()} splits for {num_tensors} groups")
        return splits
    _check_counts(function, splits.tolist(), num_tensors, rows, multiple)
    if first_dims is not None and tensor_offsets is not None:
        _check_offsets(function, splits, tensor_offsets, columns)
    return splits


def _check_counts(
    function: str, counts: list[int], num_tensors: int, rows: int, multiple: int
) -> None:
    if len(counts) != num_tensors:
        raise ValueError(f"{function}: {len(counts)} splits for {num_tensors} groups")
    if min(counts) < 0 or any(count % multiple for count in counts):
        raise ValueError(f"{function}: splits are {counts}; allowed: multiples of {multiple} >= 0")
    if sum(counts) > rows:
        raise ValueError(
            f"{function}: splits are {counts}, {sum(counts)} rows in all; the buffer has {rows}"
        )


def _check_offsets(
    function: str, splits: torch.Tensor, tensor_offsets: torch.Tensor, columns: int
) -> None:
    expected = [0, *(torch.cumsum(splits, 0) * columns).tolist()]
    if tensor_offsets.tolist() != expected:
        raise ValueError(
            f"{function}: tensor_offsets is {tensor_offsets.tolist()}; the splits "
            f"{splits.tolist()} of {columns} columns give {expected}"
        )
