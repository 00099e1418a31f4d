# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Host time of the fused op over the native kernels, on a machine without a GPU.

The native backend's own Python runs on CPU tensors: its launches do nothing, and the tests for a
GPU are answered with yes, here and not in the package. What is left out is the time of torch's
own work for CUDA tensors and of the launches; `gpu_host` measures those on a GPU.

    python -m benchmarks.native_host --weight discrete --packed
    python -m benchmarks.native_host --profile forward
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import json
import os
import pstats
from typing import Any

os.environ["NVTE_GROUPED_MLP_BACKEND"] = "cutedsl"
os.environ.setdefault("NVTE_GROUPED_MLP_STANDALONE", "1")

import torch

from benchmarks import bench_host_time as host
from te_grouped_mlp.op import environment, packages
from te_grouped_mlp.op.backends.cutedsl import arguments, backend, capability, launch
from te_grouped_mlp.op.te import adapter
from tests.support import step
from tests.support.step import StepCase

NO_FRONTEND = packages.Absent("the benchmark needs none")
VERSIONS = {"quack": "0.6.5", "cutlass_dsl": "4.8.1", "triton": "3.6.0"}


def pretend_gpu() -> None:
    """Let the native backend take CPU tensors for CUDA ones, and launch nothing."""
    refusals = capability._problem_refusals

    def on_cuda(problem: Any, env: Any, **how: bool) -> Any:
        return refusals(dataclasses.replace(problem, device="cuda"), env, **how)

    capability._problem_refusals = on_cuda
    environment._probe_sm = lambda: (9, 0)
    environment.package_versions = lambda: VERSIONS
    environment.frontend_wrappers = lambda: NO_FRONTEND
    arguments.require_bf16 = _bf16
    adapter.sizes_on_host = backend.prepare = _nothing
    backend.target_arch = launch.kernels.target_arch = lambda: 9
    launch.kernels.kernel = lambda _key: _nothing
    launch._active_clusters = lambda *_: 66


def _bf16(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype is not torch.bfloat16 or tensor.is_cuda:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}")


def _nothing(*_args: Any) -> None:
    """Stand for a compiled kernel, for splits that lie on a GPU, and for compiling ahead."""


def case_of(experts: int, weight: str) -> StepCase:
    """A layer in bf16 without a recipe, with main_grads and Megatron's flags."""
    return StepCase(
        splits=(8,) * experts, hidden=64, ffn=64, mxfp8=False, grad="fused", weight=weight,
        bias_weight="discrete",
    )  # fmt: skip


class Bench(host.Bench):
    """A step over the native backend; only the offsets of the splits are replayed."""

    def __init__(self, case: StepCase, *, packed: bool) -> None:
        self._packed = packed
        host._DEVICE_CALLS.clear()
        host._DEVICE_CALLS[host.tex] = ("splits_to_offsets_multi",)
        make = step.make_model
        step.make_model = lambda _case: (
            setattr(step, "make_model", make) or host.model_of(_case, packed=packed)
        )
        super().__init__(case)

    def step(self, model: Any) -> list[float]:
        """Run one step without gradients to add to."""
        for tensor in (*model.parameters(), self.inputs.x, self.inputs.prob):
            tensor.grad = None
        return super().step(model)


def profile(bench: Bench, name: str, runs: int, order: str) -> None:
    """Print where the time of one pass goes."""
    fused, seen = step.fused_op(bench.model), cProfile.Profile()
    inner = getattr(fused, f"fuser_{name}")
    setattr(fused, f"fuser_{name}", functools.partial(seen.runcall, inner))
    with bench.recording.replay():
        for _ in range(runs):
            bench.step(bench.model)
    pstats.Stats(seen).sort_stats(order).print_stats(48)


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--weight", choices=("discrete", "grouped"), default="discrete")
    parser.add_argument("--packed", action="store_true", help="experts lie in a row")
    parser.add_argument("--profile", choices=host.PASSES, help="where its time goes, and stop")
    parser.add_argument("--order", choices=("tottime", "cumtime"), default="cumtime")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pretend_gpu()
    bench = Bench(case_of(given.experts, given.weight), packed=given.packed)
    if given.profile:
        profile(bench, given.profile, given.runs, given.order)
    else:
        print(json.dumps(bench.own_ms(given.runs)))


if __name__ == "__main__":
    main()
