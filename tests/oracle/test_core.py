# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Our op and the installed TE's own fused op, step by step: two processes, a few steps."""

from __future__ import annotations

import pytest

from te_grouped_mlp.integration import installed_te
from tests.oracle import cases
from tests.oracle.jobs import Job, Result, Setup, differing, non_finite, relative
from tests.oracle.runner import run
from tests.support import step

# Where the installed release is right, and where it is known not to be.
RIGHT = {
    name: cases.right()[name]
    for name in (
        "1g-swiglu-plain",
        "1g-swiglu-bias",
        "1g-srelu-main_grad",
        "1g-padded-srelu-plain",
        "4g-swiglu-scale_bias",
        "4g-srelu-bias",
        "4g-qgeglu-grouped",
    )
}
WRONG = {
    "tail": cases.tails(3.0, 3.0, 0.5),
    "nan_tail": cases.tails(cases.NAN, 0.0, 0.0),
    "fc2_bias": cases.packed_path("bias", 0xFF),
    "spilled": cases.odd_splits("srelu", "first"),
}
JOBS = {**RIGHT, **WRONG}


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Result, Result]]:
    """Ours and upstream's results, by name."""
    version = installed_te.te_version()
    if version != "2.20.2":
        pytest.skip(f"the installed TE is {version}; the facts are of 2.20.2")
    ours = run(Setup(), list(JOBS.values()))
    upstream = run(Setup(version), list(JOBS.values()))
    return dict(zip(JOBS, zip(ours, upstream, strict=True), strict=True))


@pytest.mark.parametrize("name", RIGHT)
def test_bitwise_equal_where_upstream_is_right(
    results: dict[str, tuple[Result, Result]], name: str
) -> None:
    ours, upstream = results[name]
    assert differing(ours.live(JOBS[name]), upstream.live(JOBS[name])) == set()


def test_each_ran_its_own_module(results: dict[str, tuple[Result, Result]]) -> None:
    for ours, upstream in results.values():
        assert ours.fused == str(installed_te.fork_file())
        assert upstream.fused.startswith(str(installed_te.te_root()))
        assert ours.calls == []
        assert len(upstream.calls) >= 2


def test_equal_results_are_also_right(results: dict[str, tuple[Result, Result]]) -> None:
    name = "4g-srelu-bias"
    case = JOBS[name].case
    step.assert_close(case, results[name][1].outputs, step.reference(case))


@pytest.mark.parametrize("name", ["tail", "nan_tail"])
def test_tail_enters_only_upstreams_weight_gradients(
    results: dict[str, tuple[Result, Result]], name: str
) -> None:
    job: Job = WRONG[name]
    ours, upstream = results[name]
    assert differing(ours.live(job), upstream.live(job)) == {"dW1", "dW2"}
    for output in ("dW1", "dW2"):
        ours_has, upstream_has = ours.outputs[output], upstream.outputs[output]
        assert non_finite(ours_has) == 0
        if name == "tail":
            assert relative(upstream_has, ours_has) > 100
        else:
            assert upstream_has is not None
            assert non_finite(upstream_has) == upstream_has.numel()


def test_fc2_bias_brings_the_fault_back_upstream(
    results: dict[str, tuple[Result, Result]],
) -> None:
    ours, upstream = results["fc2_bias"]
    for output in ("dW1", "dW2", "db1"):
        assert non_finite(ours.outputs[output]) == 0
        assert non_finite(upstream.outputs[output]) > 0


def test_spilled_tile_changes_the_neighbours_probability_gradient(
    results: dict[str, tuple[Result, Result]],
) -> None:
    """The comparison can fail, and 256-row tiles need splits that are multiples of 256."""
    ours, upstream = results["spilled"]
    job = WRONG["spilled"]
    assert differing(ours.live(job), upstream.live(job)) == {"dprob", "db1"}
    assert relative(upstream.outputs["dprob"], ours.outputs["dprob"]) > 0.1
