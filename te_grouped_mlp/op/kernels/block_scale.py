# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP8 quantization, dequantization and scale layouts on CUDA tensors, one pass each.

The bytes are those of the C++ kernels (csrc), special values included. Nothing here synchronises
or allocates, so every call may be captured in a graph.

Rows belong to groups or to members. Groups: `group_end_offsets`, int32 (G,) on the device, are
inclusive prefix sums of row counts, each a multiple of 128; rows at or past the last are never read
or written, nor are their scales. Members: ``group_end_offsets=None``; the rows are `members` equal
matrices, each with scales padded to whole 128 x 128 tiles, one after the other.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from te_grouped_mlp.op.kernels import block_scale_kernels as kernels
from te_grouped_mlp.op.tensors import capacity

BLOCK = 32
TILE = 128


class Config(NamedTuple):
    """Elements that one program works on, and its warps.

    `rows` is 32, 64 or 128; `cols` is a power of two, at least 32.
    """

    rows: int
    cols: int
    warps: int


QUANTIZE = Config(32, 128, 2)
DEQUANTIZE = Config(32, 256, 4)
"""Fastest over all forms on an H200 (docs/performance.md)."""

_SOURCES = (torch.float32, torch.float16, torch.bfloat16)


def quantize(
    src: torch.Tensor,
    group_end_offsets: torch.Tensor | None,
    *,
    members: int = 1,
    row_data: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    column_data: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    row_values: torch.Tensor | None = None,
    column_values: torch.Tensor | None = None,
    e5m2: bool = False,
    swizzled: bool = True,
    two_d: bool = False,
    nan_in_scale: bool = False,
    gate_linear_interleaved: bool = False,
    noop: torch.Tensor | None = None,
    config: Config = QUANTIZE,
) -> None:
    """Quantize a matrix along its rows, its columns, or both, into buffers that exist.

    Args:
        src: (rows, cols) fp32, fp16 or bf16, unit column stride; cols a multiple of 32.
        group_end_offsets: Row ends of the groups, or None for members.
        members: Equal matrices that the rows are made of, each a multiple of 32 rows.
        row_data, column_data: uint8 (rows, cols) or flat, row-major.
        row_scale, column_scale: uint8, padded to whole tiles, which are written whole, padding as
            0. Given wherever the data of that direction are.
        row_values, column_values: bf16 (rows, cols): ``data * 2^(scale - 127)``, rounded only where
            bf16 has not the exponent. One may be `src`: a program reads before it writes.
        e5m2: E5M2 instead of E4M3.
        swizzled: Scales in the order that a GEMM reads; column scales restart at each group.
        two_d: One scale for each 32 x 32 block.
        nan_in_scale: A NaN makes its block's scale 0xFF; otherwise it takes no part in the scale.
        gate_linear_interleaved: Columns 2j and 2j + 1 are gate j and linear j: a row's even and odd
            columns, 64 at a time, are blocks of their own; values only.
        noop: One number on the device; unless it is 0, nothing is written.
        config: Rectangle of one program; no effect on the result.

    Raises:
        TypeError, ValueError: Naming the argument, its value and what is allowed.
    """
    rows, cols = _check_matrix("src", src, _SOURCES)
    if gate_linear_interleaved:
        _check_interleaved(row_data, row_scale, two_d, cols)
    groups = _check_groups(group_end_offsets, members, rows, src.device)
    sizes = (rows * cols, *_scale_bytes(rows, cols, members))
    _check_outputs("row", row_data, row_scale, row_values, (sizes[0], sizes[1]), src.device)
    _check_outputs("column", column_data, column_scale, column_values, sizes[::2], src.device)
    if noop is not None:
        _check_buffer("noop", noop, noop.dtype, 1, src.device)
    wanted = (row_data, row_scale, column_data, column_scale, row_values, column_values)
    if rows == 0 or cols == 0 or all(one is None for one in wanted):
        return
    unit = 16 if src.stride(0) % 16 == 0 else 8 if src.stride(0) % 8 == 0 else 1
    _launch(
        kernels.quantize_tiles, _programs(rows, cols, members, config), config.warps, src.device,
        src, group_end_offsets, noop, *wanted, rows // members, cols // BLOCK,
        src.stride(0) // unit, groups, unit, triton.next_power_of_2(groups), e5m2, swizzled, two_d,
        nan_in_scale, gate_linear_interleaved, _hardware(), config.rows, config.cols,
    )  # fmt: skip


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    group_end_offsets: torch.Tensor | None,
    out: torch.Tensor,
    *,
    axis_column: bool,
    members: int = 1,
    swizzled: bool = True,
    e5m2: bool = False,
    config: Config = DEQUANTIZE,
) -> None:
    """Write ``data * 2^(scale - 127)``, the float32 product rounded once to the result's type.

    Args:
        data: uint8 (rows, cols) or flat, row-major.
        scale: uint8, contiguous: row scales, or column scales if `axis_column`.
        group_end_offsets, members: As in `quantize`.
        out: (rows, cols) bf16, fp16 or fp32, contiguous. A NaN is the positive quiet one.
        axis_column: The direction of the scale blocks.
        swizzled, e5m2: As in `quantize`.
        config: Rectangle of one program; no effect on the result.

    Raises:
        TypeError, ValueError: Naming the argument, its value and what is allowed.
    """
    rows, cols = _check_matrix("out", out, _SOURCES)
    _check_buffer("out", out, out.dtype, rows * cols, out.device)
    groups = _check_groups(group_end_offsets, members, rows, out.device)
    size = _scale_bytes(rows, cols, members)[int(axis_column)]
    _check_buffer("data", data, torch.uint8, rows * cols, out.device)
    _check_buffer("scale", scale, torch.uint8, size, out.device)
    if rows == 0 or cols == 0:
        return
    _launch(
        kernels.dequantize_tiles, _programs(rows, cols, members, config), config.warps, out.device,
        data, scale, group_end_offsets, out, rows // members, cols // BLOCK, groups,
        triton.next_power_of_2(groups), axis_column, e5m2, swizzled, _hardware(), config.rows,
        config.cols,
    )  # fmt: skip


