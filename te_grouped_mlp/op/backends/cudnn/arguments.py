# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One builder per wrapper: the keywords of a launch, and nowhere else.

An argument that the installed wrapper lacks is left out where leaving it out means the same, and
is an error where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op.activations import ActivationSpec
from te_grouped_mlp.op.backends.cudnn import checks
from te_grouped_mlp.op.backends.cudnn.signatures import fitting
from te_grouped_mlp.op.backends.cudnn.views import (
    E4M3,
    Tokens,
    WeightArguments,
    as_kernel_matrix,
    column_scales,
)
from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS
from te_grouped_mlp.op.tensors.operands import QuantizedCopy


@dataclass(frozen=True)
class SharedArguments:
    """What all launches of one call share.

    Attributes:
        takes: Argument names of the wrapper.
        stream: Handle of the stream to launch on, or None for a CPU.
        all_rows: The layout is BUFFER: compute every row, whatever the offsets say.
        alpha: fp32 ones (G,).
        norm: fp32 one (1,).
    """

    takes: frozenset[str]
    stream: int | None
    all_rows: bool
    alpha: torch.Tensor
    norm: torch.Tensor


def glu(
    shared: SharedArguments,
    a: Tokens,
    w: WeightArguments,
    spec: ActivationSpec,
    *,
    bias: torch.Tensor | None,
    prob: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the keywords of FC1 with a gated activation.

    Args:
        shared, a, w, spec: What is multiplied, and the activation.
        bias: (G, N) bf16 or fp16, contiguous, or None.
        prob: (rows,) fp32 or bf16, or None for one.
    """
    return fitting(
        "glu",
        shared.takes,
        {**_forward(shared, a, w, bias, prob), **_gated(spec, "")},
        {RUNTIME_OFFSETS: (shared.all_rows, False)},
    )


def srelu(
    shared: SharedArguments,
    a: Tokens,
    w: WeightArguments,
    spec: ActivationSpec,
    *,
    bias: torch.Tensor | None,
    prob: torch.Tensor,
) -> dict[str, Any]:
    """Return the keywords of FC1 with a unary activation; as `glu`, but needs probabilities."""
    return fitting(
        "srelu",
        shared.takes,
        _forward(shared, a, w, bias, prob),
        {RUNTIME_OFFSETS: (shared.all_rows, False), **_unary(spec)},
    )


@dataclass(frozen=True)
class Derivative:
    """What a launch through an activation's derivative reads and makes beside the product.

    Attributes:
        pre_activation: bf16 (rows, features), contiguous.
        prob: fp32 (rows,) or None for one.
        dprob: fp32 (rows,), zeros: the kernel adds to it. None when not wanted.
        want_bias_grad: Also sum FC1's bias gradient.
        deterministic: Keep the order of the sums.
    """

    pre_activation: torch.Tensor
    prob: torch.Tensor | None
    dprob: torch.Tensor | None
    want_bias_grad: bool
    deterministic: bool


def dglu(
    shared: SharedArguments, a: Tokens, w: WeightArguments, spec: ActivationSpec, d: Derivative
) -> dict[str, Any]:
    """Return the keywords of FC2's data gradient through a gated activation."""
    return fitting(
        "dglu",
        shared.takes,
        {
            **_product(shared, a, w),
            **_quantized_output(shared),
            **_gated(spec, "d"),
            **_derivative(a, d),
            "beta_tensor": shared.alpha,
        },
        {RUNTIME_OFFSETS: (shared.all_rows, False), "deterministic": (d.deterministic, False)},
    )


def dsrelu(
    shared: SharedArguments, a: Tokens, w: WeightArguments, spec: ActivationSpec, d: Derivative
) -> dict[str, Any]:
    """Return the keywords of FC2's data gradient through a unary activation.

    Raises:
        ValueError: There is no probability, without which the wrapper ends in an error of Python's.
    """
    if d.prob is None:
        raise ValueError("prob is None; the unary kernels need fp32 values")
    return fitting(
        "dsrelu",
        shared.takes,
        {**_product(shared, a, w), **_quantized_output(shared), **_derivative(a, d)},
        {
            RUNTIME_OFFSETS: (shared.all_rows, False),
            # Said either way: left out, the wrapper follows torch's flag and not the plan.
            "deterministic": (d.deterministic, False),
            **_unary(spec),
        },
    )


def quant(
    shared: SharedArguments,
    a: Tokens,
    w: WeightArguments,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    bias_scale: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the keywords of a plain grouped product.

    Args:
        shared, a, w: What is multiplied.
        out: (rows, N), contiguous; written in place.
        bias: (G, N), contiguous, or None.
        bias_scale: (rows,) fp32 or bf16 factor of the bias, or None for one. Not a factor of the
            product: the wrapper's probability is one only where there is no bias.

    Raises:
        ValueError: A bias scale comes without a bias.
    """
    if bias_scale is not None and bias is None:
        raise ValueError("bias_scale is given without a bias; the kernel would scale the product")
    return fitting(
        "quant",
        shared.takes,
        {
            **_product(shared, a, w),
            "bias_tensor": _bias(bias),
            "prob_tensor": _per_row("bias_scale", bias_scale, a.rows),
            "norm_const_tensor": None,
            "d_dtype": out.dtype,
            "d_tensor": as_kernel_matrix(out),
        },
        {
            RUNTIME_OFFSETS: (shared.all_rows, False),
            # An amax of plain outputs is made, filled and reduced unless it is declined.
            "generate_amax": (False, True),
        },
        droppable=("generate_amax",),
    )


def wgrad(
    shared: SharedArguments,
    dy: QuantizedCopy,
    x: QuantizedCopy,
    group_end_offsets: torch.Tensor,
    target: torch.Tensor,
    *,
    dtype: torch.dtype,
    accumulate: bool,
    workspace: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the keywords of the weight gradients.

    Args:
        shared: Stream and arguments of the wrapper.
        dy, x: Column copies, (rows, N) and (rows, K).
        group_end_offsets: int32 (G,).
        target: (G, N, K), contiguous; or int64 (G,), the addresses of (N, K) members.
        dtype: Of the target.
        accumulate: Add to the content.
        workspace: uint8, for the kernel's descriptors; None if the wrapper has no such argument.
    """
    checks.packed_scales("dy", dy, tuple(dy.data.shape))
    checks.packed_scales("x", x, tuple(x.data.shape))
    dense = target.dim() == 3
    return fitting(
        "wgrad",
        shared.takes,
        {
            "a_tensor": dy.data.view(E4M3).t(),
            "b_tensor": x.data.view(E4M3),
            "sfa_tensor": column_scales(dy),
            "sfb_tensor": column_scales(x),
            "offsets_tensor": group_end_offsets,
            "output_mode": "dense" if dense else "discrete",
            "wgrad_tensor" if dense else "wgrad_ptrs": target,
            "wgrad_dtype": dtype,
            "acc_dtype": torch.float32,
            "sf_vec_size": MXFP8.block,
            "accumulate_on_output": accumulate,
            **_stream(shared),
        },
        {"descriptor_workspace": (workspace, None)},
    )


def _product(shared: SharedArguments, a: Tokens, w: WeightArguments) -> dict[str, Any]:
    return {
        "a_tensor": a.data,
        "sfa_tensor": a.scale,
        "padded_offsets": a.group_end_offsets,
        "alpha_tensor": shared.alpha,
        "acc_dtype": torch.float32,
        "cd_major": "n",
        "sf_vec_size": MXFP8.block,
        "use_dynamic_sched": True,
        **_weights(w),
        **_stream(shared),
    }


def _weights(w: WeightArguments) -> dict[str, Any]:
    if w.stacked is not None:
        data, scale = w.stacked
        return {"b_tensor": data, "sfb_tensor": scale, "b_major": w.major}
    assert w.tables is not None
    data, scale = w.tables
    return {"b_ptrs": data, "sfb_ptrs": scale, "n": w.n, "b_dtype": E4M3, "b_major": w.major}


def _stream(shared: SharedArguments) -> dict[str, Any]:
    return {} if shared.stream is None else {"current_stream": shared.stream}


def _quantized_output(shared: SharedArguments) -> dict[str, Any]:
    return {"d_dtype": E4M3, "norm_const_tensor": shared.norm, "discrete_col_sfd": True}


def _forward(
    shared: SharedArguments,
    a: Tokens,
    w: WeightArguments,
    bias: torch.Tensor | None,
    prob: torch.Tensor | None,
) -> dict[str, Any]:
    return {
        **_product(shared, a, w),
        **_quantized_output(shared),
        "c_dtype": torch.bfloat16,
        "bias_tensor": _bias(bias),
        "prob_tensor": _per_row("prob", prob, a.rows),
    }


def _derivative(a: Tokens, d: Derivative) -> dict[str, Any]:
    for name, tensor in (("prob", d.prob), ("dprob", d.dprob)):
        if tensor is not None:
            checks.fp32_rows(name, tensor, a.rows)
    return {
        "c_tensor": as_kernel_matrix(d.pre_activation),
        "prob_tensor": _per_row("prob", d.prob, a.rows),
        "dprob_tensor": _per_row("dprob", d.dprob, a.rows),
        "generate_dbias": d.want_bias_grad,
    }


def _per_row(name: str, values: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    if values is None:
        return None
    checks.float_rows(name, values, rows)
    return values.view(rows, 1, 1)


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.t()


def _gated(spec: ActivationSpec, prefix: str) -> dict[str, Any]:
    return {"act_func": f"{prefix}{spec.kind.row.act_func}", **_parameters(spec)}


def _unary(spec: ActivationSpec) -> dict[str, tuple[Any, Any]]:
    return {name: (value, None) for name, value in _parameters(spec).items()}


def _parameters(spec: ActivationSpec) -> dict[str, float]:
    return {
        name: getattr(spec, parameter.name) * factor
        for parameter in spec.kind.row.parameters
        for name, factor in parameter.frontend.items()
    }
