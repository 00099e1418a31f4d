# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Padding is invisible: a longer buffer, whatever its tail holds, changes no bit of a result."""

from __future__ import annotations

import math

import pytest

import te_grouped_mlp
from te_grouped_mlp.integration import installed_te
from te_grouped_mlp.op import environment
from tests.op.fixtures import TAILS, assert_padding_invisible, exact_size
from tests.support import step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SINGLE = StepCase(splits=(256,), hidden=256, ffn=192)
SEVERAL = StepCase(splits=(128, 0, 384), hidden=192, ffn=128)


@pytest.mark.parametrize("fill", TAILS)
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "3g"])
def test_padding_is_invisible(base: StepCase, activation: str, tiles: int, fill: float) -> None:
    case = base.but(activation=activation, buffer_rows=base.live + 128 * tiles, fill=fill)
    assert_padding_invisible(case)


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
def test_padding_is_invisible_to_every_activation(activation: str) -> None:
    case = SINGLE.but(activation=activation, buffer_rows=640, fill=math.nan, bias=True)
    assert_padding_invisible(case)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_padded_single_group_needs_the_decision(activation: str) -> None:
    """The test above fails when the group count alone decides: it sees the fault it is for."""
    case = SINGLE.but(activation=activation, buffer_rows=512, fill=3.0)
    assert_padding_invisible(case)
    with (
        environment.override(single_group_is_always_dense=True),
        pytest.raises(AssertionError, match="differ"),
    ):
        assert_padding_invisible(case)


def test_old_decision_with_a_packed_writer_reads_unwritten_scales() -> None:
    """SReLU's kernel writes 256 of 512 rows, so dense readers take NaN for scales and data."""
    case = SINGLE.but(activation="srelu", buffer_rows=512)
    with environment.override(single_group_is_always_dense=True):
        found = step.run_step(case)
    assert found["y"][: case.live].isfinite().all()
    assert not found["dW1"].isfinite().any()
    assert not found["dW2"].isfinite().any()


def test_old_decision_with_a_dense_writer_multiplies_the_tail() -> None:
    """SwiGLU's kernel writes all rows, so the padding's outer products enter the gradients."""
    case = SINGLE.but(buffer_rows=512, fill=3.0)
    with environment.override(single_group_is_always_dense=True):
        found = step.live(case, step.run_step(case))
    exact = exact_size(case)
    for name in ("y", "dx", "dprob"):
        assert step.same_bits(found[name], exact[name]), name
    for name in ("dW1", "dW2"):
        error = (found[name] - exact[name]).double().norm() / exact[name].double().norm()
        assert error > 10, name


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "3g"])
def test_step_is_close_to_float64(base: StepCase, activation: str) -> None:
    case = base.but(activation=activation, buffer_rows=base.live + 128, fill=math.nan)
    step.assert_close(case, step.run_step(case), step.reference(case))


def test_a_full_single_group_is_one_dense_matrix() -> None:
    """The dense layout gives what the packed one gives where nothing is added before rounding."""
    step.assert_same(step.run_step(SINGLE), exact_size(SINGLE))


def test_more_experts_than_one_grouped_launch_takes() -> None:
    """TE 2.20 quantizes 64 groups at once, on the CPU as on a GPU; every second is empty here."""
    case = StepCase(splits=(128, 0) * 33, hidden=64, ffn=64, buffer_rows=33 * 128 + 128, fill=1e30)
    if installed_te.te_version().startswith("2.19."):
        assert_padding_invisible(case)
        return
    with pytest.raises(RuntimeError, match="group_quantize: num_tensors is 66; allowed: 1 to 64"):
        step.run_model(step.make_model(case), case, step.make_inputs(case))
    name, refused = te_grouped_mlp.explain()[-1].refusals[0]
    assert (name, str(refused.detail)) == ("reference", "num_groups is 66; allowed: 1 to 64")
    assert_padding_invisible(case.but(splits=(128, 0) * 32, buffer_rows=33 * 128))
