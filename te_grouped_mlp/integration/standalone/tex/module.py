# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Assembles the module object that Transformer Engine imports as `transformer_engine_torch`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from te_grouped_mlp.integration.standalone.tex import (
    activations,
    dense_storage,
    enums,
    gemm,
    grouped,
    grouped_gemm,
    grouped_scales,
    grouped_storage,
    list_gemm,
    offsets,
    quantize,
    scales,
)
from te_grouped_mlp.integration.standalone.tex.placeholder import make_placeholder
from te_grouped_mlp.op.environment import STANDALONE_MARK

NAME = "transformer_engine_torch"

# Transformer Engine asks for the version to choose a path: at 13.3 and above it takes the grouped
# GEMM that the GPU takes too.
CUBLASLT_VERSION = 130400

ENUMS = (
    "DType",
    "FP8FwdTensors",
    "FP8BwdTensors",
    "NVTE_Fused_Attn_Backend",
    "NVTE_QKV_Format",
    "NVTERoutingMapFormat",
    "NVTEQBHistogramMode",
)
FUNCTIONS: dict[ModuleType, tuple[str, ...]] = {
    quantize: (
        "quantize",
        "split_quantize",
        "bgrad_quantize",
        "create_empty_quantized_tensor",
    ),
    scales: ("swizzle_scales_for_gemm_",),
    dense_storage: ("dequantize",),
    grouped: ("group_quantize", "bgrad_group_quantize"),
    grouped_storage: ("group_dequantize",),
    grouped_scales: ("group_requantize_inplace", "grouped_swizzle_for_gemm"),
    offsets: (
        "bulk_allocate",
        "copy_data_ptrs_to_device",
        "get_grouped_gemm_setup_workspace_size",
        "splits_to_offsets",
        "splits_to_offsets_multi",
    ),
    gemm: ("generic_gemm",),
    list_gemm: ("te_general_grouped_gemm",),
    grouped_gemm: (
        "te_general_grouped_gemm_for_discrete_in",
        "te_general_grouped_gemm_for_discrete_out",
        "te_general_grouped_gemm_for_grouped_tensor",
    ),
    activations: tuple(activations.FUNCTIONS),
}


def get_cublasLt_version() -> int:
    """Return the version that decides which path Transformer Engine takes."""
    return CUBLASLT_VERSION


def get_cudnn_version() -> int:
    """Return 0: there is no cuDNN."""
    return 0


def get_num_cublas_streams() -> int:
    """Return 1: there are no streams to spread a grouped GEMM over."""
    return 1


def _missing(name: str) -> Any:
    """Answer a name that standalone has not: a placeholder that raises when it is called."""
    if name.startswith("__"):
        raise AttributeError(f"module {NAME} has no attribute {name}")
    return make_placeholder(f"{NAME}.{name}")


def build() -> ModuleType:
    """Return a new module object with every function and enum, and placeholders for the rest."""
    module = ModuleType(NAME, "transformer_engine_torch in C++ and Triton, by te-grouped-mlp.")
    setattr(module, STANDALONE_MARK, True)
    for name in ENUMS:
        setattr(module, name, getattr(enums, name))
    for source, names in FUNCTIONS.items():
        for name in names:
            setattr(module, name, getattr(source, name))
    for version in (get_cublasLt_version, get_cudnn_version, get_num_cublas_streams):
        setattr(module, version.__name__, version)
    experimental = ModuleType(f"{NAME}.grouped_mlp_experimental")
    for function in (scales.swizzle_scales_and_pack_ptrs_for_discrete_weights,):
        setattr(experimental, function.__name__, function)
    module.grouped_mlp_experimental = experimental  # type: ignore[attr-defined]
    vars(module)["__getattr__"] = _missing
    return module
