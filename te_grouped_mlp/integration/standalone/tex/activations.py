# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's activations with one scale for each row: `y = act(x) * scale`.

Computed in float64 and rounded once at the store. fp32 would do for accuracy, but torch's
vectorised fp32 functions give an element other last bits in the tail of a buffer than in its body,
and a row's result must not depend on how many rows follow it.
"""

from __future__ import annotations

from typing import Any

import torch

from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.integration.standalone.tex.activation_rules import (
    backward_refusals,
    forward_refusals,
)
from te_grouped_mlp.integration.standalone.tex.contract import tex_function
from te_grouped_mlp.integration.standalone.tex.glu import (
    GluBackward,
    GluForward,
    clamped_swiglu,
    situglu,
    swiglu,
    swiglu_backward,
)

# Rows are worked off in pieces of about this many elements, to stay in the cache.
_PIECE = 1 << 18


def _halves(matrix: torch.Tensor, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 copies of the gate and linear halves of each row, de-interleaved."""
    rows, width = matrix.shape
    block = interleave or width // 2
    parts = matrix.reshape(rows, width // (2 * block), 2, block)
    return (
        parts[:, :, 0].reshape(rows, width // 2).double(),
        parts[:, :, 1].reshape(rows, width // 2).double(),
    )


def _write_halves(out: torch.Tensor, gate: torch.Tensor, linear: torch.Tensor, block: int) -> None:
    rows, width = out.shape
    block = block or width // 2
    parts = out.view(rows, width // (2 * block), 2, block)
    parts[:, :, 0] = gate.view(rows, width // (2 * block), block)
    parts[:, :, 1] = linear.view(rows, width // (2 * block), block)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a matrix; leading dimensions count as rows."""
    return x.detach().reshape(-1, x.shape[-1]) if x.numel() else x.detach().view(0, x.shape[-1])


def _pieces(rows: int, width: int) -> list[slice]:
    step = max(1, _PIECE // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _glu_forward(
    x: torch.Tensor, scales: torch.Tensor, interleave: int, activation: GluForward
) -> torch.Tensor:
    matrix = _rows(x)
    out = memory.empty((matrix.shape[0], matrix.shape[1] // 2), x.dtype, x.device)
    column = scales.detach().reshape(-1, 1).double()
    for piece in _pieces(*matrix.shape):
        out[piece] = activation(*_halves(matrix[piece], interleave)) * column[piece]
    return out.view(*x.shape[:-1], x.shape[-1] // 2)


def _glu_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    interleave: int,
    compute_scale_grad: bool,
    backward: GluBackward,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    matrix, dy = _rows(x), _rows(grad)
    dx = memory.empty(matrix.shape, x.dtype, x.device)
    d_scales = memory.empty((matrix.shape[0],), scales.dtype, x.device)
    column = scales.detach().reshape(-1, 1).double()
    for piece in _pieces(*matrix.shape):
        act, d_gate, d_linear = backward(*_halves(matrix[piece], interleave))
        upstream = dy[piece].double()
        scaled = upstream * column[piece]
        _write_halves(dx[piece], scaled * d_gate, scaled * d_linear, interleave)
        if compute_scale_grad:
            d_scales[piece] = (upstream * act).sum(dim=1).to(scales.dtype)
    return dx.view(x.shape), d_scales.view(scales.shape) if compute_scale_grad else None


@tex_function(*forward_refusals(2), gpu=False)
def scaled_swiglu(
    input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, glu_interleave_size: int = 0
) -> torch.Tensor:
    """Return `gate * sigmoid(gate) * linear * scale`, in the input's dtype, half as wide."""
    del quantizer
    return _glu_forward(input, act_scales, glu_interleave_size, swiglu)


@tex_function(*backward_refusals(2), gpu=False)
def scaled_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of `scaled_swiglu`'s input (its layout) and scales (or None)."""
    del quantizer
    return _glu_backward(
        grad, fwd_input, act_scales, glu_interleave_size, compute_scale_grad, swiglu_backward
    )


@tex_function(*forward_refusals(2), gpu=False)
def scaled_clamped_swiglu(
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
) -> torch.Tensor:
    """Return `c sigmoid(alpha c) (clamp(linear) + offset) * scale`, c = min(gate, limit)."""
    del quantizer
    forward, _ = clamped_swiglu(limit, alpha, glu_linear_offset)
    return _glu_forward(input, act_scales, glu_interleave_size, forward)


@tex_function(*backward_refusals(2), gpu=False)
def scaled_clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of `scaled_clamped_swiglu`'s input and scales (or None)."""
    del quantizer
    _, backward = clamped_swiglu(limit, alpha, glu_linear_offset)
    return _glu_backward(
        grad, fwd_input, act_scales, glu_interleave_size, compute_scale_grad, backward
    )


@tex_function(*forward_refusals(2), gpu=False)
def scaled_situglu(
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
) -> torch.Tensor:
    """Return `b1 tanh(gate/b1) sigmoid(gate) * b2 tanh(linear/b2) * scale`."""
    del quantizer
    forward, _ = situglu(beta1, beta2)
    return _glu_forward(input, act_scales, glu_interleave_size, forward)


@tex_function(*backward_refusals(2), gpu=False)
def scaled_dsituglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of `scaled_situglu`'s input and scales (or None)."""
    del quantizer
    _, backward = situglu(beta1, beta2)
    return _glu_backward(
        grad, fwd_input, act_scales, glu_interleave_size, compute_scale_grad, backward
    )


@tex_function(*forward_refusals(1), gpu=False)
def scaled_srelu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Return `max(x, 0)^2 * scale` in the input's dtype. NaN counts as not positive: 0."""
    del quantizer
    matrix = _rows(input)
    out = memory.empty(matrix.shape, input.dtype, input.device)
    column = act_scales.detach().reshape(-1, 1).double()
    for piece in _pieces(*matrix.shape):
        positive = _positive(matrix[piece])
        out[piece] = positive * positive * column[piece]
    return out.view(input.shape)


@tex_function(*backward_refusals(1), gpu=False)
def scaled_dsrelu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    compute_scale_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of `scaled_srelu`'s input, `2 max(x, 0) * scale * grad`, and scales."""
    del quantizer
    matrix, dy = _rows(fwd_input), _rows(grad)
    dx = memory.empty(matrix.shape, fwd_input.dtype, fwd_input.device)
    d_scales = memory.empty((matrix.shape[0],), act_scales.dtype, fwd_input.device)
    column = act_scales.detach().reshape(-1, 1).double()
    for piece in _pieces(*matrix.shape):
        positive, upstream = _positive(matrix[piece]), dy[piece].double()
        dx[piece] = upstream * column[piece] * 2 * positive
        if compute_scale_grad:
            d_scales[piece] = (upstream * positive * positive).sum(dim=1).to(act_scales.dtype)
    scale_grad = d_scales.view(act_scales.shape) if compute_scale_grad else None
    return dx.view(fwd_input.shape), scale_grad


def _positive(piece: torch.Tensor) -> torch.Tensor:
    values = piece.double()
    return torch.where(values > 0, values, 0.0)
