# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels of `split_guard`, in Triton, which every torch that can drive a GPU brings."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

SLOTS = 16
"""Tensors that one launch of `poison` takes."""

_PROGRAMS, _BLOCK = 132, 1024


def check(
    sizes: torch.Tensor,
    out: torch.Tensor,
    report: torch.Tensor,
    rows: int,
    multiple: int,
    full: bool,
) -> None:
    """Write the sizes, or zeros, and the fault to `out`; a fault also to `report`, if that is 0.

    Args:
        sizes: int32 or int64 (G,), contiguous.
        out: int64 (G + 1,).
        report: int64 (1,), memory of the host that the device can write.
        rows, multiple, full: Of the buffer; of every size; whether the sizes must fill the buffer.
    """
    groups = sizes.numel()
    size = triton.next_power_of_2(groups)
    shift = multiple.bit_length() - 1
    with _on(sizes):
        check_sizes[(1,)](
            sizes, out, report, groups, rows, shift, int(full), size,
            num_warps=1 if size <= 256 else 4,
        )  # fmt: skip


def poison(fault: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write NaN to contiguous tensors of 2-byte or wider floats if `fault` is not 0."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    halves = [tensor.numel() * (tensor.element_size() // 2) for tensor in tensors]
    # Filled up with an address, since the compiled kernel is one for 64-bit numbers.
    fill = -len(tensors) % SLOTS
    addresses += addresses[:1] * fill
    halves += [0] * fill
    with _on(fault):
        for start in range(0, len(addresses), SLOTS):
            part = slice(start, start + SLOTS)
            write_nan[(_PROGRAMS,)](fault, *addresses[part], *halves[part], _BLOCK, num_warps=4)


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    if tensor.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


@triton.jit(do_not_specialize=["groups", "rows", "shift", "full"])
def check_sizes(sizes, out, report, groups, rows, shift, full, SIZE: tl.constexpr):
    """One program: all sizes are looked at together. The faults are those of `Fault`."""
    group = tl.arange(0, SIZE)
    inside = group < groups
    size = tl.load(sizes + group, mask=inside, other=0).to(tl.int64)
    wrong = (size < 0) | (((size >> shift) << shift) != size)
    first = tl.min(tl.where(wrong, group, SIZE), 0)
    # Bounded, so that no sum of sizes runs over.
    total = tl.sum(tl.minimum(tl.maximum(size, 0), 1 << 40), 0)
    other = tl.where(total > rows, 2, tl.where((full != 0) & (total != rows), 3, 0))
    fault = tl.where(first < SIZE, 1, other)
    tl.store(out + group, tl.where(fault == 0, size, 0), mask=inside)
    tl.store(out + groups, fault.to(tl.int64))
    if fault != 0:  # noqa: SIM102
        # Inside, since Triton evaluates both sides of `and`, and the host's memory is far away.
        if tl.load(report) == 0:
            named = tl.sum(tl.where(group == first, size, 0), 0)
            value = tl.where(first < SIZE, named, total)
            value = tl.minimum(tl.maximum(value, -(1 << 40)), (1 << 40) - 1)
            index = tl.where(first < SIZE, first, 0).to(tl.int64)
            tl.store(report, (value << 23) | (index << 7) | (shift << 2) | fault)


_POISON = [f"{letter}{i}" for letter in "an" for i in range(SLOTS)]


@triton.jit(do_not_specialize=_POISON)
def write_nan(
    fault, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, BLOCK: tl.constexpr,
):  # fmt: skip
    """All bits set are NaN in fp16, bf16, fp32 and fp64; n counts 2-byte halves."""
    if tl.load(fault) != 0:
        _fill(a0, n0, BLOCK)
        _fill(a1, n1, BLOCK)
        _fill(a2, n2, BLOCK)
        _fill(a3, n3, BLOCK)
        _fill(a4, n4, BLOCK)
        _fill(a5, n5, BLOCK)
        _fill(a6, n6, BLOCK)
        _fill(a7, n7, BLOCK)
        _fill(a8, n8, BLOCK)
        _fill(a9, n9, BLOCK)
        _fill(a10, n10, BLOCK)
        _fill(a11, n11, BLOCK)
        _fill(a12, n12, BLOCK)
        _fill(a13, n13, BLOCK)
        _fill(a14, n14, BLOCK)
        _fill(a15, n15, BLOCK)


@triton.jit
def _fill(address, count, BLOCK: tl.constexpr):
    out = tl.cast(address, tl.pointer_type(tl.int16))
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, count, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.full((BLOCK,), -1, tl.int16), mask=at < count)
