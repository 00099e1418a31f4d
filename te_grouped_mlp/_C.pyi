# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Types of the CPU kernels; the contracts are in their docstrings (csrc/bindings.cpp)."""

_Span = tuple[int, int] | None

def mxfp8_quantize(
    src: _Span,
    src_dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    row_data: _Span,
    row_scale: _Span,
    col_data: _Span,
    col_scale: _Span,
    fp8: int,
    swizzled: bool,
    splits: _Span,
    num_groups: int,
    two_d: bool,
    nan_in_scale: bool,
    threads: int,
) -> None: ...
def mxfp8_dequantize(
    data: _Span,
    scale: _Span,
    fp8: int,
    axis: int,
    swizzled: bool,
    rows: int,
    cols: int,
    out: _Span,
    out_dtype: int,
    splits: _Span,
    num_groups: int,
    threads: int,
) -> None: ...
def swizzle_scales(
    src: _Span,
    dst: _Span,
    axis: int,
    rows: int,
    cols: int,
    splits: _Span,
    num_groups: int,
    inverse: bool,
) -> None: ...
def column_sums(
    src: _Span,
    src_dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    splits: _Span,
    num_groups: int,
    out_f32: _Span,
    threads: int,
) -> None: ...
def weighted_column_sums(
    src: _Span,
    src_dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    weights_f32: _Span,
    splits: _Span,
    num_groups: int,
    out_f32: _Span,
    threads: int,
) -> None: ...
def row_dots(
    src: _Span,
    src_dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    table_f32: _Span,
    splits: _Span,
    num_groups: int,
    out_f32: _Span,
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
