# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's matrix products: exact operands, products and sums in float64, one rounding at the store.

That rounding passes through fp32 for 16-bit outputs, as on a GPU, whose accumulators are fp32.

Layouts, all row-major: TN `out = B A^T` (forward, A the weight), NN `out = B A` (input gradient),
NT `out = B^T A` (weight gradient). A is used row-wise if transposed, B if not.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex import rules
from te_grouped_mlp.integration.standalone.tex.codes import COLUMN, ROW, torch_dtype
from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    Size,
    TeDType,
    own,
    tex_function,
)
from te_grouped_mlp.integration.standalone.tex.dense_storage import (
    dense_operand,
    extents,
    is_mxfp8,
    known_operand,
    operand_shape,
    packed_operand,
    usable_operand,
)
from te_grouped_mlp.integration.standalone.tex.quantize import quantize
from te_grouped_mlp.op.tensors import memory


def dense_matrix(value: Any, axis: int) -> torch.Tensor:
    """Return an operand's values as a float64 matrix; leading dimensions count as rows."""
    if is_mxfp8(value):
        return dense_operand(value, axis).dequantize(torch.float64)
    columns = value.shape[-1] if value.dim() else 1
    return value.detach().reshape(math.prod(value.shape[:-1]), columns).double()


def multiply(A: torch.Tensor, transa: bool, B: torch.Tensor, transb: bool) -> torch.Tensor:
    """Multiply two float64 matrices in the layout (transa, transb)."""
    return (B.t() if transb else B) @ (A.t() if transa else A)


def operand_axes(transa: bool, transb: bool) -> tuple[int, int]:
    """Return the directions in which A and B are read: the one along the inner size."""
    return (ROW if transa else COLUMN), (COLUMN if transb else ROW)


def store(out: torch.Tensor, product: torch.Tensor, alpha: float, beta: float) -> None:
    """Write `alpha * product + beta * out`, rounded once; with beta 0, `out` is not read."""
    out = out.view(product.shape)
    if alpha != 1.0:
        product = product * alpha
    if beta != 0.0:
        product = product + beta * out.double()
    out.copy_(product)


def _nominal_dtype(value: Any) -> torch.dtype:
    """Return the high-precision dtype an operand stands for; a storage keeps it in `_dtype`."""
    return value._dtype if is_mxfp8(value) else value.dtype


# What is wrong with operands ----------------------------------------------------------------------


def product_shape(A: Any, transa: bool, B: Any, transb: bool) -> tuple[int, ...] | None:
    """Return the shape of a product, with B's leading dimensions where its rows are the output's.

    None where the operands do not share their inner size.
    """
    (a_rows, a_columns), (b_rows, b_columns) = map(extents, (A, B))
    if (a_columns if transa else a_rows) != (b_rows if transb else b_columns):
        return None
    leading = (b_columns,) if transb else operand_shape(B)[:-1]
    return (*leading, a_rows if transa else a_columns)


def _operand_rule(question: Any) -> Any:
    def rule(a: Arguments) -> str | None:
        axes = operand_axes(a["transA"], a["transB"])
        found: str | None = question("A", a["A"], axes[0]) or question("B", a["B"], axes[1])
        return found

    return rule


def _given(name: str, value: Any, axis: int) -> str | None:
    del axis
    return f"{name} is None; allowed: an operand" if value is None else None


def _dimensions(name: str, value: Any, axis: int) -> str | None:
    del axis
    return None if operand_shape(value) else f"{name} has no dimensions; allowed: at least one"


def _same_scaling(a: Arguments) -> str | None:
    if is_mxfp8(a["A"]) == is_mxfp8(a["B"]):
        return None
    return "one of A and B is quantized; allowed: both or none"


def _same_dtype(A: Any, B: Any) -> str | None:
    if is_mxfp8(A) or A.dtype == B.dtype:
        return None
    return f"A is {A.dtype} and B {B.dtype}; allowed: one dtype"


def _product(a: Arguments) -> tuple[int, ...] | None:
    return product_shape(a["A"], a["transA"], a["B"], a["transB"])


def _inner_sizes(a: Arguments) -> str | None:
    if _product(a) is not None:
        return None
    shapes = operand_shape(a["A"]), operand_shape(a["B"])
    return (
        f"A {shapes[0]} (transA={a['transA']}) and B {shapes[1]} (transB={a['transB']}) do not "
        "share their inner size"
    )


def _beta(a: Arguments) -> str | None:
    if a["accumulate"] or not a["beta"]:
        return None
    return f"beta is {a['beta']} and accumulate False; allowed: 0"


