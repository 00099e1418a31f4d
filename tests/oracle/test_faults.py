# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What upstream's modules get wrong, in numbers, and that our op gets it right.

Every test has a row that is right upstream too, so that a fault of the stand-ins would show.
"""

from __future__ import annotations

import pytest

from te_grouped_mlp.integration import installed_te
from tests.oracle import cases
from tests.oracle.jobs import Job, Result, Setup, differing, non_finite, relative
from tests.oracle.runner import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed_te.te_version() != "2.20.2", reason="the facts are of TE 2.20.2"),
]

PADDED = {
    "activation": "srelu",
    "splits": (512,),
    "buffer_rows": 768,
    "hidden": 1024,
    "ffn": 1024,
}
WEIGHTS = ("dW1", "dW2")


def _pairs(module: str, jobs: list[Job], **frontend: str) -> list[tuple[Job, Result, Result]]:
    """Return (job, ours, the module's) of every job."""
    release = {"version": "1.32.0", **frontend}
    ours = run(Setup().on(**release), jobs)
    return list(zip(jobs, ours, run(Setup(module).on(**release), jobs), strict=True))


MEMORY = {
    "nan": {"memory": 0xFF},
    "nan_scales": {"memory": 0, "scale_memory": 0xFF},
    "zero": {"memory": 0},
    "stale": {"memory": 0x38, "scale_memory": 0x7F},
}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, float], tuple[Job, Result, Result]]:
    """The padded single group in 2.19.0, by what unwritten memory and the padding hold."""
    keys = [(name, fill) for name in MEMORY for fill in (0.0, 3.0)]
    jobs = [cases.job(**PADDED, **MEMORY[name], fill=fill) for name, fill in keys]
    return dict(zip(keys, _pairs("2.19.0", jobs), strict=True))


class TestPaddedSingleGroup:
    """The fault that this project was made for, in 2.19.0."""

    @pytest.mark.parametrize("fill", [0.0, 3.0])
    def test_only_weight_gradients_differ(self, found: dict, fill: float) -> None:
        for name in MEMORY:
            job, ours, upstream = found[name, fill]
            assert differing(ours.live(job), upstream.live(job)) == set(WEIGHTS)
            assert all(non_finite(ours.outputs[output]) == 0 for output in WEIGHTS)

    @pytest.mark.parametrize("fill", [0.0, 3.0])
    def test_unwritten_nan_is_everywhere(self, found: dict, fill: float) -> None:
        _, _, upstream = found["nan", fill]
        assert [non_finite(upstream.outputs[o]) for o in WEIGHTS] == [1048576, 1048576]

    @pytest.mark.parametrize("fill", [0.0, 3.0])
    def test_unwritten_scales_reach_three_eighths(self, found: dict, fill: float) -> None:
        """Tile j is read at chunk 6j; of 8 x 6 chunks 8 x 4 were written, so j = 6, 7, and half."""
        _, ours, upstream = found["nan_scales", fill]
        assert [non_finite(upstream.outputs[o]) for o in WEIGHTS] == [393216, 393216]
        for output in WEIGHTS:
            assert 0.4 < relative(upstream.outputs[output], ours.outputs[output]) < 1.5

    @pytest.mark.parametrize("fill", [0.0, 3.0])
    def test_fresh_pages_give_finite_wrong_numbers(self, found: dict, fill: float) -> None:
        _, ours, upstream = found["zero", fill]
        for output in WEIGHTS:
            assert non_finite(upstream.outputs[output]) == 0
            assert 0.4 < relative(upstream.outputs[output], ours.outputs[output]) < 1.5

    def test_stale_bytes_are_multiplied_with_the_padding(self, found: dict) -> None:
        """Of all this, only stale finite bytes let the padding's content through."""
        for name in MEMORY:
            _, ours, zeros = found[name, 0.0]
            _, _, threes = found[name, 3.0]
            differs = differing(zeros.outputs, threes.outputs) & set(WEIGHTS)
            assert differs == (set(WEIGHTS) if name == "stale" else set()), name
            if name == "stale":
                assert relative(zeros.outputs["dW1"], ours.outputs["dW1"]) > 1
                assert relative(threes.outputs["dW1"], ours.outputs["dW1"]) > 1

    def test_2_20_2_is_right(self) -> None:
        jobs = [
            cases.job(**{**PADDED, "hidden": 512, "ffn": 512}, **memory, fill=fill)
            for memory in MEMORY.values()
            for fill in (0.0, 3.0)
        ]
        for job, ours, upstream in _pairs("2.20.2", jobs):
            assert differing(ours.live(job), upstream.live(job)) == set()

    def test_exact_size_is_right_and_equals_padded(self) -> None:
        exact = cases.job(**{**PADDED, "buffer_rows": None})
        ours = run(Setup(), [exact, cases.job(**PADDED, fill=cases.NAN)])
        (upstream,) = run(Setup("2.19.0"), [exact])
        assert differing(ours[0].outputs, upstream.outputs) == set()
        assert differing(ours[0].live(exact), ours[1].live(exact)) == set()


