# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The native kernels on a Hopper GPU, beside what else computes the layer there.

    python benchmarks/bench_cutedsl.py [--out FOLDER] [--shape E,H,I,T ...] [--quick] [--tiles]

`te-grouped-mlp bench` measures the same; this keeps every result in FOLDER/cutedsl.json, section by
section, and can time all tiles that fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks import gpu_tiles  # noqa: E402
from te_grouped_mlp.measure.bench import gpu, layer  # noqa: E402
from te_grouped_mlp.measure.bench.interleaved import is_green  # noqa: E402
from te_grouped_mlp.measure.bench.shapes import SHAPES, Shape, inputs  # noqa: E402
from te_grouped_mlp.measure.bench.timing import Clock  # noqa: E402
from te_grouped_mlp.op.backends.cutedsl.compile import compile_ahead  # noqa: E402

Report = dict[str, Any]


def tiles(shape: Shape, clock: Clock) -> list[Report]:
    """Time every kernel in every tile that fits."""
    given, buffers = inputs(shape), {}
    rows: list[Report] = []
    keys = gpu_tiles.part_keys()
    compile_ahead(keys.values())
    for op in dict.fromkeys(op for op, _, _ in keys):
        works: dict[str, Callable[[], object]] = {}
        for (owner, tile, variant), key in keys.items():
            if owner is op:
                works[f"{gpu.short(tile)} {variant}"] = layer.part(given, key, buffers)
        for name, taken in clock.compare(works, runs=9, warm=2).items():
            rate = layer.part_flops(shape, op) / taken.median / 1e9
            rows.append({"kernel": op.value, "tile": name, **taken.as_dict(), "tflops": rate})
    return rows


def sections(
    shapes: tuple[Shape, ...], effort: gpu.Effort, with_tiles: bool
) -> Iterator[tuple[str, Any]]:
    """Yield everything that is measured."""
    yield from gpu.measure(shapes, effort=effort)
    if with_tiles:
        clock = Clock()
        for shape in shapes:
            yield f"tiles {shape.label}", tiles(shape, clock)


def main() -> int:
    """Measure, and write the report after each section; exit 1 on a red check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="for cutedsl.json")
    parser.add_argument("--shape", action="append", default=[], help="E,H,I,T; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--tiles", action="store_true", help="all tiles that fit, too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device is visible; there is nothing to measure")
        return 0
    shapes = tuple(Shape(*map(int, text.split(","))) for text in given.shape) or SHAPES
    given.out.mkdir(parents=True, exist_ok=True)
    report: Report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    begin = time.perf_counter()
    effort = gpu.QUICK if given.quick else gpu.FULL
    for name, result in sections(shapes, effort, given.tiles):
        report[name] = result
        show(name, result, time.perf_counter() - begin)
        (given.out / "cutedsl.json").write_text(json.dumps(report, indent=1))
        begin = time.perf_counter()
    report["ok"] = is_green(report)
    (given.out / "cutedsl.json").write_text(json.dumps(report, indent=1))
    return 0 if report["ok"] else 1


def show(name: str, result: Any, seconds: float) -> None:
    """Print one section in a few lines."""
    print(f"== {name} ({seconds:.1f} s)", flush=True)
    rows = result if isinstance(result, list) else [{key: value} for key, value in result.items()]
    for row in rows:
        print("  " + " ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}={_short(each)}" for key, each in value.items()) + "}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
