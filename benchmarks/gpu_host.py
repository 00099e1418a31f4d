# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Host time of the fused op over the native kernels on a GPU, and the time of a first call.

python -m benchmarks.gpu_host --experts 64     own time over a fused op that does nothing
python -m benchmarks.gpu_host --first          seconds of the first step of this process
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
import pstats
import statistics
import time
from typing import Any

os.environ.setdefault("NVTE_GROUPED_MLP_STANDALONE", "1")

import torch

from benchmarks import bench_host_time as host
from te_grouped_mlp.measure.bench.timing import Clock
from tests.support import step
from tests.support.step import StepCase


def case_of(experts: int, weight: str = "discrete", hidden: int = 2048, ffn: int = 768) -> StepCase:
    """A layer in bf16 without a recipe, with main_grads."""
    return StepCase(
        splits=(64,) * experts, hidden=hidden, ffn=ffn, mxfp8=False, device="cuda", grad="fused",
        weight=weight, bias_weight="discrete",
    )  # fmt: skip


class Watch:
    """Counts what one method of one object takes, in milliseconds: on the wall, and of the CPU."""

    def __init__(self, owner: Any, name: str) -> None:
        self.wall = self.cpu = 0.0
        inner = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            begin, busy = time.perf_counter(), time.thread_time()
            result = inner(*args, **kwargs)
            self.cpu = (time.thread_time() - busy) * 1e3
            self.wall = (time.perf_counter() - begin) * 1e3
            return result

        setattr(owner, name, run)


def forget_gradients(model: Any, inputs: step.Inputs) -> None:
    """Drop what autograd would add to; the main_grads stay."""
    for tensor in (*model.parameters(), inputs.x, inputs.prob):
        tensor.grad = None


def own_ms(
    experts: int, runs: int, weight: str, packed: bool, wait: bool
) -> dict[str, dict[str, float]]:
    """Return the op's own time in each pass, above that of an op that does nothing.

    `wait` for the GPU before every step; else the host runs ahead of it, as in training.
    """
    case = case_of(experts, weight)
    model, inputs = host.model_of(case, packed=packed), step.make_inputs(case)
    fused_runs: list[Any] = []
    step.run_model(model, case, inputs)
    fused = step.fused_op(model)
    assert type(fused).__name__.startswith("GroupedMLP_CuTeGEMM")
    inner = fused.fuser_backward
    fused.fuser_backward = lambda *args, **kwargs: (
        fused_runs.append(inner(*args, **kwargs)) or fused_runs[-1]
    )
    y = step.run_model(model, case, inputs)
    del fused.fuser_backward
    empty = host.empty_model(case, fused_runs[0], y)
    timers = {
        each: [Watch(step.fused_op(each), f"fuser_{name}") for name in host.PASSES]
        for each in (model, empty)
    }
    times: dict[Any, list[list[float]]] = {model: [], empty: []}
    for run in range(-10, runs):
        for each, row in times.items():
            forget_gradients(each, inputs)
            if wait:
                torch.cuda.synchronize()
            step.run_model(each, case, inputs)
            if run >= 0:
                row.append([value for watch in timers[each] for value in (watch.wall, watch.cpu)])
        # The queue must not fill, or the host would wait inside a launch.
        if run % 8 == 0:
            torch.cuda.synchronize()
    found = {}
    names = [f"{name} {clock}" for name in host.PASSES for clock in ("wall", "cpu")]
    for index, name in enumerate(names):
        own = [a[index] - b[index] for a, b in zip(*times.values(), strict=True)]
        low, median, high = statistics.quantiles(own, n=4)
        found[name] = {"own_ms": round(median, 4), "q1_ms": round(low, 4), "q3_ms": round(high, 4)}
    return found


def profile(experts: int, weight: str, packed: bool) -> None:
    """Print where the host's time goes in each pass."""
    case = case_of(experts, weight)
    model, inputs = host.model_of(case, packed=packed), step.make_inputs(case)
    step.run_model(model, case, inputs)
    fused = step.fused_op(model)
    seen = {name: cProfile.Profile() for name in host.PASSES}
    for name, found in seen.items():
        inner = getattr(fused, f"fuser_{name}")
        setattr(fused, f"fuser_{name}", functools.partial(found.runcall, inner))
    for _ in range(100):
        torch.cuda.synchronize()
        step.run_model(model, case, inputs)
    for found in seen.values():
        pstats.Stats(found).sort_stats("cumtime").print_stats(24)


def device_ms(packed: bool, descending: bool) -> dict[str, float]:
    """Return the device time of a whole step through Transformer Engine on the first shape."""
    case = case_of(8, ffn=4096).but(splits=(2048,) * 8)
    model = host.model_of(case, packed=packed, descending=descending)
    inputs = step.make_inputs(case)

    def work() -> None:
        forget_gradients(model, inputs)
        step.run_model(model, case, inputs)

    return Clock().device(work).as_dict()


def first() -> dict[str, float]:
    """Return the seconds of the first step: what it compiles or loads, and runs."""
    case = case_of(8, ffn=4096)
    model, inputs = host.model_of(case), step.make_inputs(case)
    # The GPU's own start is no part of it.
    (torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")).sum().item()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        step.run_model(model, case, inputs)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {"first_s": times[0], "second_s": times[1], "third_s": times[2]}


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--weight", choices=("discrete", "grouped"), default="discrete")
    parser.add_argument("--packed", action="store_true", help="experts lie in a row")
    parser.add_argument(
        "--descending", action="store_true", help="with --device: in a row, the last one first"
    )
    parser.add_argument("--device", action="store_true", help="device time of a whole step")
    parser.add_argument("--wait", action="store_true", help="wait for the GPU before every step")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--first", action="store_true")
    given = parser.parse_args()
    if given.device:
        print(json.dumps(device_ms(given.packed or given.descending, given.descending)))
        return
    layer = (given.weight, given.packed)
    if given.profile:
        profile(given.experts, *layer)
        return
    print(
        json.dumps(
            first() if given.first else own_ms(given.experts, given.runs, *layer, given.wait)
        )
    )


if __name__ == "__main__":
    main()
