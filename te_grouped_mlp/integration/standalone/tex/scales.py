# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions that bring the scales of dense MXFP8 tensors into the order a GEMM reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.integration.standalone import on_gpu
from te_grouped_mlp.integration.standalone.tex import mxfp8
from te_grouped_mlp.integration.standalone.tex.codes import COLUMN, ROW
from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    Rule,
    own,
    tex_function,
)
from te_grouped_mlp.integration.standalone.tex.dense_storage import (
    SLOTS,
    dense_operand,
    is_mxfp8,
    scale_problem,
    slots,
    stride_problem,
)
from te_grouped_mlp.op.tensors import memory


def _of_compact_mxfp8(rule: Rule) -> Rule:
    def checked(a: Arguments) -> str | None:
        tensor = a["tensor"]
        return rule(a) if is_mxfp8(tensor) and not tensor._with_gemm_swizzled_scales else None

    return checked


def _some_data(a: Arguments) -> str | None:
    return None if slots(a["tensor"]) else "tensor has no data; allowed: at least one direction"


@tex_function(
    Refusal(
        "no tensor",
        "common.cpp:115",
        lambda a: "tensor is None; allowed: a tensor" if a["tensor"] is None else None,
    ),
    Refusal("data of tensor", "type_converters.cpp:62", _of_compact_mxfp8(_some_data)),
    Refusal(
        "scales of tensor",
        "common/transformer_engine.cpp:98",
        _of_compact_mxfp8(lambda a: scale_problem("tensor", a["tensor"])),
    ),
    own("strides of tensor", _of_compact_mxfp8(lambda a: stride_problem("tensor", a["tensor"]))),
)
def swizzle_scales_for_gemm_(tensor: Any, /) -> None:
    """Swizzle the scales of every direction whose data a dense MXFP8 tensor holds.

    The tensor gets new scale buffers; the old ones keep their content. Nothing happens if its
    scales are swizzled already or its format has none to swizzle.
    """
    if not is_mxfp8(tensor) or tensor._with_gemm_swizzled_scales:
        return
    for axis, prefix in SLOTS.items():
        if getattr(tensor, f"{prefix}_data") is None:
            continue
        operand = dense_operand(tensor, axis)
        swizzled = mxfp8.run_swizzle(
            operand.scale.view(torch.uint8), axis, operand.rows, operand.columns
        )
        setattr(tensor, f"{prefix}_scale_inv", swizzled)
    tensor._with_gemm_swizzled_scales = True


_AXES = {"mxfp8_rowwise": ROW, "mxfp8_columnwise": COLUMN}


def _as_many(a: Arguments) -> str | None:
    counts = len(a["data_tensors"]), len(a["scale_tensors"])
    if counts[0] == counts[1]:
        return None
    return f"data_tensors has {counts[0]} entries, scale_tensors {counts[1]}; allowed: as many"


def _known_type(a: Arguments) -> str | None:
    if a["swizzle_type"] in (*_AXES, "nvfp4"):
        return None
    return f"swizzle_type is {a['swizzle_type']!r}; allowed: {', '.join(_AXES)}"


def _mxfp8_type(a: Arguments) -> str | None:
    if a["swizzle_type"] in _AXES:
        return None
    return f"swizzle_type is {a['swizzle_type']!r}; standalone implements {', '.join(_AXES)}"


def _matrices(a: Arguments) -> str | None:
    if not a["scale_tensors"] or a["scale_tensors"][0].dim() == 2:
        return None
    shape = tuple(a["scale_tensors"][0].shape)
    return f"scale_tensors have shape {shape}; allowed: two dimensions"


def _scales_of_data(a: Arguments) -> str | None:
    if not a["scale_tensors"]:
        return None
    shape, data = tuple(a["scale_tensors"][0].shape), a["data_tensors"][0]
    rows, columns = math.prod(data.shape[:-1]), data.shape[-1] if data.dim() else 1
    wanted = mxfp8.scale_shape(rows, columns, _AXES[a["swizzle_type"]])
    if shape == wanted:
        return None
    return f"scale_tensors have shape {shape}; allowed: {wanted}, for data of {rows} x {columns}"


