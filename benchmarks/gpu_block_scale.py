# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of MXFP8 quantization and dequantization on a GPU, beside torch's own copy.

    python -m benchmarks.gpu_block_scale

One line for each form, shape and rectangle of a program. A rectangle whose result differs from the
first one's ends the run. At last the host time of small calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from te_grouped_mlp.measure.bench.timing import Clock
from te_grouped_mlp.op.kernels import block_scale
from te_grouped_mlp.op.kernels.block_scale import Config

SHAPES = ((16384, 2048), (16384, 8192), (65536, 2048))
GROUPS = 8
CONFIGS = tuple(
    Config(*sizes)
    for sizes in (
        (32, 256, 4), (32, 128, 4), (32, 128, 2), (32, 64, 1), (32, 64, 2), (32, 128, 1),
        (64, 128, 4), (32, 512, 8), (64, 64, 2),
    )
)  # fmt: skip
# Form -> outputs of `quantize`; the last reads bytes.
FORMS = {
    "row values, column bytes": ("row_values", "column_data", "column_scale"),
    "row values, column values": ("row_values", "column_values"),
    "paired row values, column values": ("row_values", "column_values"),
    "row bytes, column bytes": ("row_data", "row_scale", "column_data", "column_scale"),
    "row bytes": ("row_data", "row_scale"),
    "dequantize columns": (),
}


def outputs(rows: int, cols: int) -> dict[str, torch.Tensor]:
    """Return every buffer that `quantize` writes, filled with a byte that it never leaves."""
    scales = rows * cols // 32
    sizes = {
        "row_data": (rows * cols, torch.uint8),
        "row_scale": (scales, torch.uint8),
        "column_data": (rows * cols, torch.uint8),
        "column_scale": (scales, torch.uint8),
        "row_values": (rows * cols, torch.bfloat16),
        "column_values": (rows * cols, torch.bfloat16),
    }
    return {name: torch.full((n,), 7, dtype=t, device="cuda") for name, (n, t) in sizes.items()}


class Work:
    """One form over one matrix: what to run, how many bytes it moves, what it wrote."""

    def __init__(self, form: str, src: torch.Tensor, ends: torch.Tensor) -> None:
        self._src, self._ends = src, ends
        self._buffers = outputs(*src.shape)
        self._names, self._paired = FORMS[form], form.startswith("paired")
        self._out = torch.empty_like(src)
        if not self._names:
            block_scale.quantize(src, ends, **self._pick("column_data", "column_scale"))

    def _pick(self, *names: str) -> dict[str, torch.Tensor]:
        return {name: self._buffers[name] for name in names}

    def run(self, config: Config) -> None:
        """Do the work once."""
        if self._names:
            picked = self._pick(*self._names)
            block_scale.quantize(
                self._src, self._ends, **picked, gate_linear_interleaved=self._paired, config=config
            )
        else:
            data, scale = self._pick("column_data", "column_scale").values()
            block_scale.dequantize(
                data, scale, self._ends, self._out, axis_column=True, config=config
            )

    def results(self) -> list[torch.Tensor]:
        """Return copies of what the last run wrote, and spoil it."""
        written = [self._buffers[name] for name in self._names] or [self._out]
        copies = [one.clone() for one in written]
        for one in written:
            one.fill_(7)
        return copies

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        moved = self._pick(*(self._names or ("column_data", "column_scale"))).values()
        return self._src.nbytes + sum(one.nbytes for one in moved)


def check(work: Work, configs: tuple[Config, ...]) -> None:
    """Raise AssertionError unless every rectangle gives the same bytes."""
    first: list[torch.Tensor] = []
    for config in configs:
        work.run(config)
        found = work.results()
        first = first or found
        for a, b in zip(first, found, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{config} differs"


def measure(clock: Clock, form: str, rows: int, cols: int) -> None:
    """Print the bandwidth of each rectangle and of a copy, in GB/s."""
    src = torch.randn(rows, cols, device="cuda").bfloat16()
    ends = (torch.arange(1, GROUPS + 1, device="cuda") * (rows // GROUPS)).int()
    work = Work(form, src, ends)
    check(work, CONFIGS)
    target = torch.empty_like(src)
    works: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(src)}
    works |= {str(tuple(c)): functools.partial(work.run, c) for c in CONFIGS}
    times = clock.compare(works, runs=11)
    copy = 2 * src.nbytes / times["copy"].median / 1e6
    print(f"{form:26} {rows:6} x {cols:5}  copy {copy:5.0f} GB/s", flush=True)
    for config in CONFIGS:
        median = times[str(tuple(config))].median
        rate = work.bytes / median / 1e6
        print(
            f"    {config.rows:3} x {config.cols:3}, {config.warps} warps: {median:7.4f} ms "
            f"{rate:5.0f} GB/s, {rate / copy:4.2f} of the copy",
            flush=True,
        )


def host_times() -> None:
    """Print the host time of one call of each: the best of ten means of fifty calls."""
    from te_grouped_mlp.integration.standalone import replacements
    from te_grouped_mlp.integration.standalone.tex import offsets

    splits = torch.full((64,), 128, dtype=torch.int64, device="cuda")
    weights = [torch.nn.Parameter(torch.empty(64, 64, device="cuda")) for _ in range(64)]
    for weight in weights:
        weight.grad_added_to_main_grad = False
    src = torch.randn(1024, 256, device="cuda").bfloat16()
    work = Work("row values, column bytes", src, splits[:8].cumsum(0).int())
    calls: dict[str, Callable[[], object]] = {
        "splits_to_offsets_multi, 64 groups": lambda: offsets.splits_to_offsets_multi(
            splits, src.device, strides=[1, 1, 2048, 768, 1536],
            include_leading_zero=[False, True, True, True, True],
            dtypes=[torch.int32] + [torch.int64] * 4, bulk_allocate=True,
        ),
        "dummy gradients of 64 weights": lambda: replacements.dummy_wgrads_for_params(weights),
        "copy_data_ptrs_to_device, 64": lambda: offsets.copy_data_ptrs_to_device(
            weights, src.device
        ),
        "quantize, 1024 rows": functools.partial(work.run, block_scale.QUANTIZE),
    }  # fmt: skip
    with torch.no_grad():
        for name, call in calls.items():
            call()
            means = []
            for _ in range(10):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(50):
                    call()
                means.append((time.perf_counter() - begin) / 50)
            print(f"{name:36} {min(means) * 1e6:6.1f} us of host time", flush=True)


def main() -> None:
    """Measure every form and shape."""
    print(torch.cuda.get_device_name())
    clock = Clock()
    for form in FORMS:
        for rows, cols in SHAPES:
            measure(clock, form, rows, cols)
    host_times()


if __name__ == "__main__":
    main()
