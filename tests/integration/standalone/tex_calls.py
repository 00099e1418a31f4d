# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's functions as Transformer Engine 2.20.2 binds them: signatures, good calls, refused ones.

`SIGNATURES` are facts of the extension's source; lines are those of `extensions/pybind.cpp`.
`GOOD` makes the arguments of a call that every function takes, `REFUSED` changes them into one
call of each kind that the function refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.integration.standalone.test_quantize import make_matrix, make_quantizer

Arguments = dict[str, Any]
Change = Callable[[Any, Arguments], None]

_GROUP = "tensor: Tensor, quantizer: object, num_tensors: size_t, first_dims: Tensor?"
_GROUP += ", last_dims: Tensor? = None, tensor_offsets: Tensor? = None"
_FORWARD = "input: Tensor, act_scales: Tensor, quantizer: object"
_BACKWARD = "grad: Tensor, fwd_input: Tensor, act_scales: Tensor, quantizer: object"
_BETAS = ", beta1: float = 4.0, beta2: float = 25.0"
_CLAMP = ", limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0"
_INTERLEAVE = ", glu_interleave_size: int = 0"
_SCALE_GRAD = ", compute_scale_grad: bool = True"
_TABLES = "bias: object, bias_scale: Tensor?, alpha: Tensor, beta: Tensor, workspace_setup: Tensor"
_TABLES += ", workspace_cublas: Tensor, use_split_accumulator: bool, math_sm_count: int, /"

SIGNATURES: dict[str, tuple[int, str]] = {
    "quantize": (
        209,
        "tensor: Tensor, quantizer: object, output: object = None, noop: Tensor? = None",
    ),
    "dequantize": (211, "input: object, otype: DType"),
    "create_empty_quantized_tensor": (
        213,
        "quantizer: object, shape: list[size_t], dtype: dtype, device: device, pin_memory: bool",
    ),
    "group_quantize": (217, _GROUP + ", noop_flag: Tensor? = None, output: object = None"),
    "group_dequantize": (233, "input: object, otype: DType"),
    "bgrad_group_quantize": (235, _GROUP),
    "group_requantize_inplace": (
        238,
        "grouped_x: object, quantizer: object, num_tensors: size_t, first_dims: Tensor?, "
        "otype: DType, tensor_offsets: Tensor? = None, return_dequantized: bool = False",
    ),
    "bgrad_quantize": (244, "input: Tensor, quantizer: object"),
    "generic_gemm": (
        246,
        "A: object, transA: bool, B: object, transB: bool, D: object, quantizer: object, "
        "output_dtype: DType?, bias: Tensor?, bias_type: DType, gelu: bool, gelu_in: Tensor?, "
        "grad: bool, workspace: Tensor, workspace_size: size_t, accumulate: bool, "
        "use_split_accumulator: bool, comm_overlap: object = None, comm_type: object = None, "
        "extra_output: Tensor? = None, bulk_overlap: bool = False, alpha: float = 1.0, "
        "beta: float? = None",
    ),
    "scaled_swiglu": (319, _FORWARD + _INTERLEAVE),
    "scaled_situglu": (322, _FORWARD + _BETAS + _INTERLEAVE),
    "scaled_clamped_swiglu": (325, _FORWARD + _CLAMP + _INTERLEAVE),
    "scaled_srelu": (329, _FORWARD),
    "scaled_dswiglu": (331, _BACKWARD + _INTERLEAVE + _SCALE_GRAD),
    "scaled_dsituglu": (334, _BACKWARD + _BETAS + _INTERLEAVE + _SCALE_GRAD),
    "scaled_clamped_dswiglu": (338, _BACKWARD + _CLAMP + _INTERLEAVE + _SCALE_GRAD),
    "scaled_dsrelu": (343, _BACKWARD + _SCALE_GRAD),
    "split_quantize": (
        412,
        "tensor: Tensor, split_sections: list[size_t], quantizer_list: list[object], "
        "disable_bulk_allocation: bool = False",
    ),
    "get_grouped_gemm_setup_workspace_size": (415, "num_tensors: size_t, /"),
    "te_general_grouped_gemm": (
        417,
        "A: list[object], transa: bool, B: list[object], transb: bool, D: list[Tensor]?, "
        "D_type: DType, m_splits: list[int], bias: list[Tensor], bias_type: DType, "
        "single_output: bool, pre_gelu_out: list[Tensor], grad: bool, workspace: list[Tensor], "
        "workspaceSize: size_t, accumulate: bool, use_split_accumulator: bool, "
        "math_sm_count: int, /",
    ),
    "te_general_grouped_gemm_for_grouped_tensor": (
        419,
        "A: object, transa: bool, B: object, transb: bool, D: object, " + _TABLES,
    ),
    "te_general_grouped_gemm_for_discrete_in": (
        422,
        "A: list[object], transa: bool, B: object, transb: bool, D: object, " + _TABLES,
    ),
    "te_general_grouped_gemm_for_discrete_out": (
        425,
        "A: object, transa: bool, B: object, transb: bool, D: list[Tensor], " + _TABLES,
    ),
    "swizzle_scales_for_gemm_": (529, "tensor: object, /"),
    "grouped_swizzle_for_gemm": (540, "tensor: object, rowwise: bool, columnwise: bool"),
    "bulk_allocate": (
        545,
        "shapes: list[list[size_t]], dtypes: list[dtype], device: device? = None, "
        "alignments: list[size_t]? = None",
    ),
    "copy_data_ptrs_to_device": (600, "tensors: list[Tensor], device: device"),
    "splits_to_offsets": (602, "first_dims: Tensor, logical_last_dim: int"),
    "splits_to_offsets_multi": (
        605,
        "split_sizes: Tensor, device: device, *, strides: list[int], "
        "include_leading_zero: list[bool], dtypes: list[dtype], bulk_allocate: bool = False",
    ),
    "swizzle_scales_and_pack_ptrs_for_discrete_weights": (
        731,
        "data_tensors: list[Tensor], scale_tensors: list[Tensor], swizzle_type: str, "
        "device: device",
    ),
}
"""The binding of A and D as lists checks their elements in the call, with a TypeError of its own.

2.19.0 binds the same, but has no `scaled_situglu` and `scaled_dsituglu`.
"""