def test_the_old_decision_alone_reproduces_2_19() -> None:
    """Our op with one group always dense gives the faulty bits of 2.19.0: nothing else differs."""
    rows = {"splits": (512,), "buffer_rows": 768, "hidden": 256, "ffn": 256}
    jobs = [
        cases.job(activation=activation, layout="dense", memory=memory, fill=fill, **rows, **more)
        for activation in ("srelu", "swiglu", "qgeglu")
        for memory, fill in ((0, 0.0), (0x38, 3.0))
        for more in ({}, {"grad": "overwrite"}, {"weight": "grouped"})
    ]
    # A recompute has one more packed writer.
    jobs.append(jobs[0].but(recompute=True))
    # Kernels of this release are packed writers for every activation.
    release = {"version": "1.26.0"}
    right = run(Setup().on(**release), [job.but(layout="") for job in jobs])
    found = _pairs("2.19.0", jobs, **release)
    for (job, faulty, upstream), sound in zip(found, right, strict=True):
        assert differing(faulty.live(job), upstream.live(job)) == set(), job
        assert differing(sound.live(job), upstream.live(job)) == set(WEIGHTS), job


def test_without_runtime_offsets_2_19_fails_for_every_activation() -> None:
    jobs = [
        cases.job(**{**PADDED, "hidden": 256, "ffn": 256, "activation": activation}, memory=memory)
        for activation in ("srelu", "swiglu", "qgeglu")
        for memory in (0, 0xFF)
    ]
    for job, ours, upstream in _pairs("2.19.0", jobs, version="1.26.0"):
        assert differing(ours.live(job), upstream.live(job)) == set(WEIGHTS), job
        for output in WEIGHTS:
            if job.memory:
                assert non_finite(upstream.outputs[output]) > 0
            else:
                assert 0.3 < relative(upstream.outputs[output], ours.outputs[output]) < 1.5
    for job, ours, upstream in _pairs("2.20.2", jobs, version="1.26.0"):
        assert differing(ours.live(job), upstream.live(job)) == set(), job


def test_tail_enters_2_20_2s_weight_gradients() -> None:
    """Unless x, dy or the probabilities are zero there, and nothing is NaN."""
    clean = [(3.0, 0.0, 0.5), (0.0, 3.0, 0.5), (3.0, 3.0, 0.0)]
    dirty = [(3.0, 3.0, 0.5)]
    nan = cases.NAN
    poisoned = [(nan, 0.0, 0.0), (0.0, nan, 0.0), (0.0, 0.0, nan)]
    found = _pairs("2.20.2", [cases.tails(*each) for each in clean + dirty + poisoned])
    for job, ours, upstream in found[:3]:
        assert differing(ours.live(job), upstream.live(job)) == set(), job.fills
    for job, ours, upstream in found[3:]:
        assert differing(ours.live(job), upstream.live(job)) == set(WEIGHTS), job.fills
    _, ours, upstream = found[3]
    for output in WEIGHTS:
        assert relative(upstream.outputs[output], ours.outputs[output]) > 100
    for _, ours, upstream in found[4:]:
        assert [non_finite(upstream.outputs[o]) for o in WEIGHTS] == [262144, 131072]
        assert [non_finite(ours.outputs[o]) for o in WEIGHTS] == [0, 0]


