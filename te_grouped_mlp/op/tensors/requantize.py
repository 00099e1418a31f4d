# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Row-wise quantized tokens of a caller's made ready for the products, for any width."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex

from te_grouped_mlp.op.formats import SCALE_TILE_OUTER
from te_grouped_mlp.op.tensors import scale_layout


def ready(
    grouped: Any, quantizer: Any, num_tensors: int, otype: Any, *, return_dequantized: bool
) -> torch.Tensor | None:
    """Do what ``tex.group_requantize_inplace`` does, also where features are no multiple of 128.

    Transformer Engine 2.19 to 2.20.2 refuses those; its other functions take them, one after the
    other.

    Args:
        grouped: MXFP8 storage of (rows, features): row-wise data with compact scales, or ready;
            with the row counts (multiples of 128) and offsets of the call. It gets new scales and
            a column-wise copy; no buffer is written.
        quantizer: A quantizer of the op's own, whose column-wise usage says whether that copy is
            wanted.
        num_tensors: Number of groups.
        otype: TE's dtype through which the values pass.
        return_dequantized: Also return the values.

    Returns:
        None, or the (rows, features) values, unwritten past the valid rows. Never synchronises.

    Raises:
        ValueError: The storage has another format than the quantizer, no row-wise data, or a
            column-wise copy with compact scales.
        RuntimeError: Transformer Engine says the same, of features that it takes.
    """
    groups = {
        "num_tensors": num_tensors,
        "first_dims": grouped.first_dims,
        "tensor_offsets": grouped.tensor_offsets,
    }
    rows, features = (int(size) for size in grouped.logical_shape)
    if grouped._with_gemm_swizzled_scales or not features % SCALE_TILE_OUTER:
        values = tex.group_requantize_inplace(
            grouped_x=grouped,
            quantizer=quantizer,
            otype=otype,
            return_dequantized=return_dequantized,
            **groups,
        )
        assert values is None or isinstance(values, torch.Tensor)
        return values
    _require_rows_alone(grouped, quantizer)
    values = None
    if quantizer.columnwise_usage or return_dequantized:
        plain = tex.group_dequantize(input=grouped, otype=otype)
        values = plain.rowwise_data.view(rows, features)
    grouped.scale_inv = scale_layout.tiled_rows(grouped.scale_inv, rows, features)
    grouped._with_gemm_swizzled_scales = True
    if quantizer.columnwise_usage:
        own = quantizer.copy()
        own.set_usage(rowwise=False, columnwise=True)
        column = tex.group_quantize(tensor=values, quantizer=own, **groups)
        grouped.columnwise_data = column.columnwise_data
        grouped.columnwise_scale_inv = column.columnwise_scale_inv
    return values if return_dequantized else None


def _require_rows_alone(grouped: Any, quantizer: Any) -> None:
    name = f"a GroupedTensor of shape {tuple(int(size) for size in grouped.logical_shape)}"
    own = grouped.quantizer
    if type(own) is not type(quantizer) or own.dtype != quantizer.dtype:
        raise ValueError(f"{name} was quantized by {own!r}; allowed: the format of {quantizer!r}")
    if grouped.rowwise_data is None or grouped.scale_inv is None:
        raise ValueError(f"{name} has no row-wise data and scales, which the product reads")
    if grouped.columnwise_data is not None:
        raise ValueError(
            f"{name} has a column-wise copy with compact scales; allowed: row-wise data alone, or "
            "both copies with scales in tile order"
        )
