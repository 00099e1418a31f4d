# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions that bring the scales of dense MXFP8 tensors into the order a GEMM reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op import memory
from te_grouped_mlp.standalone import on_gpu
from te_grouped_mlp.standalone.tex import mxfp8
from te_grouped_mlp.standalone.tex.codes import COLUMN, ROW
from te_grouped_mlp.standalone.tex.guard import tex_function_on_gpu_too
from te_grouped_mlp.standalone.tex.quantize import dense_operand, is_mxfp8


@tex_function_on_gpu_too
def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Swizzle the scales of every direction whose data a dense MXFP8 tensor holds.

    The tensor gets new scale buffers; the old ones keep their content. Nothing happens if its
    scales are swizzled already or its format has none to swizzle.
    """
    if not is_mxfp8(tensor) or tensor._with_gemm_swizzled_scales:
        return
    for axis, prefix in ((ROW, "_rowwise"), (COLUMN, "_columnwise")):
        if getattr(tensor, f"{prefix}_data") is None:
            continue
        operand = dense_operand("swizzle_scales_for_gemm_", tensor, axis)
        expected = mxfp8.scale_shape(operand.rows, operand.columns, axis)
        if tuple(operand.scale.shape) != expected:
            raise ValueError(
                f"swizzle_scales_for_gemm_: scales have shape {tuple(operand.scale.shape)}; "
                f"allowed: {expected}"
            )
        swizzled = mxfp8.run_swizzle(
            operand.scale.view(torch.uint8), axis, operand.rows, operand.columns
        )
        setattr(tensor, f"{prefix}_scale_inv", swizzled)
    tensor._with_gemm_swizzled_scales = True


@tex_function_on_gpu_too
def swizzle_scales_and_pack_ptrs_for_discrete_weights(
    data_tensors: Sequence[torch.Tensor],
    scale_tensors: Sequence[torch.Tensor],
    swizzle_type: str,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Swizzle the compact scales of separate weights and list the addresses a kernel needs.

    Args:
        data_tensors: The weights' bytes, one tensor for each group.
        scale_tensors: Their compact scales, two-dimensional and of one shape.
        swizzle_type: "mxfp8_rowwise" or "mxfp8_columnwise".
        device: Where the results lie.

    Returns:
        int64 addresses of the data, int64 addresses of the swizzled scales, and the bytes that
        hold those scales: the caller keeps them alive as long as the addresses are used.
    """
    axes = {"mxfp8_rowwise": ROW, "mxfp8_columnwise": COLUMN}
    if swizzle_type not in axes:
        raise NotImplementedError(
            f"swizzle_scales_and_pack_ptrs_for_discrete_weights: swizzle_type is "
            f"{swizzle_type!r}; standalone implements {', '.join(axes)}"
        )
    if len(data_tensors) != len(scale_tensors):
        raise ValueError(
            f"data_tensors has {len(data_tensors)} entries, scale_tensors {len(scale_tensors)}"
        )
    count = len(data_tensors)
    if count == 0:
        none = memory.empty((0,), torch.int64, device)
        return none, none, memory.empty((0,), torch.uint8, device)
    shape = tuple(scale_tensors[0].shape)
    if len(shape) != 2 or any(tuple(scale.shape) != shape for scale in scale_tensors):
        raise ValueError(
            f"scale_tensors have shapes {[tuple(scale.shape) for scale in scale_tensors]}; "
            "allowed: two-dimensional and all the same"
        )
    axis = axes[swizzle_type]
    # The padded shape is all the layout depends on.
    rows, columns = (shape[0], shape[1] * 32) if axis == ROW else (shape[0] * 32, shape[1])
    if on_gpu.serves(scale_tensors[0]):
        return _pack_on_gpu(data_tensors, scale_tensors, axis, torch.device(device))
    stride = mxfp8.round_up(shape[0] * shape[1], 16)
    addresses = torch.zeros(2 * count, dtype=torch.int64, device=device)
    swizzled = torch.zeros(count * stride, dtype=torch.uint8, device=device)
    for index, scale in enumerate(scale_tensors):
        part = mxfp8.run_swizzle(scale.view(torch.uint8), axis, rows, columns)
        swizzled[index * stride : index * stride + part.numel()] = part.view(-1)
        addresses[index] = data_tensors[index].data_ptr()
        addresses[count + index] = swizzled.data_ptr() + index * stride
    return addresses[:count], addresses[count:], swizzled


def _pack_on_gpu(
    data_tensors: Sequence[torch.Tensor],
    scale_tensors: Sequence[torch.Tensor],
    axis: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same with one copy of all addresses and one launch for all scales."""
    count, shape = len(data_tensors), tuple(scale_tensors[0].shape)
    sources = [scale.contiguous() for scale in scale_tensors]
    size = shape[0] * shape[1]
    swizzled = memory.empty((count * size,), torch.uint8, sources[0].device)
    first = swizzled.data_ptr()
    table = on_gpu.addresses(
        [data.data_ptr() for data in data_tensors]
        + [first + index * size for index in range(count)]
        + [source.data_ptr() for source in sources],
        device,
    )
    on_gpu.block_scale().swizzle_listed(
        table[2 * count :], shape, swizzled, axis_column=axis == COLUMN
    )
    return table[:count], table[count : 2 * count], swizzled
