# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole steps on emulated Blackwell kernels: NVIDIA's through `cudnn`, ours through `cutedsl`."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulator.jobs import StepJob, StepResult, run
from tests.emulator.packages import require_packages
from tests.support import step
from tests.support.step import StepCase

NAN = float("nan")
BOUND = 2e-4
"""Against the reference backend, whose products add in another order: a value between two
neighbours of its type may fall to the other side."""
SUMS_IN_BF16 = 6e-3
"""Of FC1's bias gradient, which the frontend's kernels add in bf16, and ours reads as stored."""

SMALL = StepCase(activation="srelu", splits=(256,), hidden=256, ffn=256)
PADDED = SMALL.but(buffer_rows=512, fill=NAN)


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    require_packages()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error in the 2-norm."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def assert_near(found: StepResult, wanted: StepResult) -> None:
    """Compare a step with the reference backend's."""
    assert found.error == wanted.error == ""
    assert found.launches
    assert not wanted.launches
    for name, value in wanted.outputs.items():
        if value is not None:
            bound = SUMS_IN_BF16 if name == "db1" else BOUND
            assert error(found.outputs[name], value) <= bound, name


def test_a_padded_step_runs_on_nvidias_kernels(tmp_path: Path) -> None:
    """The padding holds NaN and fresh memory is NaN, so one byte read of either would show."""
    fast = (("races", False),)
    found, wanted = run([StepJob("cudnn", PADDED, fast), StepJob("reference", PADDED)], tmp_path)
    assert_near(found, wanted)
    kernels = " ".join(found.launches)
    assert "cudnn" in kernels
    assert "dsrelu" in kernels.lower()


# Slow -------------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, StepCase]] = {}
for _activation, _bias in itertools.product(("srelu", "swiglu"), (False, True)):
    _more: dict[str, Any] = {"activation": _activation, "hidden": 256, "bias": _bias}
    _more["scale_bias"] = _bias
    _name = f"{_activation}{'-bias' if _bias else ''}"
    for _ffn, _splits in ((320, (256, 0, 512)), (256, (512,))):
        _mxfp8 = StepCase(splits=_splits, ffn=_ffn, **_more)
        for _backend in ("cudnn", "cutedsl"):
            CASES[f"{_backend}-mxfp8-{len(_splits)}-{_name}"] = (_backend, _mxfp8)
    _bf16 = StepCase(splits=(100, 0, 60), ffn=320, mxfp8=False, **_more)
    CASES[f"cutedsl-bf16-3-{_name}"] = ("cutedsl", _bf16)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_padding_is_invisible_and_the_reference_agrees(name: str, tmp_path: Path) -> None:
    backend, exact = CASES[name]
    padded = exact.but(buffer_rows=exact.live + 256, fill=NAN)
    # An exact-size single expert may take the dense layout, which rounds elsewhere.
    alike = exact if len(exact.splits) > 1 else exact.but(buffer_rows=exact.live + 512)
    first, second, wanted = run(
        [StepJob(backend, padded), StepJob(backend, alike), StepJob("reference", padded)], tmp_path
    )
    assert_near(first, wanted)
    assert second.error == ""
    varies = {"dprob", "db1"} if backend == "cudnn" else set()
    for key, value in first.outputs.items():
        # Sums of float atomics have one order here only because nothing is random.
        if key not in varies:
            assert step.same_bits(value, second.outputs[key]), key


SEEDS = 3
SCHEDULES = [(("schedule", "random"), ("seed", seed), ("races", False)) for seed in range(SEEDS)]
MANY = StepCase(activation="srelu", splits=(256, 0, 512), hidden=256, ffn=320)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cudnn", "cutedsl"])
def test_a_deterministic_step_repeats_under_every_schedule(backend: str, tmp_path: Path) -> None:
    jobs = [StepJob(backend, MANY, options, deterministic=True) for options in SCHEDULES]
    first, *others = run(jobs, tmp_path)
    assert first.error == ""
    for other in others:
        assert other.error == ""
        step.assert_same(other.outputs, first.outputs)


@pytest.mark.slow
def test_without_the_demand_the_float_atomics_vary(tmp_path: Path) -> None:
    found = run([StepJob("cudnn", MANY, options) for options in SCHEDULES], tmp_path)
    assert {each.error for each in found} == {""}
    first = found[0].outputs
    differ = {
        name
        for each in found[1:]
        for name, value in each.outputs.items()
        if not step.same_bits(value, first[name])
    }
    assert differ == {"dprob"}


@pytest.mark.skipif("NVTE_GROUPED_MLP_EMULATE" in os.environ, reason="the switch is set")
def test_no_process_emulates_unasked() -> None:
    from te_grouped_mlp.op import emulated, environment

    assert emulated.device() is None
    assert not environment.current().emulated


@pytest.mark.parametrize("value", ["1", "sm90", "SM100"])
def test_another_value_of_the_switch_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_grouped_mlp.op import environment

    monkeypatch.setenv(environment.EMULATE_SWITCH, value)
    with pytest.raises(ValueError, match=rf"{environment.EMULATE_SWITCH} is '{value}'; allowed"):
        environment.emulation_requested()
