# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's grouped matrix products: one product of `gemm` for each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.standalone.tex import grouped, mxfp8
from te_grouped_mlp.standalone.tex.gemm import dense_matrix, multiply, operand_axes, store
from te_grouped_mlp.standalone.tex.guard import tex_function


@tex_function
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor],
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """Multiply lists of dense operands.

    Args:
        A, B: One operand for each group, as in `generic_gemm`.
        D: One output for each group, or with `single_output` one whose rows the groups share.
        m_splits: Row counts of the groups in that single output.
        bias: One tensor for each group; empty tensors for none. Forward: added before rounding.
            With `grad`: written with the sum of B's rows.
        accumulate: Add to the outputs instead of replacing them.
        D_type, bias_type, workspace, workspaceSize, use_split_accumulator, math_sm_count: Unused.
        pre_gelu_out: Empty tensors: GELU is not implemented.

    Returns:
        `bias`.
    """
    del D_type, bias_type, workspace, workspaceSize, use_split_accumulator, math_sm_count
    if any(tensor.numel() for tensor in pre_gelu_out):
        raise NotImplementedError("te_general_grouped_gemm with GELU; standalone has none")
    outputs = list(torch.split(D[0], list(m_splits))) if single_output else list(D)
    a_axis, b_axis = operand_axes(transa, transb)
    for a, b, out, vector in zip(A, B, outputs, bias, strict=True):
        b_matrix = dense_matrix("te_general_grouped_gemm", b, b_axis)
        a_matrix = dense_matrix("te_general_grouped_gemm", a, a_axis)
        product = multiply(a_matrix, transa, b_matrix, transb)
        if vector.numel() and grad:
            vector.copy_(b_matrix.sum(dim=0))
        elif vector.numel():
            product = product + vector.double()
        store(out, product, 1.0, float(accumulate))
    return bias


class _Groups:
    """The operands of a grouped GEMM, one float64 matrix at a time."""

    def __init__(self, function: str, operand: Any, axis: int) -> None:
        self._function = function
        self._operand = operand
        self._axis = axis
        self._quantized: list[mxfp8.Operand] = []
        self._plain: Sequence[Any] = ()
        if isinstance(operand, (list, tuple)):
            self._plain = operand
        elif operand.quantizer is None:
            self._plain = _plain_members(function, operand)
        else:
            mxfp8.check_quantizer(function, operand.quantizer)
            self._quantized = list(grouped.members(function, operand, axis))

    def __len__(self) -> int:
        return len(self._quantized) or len(self._plain)

    def matrix(self, index: int) -> torch.Tensor:
        """Return the values of one group."""
        if self._quantized:
            return self._quantized[index].dequantize(torch.float64)
        return dense_matrix(self._function, self._plain[index], self._axis)


def _plain_members(function: str, storage: Any) -> Sequence[torch.Tensor]:
    """Return views of the groups of unquantized grouped storage."""
    rows, columns = storage.logical_shape
    splits = grouped.grouped_splits(function, storage, 1).tolist()
    live = sum(splits)
    return torch.split(storage.rowwise_data.view(rows, columns)[:live], splits)


def _factor(values: torch.Tensor, index: int) -> float:
    """Return a group's alpha or beta: tables hold one value for each group, or one for all."""
    return float(values[index if values.numel() > 1 else 0])


def _add_bias(out: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Add a bias row to a written output in fp32: a pass of its own, so a second rounding."""
    addend = bias.double() if scale is None else bias.double() * scale.double().unsqueeze(1)
    out.copy_((out.double() + addend).float())


def _grouped_gemm(
    function: str,
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    outputs: Sequence[torch.Tensor],
    alpha: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    a_axis, b_axis = operand_axes(transa, transb)
    a_groups, b_groups = _Groups(function, A, a_axis), _Groups(function, B, b_axis)
    if not len(a_groups) == len(b_groups) == len(outputs):
        raise ValueError(
            f"{function}: A has {len(a_groups)} groups, B {len(b_groups)}, D {len(outputs)}"
        )
    for index, out in enumerate(outputs):
        if out.numel() == 0:
            continue
        product = multiply(a_groups.matrix(index), transa, b_groups.matrix(index), transb)
        store(out, product, _factor(alpha, index), _factor(beta, index))


@tex_function
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
) -> Any:
    """Multiply group by group, into grouped storage.

    Args:
        A: Grouped storage or a list of dense operands.
        B: Grouped storage.
        D: Unquantized grouped storage. Rows past the groups keep what they hold.
        bias: Unquantized grouped storage of (groups, columns), or None.
        bias_scale: fp32 factor of the bias for each row, or None.
        alpha, beta: fp32 tables of one value, or one for each group.
        workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count: Not used.

    Returns:
        `D`.
    """
    del workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count
    name = "te_general_grouped_gemm"
    outputs = _plain_members(name, D)
    _grouped_gemm(name, A, transa, B, transb, outputs, alpha, beta)
    if bias is None:
        return D
    rows = bias.rowwise_data.view(len(outputs), -1)
    start = 0
    for index, out in enumerate(outputs):
        end = start + out.shape[0]
        scale = None if bias_scale is None else bias_scale.view(-1)[start:end]
        if out.numel():
            _add_bias(out, rows[index], scale)
        start = end
    return D


@tex_function
def te_general_grouped_gemm_for_discrete_in(A: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """The same with a list of dense operands as A."""
    return te_general_grouped_gemm_for_grouped_tensor(A, *args, **kwargs)


@tex_function
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
) -> Sequence[torch.Tensor]:
    """The same with one plain output for each group (weight gradients) and no bias.

    A group without rows gives `beta * D`: zeros, or what D holds.
    """
    del workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count
    name = "te_general_grouped_gemm_for_discrete_out"
    if bias is not None or bias_scale is not None:
        raise ValueError(f"{name}: bias is given; allowed: None")
    _grouped_gemm(name, A, transa, B, transb, list(D), alpha, beta)
    return D
