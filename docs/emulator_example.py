# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A kernel of one's own in the emulator, and the race that it finds; see emulator.md.

python docs/emulator_example.py          the sum of each row
python docs/emulator_example.py --race   the same without its second barrier
"""

import sys

import cutlass
import torch
from cutlass import Float32, Int32, cute

from te_grouped_mlp.emulator import EmulationFault, Options
from te_grouped_mlp.emulator.host import EmulatedGpu

THREADS, ROWS = 64, 2


@cute.kernel
def row_sums(x: cute.Tensor, out: cute.Tensor, guarded: cutlass.Constexpr):
    """Add the columns of ROWS rows in one CTA, a column for each thread, through shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    parts = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS))
    for index in cutlass.range(ROWS):
        row = block * ROWS + index
        parts[thread] = x[row, thread]
        cute.arch.sync_threads()
        if thread == 0:
            total = Float32(0.0)
            for i in cutlass.range(THREADS):
                total += parts[i]
            out[row] = total
        if cutlass.const_expr(guarded):
            cute.arch.sync_threads()  # the next row's parts take the place of these


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, blocks: Int32, guarded: cutlass.Constexpr):
    """Launch one CTA for every ROWS rows."""
    row_sums(x, out, guarded).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))


def main(race: bool) -> int:
    """Run the kernel on four rows."""
    gpu = EmulatedGpu(Options(schedule="random", seed=1))
    x, out = torch.rand(4, THREADS), gpu.empty((4,))
    rows = cute.sym_int()
    fakes = (
        cute.runtime.make_fake_compact_tensor(Float32, (rows, THREADS), stride_order=(1, 0)),
        cute.runtime.make_fake_compact_tensor(Float32, (rows,)),
    )
    run = gpu.compile(launch, *fakes, Int32(2), not race)
    try:
        run(x, out, 2)
    except EmulationFault as fault:
        print(f"{type(fault).__name__}: {fault}")
        return 1
    print(gpu.reports[-1])
    print("largest error:", (out - x.sum(1)).abs().max().item())
    return 0


if __name__ == "__main__":
    sys.exit(main("--race" in sys.argv))
