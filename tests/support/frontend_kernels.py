# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the frontend's grouped-GEMM kernels compute, on a CPU.

Products and activations in float64, rounded to fp32 where a kernel holds fp32, then once to the
output: the arithmetic of the reference backend, so that results can be compared bit by bit. MXFP8
operands only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op import activations
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.tensors.capacity import span
from tests.support.frontend_machine import (
    Block,
    Machine,
    blocks,
    int32_offsets,
    require,
    rows_of,
)
from tests.support.frontend_tiles import Quantized, Tokens, Weights
from tests.support.frontend_wgrad import wgrad, workspace_size

__all__ = ["dglu", "dsrelu", "glu", "quant", "srelu", "wgrad", "workspace_size"]

_BUFFER_MULTIPLE = 256
_INTERLEAVE = 32


def glu(k: SimpleNamespace, machine: Machine) -> dict[str, Any]:
    """FC1 with a gated activation."""
    require(k.b_major == "k", "b_major", k.b_major, "k")
    return _forward(k, _gated_spec(k, ""), machine, needs_prob=False)


def srelu(k: SimpleNamespace, machine: Machine) -> dict[str, Any]:
    """FC1 with a squared ReLU, clamped by a tanh or not."""
    require(k.prob_tensor is not None, "prob_tensor", None, "a tensor")
    return _forward(k, _unary_spec(k), machine, needs_prob=True)


def dglu(k: SimpleNamespace, machine: Machine) -> dict[str, Any]:
    """FC2's data gradient through a gated activation; alpha acts on both halves."""
    if getattr(k, "deterministic", False) and k.generate_dbias and k.dprob_tensor is not None:
        raise NotImplementedError("deterministic dGLU with generate_dbias")
    return _backward(k, _gated_spec(k, "d"), machine, alpha_power=2)[0]


def dsrelu(k: SimpleNamespace, machine: Machine) -> dict[str, Any]:
    """FC2's data gradient through a squared ReLU, with its recomputed value as a column copy."""
    require(k.prob_tensor is not None, "prob_tensor", None, "a tensor")
    if k.dprob_tensor is None:
        k.dprob_tensor = torch.zeros(k.a_tensor.shape[0], 1, 1)
    found, value = _backward(k, _unary_spec(k), machine, alpha_power=1)
    return {
        **found,
        "d_srelu_tensor": value.column,
        "sfd_col_d_srelu_tensor": value.column_scale,
    }


def quant(k: SimpleNamespace, machine: Machine) -> dict[str, Any]:
    """Grouped product; a probability multiplies the bias where there is one, else the product."""
    optional = hasattr(k, "use_single_group_runtime_offsets")
    require(optional or k.prob_tensor is not None, "prob_tensor", None, "a tensor")
    a, w = Tokens(k.a_tensor, k.sfa_tensor, "a"), _weights(k)
    _require_common(k, a, w)
    dtype = k.d_dtype or torch.bfloat16
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise NotImplementedError(f"quant with d_dtype {dtype}")
    out = getattr(k, "d_tensor", None)
    if out is None:
        out = machine.matrix(a.rows, w.n, dtype)
    shape, strides = (a.rows, w.n, 1), (w.n, 1, a.rows * w.n)
    fits = tuple(out.shape) == shape and out.stride() == strides and out.dtype == dtype
    require(fits, "d_tensor", (tuple(out.shape), out.stride(), out.dtype), (shape, strides, dtype))
    for block in _blocks(k, a, machine):
        values = _product(k, a, w, block)
        scale = None if k.prob_tensor is None else rows_of(_rows(k.prob_tensor), block).float()
        if k.bias_tensor is not None:
            bias = k.bias_tensor[:, block.expert].float()
            values += bias if scale is None else scale[:, None] * bias
        elif scale is not None:
            values *= scale[:, None]
        _store_plain(out, values, block)
    return _outputs(d=out)


def _forward(
    k: SimpleNamespace, spec: ActivationSpec, machine: Machine, *, needs_prob: bool
) -> dict[str, Any]:
    a, w = Tokens(k.a_tensor, k.sfa_tensor, "a"), _weights(k)
    _require_common(k, a, w)
    _require_fp8_output(k)
    optional = needs_prob or hasattr(k, "use_single_group_runtime_offsets")
    require(optional or k.prob_tensor is not None, "prob_tensor", None, "a tensor")
    features = w.n // spec.expansion
    require(w.n % (32 * spec.expansion) == 0, "n", w.n, f"multiples of {32 * spec.expansion}")
    c = machine.matrix(a.rows, w.n, k.c_dtype or torch.bfloat16)
    d = Quantized(machine, a.rows, features)
    for block in _blocks(k, a, machine):
        values = _product(k, a, w, block)
        if k.bias_tensor is not None:
            values += k.bias_tensor[:, block.expert].float()
        _store_plain(c, values, block)
        result = activations.evaluate(torch, spec, values.double()).value
        if k.prob_tensor is not None:
            result = result * rows_of(_rows(k.prob_tensor), block)[:, None]
        d.store(result.float(), block)
    return {"c_tensor": c, **_quantized_outputs(d)}


