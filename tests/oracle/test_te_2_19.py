# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Our op inside TE 2.19.0 itself, on standalone."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.integration import installed_te
from tests.oracle import cases
from tests.oracle.jobs import Job, Result, Setup, differing
from tests.oracle.runner import run, unpacked

pytestmark = pytest.mark.slow

VERSION = "2.19.0"
INSIDE = Setup(te=VERSION)
CHOICES = {
    "plain": {},
    "bias": {"bias": True},
    "scale_bias": {"bias": True, "scale_bias": True},
    "grouped": {"weight": "grouped", "bias": True},
    "quantized": {"weight": "quantized"},
    "fused_grad": {"grad": "fused"},
    "overwrite": {"grad": "overwrite"},
    "delayed": {"grad": "main_grad", "delay": True},
    "fp32_prob": {"prob_dtype": torch.float32, "round_prob": True},
    "mxfp8_x": {"prequantized": "x", "frozen": frozenset({"x"})},
    "mxfp8_dy": {"prequantized": "dy"},
    "unit_scale": {"unit_scale": True},
    "odd_features": {"hidden": 320, "ffn": 192},
}


def _jobs() -> dict[tuple[str, str, str], Job]:
    found = {}
    for activation in ("srelu", "swiglu", "qgeglu"):
        for label, choices in CHOICES.items():
            exact = cases.job(activation=activation, layout="packed", **cases.ONE, **choices)
            found[activation, label, "exact"] = exact
            if label != "unit_scale":
                # A unit scale promises full rows.
                padded = exact.but(layout="", buffer_rows=512, fill=cases.NAN)
                found[activation, label, "padded"] = padded
                many = {"splits": (256, 0, 512), "buffer_rows": 1024}
                found[activation, label, "many"] = padded.but(**many)
    return found


@pytest.fixture(scope="module")
def inside() -> dict[tuple[str, str, str], Result]:
    jobs = _jobs()
    return dict(zip(jobs, run(INSIDE, list(jobs.values())), strict=True))


def test_our_class_is_fused(inside: dict[tuple[str, str, str], Result]) -> None:
    for key, result in inside.items():
        assert result.error == "", key
        assert result.fused == str(installed_te.fork_file()), key
        assert result.te.startswith(str(unpacked(VERSION))), key


def test_padded_equals_exact(inside: dict[tuple[str, str, str], Result]) -> None:
    jobs = _jobs()
    compared = 0
    for (activation, label, form), job in jobs.items():
        if form != "padded":
            continue
        exact = inside[activation, label, "exact"].live(job)
        padded = inside[activation, label, "padded"].live(job)
        assert differing(exact, padded) == set(), (activation, label)
        compared += 1
    assert compared == 3 * (len(CHOICES) - 1)


@pytest.mark.skipif(installed_te.te_version() != "2.20.2", reason="the other side is TE 2.20.2")
def test_same_bits_as_inside_2_20_2(inside: dict[tuple[str, str, str], Result]) -> None:
    jobs = _jobs()
    for (key, job), other in zip(jobs.items(), run(Setup(), list(jobs.values())), strict=True):
        assert differing(other.live(job), inside[key].live(job)) == set(), key


def test_own_module_of_the_release_has_the_fault() -> None:
    keys = [("srelu", "plain", form) for form in ("exact", "padded", "many")]
    jobs = [_jobs()[key] for key in keys]
    upstream = run(Setup(VERSION, te=VERSION), jobs)
    ours = run(INSIDE, jobs)
    hurt = [
        differing(mine.live(job), theirs.live(job))
        for job, mine, theirs in zip(jobs, ours, upstream, strict=True)
    ]
    assert hurt == [set(), {"dW1", "dW2"}, set()]
