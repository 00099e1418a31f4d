# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's matrix products: exact operands, products and sums in float64, one rounding at the store.

That rounding passes through fp32 for 16-bit outputs, as on a GPU, whose accumulators are fp32.

Layouts, all row-major: TN `out = B A^T` (forward, A the weight), NN `out = B A` (input gradient),
NT `out = B^T A` (weight gradient). A is used row-wise if transposed, B if not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op import memory
from te_grouped_mlp.standalone.tex import grouped, mxfp8
from te_grouped_mlp.standalone.tex.codes import COLUMN, ROW, source_code, torch_dtype
from te_grouped_mlp.standalone.tex.guard import tex_function
from te_grouped_mlp.standalone.tex.quantize import dense_operand, is_mxfp8, quantize


def _dense_matrix(function: str, value: Any, axis: int) -> torch.Tensor:
    """Return an operand's values as a float64 matrix; leading dimensions count as rows."""
    if is_mxfp8(value):
        return dense_operand(function, value, axis).dequantize(torch.float64)
    if not isinstance(value, torch.Tensor) or hasattr(value, "get_data_tensors"):
        raise NotImplementedError(
            f"{function} with {type(value).__name__}; standalone implements MXFP8 and plain tensors"
        )
    source_code(value.dtype)
    columns = value.shape[-1] if value.dim() else 1
    return value.detach().reshape(math.prod(value.shape[:-1]), columns).double()


def _product(A: torch.Tensor, transa: bool, B: torch.Tensor, transb: bool) -> torch.Tensor:
    """Multiply two float64 matrices in the layout (transa, transb)."""
    left = B.t() if transb else B
    right = A.t() if transa else A
    if left.shape[1] != right.shape[0]:
        raise ValueError(
            f"GEMM operands {tuple(A.shape)} (transa={transa}) and {tuple(B.shape)} "
            f"(transb={transb}) do not share their inner size"
        )
    return left @ right


def _axes(transa: bool, transb: bool) -> tuple[int, int]:
    """Return the directions in which A and B are read: the one along the inner size."""
    return (ROW if transa else COLUMN), (COLUMN if transb else ROW)


def _store(out: torch.Tensor, product: torch.Tensor, alpha: float, beta: float) -> None:
    """Write `alpha * product + beta * out`, rounded once; with beta 0, `out` is not read."""
    if out.numel() != product.numel() or out.shape[-1] != product.shape[1]:
        raise ValueError(
            f"GEMM output has shape {tuple(out.shape)}, the product {tuple(product.shape)}"
        )
    out = out.view(product.shape)
    if alpha != 1.0:
        product = product * alpha
    if beta != 0.0:
        product = product + beta * out.double()
    out.copy_(product)


def _nominal_dtype(value: Any) -> torch.dtype:
    """Return the high-precision dtype an operand stands for; a storage keeps it in `_dtype`."""
    return value._dtype if is_mxfp8(value) else value.dtype


def _refuse_overlap(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise NotImplementedError(f"generic_gemm with {name}; standalone has none")


@tex_function
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: torch.Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Multiply two dense operands.

    Args:
        A, B: Plain fp32, fp16 or bf16 tensors, or MXFP8 ones (scales compact or swizzled).
        transA, transB: The layout.
        D: Contiguous output, or None for a new one in `output_dtype` (None: A's dtype).
        quantizer: MXFP8Quantizer for the output, or None.
        bias: Forward: (columns,) added before the rounding. With `grad`: asks for the sum of B's
            rows, in the bias's dtype.
        accumulate, alpha, beta: `alpha * product + beta * D`, with beta 1 for None.
        bias_type, gelu_in, workspace, workspaceSize, use_split_accumulator: Not used.
        gelu, comm_overlap, comm_type, bulk_overlap: Not implemented.

    Returns:
        [D, bias gradient or None, None, extra_output].
    """
    del bias_type, gelu_in, workspace, workspaceSize, use_split_accumulator
    _refuse_overlap(
        gelu=gelu,
        comm_overlap=comm_overlap is not None,
        comm_type=comm_type is not None,
        bulk_overlap=bulk_overlap,
    )
    a_axis, b_axis = _axes(transA, transB)
    b_matrix = _dense_matrix("generic_gemm", B, b_axis)
    product = _product(_dense_matrix("generic_gemm", A, a_axis), transA, b_matrix, transB)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b_matrix.sum(dim=0).to(bias.dtype)
    if D is None:
        dtype = _nominal_dtype(A) if output_dtype is None else torch_dtype(output_dtype)
        leading = tuple(_shape(B)[:-1]) if not transB else (product.shape[0],)
        D = memory.empty((*leading, product.shape[1]), dtype, "cpu")
    if bias is not None and not grad:
        # The bias joins the sum before it is rounded, whatever alpha scales the product by.
        product, alpha = product * alpha + bias.double(), 1.0
    factor = (1.0 if beta is None else float(beta)) if accumulate else 0.0
    _store(D, product, float(alpha), factor)
    if quantizer is not None:
        D = quantize(D, quantizer)
    return [D, bias_grad, None, extra_output]


def _shape(value: Any) -> Sequence[int]:
    if is_mxfp8(value):
        data = value._rowwise_data if value._rowwise_data is not None else value._columnwise_data
        return tuple(data.shape)
    return tuple(value.shape)


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
    a_axis, b_axis = _axes(transa, transb)
    for a, b, out, vector in zip(A, B, outputs, bias, strict=True):
        b_matrix = _dense_matrix("te_general_grouped_gemm", b, b_axis)
        a_matrix = _dense_matrix("te_general_grouped_gemm", a, a_axis)
        product = _product(a_matrix, transa, b_matrix, transb)
        if vector.numel() and grad:
            vector.copy_(b_matrix.sum(dim=0))
        elif vector.numel():
            product = product + vector.double()
        _store(out, product, 1.0, float(accumulate))
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
        return _dense_matrix(self._function, self._plain[index], self._axis)


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
    a_axis, b_axis = _axes(transa, transb)
    a_groups, b_groups = _Groups(function, A, a_axis), _Groups(function, B, b_axis)
    if not len(a_groups) == len(b_groups) == len(outputs):
        raise ValueError(
            f"{function}: A has {len(a_groups)} groups, B {len(b_groups)}, D {len(outputs)}"
        )
    for index, out in enumerate(outputs):
        if out.numel() == 0:
            continue
        product = _product(a_groups.matrix(index), transa, b_groups.matrix(index), transb)
        _store(out, product, _factor(alpha, index), _factor(beta, index))


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
