# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The published TE modules run on the CPU standalone: the fault is there before, and gone after.

TE's own fused op runs over stand-ins of the frontend's wrappers, in poisoned memory. A padded
step must give what the exact-size step gives, bit by bit.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from te_grouped_mlp.patches import engine
from tests.oracle.jobs import Job, Result, Setup, differing
from tests.patches import trees
from tests.patches.conftest import Wheels
from tests.support.step import StepCase

pytestmark = pytest.mark.slow

VERSIONS = ("2.19.0", "2.20.2")
EXACT = StepCase(splits=(256,), hidden=256, ffn=256)
PADDED = EXACT.but(buffer_rows=512)
NAN = float("nan")
DETERMINISM = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}

# Name -> (release, padded step, exact-size step): where upstream's result depends on the padding.
FAULTS = {
    "srelu": ("2.19.0", Job(PADDED.but(activation="srelu")), Job(EXACT.but(activation="srelu"))),
    "old frontend": ("2.19.0", Job(PADDED), Job(EXACT)),
    "old frontend, grouped": (
        "2.19.0",
        Job(PADDED.but(weight="grouped")),
        Job(EXACT.but(weight="grouped")),
    ),
    "tail": ("2.20.2", Job(PADDED.but(fill=3.0)), Job(EXACT)),
    "NaN tail": ("2.20.2", Job(PADDED.but(fill=NAN)), Job(EXACT)),
    "NaN tail, 2.19.0": ("2.19.0", Job(PADDED.but(fill=NAN)), Job(EXACT)),
    "FC2 bias": ("2.20.2", Job(PADDED.but(bias=True)), Job(EXACT.but(bias=True))),
    "prequantized x": (
        "2.20.2",
        Job(PADDED.but(frozen=frozenset({"x"})), prequantized="x"),
        Job(EXACT.but(frozen=frozenset({"x"})), prequantized="x"),
    ),
    "prequantized dy": ("2.20.2", Job(PADDED, prequantized="dy"), Job(EXACT, prequantized="dy")),
}


def run(
    tree: Path,
    version: str,
    jobs: Sequence[Job],
    frontend: str = "1.32.0",
    environment: Mapping[str, str] = {},
) -> list[Result]:
    """Run steps in a process of its own, with the TE of a tree and its own fused op."""
    setup = Setup(module=version, frontend=(("version", frontend),))
    source, target = tree / "jobs", tree / "results"
    source.write_bytes(pickle.dumps((setup, list(jobs))))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NVTE_")}
    switches = {
        "PYTHONPATH": os.pathsep.join([str(tree), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
        "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1",
        "NVTE_GROUPED_MLP_FORK": "0",
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.oracle.child", str(source), str(target)],
        env={**kept, **switches, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    results: list[Result] = pickle.loads(target.read_bytes())
    for result in results:
        assert result.error or result.fused == str(trees.te_file(tree))
    return results


def wrong(tree: Path, version: str) -> dict[str, set[str]]:
    """For each fault of a release, the results in which the padded step differs."""
    found = {}
    for frontend in ("1.32.0", "1.26.0"):
        names = [
            name
            for name, (where, *_) in FAULTS.items()
            if where == version and name.startswith("old frontend") == (frontend == "1.26.0")
        ]
        jobs = [job for name in names for job in FAULTS[name][1:]]
        results = run(tree, version, jobs, frontend) if jobs else []
        for name, padded, exact in zip(names, results[::2], results[1::2], strict=True):
            _, job, exact_job = FAULTS[name]
            one, other = padded.live(job), exact.live(exact_job)
            found[name] = differing(one, other)
            # The dense product adds the FC2 bias after rounding, the grouped one before.
            if found[name] == {"y"} and job.case.bias:
                torch.testing.assert_close(one["y"], other["y"], rtol=2**-7, atol=2**-7)
                found[name] = set()
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_fault_before_and_gone_after(version: str, unpacked: Wheels) -> None:
    tree = unpacked("transformer-engine", version)
    for name, names in wrong(tree, version).items():
        assert names & {"dW1", "dW2"}, f"upstream is right about {name}"
    engine.apply(tree)
    assert {name: names for name, names in wrong(tree, version).items() if names} == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_right_stays(version: str, unpacked: Wheels) -> None:
    """Several groups, full rows and the unit scale give the same bits with and without patches."""
    many = StepCase(splits=(256, 0, 512), buffer_rows=1024, hidden=256, ffn=256, fill=NAN)
    cases = [many, EXACT, EXACT.but(unit_scale=True), EXACT.but(grad="fused", weight="grouped")]
    cases += [case.but(activation="srelu") for case in (many,)]
    jobs = [Job(case) for case in cases]
    tree = unpacked("transformer-engine", version)
    before = run(tree, version, jobs)
    engine.apply(tree)
    after = run(tree, version, jobs)
    for job, old, new in zip(jobs, before, after, strict=True):
        assert differing(old.live(job), new.live(job)) == set(), job


def test_determinism(unpacked: Wheels) -> None:
    """GLU: refused before; after, it runs where the wrapper has the flag or nothing needs dprob."""
    frozen = frozenset({"prob"})
    jobs = [
        Job(EXACT),
        Job(EXACT.but(frozen=frozen)),
        Job(StepCase(splits=(256, 256), hidden=256, ffn=256, frozen=frozen)),
    ]
    tree = unpacked("transformer-engine", "2.20.2")
    plain = run(tree, "2.20.2", jobs)
    for result in run(tree, "2.20.2", jobs, environment=DETERMINISM):
        assert "RuntimeError" in result.error
    engine.apply(tree)
    for frontend, refused in (("1.32.0", 0), ("1.30.0", 1)):
        results = run(tree, "2.20.2", jobs, frontend, DETERMINISM)
        assert [bool(result.error) for result in results] == [index < refused for index in range(3)]
        if refused:
            assert "dprob of ScaledSwiGLU is not bit-exact" in results[0].error
        for job, old, new in zip(jobs[refused:], plain[refused:], results[refused:], strict=True):
            changed = differing(old.live(job), new.live(job))
            assert changed <= {"dprob"}
            assert (new.outputs["dprob"] is None) == ("prob" in job.case.frozen)
    biased = [Job(EXACT.but(bias=True)), Job(EXACT.but(bias=True, scale_bias=True))]
    for result, word in zip(
        run(tree, "2.20.2", biased, environment=DETERMINISM), ("FC1 bias", "FC2 bias"), strict=True
    ):
        assert "RuntimeError" in result.error
        assert word in result.error
