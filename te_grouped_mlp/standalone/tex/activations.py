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

from te_grouped_mlp.op import memory
from te_grouped_mlp.standalone.tex.codes import source_code
from te_grouped_mlp.standalone.tex.glu import (
    GluBackward,
    GluForward,
    clamped_swiglu,
    situglu,
    swiglu,
    swiglu_backward,
)
from te_grouped_mlp.standalone.tex.guard import tex_function

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


def _rows(function: str, x: torch.Tensor, scales: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Check the inputs and return `x` as a matrix; leading dimensions count as rows."""
    if quantizer is not None:
        raise NotImplementedError(f"{function} with a quantizer; standalone returns plain tensors")
    source_code(x.dtype)
    matrix = x.detach().reshape(-1, x.shape[-1]) if x.numel() else x.detach().view(0, x.shape[-1])
    rows = matrix.shape[0]
    if x.numel() and scales.numel() != rows:
        raise ValueError(
            f"{function}: act_scales has {scales.numel()} elements; allowed: {rows}, one per row"
        )
    return matrix


def _check_glu(function: str, width: int, interleave: int) -> None:
    if width % 2:
        raise ValueError(f"{function}: last dimension is {width}; allowed: even sizes")
    if interleave < 0 or interleave % 32 or (interleave and (width // 2) % interleave):
        raise ValueError(
            f"{function}: glu_interleave_size is {interleave}; allowed: 0, or a multiple of 32 "
            f"that divides {width // 2}"
        )


def _pieces(rows: int, width: int) -> list[slice]:
    step = max(1, _PIECE // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _glu_forward(
    function: str,
    x: torch.Tensor,
    scales: torch.Tensor,
    quantizer: Any,
    interleave: int,
    activation: GluForward,
) -> torch.Tensor:
    _check_glu(function, x.shape[-1], interleave)
    matrix = _rows(function, x, scales, quantizer)
    out = memory.empty((matrix.shape[0], matrix.shape[1] // 2), x.dtype, x.device)
    column = scales.detach().reshape(-1, 1).double()
    for piece in _pieces(*matrix.shape):
        out[piece] = activation(*_halves(matrix[piece], interleave)) * column[piece]
    return out.view(*x.shape[:-1], x.shape[-1] // 2)


def _glu_backward(
    function: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    quantizer: Any,
    interleave: int,
    compute_scale_grad: bool,
    backward: GluBackward,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    _check_glu(function, x.shape[-1], interleave)
    matrix = _rows(function, x, scales, quantizer)
    dy = _matching_grad(function, grad, (*x.shape[:-1], x.shape[-1] // 2))
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


def _matching_grad(function: str, grad: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(grad.shape) != tuple(shape):
        raise ValueError(f"{function}: grad has shape {tuple(grad.shape)}; allowed: {shape}")
    return grad.detach().reshape(-1, shape[-1]) if grad.numel() else grad.view(0, shape[-1])


@tex_function
def scaled_swiglu(
    input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, glu_interleave_size: int = 0
) -> torch.Tensor:
    """Return `gate * sigmoid(gate) * linear * scale`, in the input's dtype, half as wide."""
    return _glu_forward("scaled_swiglu", input, act_scales, quantizer, glu_interleave_size, swiglu)


@tex_function
def scaled_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of `scaled_swiglu`'s input (its layout) and scales (or None)."""
    return _glu_backward(
        "scaled_dswiglu",
        grad,
        fwd_input,
        act_scales,
        quantizer,
        glu_interleave_size,
        compute_scale_grad,
        swiglu_backward,
    )


@tex_function
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
    forward, _ = clamped_swiglu(limit, alpha, glu_linear_offset)
    return _glu_forward(
        "scaled_clamped_swiglu", input, act_scales, quantizer, glu_interleave_size, forward
    )


@tex_function
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
    _, backward = clamped_swiglu(limit, alpha, glu_linear_offset)
    return _glu_backward(
        "scaled_clamped_dswiglu",
        grad,
        fwd_input,
        act_scales,
        quantizer,
        glu_interleave_size,
        compute_scale_grad,
        backward,
    )


@tex_function
def scaled_situglu(
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
) -> torch.Tensor:
    """Return `b1 tanh(gate/b1) sigmoid(gate) * b2 tanh(linear/b2) * scale`."""
    forward, _ = situglu(beta1, beta2)
    return _glu_forward(
        "scaled_situglu", input, act_scales, quantizer, glu_interleave_size, forward
    )


@tex_function
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
    _, backward = situglu(beta1, beta2)
    return _glu_backward(
        "scaled_dsituglu",
        grad,
        fwd_input,
        act_scales,
        quantizer,
        glu_interleave_size,
        compute_scale_grad,
        backward,
    )


@tex_function
def scaled_srelu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Return `max(x, 0)^2 * scale` in the input's dtype. NaN counts as not positive: 0."""
    matrix = _rows("scaled_srelu", input, act_scales, quantizer)
    out = memory.empty(matrix.shape, input.dtype, input.device)
    column = act_scales.detach().reshape(-1, 1).double()
    for piece in _pieces(*matrix.shape):
        positive = _positive(matrix[piece])
        out[piece] = positive * positive * column[piece]
    return out.view(input.shape)


@tex_function
def scaled_dsrelu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    compute_scale_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of `scaled_srelu`'s input, `2 max(x, 0) * scale * grad`, and scales."""
    matrix = _rows("scaled_dsrelu", fwd_input, act_scales, quantizer)
    dy = _matching_grad("scaled_dsrelu", grad, tuple(fwd_input.shape))
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
