# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the examples share: the experts, the recipe, checkpoints that are whole or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before Transformer Engine's first step; the second is what cuBLAS needs to repeat its bits.
os.environ.setdefault("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import MXFP8BlockScaling

import te_grouped_mlp


class Experts(torch.nn.Module):
    """A grouped MLP over rows that are sorted by expert.

    The gate and linear features of FC1 alternate in blocks of 32, and `row_padding` brings each
    expert's rows to the multiple of the recipe: with both, the three ops run as one fused op.
    """

    def __init__(self, experts: int, hidden: int, ffn: int, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "device": device}
        self.mlp = te.ops.Sequential(
            te.ops.GroupedLinear(experts, hidden, 2 * ffn, **options),
            te.ops.ScaledSwiGLU(glu_interleave_size=32),
            te.ops.GroupedLinear(experts, ffn, hidden, **options),
        )
        # Beside its extension Transformer Engine has MXFP8 on Blackwell alone; bf16 runs elsewhere.
        self.recipe = MXFP8BlockScaling() if te.is_mxfp8_available() else None
        self.multiple = te_grouped_mlp.row_multiple(self.recipe)

    def forward(self, x: torch.Tensor, probs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return (rows, hidden): each expert's MLP of its rows, times their probabilities.

        Args:
            x: (rows, hidden) bf16, sorted by expert. Rows past the counts may hold anything.
            probs: (rows,) fp32.
            counts: Rows of each expert; they may lie on the device, which is not waited for.
        """
        padding = te_grouped_mlp.row_padding(counts, len(x), self.multiple)
        splits = padding.split_sizes
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y = self.mlp(padding.pad(x), splits, padding.pad(probs), splits)
        return padding.unpad(y)


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, which gets its name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.partial")
    torch.save(state, draft)
    draft.replace(path)


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's states by name, for `te_grouped_mlp.digest`."""
    named = dict(model.named_parameters())
    found: dict[str, torch.Tensor] = dict(named)
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value
    return found


@contextlib.contextmanager
def determinism(*, asked: bool) -> Iterator[None]:
    """Ask for bit-identical results while the block runs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
