# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the forward keeps for the backward: named fields; flattened and restored in one way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op.operands import (
    ExactCopy,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
)
from te_grouped_mlp.op.plan import Plan

STASH_MARK = "grouped_tensor_scale_inv"
"""Attribute by which Megatron's paged stash finds tensors whose live part is a row prefix; True on
scale buffers. (Transformer Engine sets the same attribute on its own activations.)"""


@dataclass(frozen=True)
class SavedState:
    """The state of one call between its passes.

    Attributes:
        plan: What runs; the backward decides nothing.
        splits: Division of the rows.
        prob: (rows,) or None for one.
        x: FC1's input, only the copy that its weight gradient reads; None when that is not wanted.
        pre_activation: (rows, N1); None when nothing reads it.
        activated: FC2's input likewise; None when not wanted or recomputed.
        w1, w2: Weights for the backward products; None when not read, or when a distributed weight
            is gathered anew.
        owns_x: Whether the buffers of `x` were allocated by the op, so that it may free them.
    """

    plan: Plan
    splits: Splits
    prob: torch.Tensor | None
    x: GroupedOperand | None
    pre_activation: torch.Tensor | None
    activated: GroupedOperand | None
    w1: WeightOperand | None
    w2: WeightOperand | None
    owns_x: bool


def flatten(state: SavedState) -> tuple[Any, list[torch.Tensor]]:
    """Take the tensors out of a state, so that autograd (and its hooks) can keep them.

    Activations are marked for Megatron's paged stash; nothing else is changed.

    Returns:
        What remains, and the tensors in the order that `restore` expects.
    """
    for tensor, is_scale in _row_prefix_tensors(state):
        setattr(tensor, STASH_MARK, is_scale)
    tensors: list[torch.Tensor] = []
    return _take_out(state, tensors, {}), tensors


def restore(skeleton: Any, tensors: Sequence[torch.Tensor]) -> SavedState:
    """Put the tensors back.

    Args:
        skeleton: The first result of `flatten`.
        tensors: The second, or what autograd's hooks made of it.
    """
    state = _put_back(skeleton, tensors, {})
    assert isinstance(state, SavedState)
    return state


def activations(state: SavedState) -> list[torch.Tensor]:
    """Return the saved tensors that may leave the GPU between the passes, as upstream names them.

    Data and scales of both inputs and the pre-activation; the probabilities are the caller's.
    """
    found = [tensor for tensor, _ in _row_prefix_tensors(state)]
    return [tensor for tensor in found if tensor is not state.prob]


_TENSORS = {
    SavedState: ("splits", "prob", "x", "pre_activation", "activated", "w1", "w2"),
    Splits: ("sizes", "ends", "offsets", "element_offsets"),
    GroupedOperand: ("splits", "row", "column", "plain"),
    QuantizedCopy: ("data", "scale"),
    ExactCopy: ("values",),
    WeightOperand: ("data", "scale"),
}
"""Records that hold tensors, and their fields where those may lie."""


def _row_prefix_tensors(state: SavedState) -> list[tuple[torch.Tensor, bool]]:
    found = []
    for operand in (state.x, state.activated):
        if operand is not None and isinstance(operand.column, QuantizedCopy):
            found += [(operand.column.data, False), (operand.column.scale, True)]
        elif operand is not None and operand.plain is not None:
            found.append((operand.plain, False))
    found += [
        (tensor, False) for tensor in (state.pre_activation, state.prob) if tensor is not None
    ]
    return found


def _take_out(value: Any, tensors: list[torch.Tensor], known: dict[int, Any]) -> Any:
    """Replace a tensor by its place in the flat list, and a run of tensors by a slice of it.

    A record that occurs twice, as the splits do, is taken out once.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return len(tensors) - 1
    fields = _TENSORS.get(type(value))
    if fields is not None:
        if id(value) not in known:
            parts = {name: _take_out(getattr(value, name), tensors, known) for name in fields}
            known[id(value)] = _with(value, parts)
        return known[id(value)]
    if isinstance(value, dict):
        return {key: _take_out(item, tensors, known) for key, item in value.items()}
    # Hundreds of weights: one slice instead of one place each.
    tensors.extend(value)
    return slice(len(tensors) - len(value), len(tensors))


def _put_back(value: Any, tensors: Sequence[torch.Tensor], known: dict[int, Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, int):
        return tensors[value]
    if isinstance(value, slice):
        return tuple(tensors[value])
    fields = _TENSORS.get(type(value))
    if fields is None:
        return {key: _put_back(item, tensors, known) for key, item in value.items()}
    if id(value) not in known:
        parts = {name: _put_back(getattr(value, name), tensors, known) for name in fields}
        known[id(value)] = _with(value, parts)
    return known[id(value)]


def _with(record: Any, parts: dict[str, Any]) -> Any:
    """Return a copy of a frozen record with other parts; `dataclasses.replace` is far slower."""
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__)
    copy.__dict__.update(parts)
    return copy