@pytest.mark.parametrize("path", ["bias", "x", "dy"])
def test_paths_that_2_20_2s_repair_missed(path: str) -> None:
    """FC2's bias and prequantized tensors are still packed where dense products read all rows."""
    zeros, nans = cases.packed_path(path, 0), cases.packed_path(path, 0xFF)
    sound = [
        job.but(**change)
        for job in (zeros, nans)
        for change in ({"activation": "srelu"}, {"buffer_rows": None})
    ]
    found = _pairs("2.20.2", [zeros, nans, *sound])
    victim = "dW1" if path == "x" else "dW2"
    job, ours, upstream = found[0]
    # A padded call is dense upstream and packed here: the bias is added after or before rounding.
    rounding = {"y"} if path == "bias" else set()
    assert differing(ours.live(job), upstream.live(job)) == {victim} | rounding
    assert 0.4 < relative(upstream.outputs[victim], ours.outputs[victim]) < 0.7
    job, ours, upstream = found[1]
    for output in WEIGHTS:
        have = upstream.outputs[output]
        assert have is not None
        assert non_finite(have) == have.numel()
        assert non_finite(ours.outputs[output]) == 0
    if path == "bias":
        assert relative(upstream.live(job)["y"], ours.live(job)["y"]) < 2**-7
        assert non_finite(upstream.outputs["db1"]) == 512
        assert non_finite(upstream.outputs["dprob"]) == 256
    for job, ours, upstream in found[2:]:
        assert differing(ours.live(job), upstream.live(job)) == set(), job


class TestOddSplits:
    """Experts that end on odd multiples of 128, under 256-row tiles."""

    @pytest.mark.parametrize("activation", ["srelu", "swiglu"])
    def test_who_is_hurt_depends_on_the_order(self, activation: str) -> None:
        jobs = [cases.odd_splits(activation, spill) for spill in (None, "first", "last")]
        found = _pairs("2.20.2", jobs)
        expected = [set(), {"dprob", "db1"}, {"y", "dx", "dprob", "dW1", "dW2", "db1"}]
        for (job, ours, upstream), outputs in zip(found, expected, strict=True):
            hurt = differing(ours.live(job), upstream.live(job))
            assert hurt == outputs, job.spill
            for output in hurt:
                assert 0.2 < relative(upstream.live(job)[output], ours.live(job)[output]) < 1.5
            assert upstream.out_of_bounds == []

    def test_last_expert_writes_out_of_bounds(self) -> None:
        job = cases.odd_splits("srelu", "first", splits=(256, 256, 384, 128))
        ((_, _, upstream),) = _pairs("2.20.2", [job])
        assert upstream.out_of_bounds == [
            ("sfd_row:d", 1024),
            ("sfd_col:d", 512),
            ("dprob", 512),
            ("sfd_row:d", 1024),
            ("sfd_col:d", 512),
            ("sfd_col:d_srelu", 512),
        ]

    def test_one_packed_group_is_hurt_too(self) -> None:
        """Its own column scales are overwritten: the spilled ones have their neighbours' place."""
        rows = {"splits": (640,), "buffer_rows": 768, "bias": False, "fill": cases.NAN}
        jobs = [cases.odd_splits("srelu", spill, **rows) for spill in ("first", "last")]
        (job, ours, first), (_, _, last) = _pairs("2.20.2", jobs)
        assert differing(ours.live(job), first.live(job)) == set()
        assert differing(ours.live(job), last.live(job)) == set(WEIGHTS)
        for output in WEIGHTS:
            have = last.outputs[output]
            assert have is not None
            assert non_finite(have) == have.numel() // 2


def test_row_counts_that_2_20_2_refuses_late_or_never() -> None:
    rows = {"hidden": 512, "ffn": 256}

    def at(splits: tuple[int, ...], buffer: int, **more: object) -> Job:
        return cases.job(activation="srelu", splits=splits, buffer_rows=buffer, **rows, **more)

    jobs = [
        at((256,), 1088),
        at((256,), 640),
        at((256,) * 4, 1152),
        at((192, 320), 512),
        at((0, 0), 256),
    ]
    found = _pairs("2.20.2", jobs)
    assert found[0][2].error.startswith("ValueError: Unsupported input shape")
    assert found[0][2].calls == []
    for _, ours, upstream in found[1:3]:
        # The first kernel refuses, after x has been quantized; ours has no such kernel here.
        assert upstream.error.startswith("ValueError: a_tensor.shape[0] is")
        assert upstream.calls == ["srelu"]
        assert ours.error == ""
    assert "1088" in found[0][1].error
    assert "192" in found[3][1].error
    assert "192" in found[3][2].error
    job, ours, upstream = found[4]
    assert differing(ours.live(job), upstream.live(job)) == set()
    for output in WEIGHTS:
        grad = upstream.outputs[output]
        assert grad is not None
        assert not grad.any()
