# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors as the kernels take them: experts in one strided tensor, rows that TMA can address."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_grouped_mlp.op import emulated
from te_grouped_mlp.op.tensors import memory, stacking
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
)
from te_grouped_mlp.op.tensors.stacking import Experts, Stacked

_ALIGN = 16
"""Bytes to which TMA wants addresses and row strides aligned."""


def int32_offsets(splits: Splits) -> torch.Tensor:
    """Return the row offsets with a leading zero, int32 (G + 1,); never synchronises."""
    return (
        splits.group_offsets.to(torch.int32)
        if splits.group_offsets_int32 is None
        else splits.group_offsets_int32
    )


def rows_of(operand: GroupedOperand, axis: Axis, name: str) -> torch.Tensor:
    """Return the values of a token operand, row-major and aligned.

    Args:
        operand: Unquantized: its values, copied only if they are not aligned. Block-scaled: the
            values of the copy of `axis`; of bytes, a new tensor, unwritten past the valid rows.
        axis: Which copy.
        name: Of the operand, for messages.

    Raises:
        ValueError: The operand has no such values, or they are not bf16 on a CUDA device.
    """
    values = operand.plain
    if operand.format.is_block_scaled:
        copy = operand.row if axis is Axis.ROW else operand.column
        if copy is None:
            raise ValueError(f"{name} has no {axis.value} copy, which the kernel reads")
        if isinstance(copy, QuantizedCopy):
            return _values_of(copy, operand)
        values = copy.values
    if values is None:
        raise ValueError(f"{name} has no plain values, which format unquantized needs")
    require_bf16(name, values)
    return addressable(values)


def _values_of(copy: QuantizedCopy, operand: GroupedOperand) -> torch.Tensor:
    from te_grouped_mlp.op.kernels import block_scale

    values = memory.empty(operand.shape, torch.bfloat16, copy.data.device)
    if values.numel():
        block_scale.dequantize(
            copy.data, copy.scale, operand.splits.group_end_offsets, values,
            axis_column=copy.axis is Axis.COLUMN, swizzled=copy.swizzled,
        )  # fmt: skip
    return values


def require_bf16(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless a tensor is bf16 on a CUDA device, or on what stands for one."""
    on_device = tensor.is_cuda or emulated.device() is not None
    if tensor.dtype is not torch.bfloat16 or not on_device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}; allowed: torch.bfloat16 on cuda"
        )


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows TMA can address: itself, or a contiguous copy."""
    return tensor if is_addressable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def is_addressable(tensor: torch.Tensor) -> bool:
    """Whether the last dimension is dense and address and other strides are aligned."""
    *outer, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % _ALIGN:
        return False
    size = tensor.element_size()
    # A plain loop: a generator would take longer than what it goes through.
    for stride in outer:  # noqa: SIM110
        if stride <= 0 or stride * size % _ALIGN:
            return False
    return True


def per_row(value: torch.Tensor | None) -> torch.Tensor | None:
    """Return a (rows,) tensor with stride 1 in fp32 or bf16, as it is or copied."""
    if value is not None and value.dtype == torch.float16:
        value = value.float()
    return value if value is None or value.is_contiguous() else value.contiguous()


def experts_of(w: WeightOperand) -> Stacked:
    """Return the weights in one (G, out, in) tensor: a view where they lie so, else a copy.

    Raises:
        ValueError: A weight has another shape, or is not bf16 on CUDA.
    """
    data = w.data
    require_bf16("w", data.values if isinstance(data, Stacked) else data[0])
    view = addressable_view(data)
    if view is not None and view.values.shape[1:] == w.shape:
        return view
    require_shapes("w", tuple(data), w.shape)
    return stacking.copied(data)


def target_of(
    target: WgradTarget, groups: int, shape: tuple[int, int]
) -> tuple[Stacked, tuple[torch.Tensor, ...]]:
    """Return a weight gradient's target in one (G, rows, cols) tensor.

    Returns:
        What a kernel writes, and the members to which `deliver` must bring the result afterwards:
        none where the tensor is a view of the target. A new tensor is ascending, and holds the
        members' values where the kernel has to add to them (see `kernel_adds`), else nothing.

    Raises:
        ValueError: The number of members or a shape is wrong.
    """
    out = target.out
    if isinstance(out, torch.Tensor):
        if tuple(out.shape) != (groups, *shape):
            raise ValueError(f"target has shape {tuple(out.shape)}; allowed: {(groups, *shape)}")
        if is_addressable(out):
            return Stacked(out), ()
    members = target.members()
    if len(members) != groups:
        raise ValueError(f"target has {len(members)} members; the plan has {groups} groups")
    view = addressable_view(members)
    if view is not None and view.values.shape[1:] == shape:
        return view, ()
    require_shapes("target", members, shape)
    if kernel_adds(target, members):
        return stacking.copied(members), members
    first = members[0]
    return Stacked(memory.empty((groups, *shape), first.dtype, first.device)), members


def kernel_adds(target: WgradTarget, members: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel adds to what its output holds.

    In fp32 it need not where the result is brought to `members` afterwards: adding then gives the
    same bits for two thirds of the traffic. In bf16 the sum would be rounded once more.
    """
    fp32 = bool(members) and members[0].dtype is torch.float32
    return target.accumulate and not fp32


def deliver(result: torch.Tensor, members: Sequence[torch.Tensor], adds: bool) -> None:
    """Copy a weight gradient to the members of its target, or add it, in one call for all."""
    parts = list(result.unbind(0))
    if adds:
        torch._foreach_add_(list(members), parts)
    else:
        torch._foreach_copy_(list(members), parts)


def require_shapes(name: str, members: Sequence[torch.Tensor], shape: tuple[int, int]) -> None:
    """Raise ValueError unless all members have one shape, dtype and device."""
    first = members[0]
    for index, member in enumerate(members):
        if tuple(member.shape) != shape:
            raise ValueError(f"{name}[{index}] has shape {tuple(member.shape)}; allowed: {shape}")
        if member.dtype is not first.dtype or member.device != first.device:
            raise ValueError(
                f"{name}[{index}] is {member.dtype} on {member.device}; allowed: {first.dtype} "
                f"on {first.device}, like {name}[0]"
            )


def addressable_view(experts: Experts | Sequence[torch.Tensor]) -> Stacked | None:
    """Return matrices as `stacking.as_stacked_view` does, if TMA can address them so."""
    view = stacking.as_stacked_view(experts)
    return view if view is not None and is_addressable(view.values) else None


def in_pairs(bias: torch.Tensor, width: int | None) -> torch.Tensor:
    """Return a (G, N) tensor in fp32 with gate and linear columns next to each other; new."""
    groups, cols = bias.shape
    blocks = bias.view(groups, -1, 2, cols // 2 if width is None else width)
    out = torch.empty((groups, cols), dtype=torch.float32, device=bias.device)
    out.view(*blocks.shape[:2], blocks.shape[3], 2).copy_(blocks.transpose(2, 3))
    return out


def out_of_pairs(values: torch.Tensor, width: int | None) -> torch.Tensor:
    """Undo `in_pairs` for a (G, N) tensor, dtype kept; new."""
    groups, cols = values.shape
    width = cols // 2 if width is None else width
    return values.view(groups, -1, width, 2).transpose(2, 3).reshape(groups, cols)
