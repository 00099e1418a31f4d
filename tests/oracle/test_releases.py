# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The fused modules of TE 2.17.1 to 2.20.2 inside TE 2.20.2, against our op."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_grouped_mlp.integration import installed_te
from tests.oracle import cases
from tests.oracle.jobs import Job, Result, Setup, differing, relative
from tests.oracle.runner import cache, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed_te.te_version() != "2.20.2", reason="the facts are of TE 2.20.2"),
]

MODULES = ("2.20.2", "2.19.0", "2.18.0", "2.17.1")
FRONTENDS = ("1.26.0", "1.27.0", "1.28.0", "1.29.1", "1.30.0", "1.31.0")


@pytest.fixture(scope="module")
def ours() -> dict[tuple[str, str], Result]:
    """Our results by (name, layout)."""
    wanted: dict[tuple[str, str], Job] = {}
    for module in MODULES:
        for name, job in cases.right_of(module).items():
            wanted[name, job.layout] = job
    return dict(zip(wanted, run(Setup(), list(wanted.values())), strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_bitwise_equal_where_the_release_is_right(
    ours: dict[tuple[str, str], Result], module: str
) -> None:
    jobs = cases.right_of(module)
    root = installed_te.te_root() if module == "2.20.2" else cache() / f"te-2.20.2-with-{module}"
    wrong, refused = [], set()
    for (name, job), theirs in zip(
        jobs.items(), run(Setup(module), list(jobs.values())), strict=True
    ):
        mine = ours[name, job.layout]
        if theirs.error.startswith(cases.NO_OFFSETS):
            refused.add(name)
            continue
        assert Path(theirs.fused).is_relative_to(str(root)), name
        expected, found = mine.live(job), theirs.live(job)
        for output in differing(expected, found):
            bound = cases.allowed_difference(name, output)
            if bound == 0.0 or relative(found[output], expected[output]) > bound:
                wrong.append((name, output))
    assert wrong == []
    assert refused == {
        name
        for name, job in jobs.items()
        if cases.lacks_offsets(
            job, dense=module == "2.19.0" or (module == "2.20.2" and job.case.gated)
        )
    }


def test_probability_gradient_is_ours_rounded_to_the_models_dtype(
    ours: dict[tuple[str, str], Result],
) -> None:
    """All that differs with fp32 probabilities is a rounding that upstream makes."""
    names = [name for name in cases.right() if name.endswith("fp32_prob")]
    jobs = [cases.right()[name] for name in names]
    for name, job, theirs in zip(names, jobs, run(Setup("2.20.2"), jobs), strict=True):
        mine = ours[name, ""].live(job)["dprob"]
        found = theirs.live(job)["dprob"]
        assert mine is not None
        assert found is not None
        assert found.equal(mine.bfloat16().float())
        assert not found.equal(mine)


@pytest.mark.parametrize("version", FRONTENDS)
def test_every_release_of_the_frontend(version: str) -> None:
    """Ours sees the same release, since the extents of its kernels decide the layout."""
    names = [
        f"{groups}-{activation}-{label}"
        for groups in ("1g", "4g")
        for activation in ("swiglu", "srelu", "qgeglu")
        for label in ("plain", "scale_bias", "grouped")
    ]
    jobs = [cases.right()[name] for name in (*names, "1g-padded-srelu-bias")]
    jobs.append(cases.packed_path("bias", 0xFF, activation="srelu"))
    mine = run(Setup().on(version=version), jobs)
    theirs = run(Setup("2.20.2").on(version=version), jobs)
    for job, first, second in zip(jobs, mine, theirs, strict=True):
        if cases.lacks_offsets(job, dense=job.case.gated and version >= "1.27.0"):
            assert second.error.startswith(cases.NO_OFFSETS)
            continue
        assert differing(first.live(job), second.live(job)) == set(), job
    offsets = "dglu" in theirs[0].calls and "quant" not in theirs[0].calls
    assert offsets == (version >= "1.27.0"), "dense products replace the grouped ones since 1.27"


@pytest.mark.parametrize("version", ["1.24.0", "1.25.0"])
def test_upstream_needs_frontend_1_26_although_it_asks_for_less(version: str) -> None:
    """`is_supported()` says yes from 1.23 on; FC2's wrapper takes `d_tensor` from 1.26 on."""
    job = cases.right()["4g-swiglu-plain"]
    (theirs,) = run(Setup("2.20.2").on(version=version), [job])
    assert theirs.error.startswith("TypeError")
    assert "d_tensor" in theirs.error
    (mine,) = run(Setup().on(version=version), [job])
    assert mine.error == ""


def test_unit_scale_with_a_unary_activation_works_with_us_alone() -> None:
    """Upstream hands the wrapper no probabilities, which that wrapper does not allow."""
    unit = cases.job(activation="srelu", unit_scale=True, **cases.ONE)
    plain = unit.but(unit_scale=False, fills=())
    (theirs,) = run(Setup("2.20.2"), [unit])
    assert theirs.error.startswith("ValueError: prob_tensor is None")
    mine = run(Setup(), [unit, plain])
    assert mine[0].error == ""
    assert mine[0].outputs["dprob"] is None
    assert mine[1].outputs["dprob"] is not None
