# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's grouped matrix products over grouped storage: one product of `gemm` for each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex.contract import Refusal, own, tex_function
from te_grouped_mlp.integration.standalone.tex.gemm import multiply, operand_axes, store
from te_grouped_mlp.integration.standalone.tex.grouped_operands import (
    INTO_STORAGE,
    OPERANDS,
    Groups,
    extents_fit,
    list_members,
    plain_members,
    same_count,
    storages,
)


def _add_bias(out: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Add a bias row to a written output in fp32: a pass of its own, so a second rounding."""
    addend = bias.double() if scale is None else bias.double() * scale.double().unsqueeze(1)
    out.copy_((out.double() + addend).float())


def _grouped_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    outputs: Sequence[torch.Tensor],
    alpha: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    a_axis, b_axis = operand_axes(transa, transb)
    a_groups, b_groups = Groups(A, a_axis), Groups(B, b_axis)
    for index, out in enumerate(outputs):
        if out.numel() == 0:
            continue
        product = multiply(a_groups.matrix(index), transa, b_groups.matrix(index), transb)
        store(out, product, float(alpha[index]), float(beta[index]))


def _into_storage(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
) -> Any:
    outputs = plain_members(D)
    _grouped_gemm(A, transa, B, transb, outputs, alpha, beta)
    if bias is None:
        return D
    rows = bias.rowwise_data.view(len(outputs), -1)
    start = 0
    for index, out in enumerate(outputs):
        end = start + out.shape[0]
        scale = None if bias_scale is None else bias_scale[start:end]
        if out.numel():
            _add_bias(out, rows[index], scale)
        start = end
    return D


@tex_function(
    Refusal("numbers of groups", "extensions/gemm.cpp:659", same_count("A", "B", "D")),
    *storages("A", "B", "D"),
    *OPERANDS,
    *INTO_STORAGE,
    gpu=False,
)
def te_general_grouped_gemm_for_grouped_tensor(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    workspace_setup: torch.Tensor,
    workspace_cublas: torch.Tensor,
    use_split_accumulator: bool,
    math_sm_count: int,
    /,
) -> Any:
    """Multiply group by group, into grouped storage.

    Args:
        A, B: Grouped storage, MXFP8, bf16 or fp16; row counts only with offsets beside them.
        D: Unquantized grouped storage. Rows past the groups keep what they hold.
        bias: Unquantized grouped storage of (groups, columns) in D's dtype, or None.
        bias_scale: fp32 (rows,) factor of the bias, or None.
        alpha, beta: fp32 tables of one value for each group.
        workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count: Not used.

    Returns:
        `D`.
    """
    del workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count
    return _into_storage(A, transa, B, transb, D, bias, bias_scale, alpha, beta)


@tex_function(
    own("class of A", lambda a: None if isinstance(a["A"], (list, tuple)) else "A is no list"),
    Refusal("numbers of groups", "extensions/gemm.cpp:723", same_count("B", "A", "D")),
    *storages("B", "D"),
    list_members("A"),
    *OPERANDS,
    *INTO_STORAGE,
    gpu=False,
)
def te_general_grouped_gemm_for_discrete_in(
    A: Sequence[Any],
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    workspace_setup: torch.Tensor,
    workspace_cublas: torch.Tensor,
    use_split_accumulator: bool,
    math_sm_count: int,
    /,
) -> Any:
    """The same with a list of dense operands as A."""
    del workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count
    return _into_storage(A, transa, B, transb, D, bias, bias_scale, alpha, beta)


def _bias_of_list(a: Any) -> str | None:
    return None if a["bias"] is None else "bias is given; allowed: None"


def _scale_of_list(a: Any) -> str | None:
    return None if a["bias_scale"] is None else "bias_scale is given; allowed: None"


@tex_function(
    Refusal("bias", "extensions/gemm.cpp:794", _bias_of_list),
    own("bias_scale", _scale_of_list),
    own("class of D", lambda a: None if isinstance(a["D"], (list, tuple)) else "D is no list"),
    Refusal("numbers of groups", "extensions/gemm.cpp:802", same_count("A", "B", "D")),
    *storages("A", "B"),
    list_members("D"),
    *OPERANDS,
    extents_fit(lambda a: a["D"]),
    gpu=False,
)
def te_general_grouped_gemm_for_discrete_out(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Sequence[torch.Tensor],
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    workspace_setup: torch.Tensor,
    workspace_cublas: torch.Tensor,
    use_split_accumulator: bool,
    math_sm_count: int,
    /,
) -> Sequence[torch.Tensor]:
    """The same with one plain output for each group (weight gradients) and no bias.

    A group without rows gives `beta * D`: zeros, or what D holds.
    """
    del bias, bias_scale, workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count
    _grouped_gemm(A, transa, B, transb, list(D), alpha, beta)
    return D
