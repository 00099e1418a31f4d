# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of MXFP8 quantization and dequantization on a GPU, beside torch's own copy.

    python -m benchmarks.gpu_block_scale

One line for each form, shape and rectangle of a program. A rectangle whose result differs from the
first one's ends the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from te_grouped_mlp.bench.timing import Clock
from te_grouped_mlp.op import block_scale
from te_grouped_mlp.op.block_scale import Config

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
                self._src, self._ends, **picked, paired=self._paired, config=config
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
        time = times[str(tuple(config))]
        rate = work.bytes / time.median / 1e6
        print(
            f"    {config.rows:3} x {config.cols:3}, {config.warps} warps: {time.median:7.4f} ms "
            f"{rate:5.0f} GB/s, {rate / copy:4.2f} of the copy",
            flush=True,
        )


def main() -> None:
    """Measure every form and shape."""
    print(torch.cuda.get_device_name())
    clock = Clock()
    for form in FORMS:
        for rows, cols in SHAPES:
            measure(clock, form, rows, cols)


if __name__ == "__main__":
    main()