CPU = torch.device("cpu")
BF16, FP32, BYTE = 6, 4, 0
ROWS, COLUMNS, INNER = 384, 128, 128
SPLITS = (128, 256)


def counts(*splits: int) -> torch.Tensor:
    return torch.tensor(splits or SPLITS)


def edges(*splits: int, width: int = COLUMNS) -> torch.Tensor:
    return torch.tensor([0, *(splits or SPLITS)]).cumsum(0) * width


def matrix(rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16) -> Any:
    return make_matrix(rows, columns, dtype, special=False)


def grouped(
    tex: Any, *splits: int, plain: bool = False, width: int = COLUMNS, **options: Any
) -> Any:
    """Return grouped storage with row counts and offsets; MXFP8 unless plain."""
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import (
        GroupedTensorStorage,
    )

    splits = splits or SPLITS
    values = matrix(sum(splits), width)
    if not plain:
        quantizer = make_quantizer(tex, **options)
        return tex.group_quantize(values, quantizer, len(splits), counts(*splits))
    return GroupedTensorStorage(
        shape=tuple(values.shape), dtype=values.dtype, num_tensors=len(splits), quantizer=None,
        data=values.view(-1), first_dims=counts(*splits),
        tensor_offsets=edges(*splits, width=width),
    )  # fmt: skip


