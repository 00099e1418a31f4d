# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Small tables on a GPU in Triton: offsets of groups, addresses of tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

RESULTS = 8
"""Results that one launch of `running_sums` has room for."""

_SUMS = ["groups", "slot", "results", "zeros", "narrow", *(f"s{i}" for i in range(RESULTS))]
_ADDRESSES = ["at", "count", *(f"a{i}" for i in range(8))]


def launch(
    counts: torch.Tensor,
    out: torch.Tensor,
    slot: int,
    strides: Sequence[int],
    zeros: Sequence[bool],
    narrow: Sequence[bool],
) -> None:
    """Write result i at int64 word ``i * slot`` of `out`; for int32 counts, they come last."""
    groups, results = counts.numel(), len(strides)
    told = _numbers(tuple(strides), tuple(zeros), tuple(narrow))
    arguments = (counts, out, groups, slot, results, *told)
    size = triton.next_power_of_2(groups)
    grid = (results + (counts.dtype is not torch.int64),)
    if counts.is_cuda and counts.get_device() != torch.cuda.current_device():
        with torch.cuda.device(counts.device):
            running_sums[grid](*arguments, size, num_warps=1 if size <= 256 else 4)
    else:
        running_sums[grid](*arguments, size, num_warps=1 if size <= 256 else 4)


@functools.lru_cache(maxsize=256)
def _numbers(
    strides: tuple[int, ...], zeros: tuple[bool, ...], narrow: tuple[bool, ...]
) -> tuple[int, ...]:
    """Return both lists of flags as bits, and the strides filled up."""
    bits = (sum(int(flag) << i for i, flag in enumerate(flags)) for flags in (zeros, narrow))
    return (*bits, *map(int, strides), *[0] * (RESULTS - len(strides)))


@triton.jit(do_not_specialize=_SUMS)
def running_sums(
    counts, out, groups, slot, results, zeros, narrow, s0, s1, s2, s3, s4, s5, s6, s7,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write one result for each program; the one past the results copies the counts."""
    index = tl.program_id(0)
    each = tl.arange(0, SIZE)
    count = tl.load(counts + each, mask=each < groups, other=0).to(tl.int64)
    at = out + index.to(tl.int64) * slot
    if index == results:
        tl.store(at + each, count, mask=each < groups)
    else:
        stride = tl.where(index == 0, s0, tl.where(index == 1, s1, s2))
        stride = tl.where(index == 3, s3, tl.where(index == 4, s4, stride))
        stride = tl.where(index == 5, s5, tl.where(index == 6, s6, stride))
        stride = tl.where(index == 7, s7, stride)
        total = tl.cumsum(count, 0) * stride
        zero = (zeros >> index) & 1
        if (narrow >> index) & 1:
            short = at.to(tl.pointer_type(tl.int32))
            tl.store(short + each + zero, total.to(tl.int32), mask=each < groups)
            tl.store(short, 0, mask=zero != 0)
        else:
            tl.store(at + each + zero, total, mask=each < groups)
            tl.store(at, 0, mask=zero != 0)


@triton.jit(do_not_specialize=_ADDRESSES)
def store_addresses(out, at, count, a0, a1, a2, a3, a4, a5, a6, a7):
    """Write up to eight numbers from place `at` on."""
    tl.store(out + at, a0)
    tl.store(out + at + 1, a1, mask=at + 1 < count)
    tl.store(out + at + 2, a2, mask=at + 2 < count)
    tl.store(out + at + 3, a3, mask=at + 3 < count)
    tl.store(out + at + 4, a4, mask=at + 4 < count)
    tl.store(out + at + 5, a5, mask=at + 5 < count)
    tl.store(out + at + 6, a6, mask=at + 6 < count)
    tl.store(out + at + 7, a7, mask=at + 7 < count)
