# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The TE patches on models of TE's structure that run: what changes, and that each edit counts."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from te_grouped_mlp.patches import all_patches
from te_grouped_mlp.patches.base import Mismatch
from te_grouped_mlp.patches.examine import compose
from tests.patches import trees

PATCHES = {patch.name: patch for patch in all_patches()}
ROWS = 4


def patched(version: str, *names: str, leave_out: tuple[str, str] | None = None) -> bytes:
    skip = frozenset() if leave_out is None else frozenset({leave_out})
    source = trees.te_source(version).encode()
    return compose(source, [PATCHES[name] for name in names], skip)


def step(
    module: ModuleType,
    *,
    glu: bool = True,
    groups: int = 1,
    live: int = ROWS,
    unit: bool = False,
    grouped: bool = False,
    nvfp4: bool = False,
    recompute: bool = False,
    bias: bool = False,
    scale_bias: bool = False,
    train_bias: bool = True,
    scales_grad: bool = True,
    splits: object = None,
) -> tuple[list[tuple[str, bool]], tuple[object, ...]]:
    """Run forward and backward; returns the notes and the activation's extra gradient."""
    activation = (module.ScaledSwiGLU if glu else module.ScaledSReLU)()
    activation.unit = unit
    cls = module.GroupedMLP_CuTeGEMMGLU if glu else module.GroupedMLP_CuTeGEMMUnary
    fc1 = trees.linear(groups, bias, grouped=grouped, train=train_bias)
    fc2 = trees.linear(groups, scale_bias, scale_bias=scale_bias, train=train_bias)
    op = cls(fc1, activation, fc2)
    contexts = [SimpleNamespace() for _ in range(3)]
    if splits is None:
        splits = torch.tensor([live] + [0] * (groups - 1))
    scales = torch.ones(ROWS, requires_grad=scales_grad)
    module.EVENTS.clear()
    x = torch.zeros(ROWS, 2)
    op.fuser_forward(
        contexts, x, basic_op_extra_inputs=[(splits,), (scales,), (splits,)], nvfp4=nvfp4
    )
    *_, extra = op.fuser_backward(contexts, x, recompute=recompute)
    return list(module.EVENTS), extra


def odd_events(module: ModuleType, *, full_rows: bool) -> Iterator[str]:
    """Yield every note that is not what one decision for the whole step would give."""
    for glu, groups, live, grouped, nvfp4, frontend in itertools.product(
        (True, False), (1, 2), (ROWS, 2), (True, False), (True, False), ((1, 32), (1, 26))
    ):
        module.FRONTEND = frontend
        dense = glu and groups == 1 and frontend >= (1, 27) and (live == ROWS or not full_rows)
        events, _ = step(
            module, glu=glu, groups=groups, live=live, grouped=grouped, nvfp4=nvfp4, recompute=True
        )
        for name, seen in events:
            if seen != (dense and name != "offsets"):
                yield f"{name} with {glu=} {groups=} {live=} {grouped=} {nvfp4=} {frontend=}"
        for quantizer in ("mxfp8", "nvfp4"):
            module.EVENTS.clear()
            told = {"use_dense_single_group": dense}
            module._group_quantize_with_amax_for_grouped_mlp("x", quantizer, groups, None, **told)
            if [seen for _, seen in module.EVENTS] != [dense]:
                yield f"quantize with amax, {quantizer}, {dense=}"
    module.FRONTEND = (1, 32)


