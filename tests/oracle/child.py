# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The child process: `python -m tests.oracle.child JOBS RESULTS` (a pickle in, a pickle out)."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import te_grouped_mlp
from tests.oracle.jobs import OURS, Job, Result, Setup
from tests.support import frontend_stand_in, step

_OVERRIDES: dict[str, dict[str, Any]] = {
    "packed": {"treat_rows_as_full": False},
    "dense": {"single_group_is_always_dense": True},
}


def main(source: str, target: str) -> None:
    """Run every job of a file and write the results."""
    setup, jobs = pickle.loads(Path(source).read_bytes())
    torch.set_num_threads(setup.threads)
    te_grouped_mlp.activate()
    stand_in = None
    if setup.frontend is not None:
        stand_in = frontend_stand_in.install(**dict(setup.frontend))
    import transformer_engine.pytorch  # noqa: F401

    from te_grouped_mlp.integration import standalone

    if setup.module == OURS:
        te_grouped_mlp.assert_active()
    else:
        standalone.allow_upstream_fused(True)
    results = [_run(setup, job, stand_in) for job in jobs]
    Path(target).write_bytes(pickle.dumps(results))


def _run(setup: Setup, job: Job, stand_in: Any) -> Result:
    result = Result()
    calls_before = 0
    if stand_in is not None:
        calls_before = len(stand_in.calls)
        machine = stand_in.machine
        machine.unwritten_byte, machine.unwritten_scale_byte = job.memory, job.scale_memory
        machine.spill, machine.out_of_bounds = job.spill, result.out_of_bounds
    try:
        with _layout(setup, job):
            _step(job, result)
    except Exception as error:
        # Whatever a module raises is a result here: tests compare it.
        result.error = f"{type(error).__name__}: {error}"
    if stand_in is not None:
        result.calls = [name for name, _ in stand_in.calls[calls_before:]]
    return result


@contextlib.contextmanager
def _layout(setup: Setup, job: Job) -> Iterator[None]:
    from te_grouped_mlp.op import environment
    from te_grouped_mlp.op.tensors import memory

    with contextlib.ExitStack() as stack:
        stack.enter_context(memory.poisoned(job.memory))
        if setup.module == OURS and job.layout:
            stack.enter_context(environment.override(**_OVERRIDES[job.layout]))
        yield


def _step(job: Job, result: Result) -> None:
    case = job.case
    model, inputs = step.make_model(case), step.make_inputs(case)
    with torch.no_grad():
        for name, value in job.fills:
            getattr(inputs, name)[case.live :] = value
    if job.prequantized:
        whole = getattr(inputs, job.prequantized).detach()
        setattr(inputs, job.prequantized, _prequantize(whole, inputs.split_sizes))
    y = step.run_model(model, case, inputs)
    result.te = str(sys.modules["transformer_engine"].__file__)
    result.fused = inspect.getfile(type(step.fused_op(model)))
    found = step.collect(case, model, inputs, y)
    result.outputs = {
        name: None if each is None else each.detach().clone() for name, each in found.items()
    }


def _prequantize(tensor: torch.Tensor, split_sizes: torch.Tensor) -> torch.Tensor:
    """Return a GroupedTensor with compact row scales, as a token dispatch hands it over.

    The rows past the live ones hold zeros: what the caller wrote is not the op's to read.
    """
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    from te_grouped_mlp.op.tensors import memory

    quantizer = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    with memory.poisoned(0):
        sizes = split_sizes.to(torch.int64)
        grouped: torch.Tensor = tex.group_quantize(tensor, quantizer, sizes.numel(), sizes)
    return grouped


if __name__ == "__main__":
    main(*sys.argv[1:])
