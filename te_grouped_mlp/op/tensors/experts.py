# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The parameters of all experts, read once in every pass and checked as they are read.

A parameter may be replaced, repointed through ``.data`` or freed at any time, and what takes it
takes shape, dtype, device and memory on trust.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED
from te_grouped_mlp.op.problem import LinearSpec, Problem
from te_grouped_mlp.op.te.adapter import discrete
from te_grouped_mlp.op.tensors import capacity, stacking
from te_grouped_mlp.op.tensors.operands import Axis, WeightCopies, WeightOperand
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape
from te_grouped_mlp.op.tensors.stacking import Experts, Stacked

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What is rounded to the compute dtype on the way to an operand, expert by expert if need be."""

_GROUPED_COPIES = (
    ("rowwise_data", "scale_inv", row_scale_shape),
    ("columnwise_data", "columnwise_scale_inv", column_scale_shape),
)

Held = tuple["WeightCopies | None", "WeightCopies | None"]
"""What `read` returned for FC1 and for FC2."""


def read_parameters(
    ops: Sequence[Any],
    problem: Problem,
    weights: tuple[Sequence[Any], Sequence[Any]],
    device: torch.device,
) -> Held:
    """Read the weights of both linears, and check them and the biases.

    Args:
        ops: GroupedLinear, activation, GroupedLinear.
        problem: Their facts.
        weights: Those of the first and of the second.
        device: Of the op.

    Returns:
        For each linear what `read` returns; None for distributed weights, which are gathered later.

    Raises:
        ValueError: As `read` and `require_biases`.
    """
    held: list[WeightCopies | None] = []
    for label, op, spec, owned in (
        ("fc1", ops[0], problem.fc1, weights[0]),
        ("fc2", ops[2], problem.fc2, weights[1]),
    ):
        copies = None
        if not spec.distributed:
            copies = read(label, problem.num_groups, spec, owned, device)
        held.append(copies)
        require_biases(label, op, spec, device)
    return held[0], held[1]


def read(
    label: str, groups: int, spec: LinearSpec, weights: Sequence[Any], device: torch.device
) -> WeightCopies | None:
    """Read the weights of a GroupedLinear as they are held; nothing is copied.

    Args:
        label: "fc1" or "fc2", for messages.
        groups: Number of experts.
        spec: Its facts.
        weights: Its parameters; of distributed ones, what they were gathered to.
        device: Of the op.

    Returns:
        Plain weights in their own dtype, the parameters themselves. MXFP8 weights: those of their
        copies that every expert has. None where the experts are of several kinds, or of another
        format: they must be asked one by one.

    Raises:
        ValueError: One has another shape, dtype or device, or less memory than that takes. The
            message names it: "fc1.weight3".
    """
    shape = (spec.out_features, spec.in_features)
    if spec.single_grouped_weight:
        return _read_grouped(f"{label}.weight", weights[0], groups, shape, device)
    name = f"{label}.weight{{}}"
    if spec.quantized_weight:
        return _read_quantized(name, weights, shape, device)
    if _require_plain(name, weights, shape, device) is None:
        return None
    values = tuple(weights)
    return plain(shape, values, values)


def of_storages(storages: Sequence[Any], shape: tuple[int, int]) -> WeightCopies | None:
    """Take the copies out of TE's MXFP8 tensors, unchecked; None if one is no such tensor.

    A copy is taken to be there if the first expert has it.
    """
    try:
        swizzled = bool(storages[0]._with_gemm_swizzled_scales)
        row = column = None
        # Four plain loops: half the time of an attribute getter, over hundreds of tensors.
        if storages[0]._rowwise_data is not None:
            data = tuple([storage._rowwise_data for storage in storages])
            scale = tuple([storage._rowwise_scale_inv for storage in storages])
            row = WeightOperand(MXFP8, shape, Axis.ROW, data, scale, swizzled)
        if storages[0]._columnwise_data is not None:
            data = tuple([storage._columnwise_data for storage in storages])
            scale = tuple([storage._columnwise_scale_inv for storage in storages])
            column = WeightOperand(MXFP8, shape, Axis.COLUMN, data, scale, swizzled)
    except AttributeError:
        return None
    return WeightCopies(row, column)


def require_operand(
    data_name: str,
    scale_name: str,
    w: WeightOperand,
    groups: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check data and scales of a weight operand, each expert's.

    Args:
        data_name, scale_name: With a place for the expert's number: "fc1.weight{}".
        w: The operand.
        groups: Number of experts.
        dtypes: Allowed for the data.
        device: Of the op.

    Raises:
        ValueError: The data of an expert have another shape, dtype or device, its scales are fewer
            than these take, or there is less memory than that.
    """
    if isinstance(w.data, Stacked):
        name = data_name.replace("{}", "")
        capacity.require(name, w.data.values, (groups, *w.shape), dtypes, device)
    else:
        check = functools.partial(capacity.require, shape=w.shape, dtypes=dtypes, device=device)
        stacking.require(data_name, w.data, check)
    if not len(w.scale):
        return
    scale_shape = row_scale_shape if w.axis is Axis.ROW else column_scale_shape
    count = math.prod(scale_shape(*w.shape, MXFP8))
    if isinstance(w.scale, Stacked):
        name = scale_name.replace("{}", "")
        capacity.require_bytes(name, w.scale.values, groups * count, device)
    else:
        check = functools.partial(capacity.require_bytes, count=count, device=device)
        stacking.require(scale_name, w.scale, check)


