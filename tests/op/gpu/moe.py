# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A small mixture-of-experts block round the fused op, whose routing stays on the device."""

from __future__ import annotations

from typing import Any

import torch

from tests.support import step
from tests.support.step import StepCase


class Block(torch.nn.Module):
    """Router, sorting of tokens by expert, the experts as one op, and the weighted sum.

    Args:
        case: The experts; its number of splits is theirs.
        topk: Experts of a token.
    """

    def __init__(self, case: StepCase, topk: int = 2) -> None:
        super().__init__()
        from transformer_engine.common.recipe import MXFP8BlockScaling

        # MXFP8 takes whole tiles of rows for an expert.
        self.case, self.topk, self.count = case, topk, len(case.splits)
        self.multiple = 128 if case.mxfp8 else 1
        generator = torch.Generator().manual_seed(case.seed)
        router = torch.randn(self.count, case.hidden, generator=generator) / case.hidden**0.5
        self.router = torch.nn.Parameter(router.to(case.device or "cpu"))
        self.ops = step.make_model(case)
        self.recipe = MXFP8BlockScaling()

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the probabilities (tokens, topk), rows per expert, and the chosen experts."""
        logits = x.float() @ self.router.t()
        values, chosen = logits.softmax(-1).topk(self.topk, dim=-1)
        experts = torch.arange(self.count, device=x.device)
        return values, (chosen.reshape(-1)[:, None] == experts).sum(0), chosen.reshape(-1)

    def experts(self, rows: torch.Tensor, splits: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        """Run the fused op; gradients flow to rows and probabilities."""
        import transformer_engine.pytorch as te

        with te.autocast(enabled=self.case.mxfp8, recipe=self.recipe):
            return self.ops(rows, splits, prob, splits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, hidden) to the same shape. Reads nothing on the host."""
        tokens, hidden = x.shape
        values, sizes, chosen = self.route(x)
        splits = (sizes + self.multiple - 1) // self.multiple * self.multiple
        order = chosen.argsort(stable=True)
        # Where each (token, choice) lies in the buffer: behind the experts before its own.
        expert = chosen[order]
        rank = torch.arange(len(order), device=x.device) - (sizes.cumsum(0) - sizes)[expert]
        place = torch.empty_like(order)
        place[order] = (splits.cumsum(0) - splits)[expert] + rank
        length = tokens * self.topk + self.count * (self.multiple - 1)
        length = (length + 127) // 128 * 128
        spread = x[:, None].expand(tokens, self.topk, hidden).reshape(-1, hidden)
        rows = torch.zeros(length, hidden, dtype=x.dtype, device=x.device)
        rows = rows.index_copy(0, place, spread)
        prob = torch.zeros(length, device=x.device).index_copy(0, place, values.reshape(-1))
        out = self.experts(rows, splits, prob)
        return out[place].view(tokens, self.topk, hidden).sum(1)


def gradients(block: Block, x: torch.Tensor, dy: torch.Tensor, call: Any) -> dict[str, Any]:
    """Run `call` on x forward and backward; output and every gradient by name."""
    for parameter in block.parameters():
        parameter.grad = None
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    y.backward(dy)
    found = {"y": y.detach(), "dx": leaf.grad}
    for name, parameter in block.named_parameters():
        found[name] = parameter.grad
    return found
