# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The shapes of the GPU benchmark and their inputs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Shape:
    """Experts, hidden size, FFN size, tokens."""

    experts: int
    hidden: int
    ffn: int
    tokens: int

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.experts},{self.hidden},{self.ffn},{self.tokens}"


SHAPES = (
    Shape(8, 2048, 4096, 16384),
    Shape(128, 2048, 768, 65536),
    Shape(32, 7168, 2048, 32768),
    Shape(8, 4096, 14336, 16384),
    Shape(1, 2048, 4096, 16384),
)
"""Four layers of known models' sizes, and a shared expert: one group."""


def uneven_splits(shape: Shape, seed: int = 0, tile: int = 1) -> list[int]:
    """Return sizes that sum to the tokens and differ by up to a few times.

    Args:
        shape: Its tokens are a multiple of `tile`.
        seed: Of the sizes.
        tile: What every size is a multiple of; 1 gives sizes that fit no tile of a kernel.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(shape.experts, generator=generator) + 0.3
    shares = weights / weights.sum() * (shape.tokens // tile)
    sizes = shares.long()
    missing = shape.tokens // tile - int(sizes.sum())
    if tile == 1:
        sizes[-1] += missing
    else:
        # Tiles are few, so what rounding down took goes to those who lost most.
        sizes[(shares - sizes).argsort(descending=True)[:missing]] += 1
    return [int(size) * tile for size in sizes.tolist()]


@dataclass
class Inputs:
    """Tensors of one layer with SwiGLU; gate and linear rows of w1 interleaved by 32."""

    shape: Shape
    sizes: list[int]
    counts: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    x: torch.Tensor
    dy: torch.Tensor
    prob: torch.Tensor | None
    w1: torch.Tensor
    w2: torch.Tensor

    def to(self, device: str) -> Inputs:
        """Return the same inputs on another device."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)

    @property
    def w1_pairs(self) -> torch.Tensor:
        """FC1's weight with gate and linear rows next to each other; new."""
        experts, wide, hidden = self.w1.shape
        return self.w1.view(experts, -1, 2, 32, hidden).transpose(2, 3).reshape(self.w1.shape)

    @property
    def w1_halves(self) -> torch.Tensor:
        """FC1's weight as a gate half and a linear half; new."""
        experts, wide, hidden = self.w1.shape
        return self.w1.view(experts, -1, 2, 32, hidden).transpose(1, 2).reshape(self.w1.shape)


def inputs(
    shape: Shape, seed: int = 0, *, tile: int = 1, device: str | torch.device = "cuda"
) -> Inputs:
    """Random values of order one; see `uneven_splits` for `tile`."""
    torch.manual_seed(seed)
    sizes = uneven_splits(shape, seed, tile)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, device=device) * scale).bfloat16()

    counts = torch.tensor(sizes, dtype=torch.int64, device=device)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    wide = 2 * shape.ffn
    return Inputs(
        shape, sizes, counts, offsets, offsets[1:].to(torch.int32),
        normal(shape.tokens, shape.hidden), normal(shape.tokens, shape.hidden),
        torch.rand(shape.tokens, device=device),
        normal(shape.experts, wide, shape.hidden, scale=shape.hidden**-0.5),
        normal(shape.experts, shape.hidden, shape.ffn, scale=shape.ffn**-0.5),
    )  # fmt: skip
