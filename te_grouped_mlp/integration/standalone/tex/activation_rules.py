# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What tex's scaled activations and their backwards refuse."""

from __future__ import annotations

import math

import torch

from te_grouped_mlp.integration.standalone.tex import rules
from te_grouped_mlp.integration.standalone.tex.contract import Arguments, Refusal, Rule, own

_KERNEL = "common/activation/scaled_activation.cu"


def _some_dimensions(*names: str) -> Rule:
    def rule(a: Arguments) -> str | None:
        for name in names:
            if a[name].dim() < 1:
                return f"{name} has no dimensions; allowed: at least one"
        return None

    return rule


def _a_scale_each(name: str) -> Rule:
    def rule(a: Arguments) -> str | None:
        rows, found = _row_count(a[name]), a["act_scales"].numel()
        if found == rows:
            return None
        return f"act_scales has {found} elements; allowed: {rows}, one per row"

    return rule


def _row_count(x: torch.Tensor) -> int:
    return math.prod(x.shape[:-1])


def _even_width(name: str) -> Rule:
    def rule(a: Arguments) -> str | None:
        width = a[name].shape[-1]
        return f"last dimension of {name} is {width}; allowed: even" if width % 2 else None

    return rule


def _interleave(name: str) -> Rule:
    def rule(a: Arguments) -> str | None:
        size, half = a["glu_interleave_size"], a[name].shape[-1] // 2
        if size >= 0 and size % 32 == 0 and (size == 0 or half % size == 0):
            return None
        return f"glu_interleave_size is {size}; allowed: 0, or a multiple of 32 that divides {half}"

    return rule


def _matching_grad(divisor: int) -> Rule:
    def rule(a: Arguments) -> str | None:
        grad, x = a["grad"].shape, a["fwd_input"].shape
        wanted = (math.prod(x[:-1]), x[-1] // divisor)
        if (math.prod(grad[:-1]), grad[-1]) == wanted:
            return None
        return f"grad has shape {tuple(grad)}; allowed: {wanted[0]} rows of {wanted[1]}"

    return rule


def _no_quantizer(a: Arguments) -> str | None:
    if a["quantizer"] is None:
        return None
    return f"quantizer is a {type(a['quantizer']).__name__}; standalone returns plain tensors"


def forward_refusals(divisor: int) -> tuple[Refusal, ...]:
    """Return the refusals of an activation whose input is `divisor` times as wide as its result."""
    gated = (
        Refusal("width", "extensions/activation.cpp:361", _even_width("input")),
        Refusal("glu_interleave_size", f"{_KERNEL}:307", _interleave("input")),
    )
    return (
        Refusal("dimensions", "extensions/activation.cpp:360", _some_dimensions("input")),
        *(gated if divisor > 1 else ()),
        Refusal("number of scales", "extensions/activation.cpp:367", _a_scale_each("input")),
        *(rules.high_precision(name, f"{_KERNEL}:403") for name in ("input", "act_scales")),
        own("quantizer", _no_quantizer, NotImplementedError),
    )


def backward_refusals(divisor: int) -> tuple[Refusal, ...]:
    """Return the refusals of its backward."""
    gated = (
        Refusal("width", f"{_KERNEL}:329", _even_width("fwd_input")),
        Refusal("glu_interleave_size", f"{_KERNEL}:331", _interleave("fwd_input")),
    )
    names = ("grad", "fwd_input", "act_scales")
    return (
        Refusal("dimensions", "extensions/activation.cpp:392", _some_dimensions(*names[:2])),
        Refusal("number of scales", "extensions/activation.cpp:399", _a_scale_each("fwd_input")),
        *(gated if divisor > 1 else ()),
        Refusal("shape of grad", f"{_KERNEL}:327", _matching_grad(divisor)),
        *(rules.high_precision(name, f"{_KERNEL}:403") for name in names),
        own("quantizer", _no_quantizer, NotImplementedError),
    )