def uniform(tex: Any, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return plain grouped storage of two equal groups."""
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    return GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=2, tensor_shape=(rows, columns), internal=True,
        rowwise_data=matrix(2 * rows, columns, dtype).view(-1),
    )  # fmt: skip


# Good calls ---------------------------------------------------------------------------------------


def _group_arguments(tex: Any) -> Arguments:
    return {
        "tensor": matrix(), "quantizer": make_quantizer(tex), "num_tensors": 2,
        "first_dims": counts(), "last_dims": None, "tensor_offsets": edges(),
    }  # fmt: skip


def _gemm(tex: Any) -> Arguments:
    del tex
    return {
        "A": matrix(64, INNER), "transA": True, "B": matrix(96, INNER), "transB": False,
        "D": None, "quantizer": None, "output_dtype": BF16, "bias": None, "bias_type": BF16,
        "gelu": False, "gelu_in": None, "grad": False, "workspace": torch.empty(1),
        "workspace_size": 1, "accumulate": False, "use_split_accumulator": False,
        "comm_overlap": None, "comm_type": None, "extra_output": None, "bulk_overlap": False,
        "alpha": 1.0, "beta": None,
    }  # fmt: skip


def _lists(tex: Any) -> Arguments:
    empty = torch.empty(0)
    return {
        "A": [tex.quantize(matrix(64, INNER), make_quantizer(tex)) for _ in range(2)],
        "transa": True,
        "B": [tex.quantize(matrix(rows, INNER), make_quantizer(tex)) for rows in (32, 64)],
        "transb": False, "D": [matrix(96, 64)], "D_type": BF16, "m_splits": [32, 64],
        "bias": [empty, empty], "bias_type": BF16, "single_output": True,
        "pre_gelu_out": [empty, empty], "grad": False, "workspace": [torch.empty(1)],
        "workspaceSize": 1, "accumulate": False, "use_split_accumulator": False,
        "math_sm_count": 0,
    }  # fmt: skip


def _products(tex: Any, A: Any, B: Any, D: Any, layout: str = "TN", bias: Any = None) -> Arguments:
    del tex
    byte = torch.empty(1, dtype=torch.uint8)
    return {
        "A": A, "transa": layout[0] == "T", "B": B, "transb": layout[1] == "T", "D": D,
        "bias": bias, "bias_scale": None, "alpha": torch.ones(2), "beta": torch.zeros(2),
        "workspace_setup": byte, "workspace_cublas": byte, "use_split_accumulator": False,
        "math_sm_count": 0,
    }  # fmt: skip


def _into_storage(tex: Any) -> Arguments:
    weights = uniform(tex, 64, INNER)
    rows, out = grouped(tex, plain=True, width=INNER), grouped(tex, plain=True, width=64)
    return _products(tex, weights, rows, out, bias=uniform(tex, 1, 64))


def _listed_in(tex: Any) -> Arguments:
    given = _into_storage(tex)
    quantized = [tex.quantize(matrix(64, INNER), make_quantizer(tex)) for _ in range(2)]
    return {**given, "A": quantized, "B": grouped(tex, width=INNER)}


def _listed_out(tex: Any) -> Arguments:
    out = [matrix(64, COLUMNS, torch.float32) for _ in range(2)]
    return _products(tex, grouped(tex), grouped(tex, width=64), out, "NT")


def _forward(tex: Any) -> Arguments:
    del tex
    return {"input": matrix(32), "act_scales": torch.ones(32), "quantizer": None}


def _glu(tex: Any) -> Arguments:
    return {**_forward(tex), "glu_interleave_size": 32}


def _backward(tex: Any, width: int = COLUMNS) -> Arguments:
    given = _forward(tex)
    grad = matrix(32, width)
    return {
        "grad": grad, "fwd_input": given["input"], "act_scales": given["act_scales"],
        "quantizer": None, "compute_scale_grad": True,
    }  # fmt: skip


def _dglu(tex: Any) -> Arguments:
    return {**_backward(tex, COLUMNS // 2), "glu_interleave_size": 32}


def _pack(tex: Any) -> Arguments:
    quantized = [tex.quantize(matrix(64), make_quantizer(tex)) for _ in range(2)]
    return {
        "data_tensors": [one._rowwise_data for one in quantized],
        "scale_tensors": [one._rowwise_scale_inv for one in quantized],
        "swizzle_type": "mxfp8_rowwise", "device": CPU,
    }  # fmt: skip


GOOD: dict[str, Callable[[Any], Arguments]] = {
    "quantize": lambda tex: {
        "tensor": matrix(64), "quantizer": make_quantizer(tex),
        "output": tex.quantize(matrix(64), make_quantizer(tex)), "noop": torch.zeros(1),
    },
    "dequantize": lambda tex: {
        "input": tex.quantize(matrix(64), make_quantizer(tex)), "otype": FP32,
    },
    "create_empty_quantized_tensor": lambda tex: {
        "quantizer": make_quantizer(tex), "shape": [64, 96], "dtype": torch.bfloat16,
        "device": CPU, "pin_memory": False,
    },
    "group_quantize": lambda tex: {
        **_group_arguments(tex), "noop_flag": torch.zeros(1), "output": None,
    },
    "group_dequantize": lambda tex: {"input": grouped(tex, columnwise=False), "otype": FP32},
    "bgrad_group_quantize": _group_arguments,
    "group_requantize_inplace": lambda tex: {
        "grouped_x": grouped(tex, columnwise=False), "quantizer": make_quantizer(tex),
        "num_tensors": 2, "first_dims": counts(), "otype": BF16, "tensor_offsets": edges(),
        "return_dequantized": True,
    },
    "bgrad_quantize": lambda tex: {"input": matrix(64), "quantizer": make_quantizer(tex)},
    "generic_gemm": _gemm,
    "scaled_swiglu": _glu,
    "scaled_situglu": _glu,
    "scaled_clamped_swiglu": _glu,
    "scaled_srelu": _forward,
    "scaled_dswiglu": _dglu,
    "scaled_dsituglu": _dglu,
    "scaled_clamped_dswiglu": _dglu,
    "scaled_dsrelu": _backward,
    "split_quantize": lambda tex: {
        "tensor": matrix(96), "split_sections": [32, 64],
        "quantizer_list": [make_quantizer(tex)] * 2, "disable_bulk_allocation": False,
    },
    "get_grouped_gemm_setup_workspace_size": lambda tex: {"num_tensors": 2},  # noqa: ARG005
    "te_general_grouped_gemm": _lists,
    "te_general_grouped_gemm_for_grouped_tensor": _into_storage,
    "te_general_grouped_gemm_for_discrete_in": _listed_in,
    "te_general_grouped_gemm_for_discrete_out": _listed_out,
    "swizzle_scales_for_gemm_": lambda tex: {
        "tensor": tex.quantize(matrix(64), make_quantizer(tex)),
    },
    "grouped_swizzle_for_gemm": lambda tex: {
        "tensor": grouped(tex), "rowwise": True, "columnwise": True,
    },
    "bulk_allocate": lambda tex: {  # noqa: ARG005
        "shapes": [(3, 4), (5,)], "dtypes": [torch.uint8, torch.int64], "device": CPU,
        "alignments": [16, 16],
    },
    "copy_data_ptrs_to_device": lambda tex: {  # noqa: ARG005
        "tensors": [matrix(32)], "device": CPU,
    },
    "splits_to_offsets": lambda tex: {  # noqa: ARG005
        "first_dims": counts(), "logical_last_dim": COLUMNS,
    },
    "splits_to_offsets_multi": lambda tex: {  # noqa: ARG005
        "split_sizes": counts(), "device": CPU, "strides": [1], "include_leading_zero": [True],
        "dtypes": [torch.int64], "bulk_allocate": True,
    },
    "swizzle_scales_and_pack_ptrs_for_discrete_weights": _pack,
}  # fmt: skip


# Refused calls ------------------------------------------------------------------------------------


def to(name: str, value: Any) -> Change:
    """Replace an argument: by a value, or by what a function of the old one returns."""

    def change(tex: Any, a: Arguments) -> None:
        del tex
        a[name] = value(a[name]) if callable(value) else value

    return change


def many(**values: Any) -> Change:
    def change(tex: Any, a: Arguments) -> None:
        for name, value in values.items():
            to(name, value)(tex, a)

    return change


def on(name: str, attribute: str, value: Any) -> Change:
    """Replace an attribute of an argument."""

    def change(tex: Any, a: Arguments) -> None:
        del tex
        old = getattr(a[name], attribute)
        setattr(a[name], attribute, value(old) if callable(value) else value)

    return change


def both(*changes: Change) -> Change:
    def change(tex: Any, a: Arguments) -> None:
        for one in changes:
            one(tex, a)

    return change


def made(name: str, maker: Callable[[Any], Any]) -> Change:
    """Replace an argument by what is made with tex."""

    def change(tex: Any, a: Arguments) -> None:
        a[name] = maker(tex)

    return change


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps between them."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def subclassed(quantizer: Any) -> Any:
    copy = quantizer.copy()
    copy.__class__ = type("Subclass", (type(quantizer),), {})
    return copy


def another_format(old: Any) -> Any:
    """Return a quantizer of TE's that standalone has not, of the same FP8 dtype."""
    from transformer_engine.pytorch.tensor import Float8Quantizer

    quantizer = object.__new__(Float8Quantizer)
    quantizer.dtype = getattr(old, "dtype", None)
    return quantizer


def unused(quantizer: Any) -> Any:
    copy = quantizer.copy()
    copy.set_usage(rowwise=False, columnwise=False)
    return copy


QUANTIZER: dict[str, Change] = {
    "class of quantizer": to("quantizer", subclassed),
    "format of quantizer": to("quantizer", another_format),
}
GROUPS: dict[str, Change] = {
    **QUANTIZER,
    "dimensions of tensor": to("tensor", lambda t: t[None]),
    "no groups": many(num_tensors=0, first_dims=None, tensor_offsets=None),
    "num_tensors": many(
        tensor=lambda t: t.repeat(22, 1), num_tensors=66, tensor_offsets=None,
        first_dims=torch.full((66,), 128),
    ),
    "form of first_dims": to("first_dims", lambda t: t.int()),
    "form of tensor_offsets": to("tensor_offsets", lambda t: t[:-1]),
    "dtype of tensor": to("tensor", lambda t: t.double()),
    "whole blocks": many(tensor=lambda t: t[:, :100].contiguous(), tensor_offsets=None),
    "rows": many(tensor=lambda t: t[:320], first_dims=counts(128, 128), tensor_offsets=None),
    "equal rows": many(
        num_tensors=5, first_dims=None, tensor_offsets=None, tensor=lambda t: t[:128]
    ),
    "directions of quantizer": to("quantizer", unused),
    "stride of tensor": to("tensor", strided),
    "counts": many(first_dims=counts(256, 256), tensor_offsets=None),
}  # fmt: skip


def _equal_output(tex: Any, a: Arguments) -> None:
    a.update(first_dims=None, tensor_offsets=None, tensor=a["tensor"][:256])
    a["output"] = tex.group_quantize(a["tensor"], a["quantizer"], 2, None)


def storage(name: str) -> dict[str, Change]:
    """Return the refusals of compact MXFP8 storage under this name."""
    return {
        f"tables of {name}": on(name, "tensor_offsets", None),
        f"scales of {name}": on(name, "scale_inv", lambda scale: scale[:-512]),
        f"counts of {name}": on(name, "first_dims", counts(256, 256)),
    }


def _dense(name: str) -> dict[str, Change]:
    return {
        f"data of {name}": both(
            on(name, "_rowwise_data", None), on(name, "_columnwise_data", None)
        ),
        f"scales of {name}": on(name, "_rowwise_scale_inv", lambda scale: scale[:-32]),
        f"strides of {name}": on(name, "_rowwise_data", strided),
    }


_ACTIVATION: dict[str, Change] = {
    "number of scales": to("act_scales", lambda t: t[1:]),
    "dtype of act_scales": to("act_scales", lambda t: t.double()),
    "quantizer": made("quantizer", make_quantizer),
}
FORWARD: dict[str, Change] = {
    **_ACTIVATION,
    "dimensions": to("input", lambda t: t[0, 0]),
    "dtype of input": to("input", lambda t: t.double()),
}
BACKWARD: dict[str, Change] = {
    **_ACTIVATION,
    "dimensions": to("grad", lambda t: t[0, 0]),
    "shape of grad": to("grad", lambda t: t[1:]),
    "dtype of grad": to("grad", lambda t: t.double()),
    "dtype of fwd_input": to("fwd_input", lambda t: t.double()),
}


def _gated(name: str) -> dict[str, Change]:
    return {
        "width": to(name, lambda t: t[:, 1:]),
        "glu_interleave_size": to("glu_interleave_size", 48),
    }


def _one_plain(tex: Any, a: Arguments) -> None:
    a["A"] = tex.quantize(a["A"], make_quantizer(tex))


def _row_wise_only(tex: Any, a: Arguments) -> None:
    quantizer = make_quantizer(tex, columnwise=False)
    a.update(A=tex.quantize(a["A"], quantizer), B=tex.quantize(a["B"], quantizer), transA=False)


def _members_row_wise_only(tex: Any, a: Arguments) -> None:
    del tex
    for one in a["A"]:
        one._rowwise_data = None


PRODUCTS: dict[str, Change] = {
    "alpha and beta": to("alpha", torch.ones(1)),
}
INTO: dict[str, Change] = {
    **PRODUCTS,
    "dtype of D": made("D", lambda tex: grouped(tex, width=64)),
    "dtype of bias": on("bias", "rowwise_data", lambda t: t.int()),
    "shape of bias": made("bias", lambda tex: uniform(tex, 1, 32)),
    "width of bias": on("bias", "rowwise_data", lambda t: t.float()),
    "bias_scale": to("bias_scale", torch.ones(ROWS - 1)),
    "extents": made("A", lambda tex: uniform(tex, 32, INNER)),
}


def _fp32(tex: Any, a: Arguments) -> None:
    del tex
    for name in "AB":
        storage = a[name]
        storage.rowwise_data = storage.rowwise_data.float()


REFUSED: dict[str, dict[str, Change]] = {
    "quantize": {
        **QUANTIZER,
        "dtype of tensor": to("tensor", lambda t: t.int()),
        "dimensions of tensor": to("tensor", torch.tensor(1.0)),
        "whole blocks": to("tensor", lambda t: t[:33]),
        "noop": to("noop", torch.zeros(1, dtype=torch.int32)),
        "class of output": to("output", lambda t: t.dequantize()),
        **_dense("output"),
        "shape of output": to("tensor", lambda t: t[:32]),
    },
    "dequantize": {
        "no input": to("input", None),
        "class of input": to("input", lambda t: t.dequantize()),
        "dimensions of input": both(
            on("input", "_rowwise_data", lambda t: t.view(-1)),
            on("input", "_columnwise_data", None),
        ),
        **_dense("input"),
        "otype": to("otype", BYTE),
    },
    "create_empty_quantized_tensor": {**QUANTIZER, "whole blocks": to("shape", [33, 32])},
    "bgrad_quantize": {
        **QUANTIZER,
        "dtype of input": to("input", lambda t: t.double()),
        "dimensions of input": to("input", torch.tensor(1.0)),
    },
    "split_quantize": {
        "number of quantizers": to("quantizer_list", lambda q: q[1:]),
        "sum of sections": to("split_sections", [32, 96]),
    },
    "group_quantize": {
        **GROUPS,
        "noop_flag": to("noop_flag", torch.zeros(2)),
        "tables with output": lambda tex, a: a.update(
            output=tex.group_quantize(a["tensor"], a["quantizer"], 2, counts())
        ),
        "output": both(_equal_output, to("tensor", lambda t: t[:128])),
        "scales of output": both(_equal_output, on("output", "scale_inv", None)),
        "last_dims": to("last_dims", counts(COLUMNS, COLUMNS)),
        "scales of groups": many(
            num_tensors=6, first_dims=None, tensor_offsets=None,
            quantizer=lambda q: _gemm_ready(q),
        ),
    },
    "bgrad_group_quantize": {
        **GROUPS,
        "last_dims": to("last_dims", counts(COLUMNS, COLUMNS)),
        "sums of groups": many(num_tensors=6, first_dims=None, tensor_offsets=None),
    },
    "group_dequantize": {
        "quantizer of input": on("input", "quantizer", None),
        "directions of input": on("input", "rowwise_data", None),
        **storage("input"),
        "otype": to("otype", BYTE),
        "order of scales": on("input", "_with_gemm_swizzled_scales", True),
    },
    "grouped_swizzle_for_gemm": storage("tensor"),
    "group_requantize_inplace": {
        **QUANTIZER,
        "row-wise data of grouped_x": on("grouped_x", "scale_inv", None),
        "format of grouped_x": on("grouped_x", "quantizer", None),
        "column-wise data of ready grouped_x": both(
            on("grouped_x", "_with_gemm_swizzled_scales", True), to("return_dequantized", False)
        ),
        "values of ready grouped_x": lambda tex, a: a.update(grouped_x=grouped(tex, swizzled=True)),
        "column-wise data of grouped_x": made("grouped_x", grouped),
        "class of quantizer": both(
            to("quantizer", subclassed),
            lambda tex, a: setattr(a["grouped_x"], "quantizer", a["quantizer"]),  # noqa: ARG005
        ),
        "format of quantizer": both(
            to("quantizer", another_format),
            lambda tex, a: setattr(a["grouped_x"], "quantizer", a["quantizer"]),  # noqa: ARG005
        ),
        "extents of grouped_x": made(
            "grouped_x", lambda tex: grouped(tex, columnwise=False, width=96)
        ),
        **{k: v for k, v in storage("grouped_x").items() if not k.startswith("counts")},
        "form of first_dims": to("first_dims", lambda t: t.int()),
        "form of tensor_offsets": to("tensor_offsets", lambda t: t.int()),
        "counts": to("first_dims", counts(256, 128)),
    },
    "generic_gemm": {
        **QUANTIZER,
        "no operand": to("A", None),
        "class of operands": to("B", lambda t: t.int()),
        "dimensions of operands": to("B", torch.tensor(1.0).bfloat16()),
        "scaling of operands": _one_plain,
        "directions of operands": _row_wise_only,
        "inner sizes": to("A", matrix(64, 64)),
        "beta": to("beta", 0.5),
        "class of D": lambda tex, a: a.update(D=tex.quantize(matrix(96, 64), make_quantizer(tex))),
        "quantizer of D": lambda tex, a: a.update(D=matrix(96, 64), quantizer=make_quantizer(tex)),
        "shape of D": to("D", matrix(96, 32)),
        "dtype of D": to("D", matrix(96, 64, torch.float32)),
        "strides of operands": to("A", strided),
        "dtypes of operands": to("A", lambda t: t.half()),
        "stride of D": to("D", strided(matrix(96, 64))),
        "shape of bias": to("bias", torch.ones(1, dtype=torch.bfloat16)),
        "class of quantizer": made("quantizer", lambda tex: subclassed(make_quantizer(tex))),
        "options": to("gelu", True),
    },
    "te_general_grouped_gemm": {
        "no single output": to("D", None),
        "no output": many(D=None, single_output=False),
        "numbers of operands": to("A", lambda many: many[1:]),
        "class of operands": to("B", lambda many: [one.dequantize().int() for one in many]),
        "directions of operands": _members_row_wise_only,
        "inner sizes": lambda tex, a: a.update(
            A=[tex.quantize(matrix(64, 64), make_quantizer(tex)) for _ in range(2)]
        ),
        "strides of operands": lambda tex, a: setattr(  # noqa: ARG005
            a["A"][1], "_rowwise_data", strided(a["A"][1]._rowwise_data)
        ),
        "outputs": to("D", [matrix(64, 64)]),
        "options": to("pre_gelu_out", [torch.empty(1)] * 2),
    },
    "te_general_grouped_gemm_for_grouped_tensor": {
        **INTO,
        "numbers of groups": made("B", lambda tex: grouped(tex, 128, 128, 128, plain=True)),
        "tables of A": on("A", "rowwise_data", lambda t: t[1:]),
        "tables of B": on("B", "first_dims", lambda t: t.int()),
        "tables of D": on("D", "tensor_offsets", lambda t: t[1:]),
        "counts of A": on("A", "last_dims", counts(INNER, INNER)),
        "counts of B": on("B", "first_dims", counts(256, 256)),
        "counts of D": on("D", "first_dims", counts(256, 256)),
        "dtype of operands": _fp32,
        "scaling of operands": made("B", lambda tex: grouped(tex, width=INNER)),
        "directions of operands": on("B", "rowwise_data", None),
    },
    "te_general_grouped_gemm_for_discrete_in": {
        **INTO,
        "class of A": made("A", lambda tex: matrix(2, 2)),  # noqa: ARG005
        "numbers of groups": to("A", lambda many: many[1:]),
        "tables of B": on("B", "tensor_offsets", None),
        "tables of D": on("D", "tensor_offsets", lambda t: t[1:]),
        "counts of B": on("B", "first_dims", counts(256, 256)),
        "counts of D": on("D", "first_dims", counts(256, 256)),
        "members of A": to("A", lambda many: [strided(one.dequantize()) for one in many]),
        "dtype of operands": to("A", lambda many: [one.dequantize().float() for one in many]),
        "scaling of operands": to("A", lambda many: [one.dequantize().bfloat16() for one in many]),
        "directions of operands": _members_row_wise_only,
        "extents": lambda tex, a: a.update(
            A=[tex.quantize(matrix(32, INNER), make_quantizer(tex)) for _ in range(2)]
        ),
    },
    "te_general_grouped_gemm_for_discrete_out": {
        **PRODUCTS,
        "bias": to("bias", torch.ones(1)),
        "bias_scale": to("bias_scale", torch.ones(1)),
        "class of D": made("D", lambda tex: matrix(2, 2)),  # noqa: ARG005
        "numbers of groups": to("D", lambda many: many[1:]),
        "tables of A": on("A", "tensor_offsets", None),
        "tables of B": on("B", "tensor_offsets", None),
        "counts of A": on("A", "first_dims", counts(256, 256)),
        "counts of B": on("B", "first_dims", counts(256, 256)),
        "members of D": to("D", lambda many: [strided(one) for one in many]),
        "dtype of operands": on("A", "quantizer", another_format),
        "scaling of operands": made("A", lambda tex: grouped(tex, plain=True)),
        "directions of operands": on("B", "columnwise_data", None),
        "extents": to("D", [torch.zeros(64, 64)] * 2),
    },
    "scaled_swiglu": {**FORWARD, **_gated("input")},
    "scaled_situglu": {**FORWARD, **_gated("input")},
    "scaled_clamped_swiglu": {**FORWARD, **_gated("input")},
    "scaled_srelu": FORWARD,
    "scaled_dswiglu": {**BACKWARD, **_gated("fwd_input")},
    "scaled_dsituglu": {**BACKWARD, **_gated("fwd_input")},
    "scaled_clamped_dswiglu": {**BACKWARD, **_gated("fwd_input")},
    "scaled_dsrelu": BACKWARD,
    "swizzle_scales_for_gemm_": {"no tensor": to("tensor", None), **_dense("tensor")},
    "swizzle_scales_and_pack_ptrs_for_discrete_weights": {
        "number of scales": to("scale_tensors", lambda many: many[1:]),
        "swizzle_type": to("swizzle_type", "mxfp4"),
        "format": to("swizzle_type", "nvfp4"),
        "dimensions of scales": to("scale_tensors", lambda many: [one.view(-1) for one in many]),
        "shape of scales": to("data_tensors", lambda many: [one.repeat(1, 2) for one in many]),
        "members": to("scale_tensors", lambda many: [many[0], many[1][:64]]),
    },
    "bulk_allocate": {
        "number of dtypes": to("dtypes", [torch.uint8]),
        "number of alignments": to("alignments", [16]),
    },
    "copy_data_ptrs_to_device": {},
    "get_grouped_gemm_setup_workspace_size": {},
    "splits_to_offsets": {
        "dtype of first_dims": to("first_dims", lambda t: t.int()),
        "dimensions of first_dims": to("first_dims", lambda t: t[None]),
        "logical_last_dim": to("logical_last_dim", 0),
        "number of groups": to("first_dims", lambda t: t[:0]),
    },
    "splits_to_offsets_multi": {
        "number of results": to("strides", [1, 2]),
        "form of split_sizes": to("split_sizes", lambda t: t[None]),
        "dtypes of results": to("dtypes", [torch.int16]),
        "dtype of split_sizes": to("split_sizes", lambda t: t.double()),
        "stride of split_sizes": to("split_sizes", strided),
    },
}  # fmt: skip


def _gemm_ready(quantizer: Any) -> Any:
    copy = quantizer.copy()
    copy.optimize_for_gemm = True
    return copy


def refused() -> Iterator[tuple[str, str]]:
    """Yield every function and kind of refusal."""
    for function, kinds in REFUSED.items():
        for kind in kinds:
            yield function, kind
