# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Token tensors on the grid of a block-scaled format, for plans that read values. CUDA only."""

from __future__ import annotations

import torch

from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors import memory, scale_layout
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    DequantizedCopy,
    GroupedOperand,
    QuantizedCopy,
    Splits,
)


def operand(
    plain: torch.Tensor,
    plan: Plan,
    splits: Splits,
    *,
    row: bool,
    column: bool,
    keep_quantized_for_backward: bool,
    gate_linear_interleaved: bool = False,
    nan_in_scale: bool = False,
    consumes: bool = False,
) -> GroupedOperand:
    """Make the operand of a token tensor, in one pass over it; never synchronises.

    Args:
        plain: (rows, features), fp32, fp16 or bf16. Changed only if `consumes`.
        plan: Its format and layout.
        splits: Division of the rows; rows past the valid ones are neither read nor written.
        row, column: Which copies are wanted.
        keep_quantized_for_backward: The column copy is read by a later pass: keep its bytes, which
            take half the memory.
        gate_linear_interleaved: Columns 2j and 2j + 1 are gate and linear j, without common scales.
        nan_in_scale: A NaN makes its block's scale NaN, as in the epilogues of fused kernels.
        consumes: `plain`, bf16 and contiguous, is not needed any more; values take its place.

    Returns:
        New buffers: bytes for a column copy that keep_quantized_for_backward, else values.
    """
    from te_grouped_mlp.op.kernels import block_scale

    rows, _ = shape = (int(plain.shape[0]), int(plain.shape[1]))
    device = plain.device
    free = [plain] if consumes else []

    def values(wanted: bool) -> torch.Tensor | None:
        if not wanted:
            return None
        return free.pop() if free else memory.empty(shape, torch.bfloat16, device)

    row_values, column_values = values(row), values(column and not keep_quantized_for_backward)
    column_bytes = _bytes(shape, plan, device) if column and keep_quantized_for_backward else None
    if rows and (row or column):
        block_scale.quantize(
            plain if plain.stride(1) == 1 else plain.contiguous(),
            splits.group_end_offsets,
            column_data=None if column_bytes is None else column_bytes.data,
            column_scale=None if column_bytes is None else column_bytes.scale,
            row_values=row_values,
            column_values=column_values,
            gate_linear_interleaved=gate_linear_interleaved,
            nan_in_scale=nan_in_scale,
        )
    return GroupedOperand(
        plan.call.format,
        shape,
        plan.layout,
        splits,
        None if row_values is None else DequantizedCopy(row_values, Axis.ROW),
        column_bytes if column_values is None else DequantizedCopy(column_values, Axis.COLUMN),
    )


def _bytes(shape: tuple[int, int], plan: Plan, device: torch.device) -> QuantizedCopy:
    blocks, padded = scale_layout.column_scale_shape(*shape, plan.call.format)
    return QuantizedCopy(
        memory.empty(shape, torch.uint8, device),
        memory.empty((blocks * padded,), torch.uint8, device),
        Axis.COLUMN,
        swizzled=True,
    )
