# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the frontend takes without looking and computes wrongly; each is refused before a launch.

The frontend's own checks run when a kernel is built, not when a built one is found again, and some
values it never looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_grouped_mlp.op.backends.cudnn import alignment
from te_grouped_mlp.op.backends.cudnn.capability import ROWS_MULTIPLE
from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.tensors.operands import Axis, QuantizedCopy, Splits
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape


def packed_scales(name: str, copy: QuantizedCopy, shape: tuple[int, int]) -> None:
    """Check that a copy's scales are in tile order: a compact buffer has as many and is taken too.

    Args:
        name: Of the operand, for messages.
        copy: What the kernel will read.
        shape: (rows, columns) of the data.

    Raises:
        ValueError: The scales are compact, too few or too many, or not contiguous; or the data is.
    """
    if not copy.swizzled:
        raise ValueError(f"{name} has compact {copy.axis.value} scales; allowed: in tile order")
    wanted = (row_scale_shape if copy.axis is Axis.ROW else column_scale_shape)(*shape, MXFP8)
    count = wanted[0] * wanted[1]
    if copy.scale.numel() != count or not copy.scale.is_contiguous():
        raise ValueError(
            f"{name} has {copy.scale.numel()} {copy.axis.value} scales; "
            f"allowed: {count}, contiguous"
        )
    if tuple(copy.data.shape) != shape or not copy.data.is_contiguous():
        raise ValueError(
            f"{name} has data of shape {tuple(copy.data.shape)} and strides {copy.data.stride()}; "
            f"allowed: {shape}, contiguous"
        )
    aligned(name, copy.data)


def aligned(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless TMA can address the memory of a tensor."""
    if not alignment.is_aligned(tensor):
        multiple = alignment.BYTES
        raise ValueError(
            f"{name} begins at an address that is {tensor.data_ptr() % multiple} past a multiple "
            f"of {multiple}; allowed: multiples of {multiple}"
        )


def features(name: str, value: int) -> None:
    """Check a width, which a kernel that was built for another width is not asked about.

    Raises:
        ValueError: It is no positive multiple of 64.
    """
    multiple = MXFP8.features_multiple
    if value <= 0 or value % multiple:
        raise ValueError(f"{name} is {value}; allowed: positive multiples of {multiple}")


def end_offsets(splits: Splits, groups: int) -> torch.Tensor:
    """Return the end rows of the experts as the kernels read them.

    Raises:
        ValueError: They are not int32 (G,) in one piece; other integers end in an error of the
            compiler, or in nonsense.
    """
    group_end_offsets = splits.group_end_offsets
    if (
        group_end_offsets.dtype is not torch.int32
        or tuple(group_end_offsets.shape) != (groups,)
        or not group_end_offsets.is_contiguous()
    ):
        raise ValueError(
            f"splits.group_end_offsets is {group_end_offsets.dtype} of shape "
            f"{tuple(group_end_offsets.shape)}; "
            f"allowed: torch.int32 of shape {(groups,)}, contiguous"
        )
    return group_end_offsets


def split_sizes(sizes: Sequence[int] | None, rows: int) -> None:
    """Check the rows of every expert, where the host can read them.

    Args:
        sizes: Split sizes, or None where they are on the device only.
        rows: Of the buffer.

    Raises:
        ValueError: A size is no multiple of 256, or all of them exceed the buffer.
    """
    for index, size in enumerate(sizes or ()):
        if size < 0 or size % ROWS_MULTIPLE:
            raise ValueError(
                f"splits[{index}] is {size}; the cudnn backend allows multiples of "
                f"{ROWS_MULTIPLE}, since a tile of a kernel has that many rows and would run into "
                "the next expert (NVTE_GROUPED_MLP_BACKEND names another backend)"
            )
    if sizes is not None and sum(sizes) > rows:
        raise ValueError(f"splits sum to {sum(sizes)}; the buffer has {rows} rows")


def float_rows(name: str, tensor: torch.Tensor, rows: int) -> None:
    """Check a value per row that a kernel reads through a typed pointer.

    Raises:
        ValueError: It is neither fp32 nor bf16, has another length or is strided.
    """
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} is {tensor.dtype}; allowed: torch.float32, torch.bfloat16")
    if tensor.numel() != rows or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            f"allowed: {rows} values, contiguous"
        )


def fp32_rows(name: str, tensor: torch.Tensor, rows: int) -> None:
    """Check a value per row of the kernels through the activation's derivative.

    Raises:
        ValueError: It is not fp32, has another length or is strided.
    """
    if tensor.dtype is not torch.float32:
        raise ValueError(f"{name} is {tensor.dtype}; allowed: torch.float32")
    float_rows(name, tensor, rows)
