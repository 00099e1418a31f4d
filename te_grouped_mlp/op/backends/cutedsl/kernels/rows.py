# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Two small kernels over rows, both of which read the number of valid rows on the device.

    reduce_row_partials  out[r] = row_partials[r, 0] + row_partials[r, 1] + ..., in this order;
                         0 past the valid rows
    zero_tail            out[r, :] = 0 past the valid rows

row_partials (T, S) fp32 with strides (1, T); out (T,) fp32 or (T, N) bf16, N even;
group_end_offsets (G,) int32.
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
def _reduce_row_partials(
    row_partials: cute.Tensor, group_end_offsets: cute.Tensor, out: cute.Tensor
):
    row = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
    if row < row_partials.shape[0]:
        total = Float32(0.0)
        if row < group_end_offsets[group_end_offsets.shape[0] - 1]:
            for partial in cutlass.range(row_partials.shape[1], unroll=8):
                total = total + row_partials[row, partial]
        out[row] = total


@cute.jit
def _launch_reduce_row_partials(
    row_partials: cute.Tensor,
    group_end_offsets: cute.Tensor,
    out: cute.Tensor,
    stream: cuda.CUstream,
):
    blocks = cute.ceil_div(row_partials.shape[0], _THREADS)
    _reduce_row_partials(row_partials, group_end_offsets, out).launch(
        grid=(blocks, 1, 1), block=(_THREADS, 1, 1), stream=stream
    )


@cute.kernel
def _zero_tail(out: cute.Tensor, group_end_offsets: cute.Tensor):
    thread = cute.arch.thread_idx()[0]
    row = cute.arch.block_idx()[0] * _WARPS + thread // 32
    if row < out.shape[0] and row >= group_end_offsets[group_end_offsets.shape[0] - 1]:
        pairs = cute.recast_tensor(out[row, None], Int32)
        for col in cutlass.range(thread % 32, pairs.shape[0], 32):
            pairs[col] = Int32(0)


@cute.jit
def _launch_zero_tail(out: cute.Tensor, group_end_offsets: cute.Tensor, stream: cuda.CUstream):
    blocks = cute.ceil_div(out.shape[0], _WARPS)
    _zero_tail(out, group_end_offsets).launch(
        grid=(blocks, 1, 1), block=(_THREADS, 1, 1), stream=stream
    )


def compile_reduce_row_partials() -> Any:
    """Compile; the result takes (row_partials, group_end_offsets, out)."""
    rows = cute.sym_int()
    group_end_offsets = make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0)
    row_partials = make_fake_tensor(Float32, (rows, cute.sym_int()), leading_dim=0)
    out = make_fake_tensor(Float32, (rows,), leading_dim=0)
    arguments = (row_partials, group_end_offsets, out, make_fake_stream())
    return cute.compile(_launch_reduce_row_partials, *arguments, options="--enable-tvm-ffi")


def compile_zero_tail() -> Any:
    """Compile; the result takes (out, group_end_offsets)."""
    shape = (cute.sym_int(), cute.sym_int(divisibility=2))
    out = make_fake_tensor(BFloat16, shape, leading_dim=1, divisibility=2)
    group_end_offsets = make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0)
    return cute.compile(
        _launch_zero_tail, out, group_end_offsets, make_fake_stream(), options="--enable-tvm-ffi"
    )
