# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows are read and written: padding is invisible, and the old decision is not sound."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_grouped_mlp import _C
from te_grouped_mlp.op.backends.base import GemmEpilogue
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis
from tests.op.backends.reference.cases import (
    ACTIVATIONS,
    EVERY_WRAPPER,
    GATED,
    ROWS,
    WHOLE,
    Case,
    assert_same,
    environment,
    expected,
    inputs,
    run,
    token_operand,
    weight_operand,
)

BACKEND = ReferenceBackend()
OLD_DECISION = environment(single_group_is_always_dense=True)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("splits", [(256,), (128, 0, 256), (0, 0), (0,)], ids=str)
@pytest.mark.parametrize("fmt", [MXFP8, UNQUANTIZED], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_padded_equals_exact(activation, fmt, splits):
    live = sum(splits)
    exact = Case(ACTIVATIONS[activation], splits, live, fmt=fmt, fc1_bias=True, fc2_bias=True)
    padded = dataclasses.replace(exact, rows=live + 256)
    want = run(BACKEND, exact)
    got = run(BACKEND, padded)
    assert_same(got, want, live)
    for name in ("y", "dx", "dprob"):
        assert not got[name][live:].any(), f"the tail of {name} is not zero"


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_results_do_not_depend_on_what_memory_held(activation):
    case = Case(ACTIVATIONS[activation], (128, 0, 256), 512)
    want = run(BACKEND, case, byte=0xFF)
    for byte in (0x00, 0x7E):
        assert_same(run(BACKEND, case, byte=byte), want, case.live)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_packed_writers_touch_live_rows_only(activation):
    case = Case(ACTIVATIONS[activation], (128, 0, 256), 640, hidden=320, ffn=192)
    got = run(BACKEND, case)
    assert (got["pre"][case.live :].view(torch.uint8) == 0xFF).all()
    for name in ("activated", "grad"):
        operand = got[name]
        width = -(-operand.shape[1] // 128) * 4
        for copy in (operand.row, operand.column):
            assert (copy.data[case.live :] == 0xFF).all()
            assert (copy.scale[case.live * width :] == 0xFF).all()
            assert not (copy.scale[: case.live * width] == 0xFF).any()


def test_column_scales_restart_in_each_group():
    case = Case(ACTIVATIONS["srelu"], (128, 256), 512)
    column = run(BACKEND, case)["activated"].column
    start = 128 // 32 * case.ffn
    for splits, span in (((128, 0), slice(0, start)), ((0, 256), slice(start, 3 * start))):
        alone = run(BACKEND, dataclasses.replace(case, splits=splits, rows=sum(splits)))
        assert torch.equal(column.scale[span], alone["activated"].column.scale)


def test_a_group_does_not_depend_on_the_others():
    case = Case(ACTIVATIONS["swiglu"], (256, 128, 384), 768)
    want = run(BACKEND, dataclasses.replace(case, splits=(256, 0, 0), rows=256))
    got = run(BACKEND, case)
    for name in ROWS:
        assert torch.equal(got[name][:256], want[name]), name
    for name in WHOLE:
        assert torch.equal(got[name][0], want[name][0]), name


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fmt", [MXFP8, UNQUANTIZED], ids=lambda fmt: fmt.name)
def test_thread_count_does_not_matter(fmt):
    case = Case(ACTIVATIONS["swiglu"], (256, 128), 384, hidden=512, ffn=256, fmt=fmt)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(run(BACKEND, case))
    assert_same(results[1], results[0], case.live)
    assert_same(results[2], results[0], case.live)


def test_simd_level_does_not_matter():
    case = Case(ACTIVATIONS["clamped_qgeglu"], (128, 256), 384)
    before, results = _C.simd_level(), []
    try:
        for level in _C.available_simd_levels():
            _C.set_simd_level(level)
            results.append(run(BACKEND, case))
    finally:
        _C.set_simd_level(before)
    for result in results[1:]:
        assert_same(result, results[0], case.live)


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
def test_empty_experts(accumulate):
    case = Case(ACTIVATIONS["srelu"], (0, 128, 0, 0, 128, 0), 384, accumulate=accumulate)
    got, given_ = run(BACKEND, case), inputs(case)
    for index in (0, 2, 3, 5):
        for name, main in (("dw1", given_.main1), ("dw2", given_.main2)):
            want = main[index] if accumulate else torch.zeros_like(main[index])
            assert torch.equal(got[name][index], want)
        assert not got["db1"][index].any()


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("full", [False, True], ids=["packed", "buffer"])
@pytest.mark.parametrize("fmt", [MXFP8, UNQUANTIZED], ids=lambda fmt: fmt.name)
def test_no_rows_at_all(fmt, full, accumulate):
    case = Case(ACTIVATIONS["swiglu"], (0,), 0, fmt=fmt, full=full, accumulate=accumulate)
    assert case.plan().layout.use_dense_single_group == full
    got, given_ = run(BACKEND, case), inputs(case)
    assert got["y"].shape == got["dx"].shape == (0, case.hidden)
    assert got["dprob"].shape == (0,)
    want = given_.main1 if accumulate else torch.zeros_like(given_.main1)
    assert torch.equal(got["dw1"], want)


def test_a_callers_buffer_keeps_its_tail():
    case = Case(ACTIVATIONS["srelu"], (128,), 256, fmt=MXFP8)
    plan, groups = case.plan(), inputs(case).groups
    a = token_operand(case, plan.layout, [groups[0].x])
    w = weight_operand(case, [groups[0].w1], Axis.ROW)
    wide = torch.full((256, case.wide + 3), 5.0, dtype=torch.bfloat16)
    out = wide[:, 3:]  # any row stride
    BACKEND.gemm(plan, Kernel.FC2_FORWARD, a, w, out, GemmEpilogue(zero_tail=False))
    assert (out[128:] == 5).all()
    assert (wide[:, :3] == 5).all()
    assert not (out[:128] == 5).all()


@settings(max_examples=15, deadline=None)
@given(
    tiles=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    padding=st.integers(1, 3),
    tail=st.sampled_from([0.0, 3.0, 1e30, float("inf"), float("nan")]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
def test_any_padding(tiles, padding, tail, activation):
    splits = tuple(128 * tile for tile in tiles)
    live = sum(splits)
    exact = Case(ACTIVATIONS[activation], splits, live, hidden=64, ffn=64)
    padded = dataclasses.replace(exact, rows=live + 128 * padding, tail=tail)
    assert_same(run(BACKEND, padded), run(BACKEND, exact), live)


# The old decision: one group is dense, however many of its rows are live.


def test_old_decision_poisons_every_weight_gradient_of_a_packed_writer():
    exact = Case(ACTIVATIONS["srelu"], (256,), 256, hidden=384, ffn=384)
    old = dataclasses.replace(exact, rows=384, tail=0.0, env=OLD_DECISION)
    got, want = run(BACKEND, old), run(BACKEND, exact)
    assert got["dw1"].isnan().all()
    assert got["dw2"].isnan().all()
    for name in ("y", "dx", "dprob"):
        assert torch.equal(got[name][:256], want[name]), name
    # The repair, on the same buffers.
    repaired = dataclasses.replace(old, env=environment())
    assert_same(run(BACKEND, repaired), want, 256)


@pytest.mark.parametrize(("live", "rows"), [(256, 384), (128, 384), (384, 512)])
def test_old_decision_misreads_the_column_tiles_that_the_layout_predicts(monkeypatch, live, rows):
    """Only the scales are poisoned; the data that nobody wrote is zero."""
    features, tiles = 384, 3
    exact = Case(ACTIVATIONS["srelu"], (live,), live, hidden=features, ffn=features)
    old = dataclasses.replace(exact, rows=rows, tail=0.0, env=OLD_DECISION)
    want = run(BACKEND, exact)

    def poisoned(shape, dtype, device):
        fill = 0xFF if dtype is torch.uint8 and len(shape) == 1 else 0
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        out.view(torch.uint8).fill_(fill)
        return out

    monkeypatch.setattr(memory, "empty", poisoned)
    got = run(BACKEND, old)
    # The writer leaves tiles * live / 128 chunks; the reader of column tile i takes rows / 128
    # chunks from chunk i * rows / 128 on.
    written = tiles * (live // 128)
    poisoned_tiles = [i for i in range(tiles) if (i + 1) * (rows // 128) > written]
    assert 0 < len(poisoned_tiles) < tiles
    # FC2's input runs along dW2's columns, FC1's output gradient along dW1's rows.
    for name, gradient in (("dw2", got["dw2"][0].t()), ("dw1", got["dw1"][0])):
        for tile in range(tiles):
            part = gradient[128 * tile : 128 * tile + 128]
            if tile in poisoned_tiles:
                assert not part.isfinite().any(), (name, tile)
            else:
                assert part.isfinite().all(), (name, tile)
    # The first tile column lies where the reader looks for it up to the writer's extent.
    good = [tile for tile in range(1, tiles) if tile not in poisoned_tiles]
    for tile in good:
        span = slice(128 * tile, 128 * tile + 128)
        assert relative_error(got["dw1"][0][span], want["dw1"][0][span]) > 0.1


@pytest.mark.parametrize("activation", GATED)
def test_old_decision_lets_the_tail_into_the_weight_gradients(activation):
    exact = Case(ACTIVATIONS[activation], (256,), 256)
    old = dataclasses.replace(exact, rows=384, tail=3.0, env=OLD_DECISION)
    got, want = run(BACKEND, old), run(BACKEND, exact)
    for name in ROWS:
        assert torch.equal(got[name][:256], want[name]), name
    for name in ("dw1", "dw2"):
        assert got[name].isfinite().all()
        assert relative_error(got[name], want[name]) > 1.0
    clean = run(BACKEND, dataclasses.replace(old, tail=0.0))
    for name in ("dw1", "dw2"):
        assert torch.equal(clean[name], want[name]), name


@pytest.mark.parametrize("activation", GATED)
def test_without_runtime_offsets_the_old_decision_fails_for_gated_activations_too(activation):
    env = environment(frozenset(), single_group_is_always_dense=True)
    old = Case(ACTIVATIONS[activation], (256,), 384, tail=0.0, env=env)
    got = run(BACKEND, old)
    assert got["dw1"].isnan().all()
    assert got["dw2"].isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_buffer_and_packed_agree_on_full_rows(activation):
    packed = Case(ACTIVATIONS[activation], (256,), 256, env=environment(EVERY_WRAPPER))
    dense = dataclasses.replace(packed, full=True)
    assert dense.plan().layout != packed.plan().layout
    assert_same(run(BACKEND, dense), run(BACKEND, packed), 256)
    assert_same(run(BACKEND, dense), expected(packed), 256)


# Bad input.


def test_bad_operands_are_named():
    case = Case(ACTIVATIONS["srelu"], (128, 128), 256)
    plan, groups = case.plan(), inputs(case).groups
    x = token_operand(case, plan.layout, [g.x for g in groups])
    w = weight_operand(case, [g.w1 for g in groups], Axis.ROW)
    column_w = weight_operand(case, [g.w1 for g in groups], Axis.COLUMN)
    out = torch.empty(256, case.wide, dtype=torch.bfloat16)

    def gemm(a=x, weights=w):
        BACKEND.gemm(plan, Kernel.FC2_FORWARD, a, weights, out, GemmEpilogue())

    with pytest.raises(ValueError, match="a has no row copy"):
        gemm(a=dataclasses.replace(x, row=None))
    with pytest.raises(ValueError, match="w is quantized along column; needed: row"):
        gemm(weights=column_w)
    target = WgradTarget((torch.empty(1, 1),), False)
    with pytest.raises(ValueError, match="target has 1 members"):
        BACKEND.wgrad(plan, Kernel.FC1_WGRAD, x, x, target)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 156), r"splits\[0\] is 100; mxfp8 allows multiples of 128"),
        ((-128, 128), r"splits\[0\] is -128"),
        ((256, 128), "splits sum to 384; the buffer has 256 rows"),
        ((128,), "splits has 1 sizes; the plan has 2 groups"),
    ],
)
def test_bad_splits_are_named(sizes, message):
    case = Case(ACTIVATIONS["srelu"], (128, 128), 256)
    plan, groups = case.plan(), inputs(case).groups
    x = token_operand(case, plan.layout, [g.x for g in groups])
    x = dataclasses.replace(x, splits=dataclasses.replace(x.splits, sizes_on_host=sizes))
    w = weight_operand(case, [g.w1 for g in groups], Axis.ROW)
    out = torch.full((256, case.wide), 5.0)
    with pytest.raises(ValueError, match=message):
        BACKEND.gemm(plan, Kernel.FC2_FORWARD, x, w, out, GemmEpilogue())
    assert (out == 5).all()


def test_splits_that_only_the_device_knows_are_read():
    case = Case(ACTIVATIONS["srelu"], (128, 0), 256)
    plan, groups = case.plan(), inputs(case).groups
    x = token_operand(case, plan.layout, [g.x for g in groups])
    w = weight_operand(case, [g.w1 for g in groups], Axis.ROW)
    outs = []
    for operand in (
        x,
        dataclasses.replace(x, splits=dataclasses.replace(x.splits, sizes_on_host=None)),
    ):
        outs.append(torch.full((256, case.wide), 5.0))
        BACKEND.gemm(plan, Kernel.FC2_FORWARD, operand, w, outs[-1], GemmEpilogue())
    assert torch.equal(*outs)