def _alike(a: Arguments) -> str | None:
    for name in ("data_tensors", "scale_tensors"):
        shapes = {tensor.shape for tensor in a[name]}
        if len(shapes) > 1:
            return f"{name} have shapes {sorted(map(tuple, shapes))}; allowed: one"
        if not all(tensor.is_contiguous() for tensor in a[name]):
            return f"{name} has one that is not contiguous; allowed: contiguous ones"
    return None


@tex_function(
    Refusal("number of scales", "extensions/grouped_mlp_experimental.cpp:27", _as_many),
    Refusal("swizzle_type", "extensions/grouped_mlp_experimental.cpp:41", _known_type),
    own("format", _mxfp8_type, NotImplementedError),
    Refusal("dimensions of scales", "extensions/grouped_mlp_experimental.cpp:95", _matrices),
    Refusal("shape of scales", "common/transformer_engine.cpp:98", _scales_of_data),
    own("members", _alike),
)
def swizzle_scales_and_pack_ptrs_for_discrete_weights(
    data_tensors: Sequence[torch.Tensor],
    scale_tensors: Sequence[torch.Tensor],
    swizzle_type: str,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Swizzle the compact scales of separate weights and list the addresses a kernel needs.

    Args:
        data_tensors: The weights' bytes, one tensor for each group.
        scale_tensors: Their compact scales, two-dimensional and of one shape.
        swizzle_type: "mxfp8_rowwise" or "mxfp8_columnwise".
        device: Where the results lie.

    Returns:
        int64 addresses of the data, int64 addresses of the swizzled scales, and the bytes that
        hold those scales: the caller keeps them alive as long as the addresses are used.
    """
    count, axis = len(data_tensors), _AXES[swizzle_type]
    if count == 0:
        none = memory.empty((0,), torch.int64, device)
        return none, none.clone(), memory.empty((0,), torch.uint8, device)
    shape = tuple(scale_tensors[0].shape)
    # The padded shape is all the layout depends on.
    rows, columns = (shape[0], shape[1] * 32) if axis == ROW else (shape[0] * 32, shape[1])
    if on_gpu.serves(scale_tensors[0]):
        return _pack_on_gpu(data_tensors, scale_tensors, axis, torch.device(device))
    stride = mxfp8.round_up(shape[0] * shape[1], 16)
    addresses = torch.zeros(2 * count, dtype=torch.int64, device=device)
    swizzled = torch.zeros(count * stride, dtype=torch.uint8, device=device)
    for index, scale in enumerate(scale_tensors):
        part = mxfp8.run_swizzle(scale.view(torch.uint8), axis, rows, columns)
        swizzled[index * stride : index * stride + part.numel()] = part.view(-1)
        addresses[index] = data_tensors[index].data_ptr()
        addresses[count + index] = swizzled.data_ptr() + index * stride
    return addresses[:count], addresses[count:], swizzled


def _pack_on_gpu(
    data_tensors: Sequence[torch.Tensor],
    scale_tensors: Sequence[torch.Tensor],
    axis: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same with one copy of all addresses and one launch for all scales."""
    count, shape = len(data_tensors), tuple(scale_tensors[0].shape)
    sources = [scale.contiguous() for scale in scale_tensors]
    size = shape[0] * shape[1]
    swizzled = memory.empty((count * size,), torch.uint8, sources[0].device)
    first = swizzled.data_ptr()
    table = on_gpu.addresses(
        [data.data_ptr() for data in data_tensors]
        + [first + index * size for index in range(count)]
        + [source.data_ptr() for source in sources],
        device,
    )
    on_gpu.block_scale().swizzle_listed(
        table[2 * count :], shape, swizzled, axis_column=axis == COLUMN
    )
    return table[:count], table[count : 2 * count], swizzled