def swizzle(
    scale: torch.Tensor,
    group_end_offsets: torch.Tensor | None,
    rows: int,
    cols: int,
    out: torch.Tensor,
    *,
    axis_column: bool,
    members: int = 1,
    inverse: bool = False,
) -> None:
    """Move scales from the compact order to the swizzled one, padding written as 0.

    Args:
        scale: uint8, contiguous, padded to whole tiles.
        group_end_offsets, members: As in `quantize`.
        rows, cols: Shape of the data.
        out: uint8 like `scale`, contiguous, without overlap.
        axis_column: The direction of the scale blocks.
        inverse: From the swizzled order to the compact one.

    Raises:
        TypeError, ValueError: Naming the argument, its value and what is allowed.
    """
    _check_shape("rows x cols", rows, cols)
    groups = _check_groups(group_end_offsets, members, rows, out.device)
    size = _scale_bytes(rows, cols, members)[int(axis_column)]
    _check_buffer("scale", scale, torch.uint8, size, out.device)
    _check_buffer("out", out, torch.uint8, size, out.device)
    if rows == 0 or cols == 0:
        return
    _launch(
        kernels.swizzle_tiles, _programs(rows, cols, members, Config(TILE, TILE, 4)), 4, out.device,
        scale, group_end_offsets, out, rows // members, cols // BLOCK, groups,
        triton.next_power_of_2(groups), axis_column, inverse,
    )  # fmt: skip


