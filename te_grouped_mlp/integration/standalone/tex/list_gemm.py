# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's product of two lists of dense operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    Size,
    TeDType,
    own,
    tex_function,
)
from te_grouped_mlp.integration.standalone.tex.dense_storage import (
    known_operand,
    packed_operand,
    usable_operand,
)
from te_grouped_mlp.integration.standalone.tex.gemm import (
    dense_matrix,
    multiply,
    operand_axes,
    product_shape,
    store,
)


def _each(question: Any) -> Any:
    """Ask a question about every operand of two lists."""

    def rule(a: Arguments) -> str | None:
        axes = operand_axes(a["transa"], a["transb"])
        for name, axis in zip("AB", axes, strict=True):
            for index, value in enumerate(a[name]):
                words = question(f"{name}[{index}]", value, axis)
                if words is not None:
                    return str(words)
        return None

    return rule


def _as_many(a: Arguments) -> str | None:
    counts = {name: len(a[name]) for name in ("A", "B", "bias", "pre_gelu_out")}
    if not a["single_output"] and a["D"] is not None:
        counts["D"] = len(a["D"])
    if len(set(counts.values())) == 1:
        return None
    return f"numbers of entries are {counts}; allowed: as many"


def _allocated(a: Arguments) -> str | None:
    if a["D"] is not None or not a["single_output"]:
        return None
    return "D is None and single_output True; allowed: one tensor"


def _returned(a: Arguments) -> str | None:
    return "D is None; standalone writes tensors that it is given" if a["D"] is None else None


def _inner_sizes(a: Arguments) -> str | None:
    for index, (one, other) in enumerate(zip(a["A"], a["B"], strict=True)):
        if product_shape(one, a["transa"], other, a["transb"]) is None:
            return f"A[{index}] and B[{index}] do not share their inner size"
    return None


def _outputs(a: Arguments) -> list[torch.Tensor]:
    """Return one output for each group, cut from a single one by the products' rows."""
    if not a["single_output"]:
        return list(a["D"])
    shapes = [
        product_shape(one, a["transa"], other, a["transb"])
        for one, other in zip(a["A"], a["B"], strict=True)
    ]
    rows = [shape[0] for shape in shapes if shape is not None]
    return list(torch.split(a["D"][0][: sum(rows)], rows))


def _fitting_outputs(a: Arguments) -> str | None:
    shapes = [
        product_shape(one, a["transa"], other, a["transb"])
        for one, other in zip(a["A"], a["B"], strict=True)
    ]
    if not a["single_output"]:
        found = [tuple(out.shape) for out in a["D"]]
        if found != shapes:
            return f"D has shapes {found}; allowed: {shapes}"
    else:
        rows, shape = sum(shape[0] for shape in shapes if shape is not None), a["D"][0].shape
        if len(shape) != 2 or shape[0] < rows or any(s[1:] != shape[1:] for s in shapes if s):
            return f"D has shape {tuple(shape)}; allowed: {rows} rows for products of {shapes}"
    for out in a["D"]:
        if not out.is_contiguous():
            return f"D has stride {tuple(out.stride())}; allowed: contiguous"
    return None


def _gelu(a: Arguments) -> str | None:
    if all(tensor.numel() == 0 for tensor in a["pre_gelu_out"]):
        return None
    return "pre_gelu_out is given; standalone has no GELU"


@tex_function(
    Refusal("no single output", "extensions/gemm.cpp:474", _allocated),
    own("no output", _returned, NotImplementedError),
    own("numbers of operands", _as_many),
    own("class of operands", _each(lambda n, v, _: known_operand(n, v)), NotImplementedError),
    Refusal("directions of operands", "common/gemm/cublaslt_gemm.cu:185", _each(usable_operand)),
    Refusal("inner sizes", "extensions/gemm.cpp:49", _inner_sizes),
    own("strides of operands", _each(lambda name, value, _: packed_operand(name, value))),
    own("outputs", _fitting_outputs),
    own("options", _gelu, NotImplementedError),
    gpu=False,
)
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: TeDType,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: TeDType,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspaceSize: Size,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
    /,
) -> Sequence[torch.Tensor]:
    """Multiply lists of dense operands.

    Args:
        A, B: One operand for each group, as in `generic_gemm`.
        D: One output for each group, or with `single_output` one whose rows the products share.
        bias: One tensor for each group; empty tensors for none. Forward: added before rounding.
            With `grad`: written with the sum of B's rows.
        accumulate: Add to the outputs instead of replacing them.
        D_type, m_splits, bias_type, workspace, workspaceSize, use_split_accumulator,
            math_sm_count: Unused.
        pre_gelu_out: Empty tensors: GELU is not implemented.

    Returns:
        `bias`.
    """
    del D_type, m_splits, bias_type, pre_gelu_out, workspace, workspaceSize
    del use_split_accumulator, math_sm_count
    outputs = _outputs(
        {"A": A, "transa": transa, "B": B, "transb": transb, "D": D, "single_output": single_output}
    )
    a_axis, b_axis = operand_axes(transa, transb)
    for a, b, out, vector in zip(A, B, outputs, bias, strict=True):
        b_matrix = dense_matrix(b, b_axis)
        product = multiply(dense_matrix(a, a_axis), transa, b_matrix, transb)
        if vector.numel() and grad:
            vector.copy_(b_matrix.sum(dim=0))
        elif vector.numel():
            product = product + vector.double()
        store(out, product, 1.0, float(accumulate))
    return bias