def questions(source: bytes) -> list[int]:
    """The lines that compare the group count with one, apart from helpers and the unit reset."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("_tegm_"):
            continue
        for node in ast.walk(function):
            text = ast.unparse(node) if isinstance(node, ast.Compare) else ""
            if text in ("num_groups == 1", "num_groups != 1"):
                found.append(node.lineno)
    return sorted(set(found))


def test_old_structure_has_the_fault(tmp_path: Path) -> None:
    module = trees.load(trees.te_source("2.19.0"), tmp_path)
    events, _ = step(module, glu=False)
    assert ("FC2", True) in events
    assert ("dactivation kernel", False) in events


def test_one_decision_holds_for_every_shortcut(tmp_path: Path) -> None:
    source = patched("2.19.0", "te_one_decision")
    assert list(odd_events(trees.load(source, tmp_path), full_rows=False)) == []
    assert len(questions(source)) == 1  # the reset of the unit scale


@pytest.mark.parametrize("version", ["2.19.0", "2.20.2"])
def test_full_rows_only(version: str, tmp_path: Path) -> None:
    names = ["te_one_decision", "te_full_rows"][version == "2.20.2" :]
    before = patched(version, *names[:-1])
    assert list(odd_events(trees.load(before, tmp_path), full_rows=True)) != []
    module = trees.load(patched(version, *names), tmp_path)
    assert list(odd_events(module, full_rows=True)) == []


@pytest.mark.parametrize(
    ("version", "name", "place"),
    [
        (version, name, place)
        for version, names in (
            ("2.19.0", ("te_one_decision", "te_full_rows")),
            ("2.20.2", ("te_full_rows",)),
        )
        for name in names
        for place in PATCHES[name].places
    ],
)
def test_every_layout_edit_counts(version: str, name: str, place: str, tmp_path: Path) -> None:
    names = ["te_one_decision", "te_full_rows"][version == "2.20.2" :]
    try:
        source = patched(version, *names, leave_out=(name, place))
        module = trees.load(source, tmp_path)
        faults = list(odd_events(module, full_rows=True))
    except (Mismatch, NameError, TypeError, AttributeError) as error:
        faults = [repr(error)]
    assert faults or len(questions(source)) > 1


class DeviceSplits:
    """Split sizes on a device: to read them would wait."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, live: int | None = None) -> None:
        self.live = live

    def sum(self) -> int:
        if self.live is None:
            raise AssertionError("the device was waited for")
        return self.live


