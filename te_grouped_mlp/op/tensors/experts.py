# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The parameters of all experts, checked in every pass before any of them is read.

A parameter may be replaced, repointed through ``.data`` or freed at any time, and what reads it
takes shape, dtype, device and memory on trust.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.problem import LinearSpec, Problem
from te_grouped_mlp.op.te.adapter import discrete
from te_grouped_mlp.op.tensors import capacity, stacking
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What is rounded to the compute dtype on the way to an operand, expert by expert if need be."""

_COPIES = (
    ("_rowwise_data", "_rowwise_scale_inv", row_scale_shape),
    ("_columnwise_data", "_columnwise_scale_inv", column_scale_shape),
)
_PARTS = operator.attrgetter(*(name for data, scale, _ in _COPIES for name in (data, scale)))
_GROUPED_COPIES = (
    ("rowwise_data", "scale_inv", row_scale_shape),
    ("columnwise_data", "columnwise_scale_inv", column_scale_shape),
)


def require_parameters(
    ops: Sequence[Any],
    problem: Problem,
    weights: tuple[Sequence[Any], Sequence[Any]],
    device: torch.device,
) -> None:
    """Check all that the forward reads of both linears but distributed weights.

    Args:
        ops: GroupedLinear, activation, GroupedLinear.
        problem: Their facts.
        weights: Those of the first and of the second.
        device: Of the op.

    Raises:
        ValueError: As `require_weights` and `require_biases`.
    """
    for label, op, spec, owned in (
        ("fc1", ops[0], problem.fc1, weights[0]),
        ("fc2", ops[2], problem.fc2, weights[1]),
    ):
        if not spec.distributed:
            require_weights(label, problem.num_groups, spec, owned, device)
        require_biases(label, op, spec, device)


def require_weights(
    label: str, groups: int, spec: LinearSpec, weights: Sequence[Any], device: torch.device
) -> None:
    """Check the weights of a GroupedLinear.

    Args:
        label: "fc1" or "fc2", for messages.
        groups: Number of experts.
        spec: Its facts.
        weights: Its parameters; of distributed ones, what they were gathered to.
        device: Of the op.

    Raises:
        ValueError: One has another shape, dtype or device, or less memory than that takes. The
            message names it: "fc1.weight3".
    """
    shape = (spec.out_features, spec.in_features)
    if spec.single_grouped_weight:
        _require_grouped(f"{label}.weight", weights[0], groups, shape, device)
    elif spec.quantized_weight:
        require_quantized(f"{label}.weight{{}}", weights, shape, device)
    else:
        _require_plain(f"{label}.weight{{}}", weights, shape, device)


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


def require_quantized(
    name: str, weights: Sequence[Any], shape: tuple[int, int], device: torch.device
) -> None:
    """Check every copy that MXFP8 tensors hold.

    Raises:
        ValueError: The data of one have another shape, element size or device, its scales are
            fewer than these take, or there is less memory than that.
    """
    try:
        parts = list(zip(*map(_PARTS, weights), strict=True))
    except AttributeError:
        return
    for index, (data_name, scale_name, scale_shape) in enumerate(_COPIES):
        data, scale = parts[2 * index : 2 * index + 2]
        if type(None) in map(type, data) or type(None) in map(type, scale):
            # Missed by whoever needs it.
            continue
        check = functools.partial(
            capacity.require, shape=shape, dtypes=capacity.BYTES, device=device
        )
        stacking.require(f"{name}.{data_name}", data, check)
        count = math.prod(scale_shape(*shape, MXFP8))
        check = functools.partial(capacity.require_bytes, count=count, device=device)
        stacking.require(f"{name}.{scale_name}", scale, check)


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


def _require_plain(
    name: str, tensors: Sequence[Any], shape: tuple[int, ...], device: torch.device
) -> None:
    check = functools.partial(capacity.require, shape=shape, dtypes=FLOATS, device=device)
    stacking.require(name, tensors, check, cut=True)


def _require_grouped(
    name: str, weight: Any, count: int, shape: tuple[int, int], device: torch.device
) -> None:
    if weight.quantizer is None:
        _require_flat(name, weight.rowwise_data, count * math.prod(shape))
        return
    require_grouped_bytes(name, weight, count, shape, device)
    if weight.quantized_tensors is not None and isinstance(weight.quantizer, MXFP8Quantizer):
        require_quantized(f"{name}[{{}}]", weight.quantized_tensors, shape, device)


def _require_flat(name: str, values: torch.Tensor, count: int) -> None:
    if values.numel() != count:
        raise ValueError(f"{name} has {values.numel()} elements; allowed: {count}")
    capacity.require_memory(name, values)
