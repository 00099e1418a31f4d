# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What `bench` measures on a GPU, on a CPU with a clock that counts instead of timing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from te_grouped_mlp.cli.output import CommandError
from te_grouped_mlp.integration import standalone
from te_grouped_mlp.measure import step
from te_grouped_mlp.measure.bench import gpu, interleaved, mxfp8, peers, te_layer, timing
from te_grouped_mlp.measure.bench.shapes import SHAPES, Shape, inputs, uneven_splits
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.tensors import dequantized_weights
from tests.support.values_backend import in_use

SMALL = Shape(3, 128, 128, 640)


class Counting(timing.Clock):
    """Runs everything once; a candidate takes as many milliseconds as its place."""

    place = "cpu"

    def __init__(self) -> None:
        self.timed: list[str] = []

    def compare(
        self, works: Mapping[str, Callable[[], object]], runs: int = 15, warm: int = 3
    ) -> dict[str, timing.Time]:
        self.timed += works
        for work in works.values():
            work()
        times = {name: [float(place)] * runs for place, name in enumerate(works, 1)}
        return {name: timing.summary(each) for name, each in times.items()}

    def host(self, work: Callable[[], object], runs: int = 30) -> timing.Time:
        return timing.summary([1.0, 1.0])

    def memory(self) -> int:
        return 0

    def peak(self, work: Callable[[], Any]) -> tuple[Any, int]:
        return work(), 5_000_000_000


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    te_layer.start()
    on_cpu = {
        name: mode if mode.backend is None else replace(mode, backend="reference")
        for name, mode in mxfp8.MODES.items()
    }
    monkeypatch.setattr(mxfp8, "MODES", on_cpu)


@pytest.mark.parametrize("count", range(1, 9))
def test_each_candidate_follows_each_other_one_equally_often(count: int) -> None:
    turns = timing.orders(count)
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    found = Counter(pair for turn in turns for pair in pairwise(turn))
    assert len(found) == count * (count - 1)
    assert len(set(found.values())) <= 1
    # Nor does one of them always begin.
    assert len({turn[0] for turn in turns}) == count


def test_a_ratio_is_formed_run_by_run() -> None:
    # The clocks halve after the second run; the ratio does not notice.
    slow, fast = [3.0, 3.3, 6.0, 6.6], [2.0, 2.0, 4.0, 4.0]
    found = timing.summary(slow).over(timing.summary(fast))
    assert found["ratio"] == pytest.approx(1.575)
    assert found["ratio_spread"] == pytest.approx(0.15)


def test_splits_are_whole_tiles() -> None:
    for shape in SHAPES:
        sizes = uneven_splits(shape, tile=128)
        assert sum(sizes) == shape.tokens
        assert [size % 128 for size in sizes] == [0] * shape.experts
        assert max(sizes) < 2.5 * shape.tokens / shape.experts
        assert len(set(sizes)) > 1 or shape.experts == 1


def test_a_candidate_that_is_not_there_or_fails_is_named() -> None:
    def absent() -> interleaved.Step:
        raise interleaved.NotThere("no extension")

    def broken() -> interleaved.Step:
        raise ValueError("no such argument")

    values = torch.tensor([3.0, 4.0])
    clock = Counting()
    makers: dict[str, Callable[[], interleaved.Step]] = {
        "ours": lambda: lambda: {"y": values, "dw1": values},
        "away": absent,
        "broken": broken,
        "other": lambda: lambda: {"y": values + torch.tensor([0.0, 1.0]), "dw1": -values},
    }
    found = interleaved.time_interleaved(makers, clock, 4)
    assert clock.timed == ["ours", "other"]
    assert found["away"] == {"absent": "no extension"}
    assert found["broken"] == {"error": "ValueError('no such argument')"}
    assert found["other"]["against_ours"] == {"y": pytest.approx(0.2)}
    assert (found["other"]["ratio"], found["other"]["runs"]) == (2.0, 4)
    assert found["other"]["peak_gb"] == 5.0


def test_te_ops_is_no_peer_without_its_extension() -> None:
    assert standalone.is_active()
    given = inputs(SMALL, device="cpu")
    found = interleaved.time_interleaved(
        {"te.ops": lambda: peers.te_ops_step(given)}, Counting(), 2
    )
    assert list(found["te.ops"]) == ["absent"]
    assert "extension is not in this process" in found["te.ops"]["absent"]


def test_te_ops_computes_the_layer_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ours stands in for the extension, under the same three ops.
    monkeypatch.setattr(standalone, "is_active", lambda: False)
    given = inputs(SMALL, device="cpu")
    want = {name: value.detach() for name, value in gpu.oracle(given).items()}
    found = interleaved.errors(peers.te_ops_step(given)(), want)
    assert sorted(found) == ["dprob", "dx", "y"]
    assert all(0 < value < 8e-3 for value in found.values())