@pytest.mark.parametrize("version", ["2.19.0", "2.20.2"])
class TestPromise:
    @pytest.fixture
    def module(self, version: str, tmp_path: Path) -> ModuleType:
        names = ["te_one_decision", "te_full_rows"][version == "2.20.2" :]
        return trees.load(patched(version, *names), tmp_path)

    def test_device_rows_are_not_known(self, module: ModuleType) -> None:
        events, _ = step(module, splits=DeviceSplits())
        assert not any(dense for _, dense in events)

    def test_unit_scale_promises(self, module: ModuleType) -> None:
        events, _ = step(module, splits=DeviceSplits(), unit=True)
        assert all(dense for _, dense in events)

    def test_user_promises(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVTE_GROUPED_MLP_FULL_ROWS", "1")
        events, _ = step(module, splits=DeviceSplits())
        assert all(dense for name, dense in events if name != "offsets")

    @pytest.mark.parametrize("unit", [True, False])
    @pytest.mark.parametrize("on_host", [True, False])
    def test_broken_promise(
        self, module: ModuleType, monkeypatch: pytest.MonkeyPatch, unit: bool, on_host: bool
    ) -> None:
        monkeypatch.setenv("NVTE_GROUPED_MLP_CHECK", "1")
        if not unit:
            monkeypatch.setenv("NVTE_GROUPED_MLP_FULL_ROWS", "1")
        splits = torch.tensor([2]) if on_host else DeviceSplits(2)
        with pytest.raises(ValueError, match=r"add up to 2, but the buffer has 4 rows.*promises"):
            step(module, splits=splits, unit=unit)

    def test_bad_switch(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVTE_GROUPED_MLP_FULL_ROWS", "yes")
        with pytest.raises(ValueError, match="'yes'; allowed: 0, 1"):
            step(module)


def determinism_faults(module: ModuleType) -> Iterator[str]:
    """Yield what is not as promised when determinism is asked for and dprob is needed."""
    module.DETERMINISM = True
    step(module)
    if module.KERNEL_ARGUMENTS.get("deterministic") is not True:
        yield "the dGLU kernel is not told"
    for options, word in (
        ({"bias": True}, "FC1 bias gradient"),
        ({"scale_bias": True}, "FC2 bias gradient"),
    ):
        try:
            step(module, **options)
            yield f"no refusal for {options}"
        except RuntimeError as error:
            if word not in str(error) or "ScaledSwiGLU" not in str(error):
                yield f"the refusal does not name {word}: {error}"
    step(module, glu=False, bias=True)
    if module.KERNEL_ARGUMENTS.get("deterministic") is not True:
        yield "the dSReLU kernel is not told"
    module.DETERMINISM = False
    step(module)
    if "deterministic" in module.KERNEL_ARGUMENTS:
        yield "told without a request"


def test_deterministic_dglu(tmp_path: Path) -> None:
    upstream = trees.load(trees.te_source("2.20.2"), tmp_path)
    upstream.DETERMINISM = True
    with pytest.raises(RuntimeError, match="upstream refuses"):
        step(upstream)
    module = trees.load(patched("2.20.2", "te_deterministic_dglu"), tmp_path)
    assert list(determinism_faults(module)) == []


@pytest.mark.parametrize("place", PATCHES["te_deterministic_dglu"].places)
def test_every_dglu_edit_counts(place: str, tmp_path: Path) -> None:
    skip = ("te_deterministic_dglu", place)
    source = patched("2.20.2", "te_deterministic_dglu", leave_out=skip)
    try:
        faults = list(determinism_faults(trees.load(source, tmp_path)))
    except (NameError, RuntimeError) as error:
        faults = [repr(error)]
    assert faults


def test_dglu_without_the_flag_still_refuses(tmp_path: Path) -> None:
    module = trees.load(patched("2.20.2", "te_deterministic_dglu"), tmp_path)
    module.DETERMINISM = True
    module.dglu_kernel = lambda *, dprob_tensor, use_single_group_runtime_offsets=False: {}
    with pytest.raises(RuntimeError, match="dprob of ScaledSwiGLU.*wrapper takes `deterministic`"):
        step(module)


def test_dglu_on_the_chip_that_refuses_the_flag(tmp_path: Path) -> None:
    module = trees.load(patched("2.20.2", "te_deterministic_dglu"), tmp_path)
    module.DETERMINISM = True
    module.get_device_compute_capability = lambda: (10, 7)
    with pytest.raises(RuntimeError, match="dprob of ScaledSwiGLU"):
        step(module)


def dprob_faults(module: ModuleType) -> Iterator[str]:
    """Yield what is not as promised about the probability gradient."""
    for glu, groups, determinism in itertools.product((True, False), (1, 4), (True, False)):
        module.DETERMINISM = determinism
        _, extra = step(module, glu=glu, groups=groups, scales_grad=False)
        if module.KERNEL_ARGUMENTS["dprob_tensor"] is not None or extra != (None,):
            yield f"dprob is made, {glu=} {groups=} {determinism=}"
    module.DETERMINISM = False
    module.FRONTEND = (1, 26)
    _, extra = step(module, scales_grad=False)
    if module.KERNEL_ARGUMENTS["dprob_tensor"] is None or extra != (None,):
        yield "an old frontend gets no buffer, or its content comes out"
    module.FRONTEND = (1, 32)
    for unit in (False, True):
        _, extra = step(module, unit=unit)
        if (extra[0] is None) != unit:
            yield f"extra gradient {extra} with {unit=}"
    module.DETERMINISM = True
    for options, word in (({"bias": True}, "FC1 bias"), ({"scale_bias": True}, "FC2 bias")):
        step(module, scales_grad=False, train_bias=False, **options)
        try:
            step(module, scales_grad=False, **options)
            yield f"no refusal for {options}"
        except RuntimeError as error:
            if word not in str(error):
                yield f"the refusal does not name {word}"
    step(module, glu=False, bias=True, scales_grad=False)
    if module.KERNEL_ARGUMENTS.get("deterministic") is not True:
        yield "the dSReLU kernel is not told, so its bias gradient is not bit-exact"


def test_no_dprob(tmp_path: Path) -> None:
    upstream = trees.load(trees.te_source("2.20.2"), tmp_path)
    _, extra = step(upstream, scales_grad=False)
    assert extra[0] is not None
    module = trees.load(patched("2.20.2", "te_no_dprob"), tmp_path)
    assert list(dprob_faults(module)) == []


@pytest.mark.parametrize("place", PATCHES["te_no_dprob"].places)
def test_every_dprob_edit_counts(place: str, tmp_path: Path) -> None:
    source = patched("2.20.2", "te_no_dprob", leave_out=("te_no_dprob", place))
    try:
        faults = list(dprob_faults(trees.load(source, tmp_path)))
    except (NameError, AttributeError, RuntimeError) as error:
        faults = [repr(error)]
    assert faults


def test_all_together(tmp_path: Path) -> None:
    names = ("te_full_rows", "te_deterministic_dglu", "te_no_dprob")
    module = trees.load(patched("2.20.2", *names), tmp_path)
    assert list(odd_events(module, full_rows=True)) == []
    assert list(determinism_faults(module)) == []
    module.DETERMINISM = False
    assert list(dprob_faults(module)) == []
