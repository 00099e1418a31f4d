# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Split sizes that the host does not read: right, or NaN and named; never past a buffer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import te_grouped_mlp
from te_grouped_mlp.op.plan import Reason
from te_grouped_mlp.op.step import split_guard
from te_grouped_mlp.op.step.split_guard import Fault
from te_grouped_mlp.op.tensors import memory
from tests.op.backends.cudnn.launcher import REQUIRE, ROOT
from tests.op.backends.cudnn.simulated import simulation
from tests.op.gpu import graphs
from tests.op.gpu.graphs import Layers
from tests.support import step
from tests.support.step import StepCase

MXFP8 = StepCase(splits=(128, 256, 0, 128), buffer_rows=640)
BF16 = MXFP8.but(mxfp8=False, splits=(100, 31, 0, 257))
RECIPES = {"mxfp8": MXFP8, "bf16": BF16}
HOSTILE = {
    "negative": (-128, 256, 0, 128),
    "past-the-buffer": (128, 384, 0, 256),
    "huge": (2**62, 2**62, 2**62, 2**62),
    "runs-over": (2**63 - 1, 1, 0, 0),
    "lowest": (-(2**63), 0, 0, 0),
}
UNALIGNED = {"unaligned": (96, 32, 0, 128), "last-unaligned": (128, 128, 0, 32)}


pytestmark = pytest.mark.usefixtures("fused_switch")


@pytest.fixture(autouse=True)
def _unread(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a report; on a CPU, splits are as unreadable as on a device."""
    split_guard.forget_reports()
    if not request.node.get_closest_marker("gpu"):
        from te_grouped_mlp.op.te import adapter

        monkeypatch.setattr(adapter, "sizes_on_host", lambda sizes, switches: None)
    yield
    split_guard.forget_reports()


def run(case: StepCase, sizes: Any = None, device: str = "cpu") -> dict[str, Any]:
    """Run a step whose model and data are those of `case`, with other split sizes."""
    case = case.but(device=device)
    model, inputs = step.make_model(case), step.make_inputs(case)
    if sizes is not None:
        inputs.split_sizes.copy_(torch.tensor(sizes))
    y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
    return step.collect(case, model, inputs, y)


def assert_nan(found: dict[str, Any]) -> None:
    for name, value in found.items():
        assert value is None or value.isnan().all(), name


GPU = [pytest.mark.gpu]


def on_devices(cases: Iterator[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Name each case for the CPU (no bf16: it runs unfused there) and for a GPU."""
    return [
        pytest.param(*values, device, id=f"{name}-{device}", marks=marks)
        for name, values in cases
        for device, marks in (("cpu", ()), ("cuda", GPU + [pytest.mark.mxfp8] * values[0].mxfp8))
        if device == "cuda" or values[0].mxfp8
    ]


def wrong_sizes() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for recipe, case in RECIPES.items():
        for name, sizes in {**HOSTILE, **(UNALIGNED if recipe == "mxfp8" else {})}.items():
            yield f"{recipe}-{name}", (case, sizes)


@pytest.mark.parametrize(("case", "sizes", "device"), on_devices(wrong_sizes()))
def test_splits_that_do_not_fit_give_nan_and_are_named_by_the_next_call(
    case: StepCase, sizes: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The backward of this very step would be the next call.
    with monkeypatch.context() as late:
        late.setattr(split_guard, "require_none_reported", lambda: None)
        found = run(case, sizes, device)
    assert_nan(found)
    assert te_grouped_mlp.explain()[-1].refusals[0][1].reason is Reason.SPLITS
    with pytest.raises(RuntimeError, match=r"earlier step split_sizes.*allowed.*are NaN.*CHECK=1"):
        run(case, None, device)
    # Said once: the step after it is right.
    values = run(case, None, device).values()
    assert not any(value.isnan().any() for value in values if value is not None)


def test_the_next_forward_names_them_where_no_backward_follows() -> None:
    model, inputs = step.make_model(MXFP8), step.make_inputs(MXFP8)
    good = inputs.split_sizes.clone()
    with torch.no_grad():
        inputs.split_sizes.copy_(torch.tensor(UNALIGNED["unaligned"]))
        step.forward(model, MXFP8, inputs)
        inputs.split_sizes.copy_(good)
        with pytest.raises(RuntimeError, match="earlier step split_sizes"):
            step.forward(model, MXFP8, inputs)
        step.forward(model, MXFP8, inputs)


def test_the_backward_of_a_step_names_its_own_splits() -> None:
    with pytest.raises(RuntimeError, match=r"split_sizes\[1\] was 96; .*multiple of 128 .*padding"):
        run(MXFP8, (128, 96, 0, 128))


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"grad": "main_grad"},
    {"grad": "fused", "weight": "grouped"},
    {"grad": "overwrite", "delay": True},
    {"weight": "quantized", "bias": True},
    {"bias": True, "scale_bias": True},
    {"activation": "srelu", "bias": True, "recompute": True},
)


def changed_cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for recipe, case in RECIPES.items():
        for changes in CHANGES:
            if case.mxfp8 or changes.get("weight") != "quantized":
                name = "-".join(map(str, changes.values())) or "plain"
                yield f"{recipe}-{name}", (case.but(**changes),)