def _backward(
    k: SimpleNamespace, spec: ActivationSpec, machine: Machine, *, alpha_power: int
) -> tuple[dict[str, Any], Quantized]:
    """Return the wrapper's outputs, and the activation times the probability as a column copy."""
    a, w = Tokens(k.a_tensor, k.sfa_tensor, "a"), _weights(k)
    _require_common(k, a, w)
    _require_fp8_output(k)
    prob, dprob = k.prob_tensor, k.dprob_tensor
    for name, tensor in (("prob_tensor", prob), ("dprob_tensor", dprob)):
        fits = tensor is None or (tensor.dtype == torch.float32 and tensor.numel() == a.rows)
        require(fits, name, tensor, f"float32 with {a.rows} values")
    wide = w.n * spec.expansion
    require(
        tuple(k.c_tensor.shape) == (a.rows, wide, 1),
        "c_tensor",
        tuple(k.c_tensor.shape),
        (a.rows, wide, 1),
    )
    d = Quantized(machine, a.rows, wide)
    activated = Quantized(machine, a.rows, w.n, row=False, name="d_srelu")
    dbias = torch.zeros(w.count, wide) if k.generate_dbias else None
    for block in _blocks(k, a, machine):
        g = _product(k, a, w, block, alpha_power).double()
        pre = rows_of(k.c_tensor[:, :, 0], block)
        value, derivatives = activations.evaluate(torch, spec, pre)
        if dprob is not None:
            _add_rows(_rows(dprob), (g * value).sum(1).float(), block, machine)
        if prob is not None:
            factor = rows_of(_rows(prob), block)[:, None]
            g, value = g * factor, value * factor
        parts = tuple(g * part for part in derivatives(torch.mul))
        values = activations.join(torch, spec, parts).float()
        d.store(values, block)
        if not spec.is_gated:
            activated.store(value.float(), block)
        if dbias is not None:
            dbias[block.expert] += _column_sums(values)
    if dbias is not None:
        dbias = dbias.bfloat16().unsqueeze(-1)
    found = {"d_row_tensor": d.row, **_quantized_outputs(d)}
    del found["d_tensor"]
    return {**found, "dprob_tensor": dprob, "dbias_tensor": dbias}, activated


def _product(
    k: SimpleNamespace, a: Tokens, w: Weights, block: Block, alpha_power: int = 1
) -> torch.Tensor:
    """Return alpha^power times the product, fp32."""
    alpha = k.alpha_tensor[block.expert].float() ** alpha_power
    return (a.read(block) @ w.read(block.expert)).float() * alpha


def _column_sums(values: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(values.shape[1])
    rows, cols = values.shape
    _C.column_sums(span(values), 0, rows, cols, values.stride(0), None, 0, span(out), 1)
    return out


def _store_plain(out: torch.Tensor, values: torch.Tensor, block: Block) -> None:
    kept = max(min(block.stop, out.shape[0]) - block.start, 0)
    out[block.start : block.start + kept, :, 0] = values[:kept].to(out.dtype)


def _add_rows(out: torch.Tensor, values: torch.Tensor, block: Block, machine: Machine) -> None:
    kept = max(min(block.stop, out.shape[0]) - block.start, 0)
    out[block.start : block.start + kept] += values[:kept]
    if kept < values.shape[0]:
        machine.out_of_bounds.append(("dprob", (values.shape[0] - kept) * 4))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)


def _blocks(k: SimpleNamespace, a: Tokens, machine: Machine) -> list[Block]:
    all_rows = getattr(k, "use_single_group_runtime_offsets", False)
    return blocks(k.padded_offsets, a.rows, all_rows=all_rows, machine=machine)


def _weights(k: SimpleNamespace) -> Weights:
    dense, discrete = k.b_tensor is not None, k.b_ptrs is not None
    require(dense != discrete, "b_tensor and b_ptrs", (dense, discrete), "exactly one of them")
    if dense:
        given = (k.n, k.b_dtype)
        require(given == (None, None), "n, b_dtype", given, "None with b_tensor")
        require(k.b_tensor.dtype == k.a_tensor.dtype, "b_tensor", k.b_tensor.dtype, "that of A")
        return Weights.stacked(k.b_tensor, k.sfb_tensor)
    require(k.n is not None, "n", k.n, "an integer with b_ptrs")
    require(k.b_dtype == k.a_tensor.dtype, "b_dtype", k.b_dtype, k.a_tensor.dtype)
    return Weights.behind(k.b_ptrs, k.sfb_ptrs, k.n, k.a_tensor.shape[1], k.b_major)


