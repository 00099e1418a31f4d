# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP8 quantization along rows and columns with swizzled scales: one call against eager torch.

Every variant's bytes are compared before anything is timed, and eager's with the tests' naive
formulas on a corner of the input. Run from a checkout: python benchmarks/bench_quantize.py
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors.capacity import span
from tests.csrc import naive_mxfp8

Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def eager_scale(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E8M0 bytes of finite block maxima, and 2^(127 - scale) in bfloat16."""
    bits = (amax.float() * (1.0 / 448.0)).view(torch.int32)
    threshold = torch.where(bits < 0x00800000, 0x00400000, 0)
    scale = (bits >> 23) + ((bits & 0x007FFFFF) > threshold)
    return scale.to(torch.uint8), torch.exp2((127 - scale).float()).bfloat16()


def eager_swizzle(scale: torch.Tensor) -> torch.Tensor:
    """(outer, inner) scales, multiples of 128 and 4, to tiles in memory order."""
    outer, inner = scale.shape
    tiles = scale.reshape(outer // 128, 4, 32, inner // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous()


def eager_quantize(x: torch.Tensor) -> Buffers:
    """Vectorised eager torch, for finite values and sizes that are multiples of 128.

    It works in bfloat16, where the product with a power of two is exact: with float32
    intermediates it moves twice the memory and is slower.
    """
    rows, cols = x.shape
    magnitude = x.abs()
    by_row = x.view(rows, cols // 32, 32)
    row_scale, factor = eager_scale(magnitude.view(rows, cols // 32, 32).amax(2))
    row_data = (by_row * factor.unsqueeze(2)).to(torch.float8_e4m3fn)
    by_col = x.view(rows // 32, 32, cols)
    col_scale, factor = eager_scale(magnitude.view(rows // 32, 32, cols).amax(1))
    col_data = (by_col * factor.unsqueeze(1)).to(torch.float8_e4m3fn)
    return (
        row_data.view(torch.uint8).view(rows, cols),
        eager_swizzle(row_scale),
        col_data.view(torch.uint8).view(rows, cols),
        eager_swizzle(col_scale.t()),
    )


def empty_buffers(rows: int, cols: int) -> Buffers:
    """Data and scales of both directions."""
    data = torch.empty(rows, cols, dtype=torch.uint8)
    scale = torch.empty(rows * cols // 32, dtype=torch.uint8)
    return data, scale, torch.empty_like(data), torch.empty_like(scale)


def our_quantize(x: torch.Tensor, out: Buffers, threads: int) -> None:
    """One call of the extension."""
    rows, cols = x.shape
    _C.mxfp8_quantize(
        *(span(x), 2, rows, cols, cols, *map(span, out), 0, True, None, 0, False, False, threads)
    )


def check_equal(got: Buffers, wanted: Buffers, name: str) -> None:
    """No number without equal bytes."""
    for ours, theirs, what in zip(got, wanted, ("row", "row", "col", "col"), strict=True):
        if not torch.equal(ours.flatten(), theirs.flatten()):
            raise SystemExit(f"{name}: {what} bytes differ, nothing was timed")


def check_all(x: torch.Tensor, wanted: Buffers) -> None:
    """Eager against the naive formulas, every level and thread count against eager."""
    corner = x[:128, :256].contiguous()
    naive = [b for axis in (0, 1) for b in naive_mxfp8.quantize(corner, 0, axis, True)]
    check_equal(eager_quantize(corner), tuple(naive), "eager")
    for level in _C.available_simd_levels():
        _C.set_simd_level(level)
        for threads in (1, 2):
            out = empty_buffers(*x.shape)
            our_quantize(x, out, threads)
            check_equal(out, wanted, f"{level}, {threads} threads")


def measure(call: Callable[[], object], repeat: int) -> dict[str, float]:
    """Median, fastest and slowest of repeat calls, in milliseconds, after one to warm up."""
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}


def run(rows: int, cols: int, repeat: int) -> list[dict[str, object]]:
    """One row of the table per variant; "ratio" is against eager with as many threads."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).bfloat16()
    check_all(x, eager_quantize(x))
    out = empty_buffers(rows, cols)
    moved = rows * cols * (2 + 2 * (1 + 1 / 32))
    table: list[dict[str, object]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        eager = measure(lambda: eager_quantize(x), repeat)
        results = [("eager torch", eager)]
        for level in _C.available_simd_levels():
            _C.set_simd_level(level)
            call = lambda n=threads: our_quantize(x, out, n)  # noqa: E731 - one line per variant
            results.append((level, measure(call, repeat)))
        for name, result in results:
            row = {"name": name, "threads": threads, **result}
            row["gb_per_s"] = moved / result["median_ms"] / 1e6
            row["ratio"] = eager["median_ms"] / result["median_ms"]
            table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="a multiple of 128")
    parser.add_argument("--cols", type=int, default=4096, help="a multiple of 128, at least 256")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table here")
    args = parser.parse_args()
    for name, least in (("rows", 128), ("cols", 256)):
        value = getattr(args, name)
        if value < least or value % 128:
            parser.error(f"--{name} is {value}, allowed: multiples of 128 from {least}")
    if args.repeat < 1:
        parser.error(f"--repeat is {args.repeat}, allowed: 1 or more")
    table = run(args.rows, args.cols, args.repeat)
    print(f"{args.rows} x {args.cols} bf16, row + column + swizzle; median of {args.repeat}")
    print(f"{'variant':12} {'threads':>7} {'median ms':>10} {'min':>8} {'max':>8} ", end="")
    print(f"{'GB/s':>7} {'x eager':>8}")
    for row in table:
        print(
            f"{row['name']:12} {row['threads']:7d} {row['median_ms']:10.2f} {row['min_ms']:8.2f} "
            f"{row['max_ms']:8.2f} {row['gb_per_s']:7.2f} {row['ratio']:8.1f}"
        )
    if args.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__}
        shape = {"rows": args.rows, "cols": args.cols, "repeat": args.repeat}
        args.json.write_text(json.dumps({**machine, **shape, "results": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
