# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that runs the padded single group on emulated kernels; `repro --emulate` starts it.

    python -m te_grouped_mlp.emulator.padded_step JOB RESULTS

JOB is a JSON file with the fields of `Job`; RESULTS gets the outputs of every run, by name, as
`torch.save` writes them. Each run's name is a line on standard output before it starts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXACT = "exact size"


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        activations: Names of TE's classes.
        hidden, ffn: Features.
        live, padding: Rows.
        seed: Of weights and inputs.
        fills: What the padding holds, as text that `float` reads.
        bytes: What fresh memory holds.
    """

    activations: list[str]
    hidden: int
    ffn: int
    live: int
    padding: int
    seed: int
    fills: list[str]
    bytes: list[int]

    def runs(self) -> Iterator[tuple[str, str, int]]:
        """Yield every run: activation, what the padding holds or EXACT, fresh memory's byte."""
        for activation in self.activations:
            yield activation, EXACT, self.bytes[0]
            for fill in self.fills:
                for byte in self.bytes:
                    yield activation, fill, byte


def name_of(activation: str, fill: str, byte: int) -> str:
    """Return the name of a run."""
    return f"{activation}, {fill}, memory 0x{byte:02X}"


def main(source: str, target: str) -> None:
    """Run every step of a job and write its outputs."""
    job = Job(**json.loads(Path(source).read_text(encoding="utf-8")))
    from te_grouped_mlp.integration import overlay, standalone

    overlay.activate()
    import torch
    import transformer_engine.pytorch  # noqa: F401

    from te_grouped_mlp.emulator import process
    from te_grouped_mlp.emulator.options import Options
    from te_grouped_mlp.measure import step
    from te_grouped_mlp.op import environment
    from te_grouped_mlp.op.activations import Activation
    from te_grouped_mlp.op.tensors import memory

    gpu = process.enter()
    # Results are what is looked for here; tracking races would double the time.
    gpu.options = Options(races=False)
    ours = overlay.status().active
    if not ours:
        standalone.allow_upstream_fused(True)
    shape = step.Shape(1, job.hidden, job.ffn, job.live)
    batch = step.batch(shape, job.seed + 1, "cpu")
    models: dict[str, Any] = {}
    outputs = {}
    for activation, fill, byte in job.runs():
        name = name_of(activation, fill, byte)
        print(name, flush=True)  # noqa: T201
        if activation not in models:
            kind = Activation(activation)
            models[activation] = step.Model.build(kind, shape, seed=job.seed, device="cpu")
        model = models[activation]
        given = batch if fill == EXACT else batch.padded(job.padding, float(fill))
        gpu.poison = byte
        # Our padded calls are laid out as packed rows; so is what they are compared with.
        alike = {"treat_rows_as_full": False} if ours else {}
        with memory.poisoned(byte), environment.override(**alike):
            outputs[name] = model.run(given)
        if not model.path.startswith("GroupedMLP"):
            raise RuntimeError(f"the step ran as {model.path}, not in a fused op")
    torch.save(outputs, target)


def write(job: Job, file: Path) -> None:
    """Write a job where `main` reads it."""
    file.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
