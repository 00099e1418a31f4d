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
from te_grouped_mlp.standalone.tex.codes import COLUMN, ROW, source_code, torch_dtype
from te_grouped_mlp.standalone.tex.guard import tex_function
from te_grouped_mlp.standalone.tex.quantize import dense_operand, is_mxfp8, quantize


def dense_matrix(function: str, value: Any, axis: int) -> torch.Tensor:
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


def multiply(A: torch.Tensor, transa: bool, B: torch.Tensor, transb: bool) -> torch.Tensor:
    """Multiply two float64 matrices in the layout (transa, transb)."""
    left = B.t() if transb else B
    right = A.t() if transa else A
    if left.shape[1] != right.shape[0]:
        raise ValueError(
            f"GEMM operands {tuple(A.shape)} (transa={transa}) and {tuple(B.shape)} "
            f"(transb={transb}) do not share their inner size"
        )
    return left @ right


def operand_axes(transa: bool, transb: bool) -> tuple[int, int]:
    """Return the directions in which A and B are read: the one along the inner size."""
    return (ROW if transa else COLUMN), (COLUMN if transb else ROW)


def store(out: torch.Tensor, product: torch.Tensor, alpha: float, beta: float) -> None:
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


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
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
    _refuse(gelu=gelu, comm_overlap=comm_overlap, comm_type=comm_type, bulk_overlap=bulk_overlap)
    a_axis, b_axis = operand_axes(transA, transB)
    b_matrix = dense_matrix("generic_gemm", B, b_axis)
    product = multiply(dense_matrix("generic_gemm", A, a_axis), transA, b_matrix, transB)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b_matrix.sum(dim=0).to(bias.dtype)
    elif bias is not None:
        # The bias joins the sum before it is rounded, and alpha does not scale it.
        product, alpha = product * alpha + bias.double(), 1.0
    if D is None:
        D = _new_output(A, B, transB, product.shape, output_dtype)
    beta = 1.0 if beta is None else float(beta)
    store(D, product, float(alpha), beta if accumulate else 0.0)
    return [D if quantizer is None else quantize(D, quantizer), bias_grad, None, extra_output]


def _new_output(
    A: Any, B: Any, transb: bool, shape: Sequence[int], output_dtype: Any
) -> torch.Tensor:
    """Allocate an output that keeps B's leading dimensions where its rows are the output's."""
    dtype = _nominal_dtype(A) if output_dtype is None else torch_dtype(output_dtype)
    leading = (shape[0],) if transb else _shape(B)[:-1]
    return memory.empty((*leading, shape[1]), dtype, "cpu")


def _shape(value: Any) -> Sequence[int]:
    if is_mxfp8(value):
        data = value._rowwise_data if value._rowwise_data is not None else value._columnwise_data
        return tuple(data.shape)
    return tuple(value.shape)