@pytest.mark.parametrize(("case", "device"), on_devices(changed_cases()))
def test_every_result_is_nan(case: StepCase, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_guard, "require_none_reported", lambda: None)
    found = run(case, HOSTILE["past-the-buffer"], device)
    assert_nan(found)
    step.assert_present(case, found)


@pytest.mark.parametrize(("case", "device"), on_devices(changed_cases()))
def test_splits_that_fit_give_the_bits_of_a_step_that_read_them(
    case: StepCase, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory.poisoned(0xFF):
        unread = run(case, None, device)
    if device == "cpu":
        monkeypatch.undo()
        monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
        monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    with step.switches(NVTE_GROUPED_MLP_CHECK="1"):
        step.assert_same(unread, run(case, None, device))
    assert not split_guard.reported()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_replayed_graph_with_bad_splits_and_then_with_good_ones(recipe: str) -> None:
    case = RECIPES[recipe].but(device="cuda")
    layers = Layers.make(case)
    captured = graphs.capture(layers)
    good = {name: None if v is None else v.clone() for name, v in captured_results(captured)}
    for sizes in HOSTILE.values():
        layers.inputs.split_sizes.copy_(torch.tensor(sizes))
        captured.replay()
        assert_nan(captured.found)
        assert split_guard.reported()
        split_guard.forget_reports()
        layers.inputs.split_sizes.copy_(torch.tensor(case.splits))
        captured.replay()
        step.assert_same(captured.found, good)
    assert not split_guard.reported()


def captured_results(captured: graphs.Captured) -> Any:
    captured.replay()
    return captured.found.items()


def test_a_promise_that_is_broken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = StepCase(splits=(256,), buffer_rows=256)
    with step.switches(NVTE_GROUPED_MLP_FULL_ROWS="1"):
        with pytest.raises(RuntimeError, match="summed to 128, but the caller promised"):
            run(case, (128,))
        assert not run(case)["y"].isnan().any()


def test_a_report_says_what_was_written() -> None:
    sizes = (-(2**50), -(2**40), -1, 0, 2**40 - 1, 2**50)
    for multiple, value, fault in product((1, 32, 256), sizes, (Fault.SIZE, Fault.SUM)):
        word = split_guard.report_word(fault, 65_535, value, multiple)
        assert -(2**63) <= word < 2**63
        told = max(-(2**40), min(value, 2**40 - 1))
        text = split_guard._text(word)
        assert f" {told};" in text
        if fault is Fault.SIZE:
            assert "split_sizes[65535]" in text
            assert f"a positive multiple of {multiple} " in text


@pytest.mark.parametrize("sizes", [(128, 384), (256, 128)], ids=["inner", "last"])
def test_odd_multiples_of_128_do_not_fit_the_tiles_of_the_frontend(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 256 rows would write into the next expert, or past the buffers of the last."""
    case = StepCase(splits=(256, 256), bias=True)
    with simulation(monkeypatch), step.switches(NVTE_GROUPED_MLP_BACKEND="cudnn"):
        with monkeypatch.context() as late:
            late.setattr(split_guard, "require_none_reported", lambda: None)
            assert_nan(run(case, sizes))
        with pytest.raises(RuntimeError, match="128; allowed: 0 or a positive multiple of 256"):
            run(case)
        assert not run(case)["y"].isnan().any()


_INTERPRETED = """
import itertools, torch
from te_grouped_mlp.op.step import split_guard
from te_grouped_mlp.op.kernels import split_guard_kernels as kernels
kernels._on = lambda tensor: __import__("contextlib").nullcontext()
for sizes in (
    [128], [0, 0], [128, 96, 0], [-1, 5], [2**62] * 4, [256] * 300, [2**63 - 1, 1], [-(2**63), 1]
):
    for rows, multiple, full, dtype in itertools.product(
        (0, 256, 76800), (1, 128), (False, True), (torch.int32, torch.int64)
    ):
        if dtype is torch.int32 and max(map(abs, sizes)) >= 2**31:
            continue
        given = torch.tensor(sizes, dtype=dtype)
        found = []
        for check in (kernels.check, split_guard._check_on_host):
            out = torch.full((len(sizes) + 1,), -7)
            report = torch.zeros(1, dtype=torch.int64)
            check(given, out, report, rows, multiple, full)
            found.append((out.tolist(), split_guard._text(report.item()) if report.item() else ""))
        assert found[0] == found[1], (sizes, rows, multiple, full, found)
for count in (1, 16, 17, 40):
    for fault in (0, 1):
        dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.float16, torch.float64))
        guarded = [torch.ones(3 * i + 7, dtype=next(dtypes)) for i in range(count)]
        kernels.poison(torch.tensor([fault]), [each[2:-2] for each in guarded])
        for each in guarded:
            assert each[2:-2].isnan().all() if fault else (each == 1).all(), (count, fault)
            assert (each[:2] == 1).all() and (each[-2:] == 1).all()
"""


def test_the_kernels_do_what_the_host_does() -> None:
    """In Triton's interpreter: no GPU is needed."""
    if importlib.util.find_spec("triton") is None and os.environ.get(REQUIRE) != "1":
        pytest.skip(f"triton not installed ({REQUIRE}=1 makes that an error)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