def _shape_of_d(a: Arguments) -> str | None:
    D, wanted = a["D"], _product(a)
    if D is None or tuple(D.shape) == wanted:
        return None
    return f"D has shape {tuple(D.shape)}; allowed: {wanted}"


def _dtype_of_d(a: Arguments) -> str | None:
    D, wanted = a["D"], a["output_dtype"]
    if D is None or wanted is None or D.dtype == torch_dtype(wanted):
        return None
    return f"D is {D.dtype}; allowed: {torch_dtype(wanted)}, the output_dtype"


def _plain_d(a: Arguments) -> str | None:
    D = a["D"]
    if D is None or (isinstance(D, torch.Tensor) and not hasattr(D, "get_data_tensors")):
        return None
    return f"D is a {type(D).__name__}; standalone writes plain tensors"


def _quantized_d(a: Arguments) -> str | None:
    if a["D"] is None or a["quantizer"] is None:
        return None
    return "a plain D is given with a quantizer; allowed: one of them"


def _bias(a: Arguments) -> str | None:
    bias, shape = a["bias"], _product(a)
    if bias is None or a["grad"] or shape is None or tuple(bias.shape) == shape[-1:]:
        return None
    return f"bias has shape {tuple(bias.shape)}; allowed: {shape[-1:]}"


def _options(a: Arguments) -> str | None:
    wanted = (
        ("gelu", bool(a["gelu"])),
        ("comm_overlap", a["comm_overlap"] is not None),
        ("comm_type", a["comm_type"] is not None),
        ("bulk_overlap", bool(a["bulk_overlap"])),
    )
    given = [name for name, value in wanted if value]
    return f"{', '.join(given)} given; standalone has none" if given else None


@tex_function(
    Refusal("no operand", "extensions/gemm.cpp:159", _operand_rule(_given)),
    own(
        "class of operands",
        _operand_rule(lambda name, value, _: known_operand(name, value)),
        NotImplementedError,
    ),
    Refusal("dimensions of operands", "extensions/gemm.cpp:183", _operand_rule(_dimensions)),
    Refusal("scaling of operands", "common/gemm/cublaslt_gemm.cu:106", _same_scaling),
    Refusal(
        "directions of operands", "common/gemm/cublaslt_gemm.cu:185", _operand_rule(usable_operand)
    ),
    Refusal("inner sizes", "extensions/gemm.cpp:49", _inner_sizes),
    Refusal("beta", "extensions/gemm.cpp:195", _beta),
    own("class of D", _plain_d, NotImplementedError),
    Refusal("quantizer of D", "common.cpp:131", _quantized_d),
    Refusal("shape of D", "extensions/gemm.cpp:206", _shape_of_d),
    Refusal("dtype of D", "extensions/gemm.cpp:210", _dtype_of_d),
    own("strides of operands", _operand_rule(lambda name, value, _: packed_operand(name, value))),
    own("dtypes of operands", lambda a: _same_dtype(a["A"], a["B"])),
    rules.contiguous("D"),
    own("shape of bias", _bias),
    *rules.quantizer(optional=True),
    own("options", _options, NotImplementedError),
    gpu=False,
)
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: TeDType | None,
    bias: torch.Tensor | None,
    bias_type: TeDType,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: Size,
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
            rows, in the output's dtype.
        accumulate, alpha, beta: `alpha * product + beta * D`, with beta 1 for None.
        bias_type, gelu_in, workspace, workspace_size, use_split_accumulator: Not used.
        gelu, comm_overlap, comm_type, bulk_overlap: Not implemented.

    Returns:
        [D, bias gradient or None, None, extra_output].
    """
    del bias_type, gelu_in, workspace, workspace_size, use_split_accumulator
    del gelu, comm_overlap, comm_type, bulk_overlap
    a_axis, b_axis = operand_axes(transA, transB)
    b_matrix = dense_matrix(B, b_axis)
    product = multiply(dense_matrix(A, a_axis), transA, b_matrix, transB)
    if D is None:
        dtype = _nominal_dtype(A) if output_dtype is None else torch_dtype(output_dtype)
        shape = product_shape(A, transA, B, transB)
        assert shape is not None
        D = memory.empty(shape, dtype, "cpu")
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b_matrix.sum(dim=0).to(D.dtype)
    elif bias is not None:
        # The bias joins the sum before it is rounded, and alpha does not scale it.
        product, alpha = product * alpha + bias.double(), 1.0
    beta = 1.0 if beta is None else float(beta)
    store(D, product, float(alpha), beta if accumulate else 0.0)
    return [D if quantizer is None else quantize(D, quantizer), bias_grad, None, extra_output]