def swizzle_listed(
    table: torch.Tensor, shape: tuple[int, int], out: torch.Tensor, *, axis_column: bool
) -> None:
    """Swizzle compact scales that lie apart, into one buffer after the other.

    Args:
        table: int64 (members,) on the device, the addresses of equal compact matrices.
        shape: Their padded shape: multiples of 128 x 4 for row scales, 4 x 128 for column scales.
        out: uint8, contiguous, on the same device.
        axis_column: The direction of the scale blocks.

    Raises:
        TypeError, ValueError: Naming the argument, its value and what is allowed.
    """
    outer, inner = shape[::-1] if axis_column else shape
    if outer % TILE or inner % 4:
        raise ValueError(f"shape is {shape}; allowed: whole tiles of {TILE} x 4 scales")
    size = shape[0] * shape[1]
    _check_buffer("table", table, torch.int64, 0, out.device)
    _check_buffer("out", out, torch.uint8, size * table.numel(), out.device)
    if size == 0 or table.numel() == 0:
        return
    down, blocks = (inner // 4, outer // BLOCK) if axis_column else (outer // TILE, inner)
    _launch(
        kernels.swizzle_listed_tiles, table.numel() * size // (TILE * 4), 4, out.device,
        table, out, blocks, down, size, axis_column,
    )  # fmt: skip


def _programs(rows: int, cols: int, members: int, config: Config) -> int:
    tiles = members * -(-(rows // members) // TILE) * (TILE // config.rows)
    return tiles * -(-(-(-cols // TILE) * TILE) // config.cols)


def _launch(kernel: Any, programs: int, warps: int, device: torch.device, *arguments: Any) -> None:
    """Start a kernel on the tensors' device, which need not be the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, num_warps=warps)
    else:
        kernel[(programs,)](*arguments, num_warps=warps)


@functools.cache
def _hardware() -> bool:
    """Whether the device converts to FP8 and back; Triton's interpreter rounds otherwise."""
    if not isinstance(kernels.quantize_tiles, triton.JITFunction):
        return False
    return int(triton.runtime.driver.active.get_current_target().arch) >= 89


def _scale_bytes(rows: int, cols: int, members: int) -> tuple[int, int]:
    """Bytes of the row scales and of the column scales."""
    padded = members * (-(-(rows // members) // TILE) * TILE)
    return padded * (-(-cols // TILE) * 4), padded // BLOCK * (-(-cols // TILE) * TILE)


def _check_interleaved(
    row_data: torch.Tensor | None, row_scale: torch.Tensor | None, two_d: bool, cols: int
) -> None:
    if row_data is not None or row_scale is not None or two_d or cols % (2 * BLOCK):
        raise ValueError(
            "gate_linear_interleaved is set; allowed: without row_data, row_scale and two_d, for "
            f"columns a multiple of {2 * BLOCK} (now {cols})"
        )


def _check_shape(name: str, rows: int, cols: int) -> None:
    if rows < 0 or cols < 0 or cols % BLOCK:
        raise ValueError(f"{name} is {rows} x {cols}; allowed: columns a multiple of {BLOCK}")


def _check_matrix(
    name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]
) -> tuple[int, int]:
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")
    if tensor.dim() != 2:
        raise ValueError(f"{name} has {tensor.dim()} dimensions; allowed: 2")
    rows, cols = tensor.shape
    _check_shape(name, rows, cols)
    if tensor.stride(1) != 1 and cols > 1:
        raise ValueError(f"{name} has column stride {tensor.stride(1)}; allowed: 1")
    capacity.require_memory(name, tensor)
    return rows, cols


def _check_groups(
    group_end_offsets: torch.Tensor | None, members: int, rows: int, device: torch.device
) -> int:
    """Return the number of groups, 1 for members."""
    if group_end_offsets is not None:
        if members != 1:
            raise ValueError(f"members is {members}; allowed: 1 beside group_end_offsets")
        if group_end_offsets.dim() != 1:
            shape = tuple(group_end_offsets.shape)
            raise TypeError(f"group_end_offsets has shape {shape}; allowed: one dimension")
        _check_buffer("group_end_offsets", group_end_offsets, torch.int32, 1, device)
        if rows % TILE:
            raise ValueError(f"rows is {rows}; allowed: multiples of {TILE} with group_end_offsets")
        return int(group_end_offsets.numel())
    if members < 1 or rows % (members * BLOCK):
        raise ValueError(
            f"members is {members} for {rows} rows; allowed: equal members of a multiple of "
            f"{BLOCK} rows"
        )
    return 1


def _check_outputs(
    direction: str,
    data: torch.Tensor | None,
    scale: torch.Tensor | None,
    values: torch.Tensor | None,
    sizes: tuple[int, ...],
    device: torch.device,
) -> None:
    """Check one direction's outputs; `sizes` are those of the data and of the scales."""
    _check_buffer(f"{direction}_data", data, torch.uint8, sizes[0], device)
    _check_buffer(f"{direction}_scale", scale, torch.uint8, sizes[1], device)
    _check_buffer(f"{direction}_values", values, torch.bfloat16, sizes[0], device)
    if data is not None and scale is None:
        name = f"{direction}_scale"
        raise ValueError(f"{name} is None; allowed: a buffer, because {direction}_data is given")


def _check_buffer(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype, size: int, device: torch.device
) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}; allowed: {dtype}")
    if tensor.numel() < size or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} has {tensor.numel()} elements, strides {tensor.stride()}, on "
            f"{tensor.device}; allowed: at least {size}, contiguous, on {device}"
        )
    capacity.require_memory(name, tensor)
