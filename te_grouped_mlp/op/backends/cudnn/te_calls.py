# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What this backend has of Transformer Engine: tables of addresses, and the dense matrix product.

TE is imported when a function is called, so that the backend can be imported, and asked for its
plan, where TE is not.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

import torch

from te_grouped_mlp.op.backends.cudnn import alignment
from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.tensors.operands import Axis, QuantizedCopy, WeightOperand
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape

_SWIZZLES = {Axis.ROW: "mxfp8_rowwise", Axis.COLUMN: "mxfp8_columnwise"}


def addresses(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the addresses of tensors as int64 (G,) on `device`.

    The caller keeps the tensors alive. The values travel as kernel arguments: nothing
    synchronises, and a captured graph keeps them.
    """
    table = _tex().copy_data_ptrs_to_device(list(tensors), device)
    assert isinstance(table, torch.Tensor)
    return table


def swizzled_tables(
    w: WeightOperand, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring compact scales into tile order.

    Args:
        w: Weights with compact scales.
        device: Of the result.

    Returns:
        int64 (G,) addresses of the data, int64 (G,) addresses of the new scales, and the uint8
        buffer that holds these, expert after expert in steps of whole tiles; the caller keeps it.
    """
    rows, cols = w.shape
    wanted = (row_scale_shape if w.axis is Axis.ROW else column_scale_shape)(rows, cols, MXFP8)
    experimental = _tex().grouped_mlp_experimental
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        experimental.swizzle_scales_and_pack_ptrs_for_discrete_weights(
            list(w.data), [scale.view(wanted) for scale in w.scale], _SWIZZLES[w.axis], device
        )
    )
    return tables


def dense_forward(a: QuantizedCopy, w: WeightOperand, out: torch.Tensor) -> None:
    """Write ``a W^T`` of one expert into `out` (rows, N), contiguous; all rows."""
    _gemm("TN", _weight(w), _matrix(a), out)


def dense_dgrad(a: QuantizedCopy, w: WeightOperand, out: torch.Tensor) -> None:
    """Write ``a W`` of one expert into `out` (rows, K), contiguous; all rows."""
    _gemm("NN", _weight(w), _matrix(a), out, split=True)


def dense_wgrad(
    x: QuantizedCopy, dy: QuantizedCopy, out: torch.Tensor, *, accumulate: bool
) -> None:
    """Write, or add, ``dy^T x`` of all rows into `out` (N, K), contiguous."""
    _gemm("NT", _matrix(x), _matrix(dy), out, split=True, accumulate=accumulate)


def _gemm(
    layout: str,
    a: Any,
    b: Any,
    out: torch.Tensor,
    *,
    split: bool = False,
    accumulate: bool = False,
) -> None:
    module = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    # The split accumulator in the backward products alone is TE's own choice in every linear.
    module.general_gemm(
        a, b, out_dtype=out.dtype, layout=layout, out=out, accumulate=accumulate,
        use_split_accumulator=split,
    )  # fmt: skip


def _weight(w: WeightOperand) -> Any:
    copy = QuantizedCopy(w.data[0].view(w.shape), w.scale[0], w.axis, w.swizzled)
    return _matrix(alignment.readable_scales(copy))


def _matrix(copy: QuantizedCopy) -> Any:
    """Return TE's object for one quantized copy; it shares the memory."""
    storage = importlib.import_module("transformer_engine.pytorch.tensor.storage")
    rows, cols = copy.data.shape
    wanted = row_scale_shape if copy.axis is Axis.ROW else column_scale_shape
    data_and_scale = (
        copy.data.view(torch.uint8),
        copy.scale.view(torch.uint8).view(wanted(rows, cols, MXFP8)),
    )
    row, column = (
        (data_and_scale, (None, None)) if copy.axis is Axis.ROW else ((None, None), data_and_scale)
    )
    return storage.mxfp8_tensor_storage.MXFP8TensorStorage(
        *row, *column, _e4m3(), None, copy.swizzled, fake_dtype=torch.bfloat16
    )


@functools.cache
def _e4m3() -> Any:
    return importlib.import_module("transformer_engine.pytorch.constants").TE_DType[
        torch.float8_e4m3fn
    ]


@functools.cache
def _tex() -> Any:
    return importlib.import_module("transformer_engine_torch")