def _require_common(k: SimpleNamespace, a: Tokens, w: Weights) -> None:
    """Refuse what the wrappers refuse, and what they would silently get wrong."""
    require(k.a_tensor.dtype == torch.float8_e4m3fn, "a_tensor", k.a_tensor.dtype, "float8_e4m3fn")
    require(k.sf_vec_size == 32, "sf_vec_size", k.sf_vec_size, 32)
    require(k.m_aligned == 256, "m_aligned", k.m_aligned, 256)
    require(k.cd_major == "n", "cd_major", k.cd_major, "n")
    multiple = f"multiples of {_BUFFER_MULTIPLE}"
    require(a.rows % _BUFFER_MULTIPLE == 0, "a_tensor.shape[0]", a.rows, multiple)
    require(k.alpha_tensor.numel() == w.count, "alpha_tensor", k.alpha_tensor.numel(), w.count)
    ends = int32_offsets(k.padded_offsets, "padded_offsets")
    if getattr(k, "use_single_group_runtime_offsets", False):
        require(w.count == 1, "use_single_group_runtime_offsets", True, "False with many experts")
    else:
        require(ends.numel() == w.count, "padded_offsets", ends.numel(), w.count)
    bias = getattr(k, "bias_tensor", None)
    fits = bias is None or (tuple(bias.shape) == (w.n, w.count) and bias.stride(0) == 1)
    require(fits, "bias_tensor", bias, f"({w.n}, {w.count}) with strides (1, {w.n})")


def _require_fp8_output(k: SimpleNamespace) -> None:
    require(k.d_dtype == torch.float8_e4m3fn, "d_dtype", k.d_dtype, "float8_e4m3fn")
    norm = k.norm_const_tensor
    fits = norm is not None and norm.dtype == torch.float32 and norm.tolist() == [1.0]
    require(fits, "norm_const_tensor", norm, "float32 [1.0]")
    if not k.discrete_col_sfd:
        raise NotImplementedError("discrete_col_sfd=False")


def _gated_spec(k: SimpleNamespace, prefix: str) -> ActivationSpec:
    allowed = [prefix + name for name in ("swiglu", "geglu", "situglu")]
    require(k.act_func in allowed, "act_func", k.act_func, allowed)
    if k.act_func.endswith("swiglu"):
        return ActivationSpec(Activation.SWIGLU, interleave=_INTERLEAVE)
    if k.act_func.endswith("situglu"):
        known = hasattr(k, "situ_beta1")
        require(known, "act_func", k.act_func, "a release that has situ_beta1")
        return ActivationSpec(
            Activation.SITU_GLU, interleave=_INTERLEAVE, beta1=k.situ_beta1, beta2=k.situ_beta2
        )
    if not hasattr(k, "geglu_alpha"):
        return ActivationSpec(Activation.CLAMPED_QGEGLU, interleave=_INTERLEAVE)
    symmetric = k.glu_clamp_min == -k.glu_clamp_max
    require(symmetric, "glu_clamp_min", k.glu_clamp_min, -k.glu_clamp_max)
    return ActivationSpec(
        Activation.CLAMPED_QGEGLU,
        interleave=_INTERLEAVE,
        limit=k.glu_clamp_max,
        alpha=k.geglu_alpha,
        linear_offset=1.0 if k.linear_offset is None else k.linear_offset,
    )


def _unary_spec(k: SimpleNamespace) -> ActivationSpec:
    clamp = getattr(k, "tanh_clamp_scale", None)
    if clamp is None:
        return ActivationSpec(Activation.SRELU)
    require(clamp > 0, "tanh_clamp_scale", clamp, "positive values")
    return ActivationSpec(Activation.TANH_SRELU, clamp_scale=clamp)


def _quantized_outputs(d: Quantized) -> dict[str, Any]:
    return {
        **_outputs(d=d.row, d_col=d.column),
        "sfd_row_tensor": d.row_scale,
        "sfd_col_tensor": d.column_scale,
    }


def _outputs(d: torch.Tensor | None, d_col: torch.Tensor | None = None) -> dict[str, Any]:
    return {
        "d_tensor": d,
        "d_col_tensor": d_col,
        "amax_tensor": None,
        "sfd_row_tensor": None,
        "sfd_col_tensor": None,
    }
