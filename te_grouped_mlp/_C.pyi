# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Types of the CPU kernels; the contracts are in their docstrings (csrc/bindings.cpp)."""

def mxfp8_quantize(
    src: int,
    src_dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    row_data: int,
    row_scale: int,
    col_data: int,
    col_scale: int,
    fp8: int,
    swizzled: bool,
    splits: int,
    num_groups: int,
    two_d: bool,
    nan_in_scale: bool,
    threads: int,
) -> None: ...
def mxfp8_dequantize(
    data: int,
    scale: int,
    fp8: int,
    axis: int,
    swizzled: bool,
    rows: int,
    cols: int,
    out: int,
    out_dtype: int,
    splits: int,
    num_groups: int,
    threads: int,
) -> None: ...
def swizzle_scales(
    src: int,
    dst: int,
    axis: int,
    rows: int,
    cols: int,
    splits: int,
    num_groups: int,
    inverse: bool,
) -> None: ...
def column_sums(
    src: int,
    src_dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    splits: int,
    num_groups: int,
    out_f32: int,
    threads: int,
) -> None: ...
def weighted_column_sums(
    src: int,
    src_dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    weights_f32: int,
    splits: int,
    num_groups: int,
    out_f32: int,
    threads: int,
) -> None: ...
def row_dots(
    src: int,
    src_dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    table_f32: int,
    splits: int,
    num_groups: int,
    out_f32: int,
    threads: int,
) -> None: ...
def uniform_stride(
    table: object,
    tensors: object,
    tensor_type: type,
    parameter_type: type,
) -> int | None: ...
def simd_level() -> str: ...
def set_simd_level(name: str) -> None: ...
def available_simd_levels() -> list[str]: ...
