# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The Python call in front of tex's grouped GEMM, without the demand for CUDA tensors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

_LAYOUTS = ("TN", "NN", "NT")


def make(module: ModuleType, original: Any) -> Any:
    """Return `general_grouped_gemm_for_grouped_tensor` for Transformer Engine's gemm module."""
    del original

    def general_grouped_gemm_for_grouped_tensor(
        A: Any,
        B: Any,
        out: Any,
        *,
        layout: str = "TN",
        accumulate: bool = False,
        use_split_accumulator: bool = False,
        bias: Any = None,
        bias_scale: torch.Tensor | None = None,
        grad: bool = False,
        alpha: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> Any:
        """Multiply each group's operands; arguments and results as Transformer Engine's."""
        if layout not in _LAYOUTS:
            raise ValueError(f"layout is {layout!r}; allowed: {', '.join(_LAYOUTS)}")
        if grad:
            raise NotImplementedError("grad=True: the grouped GEMM computes no bias gradient")
        if isinstance(A, list) and isinstance(out, list):
            raise ValueError("A and out are both lists; at most one of them may be")
        if isinstance(out, list) and bias is not None:
            raise ValueError("bias with a list of outputs; add it after the GEMM")
        if bias_scale is not None and bias is None:
            raise ValueError("bias_scale without bias")
        data = B.rowwise_data if B.rowwise_data is not None else B.columnwise_data
        options = {"dtype": torch.float32, "device": data.device}
        if alpha is None:
            alpha = torch.ones(B.num_tensors, **options)
        if beta is None:
            beta = torch.full((B.num_tensors,), float(accumulate), **options)
        name = "te_general_grouped_gemm_for_" + _kind(A, out)
        workspace = torch.empty(0, dtype=torch.uint8, device=data.device)
        return getattr(module.tex, name)(
            A,
            layout[0] == "T",
            B,
            layout[1] == "T",
            out,
            bias,
            bias_scale,
            alpha,
            beta,
            workspace,
            workspace,
            use_split_accumulator,
            0,
        )

    return general_grouped_gemm_for_grouped_tensor


def _kind(A: Any, out: Any) -> str:
    if isinstance(out, list):
        return "discrete_out"
    return "discrete_in" if isinstance(A, list) else "grouped_tensor"