def test_a_layer_that_ran_otherwise_than_asked_is_refused() -> None:
    layer = te_layer.Layer(inputs(SMALL, device="cpu"), te_layer.Mode(False, None))
    layer.mode = te_layer.Mode(False, "reference")
    layer.step()
    with pytest.raises(RuntimeError, match="ran as GroupedLinear, ScaledSwiGLU, GroupedLinear"):
        layer.require_path()


def test_the_weights_are_those_of_the_inputs() -> None:
    given = inputs(SMALL, device="cpu")
    layer = te_layer.Layer(given, te_layer.Mode(False, None))
    for op, values in ((layer.fc1, given.w1), (layer.fc2, given.w2)):
        places = [parameter.data_ptr() for parameter in op.parameters()]
        assert places == [member.data_ptr() for member in values.unbind(0)]


def test_mxfp8_is_checked_against_the_reference() -> None:
    found = mxfp8.check(SMALL, device="cpu", replays=2)
    assert found["green"] is found["mxfp8"]["bitwise"] is True
    assert found["mxfp8"]["errors"] == dict.fromkeys(("y", "dx", "dprob", "dw1", "dw2"), 0.0)


@pytest.mark.parametrize("name", ["y", "dx", "dprob", "dw1", "dw2"])
def test_a_wrong_mxfp8_result_is_red(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    honest, calls = te_layer.Layer.results, []

    def wrong(self: te_layer.Layer) -> interleaved.Results:
        found = honest(self)
        calls.append(1)
        # The reference asks first.
        if len(calls) > 1:
            found[name] = found[name] * 1.01
        return found

    monkeypatch.setattr(te_layer.Layer, "results", wrong)
    found = mxfp8.check(SMALL, device="cpu", replays=1)
    assert found["green"] is False
    assert found["errors"][f"mxfp8: {name}"] > mxfp8.BOUND


def test_a_varying_mxfp8_result_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = te_layer.Layer.results, []

    def varying(self: te_layer.Layer) -> interleaved.Results:
        found = honest(self)
        calls.append(1)
        found["dprob"].view(torch.int32)[7] ^= len(calls) & 1
        return found

    monkeypatch.setattr(te_layer.Layer, "results", varying)
    found = mxfp8.check(SMALL, device="cpu", replays=2)
    assert found["mxfp8"]["bitwise"] is found["green"] is False


def test_mxfp8_stands_beside_bf16_and_its_floor() -> None:
    clock = Counting()
    found = mxfp8.measure(SMALL, clock, copy_tbs=4.0, runs=3)
    assert clock.timed[:2] == ["bf16", "mxfp8"]
    row = found["mxfp8"]
    assert row["bitwise"] is True
    assert all(0.05 < value < 0.09 for value in row["against_bf16"].values())
    assert row["ratio"] == 2.0
    moved = mxfp8.floor_bytes(SMALL, keep_weights=False)
    assert row["floor_ms"] == pytest.approx(1.0 + moved / 4e12 * 1e3)
    assert row["over_floor"] == pytest.approx(2.0 / row["floor_ms"])
    assert "floor_ms" not in found["bf16"]


def test_kept_weights_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {
        name: replace(mode, backend="cutedsl" if mode.mxfp8 else "reference")
        for name, mode in mxfp8.MODES.items()
    }
    monkeypatch.setattr(mxfp8, "MODES", modes)
    original, made = dequantized_weights.of_plain, []
    monkeypatch.setattr(
        dequantized_weights, "of_plain", lambda *args, **kw: made.append(1) or original(*args, **kw)
    )
    with in_use(monkeypatch):
        assert mxfp8.check(SMALL, device="cpu", replays=2)["green"] is True
        # Two linears in each of two steps; and once where they are kept.
        assert len(made) == 2 * 2 + 2
        made.clear()
        found = mxfp8.measure(SMALL, Counting(), copy_tbs=4.0, runs=3)
        assert len(made) == 2 * 4 + 2
    assert interleaved.is_green({f"mxfp8 {SMALL.label}": found})
    rows = [found[name] for name in ("mxfp8", "mxfp8, weights kept")]
    assert rows[0]["against_bf16"] == rows[1]["against_bf16"]
    assert rows[0]["floor_ms"] > rows[1]["floor_ms"]


def test_the_floor_counts_every_pass() -> None:
    # One expert, 128 rows, hidden 256, FFN 512; the bytes of each pass, one by one.
    rows, hidden, ffn = 128, 256, 512
    moved = 0
    for width in (hidden, ffn):
        elements, scales = rows * width, rows * width // 32
        moved += 2 * elements  # read
        moved += 2 * elements  # row values
        moved += 2 * (elements + scales)  # column codes, written and read
        moved += 2 * elements  # column values
    for width in (hidden, 2 * ffn):
        moved += (2 + 2 + 2) * rows * width
    shape = Shape(1, hidden, ffn, rows)
    assert mxfp8.floor_bytes(shape, keep_weights=True) == moved
    moved += (2 + 2 + 2) * (2 * ffn * hidden + hidden * ffn)
    assert mxfp8.floor_bytes(shape, keep_weights=False) == moved


def test_what_was_not_rounded_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_layer.Layer, "forward", _in_bf16(te_layer.Layer.forward))
    clock = Counting()
    found = mxfp8.measure(SMALL, clock, copy_tbs=4.0, runs=3)
    assert clock.timed == ["bf16"]
    assert "differs from bf16 by 0" in found["mxfp8"]["error"]
    assert not interleaved.is_green({"check x": {"green": True}, "mxfp8 x": found})