def require_biases(label: str, op: Any, spec: LinearSpec, device: torch.device) -> None:
    """Check the biases of a GroupedLinear, if it has any.

    Raises:
        ValueError: As `require_weights`; the message names "fc1.bias3".
    """
    if not spec.has_bias:
        return
    if spec.single_grouped_bias:
        grouped = op.bias
        _require_flat(f"{label}.bias", grouped.rowwise_data, op.num_groups * spec.out_features)
        return
    _require_plain(f"{label}.bias{{}}", discrete(op, "bias"), (spec.out_features,), device)


def require_grouped_bytes(
    name: str, grouped: Any, count: int, shape: tuple[int, int], device: torch.device
) -> None:
    """Check the copies of grouped MXFP8 storage.

    Args:
        name: For messages.
        grouped: TE's grouped storage.
        count: Members whose scales are padded one by one; 1 for groups of whole tiles.
        shape: Of a member.
        device: Where they must lie.

    Raises:
        ValueError: Data or scales are too few, too wide, elsewhere or without memory.
    """
    if not isinstance(grouped.quantizer, MXFP8Quantizer):
        return
    for data_name, scale_name, scale_shape in _GROUPED_COPIES:
        data, scale = getattr(grouped, data_name), getattr(grouped, scale_name)
        scales = math.prod(scale_shape(*shape, MXFP8))
        if data is not None:
            capacity.require_bytes(f"{name}.{data_name}", data, count * math.prod(shape), device)
        if scale is not None:
            capacity.require_bytes(f"{name}.{scale_name}", scale, count * scales, device)


def _read_quantized(
    name: str, weights: Sequence[Any], shape: tuple[int, int], device: torch.device
) -> WeightCopies | None:
    copies = of_storages(weights, shape)
    if copies is None:
        return None
    row = _complete(f"{name}._rowwise", copies.row, device)
    column = _complete(f"{name}._columnwise", copies.column, device)
    return WeightCopies(row, column)


def _complete(name: str, w: WeightOperand | None, device: torch.device) -> WeightOperand | None:
    """Check a copy; None if an expert lacks it, which is missed by whoever needs it."""
    if w is None:
        return None
    try:
        names = f"{name}_data", f"{name}_scale_inv"
        require_operand(*names, w, w.num_groups, capacity.BYTES, device)
    except AttributeError:
        # What is None has no shape. Looking for it among hundreds is for this case only.
        if type(None) not in map(type, (*w.data, *w.scale)):
            raise
        return None
    return w


def _read_grouped(
    name: str, weight: Any, groups: int, shape: tuple[int, int], device: torch.device
) -> WeightCopies | None:
    if weight.quantizer is None:
        _require_flat(name, weight.rowwise_data, groups * math.prod(shape))
        values = Stacked(weight.rowwise_data.view(groups, *shape))
        return plain(shape, values, values)
    require_grouped_bytes(name, weight, groups, shape, device)
    if not isinstance(weight.quantizer, MXFP8Quantizer):
        return None
    return _read_quantized(f"{name}[{{}}]", storages_in(weight), shape, device)


def storages_in(weight: Any) -> Sequence[Any]:
    """Return the experts' quantized tensors of one grouped weight; they share its memory."""
    storages: Sequence[Any] | None = weight.quantized_tensors
    return storages or list(weight.copy().split_into_quantized_tensors())


def plain(shape: tuple[int, int], row: Experts, column: Experts) -> WeightCopies:
    """Return plain weights as operands of both axes."""
    return WeightCopies(
        WeightOperand(UNQUANTIZED, shape, Axis.ROW, row),
        WeightOperand(UNQUANTIZED, shape, Axis.COLUMN, column),
    )


def _require_plain(
    name: str, tensors: Sequence[Any], shape: tuple[int, ...], device: torch.device
) -> int | None:
    check = functools.partial(capacity.require, shape=shape, dtypes=FLOATS, device=device)
    return stacking.require(name, tensors, check, cut=True)


def _require_flat(name: str, values: torch.Tensor, count: int) -> None:
    if values.numel() != count:
        raise ValueError(f"{name} has {values.numel()} elements; allowed: {count}")
    capacity.require_memory(name, values)
