# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights rounded to a block-scaled format and kept as bf16 values, for plans that read values.

The copies are made anew in every forward, unless NVTE_GROUPED_MLP_REUSE_WEIGHTS=1 promises that
weights change in ways which PyTorch counts: in-place operations on the parameter itself, as an
optimizer's step, and new storage. A write through ``.data``, or into a flat buffer of which the
parameter is a part, is not counted; frameworks that do so must not set the switch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from te_grouped_mlp.op import memory, spacing
from te_grouped_mlp.op.operands import Axis


@dataclass(frozen=True)
class ExactWeights:
    """The values of all experts of one linear, as their quantized copies have them.

    Attributes:
        row, column: bf16 (G, out, in), rounded along the axis of the name; None if not asked for.
        descending: The last expert comes first, as the weights lie.
    """

    row: torch.Tensor | None
    column: torch.Tensor | None
    descending: bool = False

    def covers(self, *, row: bool, column: bool) -> bool:
        """Whether every copy that is asked for is there."""
        return (self.row is not None or not row) and (self.column is not None or not column)


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""First weight of a linear to (what its copies were made of, the copies)."""


def of_plain(
    weights: Sequence[torch.Tensor], *, row: bool, column: bool, two_d: bool
) -> ExactWeights:
    """Round plain weights along one or both axes.

    Args:
        weights: One bf16 (out, in) tensor per expert, or one (G, out, in) tensor; read only, and
            in place where they lie evenly.
        row, column: Which copies to make.
        two_d: One scale per 32 x 32 block.

    Returns:
        New tensors; never synchronises.
    """
    from te_grouped_mlp.op import block_scale

    stacked, descending = _in_one(weights)
    made = _empty(stacked, descending, row=row, column=column)
    if stacked.numel():
        block_scale.quantize(
            stacked.reshape(-1, stacked.shape[2]),
            None,
            members=stacked.shape[0],
            row_values=_flat(made.row),
            column_values=_flat(made.column),
            two_d=two_d,
        )
    return made


def of_quantized(
    copies: dict[Axis, tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    shape: tuple[int, int],
    *,
    swizzled: bool,
) -> ExactWeights:
    """Return the values of weights that are stored quantized.

    Args:
        copies: Axis of each copy that is wanted to (data, scales), one uint8 tensor per expert.
        shape: (out, in) of one expert.
        swizzled: Whether the scales are in tile order.

    Returns:
        New tensors; never synchronises.
    """
    from te_grouped_mlp.op import block_scale

    found = {}
    for axis, (data, scale) in copies.items():
        joined = torch.stack([each.view(torch.uint8).reshape(shape) for each in data])
        scales = torch.stack([each.view(torch.uint8).reshape(-1) for each in scale])
        values = memory.empty(joined.shape, torch.bfloat16, joined.device)
        if values.numel():
            block_scale.dequantize(
                joined.view(-1, shape[1]),
                scales.view(-1),
                None,
                values.view(-1, shape[1]),
                axis_column=axis is Axis.COLUMN,
                members=len(data),
                swizzled=swizzled,
            )
        found[axis] = values
    return ExactWeights(found.get(Axis.ROW), found.get(Axis.COLUMN))


def content_name(
    weights: Sequence[torch.Tensor], counted: Sequence[torch.Tensor], two_d: bool
) -> Hashable | None:
    """Name the content of plain weights, by where they lie and by how often they were written.

    Args:
        weights: The tensors that hold them.
        counted: Those whose versions count the writes.
        two_d: As in `of_plain`.

    Returns:
        None where nothing can be named: tensors of inference mode count no versions, and while a
        CUDA graph is captured a replay must see the weights of its own moment.
    """
    first = weights[0]
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if any(map(torch.Tensor.is_inference, counted)):
        return None
    addresses = tuple(map(torch.Tensor.data_ptr, weights))
    return addresses, tuple([each._version for each in counted]), two_d


def kept(
    owner: torch.Tensor, name: Hashable | None, *, row: bool, column: bool
) -> ExactWeights | None:
    """Return the copies that `keep` was given for a linear's first weight under this name."""
    entry: Any = None if name is None else _kept.get(owner)
    if entry is None or entry[0] != name:
        return None
    found: ExactWeights = entry[1]
    return found if found.covers(row=row, column=column) else None


def keep(owner: torch.Tensor, name: Hashable | None, made: ExactWeights) -> None:
    """Hold copies as long as the first weight lives, instead of what was held for it."""
    if name is not None:
        _kept[owner] = (name, made)


def _in_one(weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Return weights as one (G, out, in) tensor, and whether the last expert comes first."""
    if isinstance(weights, torch.Tensor):
        return weights, False
    step = spacing.distance(weights) or 0
    whole = spacing.joined(weights[::-1] if step < 0 else weights, abs(step))
    if whole is not None:
        return whole, step < 0
    return torch.cat(tuple(weights)).view(len(weights), *weights[0].shape), False


def _empty(like: torch.Tensor, descending: bool, *, row: bool, column: bool) -> ExactWeights:
    def one(wanted: bool) -> torch.Tensor | None:
        return memory.empty(like.shape, torch.bfloat16, like.device) if wanted else None

    return ExactWeights(one(row), one(column), descending)


def _flat(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.view(-1, values.shape[2])
