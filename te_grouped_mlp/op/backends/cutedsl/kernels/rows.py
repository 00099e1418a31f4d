# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Two small kernels over rows, both of which read the number of live rows on the device.

    finish_rows   out[r] = slots[r, 0] + slots[r, 1] + ..., in this order; zero past the live rows
    zero_tail     out[r, :] = 0 past the live rows

slots (T, S) fp32 with strides (1, T); out (T,) fp32 or (T, N) bf16, N even; ends (G,) int32.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from quack.compile_utils import make_fake_stream, make_fake_tensor

_THREADS = 128
_WARPS = _THREADS // 32


@cute.kernel
def _finish_rows(slots: cute.Tensor, ends: cute.Tensor, out: cute.Tensor):
    row = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
    if row < slots.shape[0]:
        total = Float32(0.0)
        if row < ends[ends.shape[0] - 1]:
            for slot in cutlass.range(slots.shape[1], unroll=8):
                total = total + slots[row, slot]
        out[row] = total


@cute.jit
def _launch_finish_rows(
    slots: cute.Tensor, ends: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream
):
    blocks = cute.ceil_div(slots.shape[0], _THREADS)
    _finish_rows(slots, ends, out).launch(
        grid=(blocks, 1, 1), block=(_THREADS, 1, 1), stream=stream
    )


@cute.kernel
def _zero_tail(out: cute.Tensor, ends: cute.Tensor):
    thread = cute.arch.thread_idx()[0]
    row = cute.arch.block_idx()[0] * _WARPS + thread // 32
    if row < out.shape[0] and row >= ends[ends.shape[0] - 1]:
        pairs = cute.recast_tensor(out[row, None], Int32)
        for col in cutlass.range(thread % 32, pairs.shape[0], 32):
            pairs[col] = Int32(0)


@cute.jit
def _launch_zero_tail(out: cute.Tensor, ends: cute.Tensor, stream: cuda.CUstream):
    blocks = cute.ceil_div(out.shape[0], _WARPS)
    _zero_tail(out, ends).launch(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), stream=stream)


def compile_finish_rows() -> Any:
    """Compile; the result takes (slots, ends, out)."""
    rows, ends = cute.sym_int(), make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0)
    slots = make_fake_tensor(Float32, (rows, cute.sym_int()), leading_dim=0)
    out = make_fake_tensor(Float32, (rows,), leading_dim=0)
    return cute.compile(
        _launch_finish_rows, slots, ends, out, make_fake_stream(), options="--enable-tvm-ffi"
    )


def compile_zero_tail() -> Any:
    """Compile; the result takes (out, ends)."""
    shape = (cute.sym_int(), cute.sym_int(divisibility=2))
    out = make_fake_tensor(BFloat16, shape, leading_dim=1, divisibility=2)
    ends = make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0)
    return cute.compile(
        _launch_zero_tail, out, ends, make_fake_stream(), options="--enable-tvm-ffi"
    )
