# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The backend on a Blackwell GPU, with Transformer Engine's extension and the frontend.

What no other test can show: the kernels' numbers. `docs/blackwell.md` says how to run it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_grouped_mlp.op import environment
from tests.support import step
from tests.support.step import StepCase

pytestmark = [pytest.mark.sm100, pytest.mark.usefixtures("fused_switch", "_named")]

SEVERAL = StepCase(
    splits=(256, 0, 512, 256), buffer_rows=1536, hidden=512, ffn=384, fill=float("nan"),
    device="cuda",
)  # fmt: skip
PADDED = SEVERAL.but(splits=(512,), buffer_rows=1024)
FULL = SEVERAL.but(splits=(512,), buffer_rows=None)
LAYOUTS = {"several": SEVERAL, "padded": PADDED, "full": FULL}
BIASES = {"nobias": {}, "bias": {"bias": True}, "scaledbias": {"bias": True, "scale_bias": True}}
AGREEMENT = 0.02
"""Against the reference backend on the same operands: orders of addition, and codes one apart."""


@pytest.fixture
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the backend."""
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", "cudnn")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def assert_agrees(case: StepCase, found: dict[str, Any]) -> None:
    """Compare with float64 on the unquantized inputs, and with the reference backend."""
    step.assert_close(case, found, step.reference(case))
    with step.switches(NVTE_GROUPED_MLP_BACKEND="reference"):
        expected = step.live(case, step.run_step(case))
    for name, value in step.live(case, found).items():
        if value is not None:
            assert relative(value, expected[name]) <= AGREEMENT, name


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers(layout: str, bias: str, activation: str) -> None:
    case = LAYOUTS[layout].but(activation=activation, **BIASES[bias])
    assert_agrees(case, step.run_step(case))


@pytest.mark.parametrize("weight", ["grouped", "quantized"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_weights(layout: str, weight: str) -> None:
    case = LAYOUTS[layout].but(weight=weight)
    assert_agrees(case, step.run_step(case))


@pytest.mark.parametrize("shape", [(2880, 2880), (320, 192), (64, 64)], ids=str)
@pytest.mark.parametrize("activation", ["qgeglu", "srelu"])
def test_features_that_do_not_fill_a_scale_tile(activation: str, shape: tuple[int, int]) -> None:
    case = SEVERAL.but(activation=activation, hidden=shape[0], ffn=shape[1])
    assert_agrees(case, step.run_step(case))


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("layout", ["several", "padded"])
def test_padding_is_invisible(layout: str, activation: str) -> None:
    """Bit by bit: another fill, and a buffer without padding. Padded tails come back as zeros."""
    case = LAYOUTS[layout].but(activation=activation)
    with step.switches(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"):
        found = step.run_step(case)
        for other in (case.but(fill=3.0), case.but(buffer_rows=None)):
            with environment.override(treat_rows_as_full=False):
                step.assert_same(step.live(other, step.run_step(other)), step.live(case, found))
    for name in ("y", "dx", "dprob"):
        assert not found[name][case.live :].any(), name


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deterministic_step_repeats(layout: str, activation: str) -> None:
    case = LAYOUTS[layout].but(activation=activation, ffn=1536)
    with step.switches(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"):
        first = step.run_step(case)
        for _ in range(10):
            step.assert_same(step.live(case, step.run_step(case)), step.live(case, first))


def test_two_streams_do_not_disturb_each_other() -> None:
    expected = step.live(SEVERAL, step.run_step(SEVERAL))
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            found.append(step.run_step(SEVERAL))
    torch.cuda.synchronize()
    for each in found:
        cut = step.live(SEVERAL, each)
        for name in ("y", "dx", "dW1", "dW2"):
            assert step.same_bits(cut[name], expected[name]), name


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_demand_that_the_frontend_cannot_meet(layout: str, activation: str) -> None:
    """No backend is named: with FC1's bias, gated activations run on the native kernels."""
    case = LAYOUTS[layout].but(activation=activation, **BIASES["scaledbias"])
    with step.switches(NVTE_GROUPED_MLP_BACKEND=None, NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"):
        first = step.run_step(case)
        for _ in range(5):
            step.assert_same(step.live(case, step.run_step(case)), step.live(case, first))
    assert_agrees(case, first)
