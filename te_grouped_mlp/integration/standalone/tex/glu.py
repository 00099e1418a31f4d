# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The gated activations and their derivatives, for tensors of any floating dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

# (gate, linear) -> their activation; and -> (activation, d/d gate, d/d linear).
GluForward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GluBackward = Callable[
    [torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]


def swiglu(gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * linear


def swiglu_backward(
    gate: torch.Tensor, linear: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(gate)
    act = gate * sigmoid
    return act * linear, linear * (sigmoid + act * (1 - sigmoid)), act


def clamped_swiglu(limit: float, alpha: float, offset: float) -> tuple[GluForward, GluBackward]:
    """Gate clamped from above, linear part from both sides and shifted by `offset`."""

    def forward(gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        clamped = gate.clamp(max=limit)
        shifted = linear.clamp(-limit, limit) + offset
        return clamped * torch.sigmoid(alpha * clamped) * shifted

    def backward(
        gate: torch.Tensor, linear: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        clamped = gate.clamp(max=limit)
        shifted = linear.clamp(-limit, limit) + offset
        sigmoid = torch.sigmoid(alpha * clamped)
        act = clamped * sigmoid
        slope = sigmoid + alpha * act * (1 - sigmoid)
        d_gate = torch.where(gate <= limit, shifted * slope, 0.0)
        d_linear = torch.where((linear >= -limit) & (linear <= limit), act, 0.0)
        return act * shifted, d_gate, d_linear

    return forward, backward


def situglu(beta1: float, beta2: float) -> tuple[GluForward, GluBackward]:
    """Both halves bounded by a tanh: `beta1 tanh(gate / beta1) sigmoid(gate)` and alike."""

    def forward(gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        bounded = beta1 * torch.tanh(gate / beta1) * torch.sigmoid(gate)
        return bounded * (beta2 * torch.tanh(linear / beta2))

    def backward(
        gate: torch.Tensor, linear: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tanh1, tanh2 = torch.tanh(gate / beta1), torch.tanh(linear / beta2)
        sigmoid = torch.sigmoid(gate)
        bounded, up = beta1 * tanh1 * sigmoid, beta2 * tanh2
        slope = (1 - tanh1 * tanh1) * sigmoid + bounded * (1 - sigmoid)
        return bounded * up, slope * up, bounded * (1 - tanh2 * tanh2)

    return forward, backward
