# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One FC1 tensor from one order of its output features into another."""

from __future__ import annotations

import torch

from te_grouped_mlp.checkpoint.names import Output, Step
from te_grouped_mlp.op.shape_constraints import INTERLEAVE


def interleave(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Bring two halves, gate and linear, into alternating blocks of 32; a new tensor."""
    axis %= tensor.dim()
    blocks = tensor.unflatten(axis, (2, -1, INTERLEAVE))
    return blocks.transpose(axis, axis + 1).flatten(axis, axis + 2).contiguous()


def contiguous(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Bring alternating blocks of 32 into two halves, gate and linear; a new tensor."""
    axis %= tensor.dim()
    blocks = tensor.unflatten(axis, (-1, 2, INTERLEAVE))
    return blocks.transpose(axis, axis + 1).flatten(axis, axis + 2).contiguous()


def made(output: Output, sources: list[torch.Tensor]) -> torch.Tensor:
    """Return the tensor of `output`, of the shape that it names, row-major in memory.

    Args:
        output: What to make.
        sources: The tensors of its `sources`. Their elements are only moved.
    """
    axis = -2 if output.is_weight else -1
    first, step = sources[0], output.step
    if step is Step.COPY:
        return first
    if step is Step.JOIN:
        return interleave(torch.cat(sources, axis), axis)
    if step is Step.INTERLEAVE:
        return interleave(first, axis)
    if step is Step.FROM_ALTERNATING:
        turned = first.mT if output.is_weight else first
        axis %= turned.dim()
        halves = turned.unflatten(axis, (-1, 2)).transpose(axis, axis + 1).flatten(axis, axis + 1)
        return interleave(halves, axis)
    halves = contiguous(first, axis)
    if step is Step.CONTIGUOUS:
        return halves
    if step in (Step.GATE, Step.LINEAR):
        return halves.chunk(2, axis)[int(step is Step.LINEAR)].contiguous()
    axis %= halves.dim()
    pairs = halves.unflatten(axis, (2, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)
    return (pairs.mT if output.is_weight else pairs).contiguous()
