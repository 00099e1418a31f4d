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

from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.tensors import memory, stacking
from te_grouped_mlp.op.tensors.operands import Axis, WeightCopies, WeightOperand
from te_grouped_mlp.op.tensors.stacking import Experts, Stacked


@dataclass(frozen=True)
class _Entry:
    """Copies with what they were made of.

    Attributes:
        content: Its name.
        storages: Where that lay; an address names nothing once its storage is gone.
        copies: Of it.
    """

    content: Hashable
    storages: tuple[StorageWeakRef, ...]
    copies: WeightCopies


_reusable: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""First weight of a linear to the entry of its copies."""


def of_plain(
    weights: Experts, shape: tuple[int, int], *, row: bool, column: bool, two_d: bool
) -> WeightCopies:
    """Round plain weights along one or both axes.

    Args:
        weights: bf16; read only, and in place where they are stacked.
        shape: (out, in) of one expert.
        row, column: Which copies to make.
        two_d: One scale per 32 x 32 block.

    Returns:
        New bf16 values, stacked in the order of the weights; never synchronises.
    """
    from te_grouped_mlp.op.kernels import block_scale

    source = stacking.stacked(weights)
    plain = source.values

    def values(wanted: bool) -> torch.Tensor | None:
        return memory.empty(plain.shape, torch.bfloat16, plain.device) if wanted else None

    row_values, column_values = values(row), values(column)
    if plain.numel():
        block_scale.quantize(
            plain.reshape(-1, shape[1]),
            None,
            members=len(source),
            row_values=None if row_values is None else row_values.view(-1, shape[1]),
            column_values=None if column_values is None else column_values.view(-1, shape[1]),
            two_d=two_d,
        )

    def copy(axis: Axis, stack: torch.Tensor | None) -> WeightOperand | None:
        if stack is None:
            return None
        return WeightOperand(MXFP8, shape, axis, Stacked(stack, source.reversed_experts))

    return WeightCopies(copy(Axis.ROW, row_values), copy(Axis.COLUMN, column_values))


def of_quantized(w: WeightOperand) -> WeightOperand:
    """Return the values of weights that are stored quantized.

    Args:
        w: Element bytes and scales.

    Returns:
        New bf16 values; never synchronises.
    """
    from te_grouped_mlp.op.kernels import block_scale

    data, scale = _bytes(w.data), _bytes(w.scale)
    values = memory.empty((len(w.data), *w.shape), torch.bfloat16, data.device)
    if values.numel():
        block_scale.dequantize(
            data.view(-1, w.shape[1]),
            scale.view(-1),
            None,
            values.view(-1, w.shape[1]),
            axis_column=w.axis is Axis.COLUMN,
            members=len(w.data),
            swizzled=w.swizzled,
        )
    return WeightOperand(w.format, w.shape, w.axis, Stacked(values))


def _bytes(experts: Experts) -> torch.Tensor:
    """Return uint8 (G, bytes), as they lie where they are packed, else copied."""
    packed = stacking.packed_bytes(experts)
    if packed is not None:
        return packed
    return torch.stack([expert.view(torch.uint8).reshape(-1) for expert in experts])


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
    versions = tuple([tensor._version for tensor in counted])
    return addresses, versions, two_d, _stream(weights[0].device)


def reusable(
    owner: torch.Tensor, content: Hashable | None, *, row: bool, column: bool
) -> WeightCopies | None:
    """Return the copies that `keep_for_reuse` was given for a linear's first weight by this name.

    Others that were kept for it are dropped, unless there is no name.
    """
    entry: _Entry | None = None if content is None else _reusable.get(owner)
    if entry is None:
        return None
    copies = entry.copies
    lives = not any(map(StorageWeakRef.expired, entry.storages))
    covers = (copies.row is not None or not row) and (copies.column is not None or not column)
    if lives and covers and entry.content == content:
        return copies
    # Now, not when others take its place: their memory can be this one's.
    del _reusable[owner]
    return None


def keep_for_reuse(
    owner: torch.Tensor,
    content: Hashable | None,
    weights: Sequence[torch.Tensor],
    copies: WeightCopies,
) -> None:
    """Hold copies until an optimizer steps, at most as long as the first weight lives.

    Args:
        owner: The first weight.
        content: What `content_name` said of `weights` before the copies were made.
        weights: The tensors that hold them.
        copies: Of them.
    """
    if content is None:
        return
    _forget_at_steps()
    storages = {storage._cdata: storage for storage in map(torch.Tensor.untyped_storage, weights)}
    _reusable[owner] = _Entry(content, tuple(map(StorageWeakRef, storages.values())), copies)


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@functools.cache
def _forget_at_steps() -> None:
    """Drop all copies at every step of an optimizer from now on; registered once."""
    register_optimizer_step_post_hook(lambda *_: _reusable.clear())