def _in_bf16(honest: Callable[[te_layer.Layer], torch.Tensor]) -> Any:
    def forward(self: te_layer.Layer) -> torch.Tensor:
        mode, self.mode = self.mode, replace(self.mode, mxfp8=False)
        try:
            return honest(self)
        finally:
            self.mode = mode

    return forward


@pytest.mark.parametrize("name", ["hidden", "ffn", "tokens"])
def test_a_shape_without_whole_tiles_is_named(name: str) -> None:
    found = mxfp8.measure(replace(SMALL, **{name: 192}), Counting(), copy_tbs=4.0, runs=3)
    assert found["bf16"] == {"absent": f"{name} is 192; allowed in MXFP8: multiples of 128"}


def test_no_mxfp8_number_on_a_red_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ValueError("no such kernel")

    run = {"runs": 3, "replays": 2}
    found = dict(mxfp8.sections([SMALL], Counting(), 4.0, **run))
    assert list(found) == ["check mxfp8", f"mxfp8 {SMALL.label}"]
    monkeypatch.setattr(mxfp8, "check", broken)
    found = dict(mxfp8.sections([SMALL], Counting(), 4.0, **run))
    assert list(found) == ["check mxfp8"]
    assert found["check mxfp8"]["green"] is False
    assert "no such kernel" in found["check mxfp8"]["error"]


def test_mxfp8_is_not_there_beside_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "is_active", lambda: False)
    ((name, found),) = mxfp8.sections([SMALL], Counting(), 4.0, runs=3, replays=2)
    assert name == "mxfp8"
    assert "NVTE_GROUPED_MLP_STANDALONE=1" in found["absent"]


class _Stub:
    """Stands in for a layer over the native kernels."""

    def __init__(self, given: Any, deterministic: bool = False, **_: object) -> None:
        self.values = {"y": given.x.float(), "dprob": given.prob}
        self.deterministic = deterministic

    def step(self) -> interleaved.Results:
        return self.values

    def forward(self) -> tuple[torch.Tensor, ...]:
        return self.values["y"], self.values["y"], self.values["y"]

    def backward(self, *_: object, dprob: bool = True) -> interleaved.Results:
        return self.values


def test_a_whole_gpu_run_has_every_section(monkeypatch: pytest.MonkeyPatch) -> None:
    red = Shape(1, 128, 128, 128)
    monkeypatch.setattr(gpu, "Clock", Counting)
    monkeypatch.setattr(gpu, "compile_all", lambda shapes: None)
    monkeypatch.setattr(gpu, "ceilings", lambda clock: {"bf16_tflops": 800.0, "copy_tbs": 4.0})
    monkeypatch.setattr(gpu, "check", lambda shape, replays: {"green": shape != red})
    monkeypatch.setattr(gpu, "inputs", lambda shape: inputs(shape, device="cpu"))
    monkeypatch.setattr(gpu, "kernels", lambda shape, clock, limits, runs: [runs])
    monkeypatch.setattr(gpu.layer, "layer_of", _Stub)
    found = dict(gpu.measure([red, SMALL], with_peers=False, effort=gpu.QUICK))
    of_small = ("steps", "modes", "passes", "kernels")
    assert list(found) == [
        "ceilings", f"check {red.label}", f"check {SMALL.label}",
        *(f"{kind} {SMALL.label}" for kind in of_small), "check mxfp8", f"mxfp8 {SMALL.label}",
    ]  # fmt: skip
    modes = found[f"modes {SMALL.label}"]
    assert (modes["ours, deterministic"]["ratio"], modes["ours"]["runs"]) == (2.0, gpu.QUICK.modes)
    assert found[f"steps {SMALL.label}"]["ours"]["runs"] == gpu.QUICK.steps
    assert found[f"passes {SMALL.label}"]["backward"]["runs"] == gpu.QUICK.parts
    assert found[f"kernels {SMALL.label}"] == [gpu.QUICK.parts]
    assert found[f"mxfp8 {SMALL.label}"]["mxfp8"]["runs"] == gpu.QUICK.steps
    assert not interleaved.is_green(found)


def test_a_step_that_ran_unfused_is_not_measured() -> None:
    step.start()
    shape = step.Shape(2, 128, 128, 256)
    model = step.Model.build(Activation.SWIGLU, shape, seed=0, device="cpu")
    off = replace(environment.read_switches(), fused=False)
    with environment.override(switches=off):
        model.run(step.batch(shape, 1, "cpu"))
    with pytest.raises(CommandError, match="not in our fused op"):
        model.require_fused()
