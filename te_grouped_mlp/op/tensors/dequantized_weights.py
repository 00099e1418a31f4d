# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights rounded to a block-scaled format and kept as bf16 values, for plans that read values.

The copies are made anew in every forward, unless NVTE_GROUPED_MLP_REUSE_WEIGHTS=1 promises that
weights change in ways which are seen here: an in-place operation of PyTorch on the parameter
itself, new storage, and the step of any ``torch.optim.Optimizer`` (a fused one writes by kernels
that PyTorch does not count, so every step of one drops all copies). Elsewhere, a write through
``.data``, into a flat buffer of which the parameter is a part, by a kernel or by the replay of a
CUDA graph is not seen; frameworks that do so must not set the switch.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from te_grouped_mlp.op.tensors import memory, stacking
from te_grouped_mlp.op.tensors.operands import Axis
from te_grouped_mlp.op.tensors.stacking import Matrices


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


@dataclass(frozen=True)
class _Kept:
    """Copies with what they were made of.

    Attributes:
        name: Of the content.
        storages: Where that lay; an address names nothing once its storage is gone.
        made: The copies.
    """

    name: Hashable
    storages: tuple[StorageWeakRef, ...]
    made: ExactWeights


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""First weight of a linear to what is kept of it."""


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
    from te_grouped_mlp.op.kernels import block_scale

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
    from te_grouped_mlp.op.kernels import block_scale

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

    The stream is a part of the name: a copy is ready only for the stream that made it.

    Args:
        weights: The tensors that hold them.
        counted: Those whose versions count the writes.
        two_d: As in `of_plain`.

    Returns:
        None where nothing can be named: tensors of inference mode count no versions, and while a
        CUDA graph is captured a replay must see the weights of its own moment.
    """
    if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if any(map(torch.Tensor.is_inference, counted)):
        return None
    addresses = tuple(map(torch.Tensor.data_ptr, weights))
    versions = tuple([each._version for each in counted])
    return addresses, versions, two_d, _stream(weights[0].device)


def kept(
    owner: torch.Tensor, name: Hashable | None, *, row: bool, column: bool
) -> ExactWeights | None:
    """Return the copies that `keep` was given for a linear's first weight under this name.

    Others that were kept for it are dropped, unless there is no name.
    """
    entry: _Kept | None = None if name is None else _kept.get(owner)
    if entry is None:
        return None
    lives = not any(map(StorageWeakRef.expired, entry.storages))
    if lives and entry.name == name and entry.made.covers(row=row, column=column):
        return entry.made
    # Now, not when others take its place: their memory can be this one's.
    del _kept[owner]
    return None


def keep(
    owner: torch.Tensor, name: Hashable | None, weights: Sequence[torch.Tensor], made: ExactWeights
) -> None:
    """Hold copies until an optimizer steps, at most as long as the first weight lives.

    Args:
        owner: The first weight.
        name: What `content_name` said of `weights` before the copies were made.
        weights: The tensors that hold them.
        made: The copies.
    """
    if name is None:
        return
    _forget_at_steps()
    storages = {each._cdata: each for each in map(torch.Tensor.untyped_storage, weights)}
    _kept[owner] = _Kept(name, tuple(map(StorageWeakRef, storages.values())), made)


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@functools.cache
def _forget_at_steps() -> None:
    """Drop all copies at every step of an optimizer from now on; registered once."""
    register_optimizer_step_post_hook(lambda *_: _kept.clear())


def _in_one(weights: Sequence[torch.Tensor]) -> Matrices:
    """Return weights in one tensor: as they lie where that is in a row, else copied."""
    if isinstance(weights, torch.Tensor):
        return Matrices(weights)
    found = stacking.in_a_row(weights)
    if found is not None:
        return found
    return Matrices(torch.cat(tuple(weights)).view(len(weights), *weights[0].shape))


def _empty(like: torch.Tensor, descending: bool, *, row: bool, column: bool) -> ExactWeights:
    def one(wanted: bool) -> torch.Tensor | None:
        return memory.empty(like.shape, torch.bfloat16, like.device) if wanted else None

    return ExactWeights(one(row), one(column), descending)


def _flat(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.view(-1, values.shape[2])
