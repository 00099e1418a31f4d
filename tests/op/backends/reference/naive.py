# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The grouped MLP written out step by step in float64, sharing nothing with the package.

One group at a time, on values and logical scales: there are no buffers, layouts or extents here.
Every rounding point is a visible conversion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK = 32
E4M3_MAX = 448.0


def e8m0(amax: torch.Tensor) -> torch.Tensor:
    """Scale bytes (int64) of fp32 block maxima: amax / 448 rounded up to a power of two."""
    ratio = amax.float() * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32)
    mantissa, exponent = torch.frexp(ratio)
    byte = exponent.long() - 1 + 127 + (mantissa > 0.5).long()
    byte = torch.where(ratio == 0, 0, byte.clamp(min=0))
    byte = torch.where(ratio.isinf(), 254, byte)
    return torch.where(ratio.isnan(), 255, byte)


def quantize(
    values: torch.Tensor, along_columns: bool, nan_in_scale: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (rows, cols); return E4M3 bytes (rows, cols) and scale bytes.

    The scales are (rows, cols / 32) with 32 neighbours of a row in a block (`along_columns`), else
    (rows / 32, cols).
    """
    if not along_columns:
        data, scale = quantize(values.t(), True, nan_in_scale)
        return data.t().contiguous(), scale.t().contiguous()
    rows, cols = values.shape
    blocks = values.double().reshape(rows, cols // BLOCK, BLOCK)
    magnitudes = blocks.abs()
    if not nan_in_scale:
        magnitudes = torch.where(blocks.isnan(), 0.0, magnitudes)
    scale = e8m0(magnitudes.amax(2) if cols else magnitudes.sum(2))
    factor = torch.where(scale == 255, math.nan, torch.exp2(127.0 - scale.double()))
    scaled = (blocks * factor[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).float()
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(scaled.isnan(), torch.tensor(0x7F, dtype=torch.uint8), codes)
    return codes.reshape(rows, cols), scale.to(torch.uint8)


def dequantize(data: torch.Tensor, scale: torch.Tensor, along_columns: bool) -> torch.Tensor:
    """The float64 values behind `quantize`'s result."""
    power = torch.where(scale == 255, math.nan, torch.exp2(scale.double() - 127.0))
    power = power.repeat_interleave(BLOCK, 1 if along_columns else 0)
    return data.view(torch.float8_e4m3fn).double() * power


@dataclass
class Numbers:
    """How operands are stored: MXFP8 copies, or plain values of one dtype."""

    quantized: bool
    dtype: torch.dtype

    def copy(self, values: torch.Tensor, along_columns: bool, epilogue: bool = False):
        """The float64 values that a product sees of an operand."""
        if not self.quantized:
            return values.to(self.dtype).double()
        return dequantize(*quantize(values, along_columns, epilogue), along_columns)


def deinterleave(features: int, width: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Column indices of gate and linear feature k in FC1's output."""
    k = torch.arange(features)
    if width is None:
        return k, features + k
    return 2 * width * (k // width) + k % width, 2 * width * (k // width) + width + k % width


def _sigma(z: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-z))


def activation(kind: str, x: torch.Tensor, params: dict) -> torch.Tensor:
    """Value (rows, features) of a scaled activation without its scale."""
    return _activation(kind, x, params)[0]


def activation_grad(kind: str, x: torch.Tensor, grad: torch.Tensor, params: dict) -> torch.Tensor:
    """Gradient (rows, columns of x) for a gradient (rows, features) of the value."""
    _, partials, indices = _activation(kind, x, params)
    out = torch.empty_like(x)
    for partial, index in zip(partials, indices, strict=True):
        out[:, index] = grad * partial
    return out


def _activation(kind: str, x: torch.Tensor, p: dict):
    if kind in ("ScaledSReLU", "ScaledTanhSReLU"):
        r = torch.where(x > 0, x, 0.0)
        indices = (torch.arange(x.shape[1]),)
        if kind == "ScaledSReLU":
            return r**2, (2.0 * r,), indices
        t = torch.tanh(r / p["clamp_scale"])
        scaled = p["clamp_scale"] * t
        return scaled**2, (2.0 * scaled * (1.0 - t**2),), indices
    indices = deinterleave(x.shape[1] // 2, p["interleave"])
    a, b = x[:, indices[0]], x[:, indices[1]]
    if kind == "ScaledSwiGLU":
        s = _sigma(a)
        return a * s * b, (b * (s + a * s * (1.0 - s)), a * s), indices
    if kind == "ScaledClampedQGeGLU":
        ac = torch.minimum(a, torch.tensor(p["limit"], dtype=a.dtype))
        s = _sigma(p["alpha"] * ac)
        bc = torch.minimum(b, torch.tensor(p["limit"], dtype=b.dtype))
        bc = torch.maximum(bc, torch.tensor(-p["limit"], dtype=b.dtype)) + p["linear_offset"]
        da = torch.where(a <= p["limit"], bc * (s + p["alpha"] * ac * s * (1.0 - s)), 0.0)
        db = torch.where(b.abs() <= p["limit"], ac * s, 0.0)
        return ac * s * bc, (da, db), indices
    assert kind == "ScaledSiTUGLU"
    s, t1, t2 = _sigma(a), torch.tanh(a / p["beta1"]), torch.tanh(b / p["beta2"])
    gate, up = p["beta1"] * t1 * s, p["beta2"] * t2
    d_gate = (1.0 - t1**2) * s + p["beta1"] * t1 * s * (1.0 - s)
    return gate * up, (d_gate * up, gate * (1.0 - t2**2)), indices


def tiled_column_sums(values: torch.Tensor) -> torch.Tensor:
    """fp32 sums down each tile of 128 rows, then over the tiles in order."""
    total = torch.zeros(values.shape[1], dtype=torch.float32)
    for start in range(0, values.shape[0], 128):
        tile = torch.zeros_like(total)
        for row in values[start : start + 128]:
            tile = tile + row
        total = total + tile
    return total


@dataclass
class Group:
    """One expert's inputs: rows, weights and biases; None where there are none."""

    x: torch.Tensor
    dy: torch.Tensor
    prob: torch.Tensor | None
    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    bias_scale: torch.Tensor | None


def step(
    group: Group, kind: str, params: dict, numbers: Numbers, *, dense: bool, recompute: bool = False
) -> dict[str, torch.Tensor]:
    """Forward and backward of one expert.

    Args:
        group: Inputs.
        kind: Class name of the activation.
        params: Its parameters.
        numbers: How operands are stored.
        dense: The FC2 bias is added after rounding, as in a dense product.
        recompute: FC2's weight gradient reads the activation of the rounded pre-activation.

    Returns:
        y and dx (compute dtype), pre, and fp32 dprob, db1, dw1, dw2.
    """
    dtype = numbers.dtype
    acc = numbers.copy(group.x, True) @ numbers.copy(group.w1, True).t()
    values = acc.float()
    if group.b1 is not None:
        values = values + group.b1.float()
    pre = values.to(dtype)
    prob = torch.ones(len(values)) if group.prob is None else group.prob
    act = (activation(kind, values.double(), params) * prob.double()[:, None]).float()
    out = (numbers.copy(act, True, True) @ numbers.copy(group.w2, True).t()).float()
    y = _add_bias(out, group, dtype, dense)

    g = (numbers.copy(group.dy, True) @ numbers.copy(group.w2, False)).float().double()
    dprob = (g * activation(kind, pre.double(), params)).sum(1).float()
    scaled = g * prob.double()[:, None]
    dpre = activation_grad(kind, pre.double(), scaled, params).float()
    dx = (numbers.copy(dpre, True, True) @ numbers.copy(group.w1, False)).float().to(dtype)
    if recompute:
        act = (activation(kind, pre.double(), params) * prob.double()[:, None]).float()
    dw2 = numbers.copy(group.dy, False).t() @ numbers.copy(act, False, True)
    dw1 = numbers.copy(dpre, False, True).t() @ numbers.copy(group.x, False)
    return {
        "y": y,
        "dx": dx,
        "dprob": dprob,
        "db1": tiled_column_sums(dpre),
        "dw1": dw1.float(),
        "dw2": dw2.float(),
        "pre": pre,
    }


def _add_bias(out: torch.Tensor, group: Group, dtype: torch.dtype, dense: bool) -> torch.Tensor:
    if group.b2 is None:
        return out.to(dtype)
    scale = group.bias_scale
    if dense:
        bias = group.b2.expand(out.shape) if scale is None else group.b2 * scale[:, None]
        return (out.to(dtype).float() + bias.float()).to(dtype)
    bias = group.b2.float() * (1.0 if scale is None else scale.float()[:, None])
    return (out + bias).to(dtype)


def into_target(
    content: torch.Tensor, grad: torch.Tensor, *, accumulate: bool, dense: bool
) -> torch.Tensor:
    """What a weight-gradient buffer holds afterwards."""
    if not accumulate:
        return grad.to(content.dtype)
    if dense:
        return (grad + content.float()).to(content.dtype)
    return (content.float() + grad.to(content.dtype).float()).to(content.dtype)
