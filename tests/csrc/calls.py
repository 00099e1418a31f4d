# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The extension's functions on tensors, with poisoned outputs, and inputs that stress them."""

import itertools
from collections.abc import Iterator

import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors.capacity import Span, span
from tests.csrc.naive_mxfp8 import POISON, scale_shape

SOURCE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
BIT_TYPES = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float64: torch.int64,
}


def each_level_and_threads() -> Iterator[tuple[str, int]]:
    """Every SIMD level of this CPU with 1 and 3 threads; afterwards the level is the first one."""
    before = _C.simd_level()
    try:
        for level, threads in itertools.product(_C.available_simd_levels(), (1, 3)):
            _C.set_simd_level(level)
            yield level, threads
    finally:
        _C.set_simd_level(before)


def host_splits(splits: list[int] | None) -> tuple[torch.Tensor | None, Span | None, int]:
    """(tensor to keep alive, its memory, number of groups)."""
    if splits is None:
        return None, None, 0
    held = torch.tensor(splits, dtype=torch.int64)
    return held, span(held), len(splits)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A fresh tensor whose bytes are all POISON."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((count,), POISON, dtype=torch.uint8).view(dtype).reshape(shape)


def quantize(
    x: torch.Tensor,
    fp8: int = 0,
    rows_wanted: bool = True,
    cols_wanted: bool = True,
    swizzled: bool = False,
    splits: list[int] | None = None,
    two_d: bool = False,
    nan_in_scale: bool = False,
    threads: int = 1,
) -> tuple[torch.Tensor, ...]:
    """(row data, row scale, column data, column scale); those not wanted are left out."""
    rows, cols = x.shape
    buffers: list[torch.Tensor] = []
    spans: list[Span | None] = []
    for axis, wanted in enumerate((rows_wanted, cols_wanted)):
        if not wanted:
            spans += [None, None]
            continue
        buffers += [poisoned((rows, cols)), poisoned(scale_shape(rows, cols, axis))]
        spans += map(span, buffers[-2:])
    held, where, groups = host_splits(splits)
    _C.mxfp8_quantize(
        *(span(x), SOURCE_TYPES[x.dtype], rows, cols, x.stride(0)),
        *spans,
        *(fp8, swizzled, where, groups, two_d, nan_in_scale, threads),
    )
    del held
    return tuple(buffers)


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    fp8: int,
    axis: int,
    swizzled: bool,
    dtype: torch.dtype,
    splits: list[int] | None = None,
    threads: int = 1,
) -> torch.Tensor:
    """The whole poisoned output."""
    rows, cols = data.shape
    out = poisoned((rows, cols), dtype)
    held, where, groups = host_splits(splits)
    _C.mxfp8_dequantize(
        *(span(data), span(scale), fp8, axis, swizzled, rows, cols),
        *(span(out), SOURCE_TYPES[dtype], where, groups, threads),
    )
    del held
    return out


def sample(rows: int, cols: int, dtype: torch.dtype, kind: str, seed: int) -> torch.Tensor:
    """Inputs by kind: "normal", "wide" (all exponents), "bits" (any bit pattern, NaN and Inf
    included), "special" (normal values, zero blocks, and a few NaN, Inf, subnormals, -0)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    if kind == "normal":
        return x.to(dtype)
    if kind == "wide":
        limit = 20 if dtype == torch.float16 else 140
        return (x * torch.exp2(_integers(x, -limit, limit, generator).double())).to(dtype)
    if kind == "bits":
        info = torch.iinfo(BIT_TYPES[dtype])
        # The upper bound is exclusive, so the pattern of all ones but the sign is never drawn.
        bits = torch.randint(info.min, info.max, (rows, cols), generator=generator)
        return bits.to(BIT_TYPES[dtype]).view(dtype)
    assert kind == "special"
    x = x.to(dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4
    for value in (float("nan"), float("inf"), -float("inf"), tiny, -0.0, torch.finfo(dtype).max):
        chosen = torch.rand(rows, cols, generator=generator) < 0.01
        x[chosen] = value
    x[torch.rand(rows, generator=generator) < 0.3] = 0
    x[:, torch.rand(cols, generator=generator) < 0.3] = tiny
    return x


def _integers(like: torch.Tensor, low: int, high: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, like.shape, generator=generator)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and memory, NaN payloads included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
