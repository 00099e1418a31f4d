# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.emulator.child JOBS RESULTS`: steps in a process that emulates a GPU."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from tests.emulator.jobs import StepJob, StepResult


def main(source: str, target: str) -> None:
    """Run every step of a file and write what came of it."""
    import te_grouped_mlp

    te_grouped_mlp.activate()
    import transformer_engine.pytorch  # noqa: F401

    from te_grouped_mlp.emulator import process

    gpu = process.enter()
    jobs = pickle.loads(Path(source).read_bytes())
    Path(target).write_bytes(pickle.dumps([_run(gpu, job) for job in jobs]))


def _run(gpu: Any, job: StepJob) -> StepResult:
    import torch

    from te_grouped_mlp.emulator.options import Options
    from tests.support import step

    gpu.options, result, before = Options(**dict(job.options)), StepResult(), len(gpu.reports)
    torch.use_deterministic_algorithms(job.deterministic)
    try:
        with step.switches(NVTE_GROUPED_MLP_BACKEND=job.backend):
            result.outputs = step.live(job.case, step.run_step(job.case))
    except Exception as error:
        # Whatever a launch raises is a result here.
        result.error = f"{type(error).__name__}: {error}"
    result.launches = [report.entry for report in gpu.reports[before:]]
    result.outputs = {
        name: None if value is None else value.detach().clone()
        for name, value in result.outputs.items()
    }
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
