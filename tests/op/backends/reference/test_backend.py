# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference backend against the same mathematics written out naively, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED, DType
from te_grouped_mlp.op.tensors.scale_layout import swizzled_offset
from tests.op.backends.reference import cases
from tests.op.backends.reference.cases import (
    ACTIVATIONS,
    EVERY_WRAPPER,
    Case,
    assert_same,
    environment,
    expected,
    inputs,
    run,
)

BACKEND = ReferenceBackend()
BIASES = {
    "nobias": {},
    "bias1": {"fc1_bias": True},
    "bias2": {"fc2_bias": True},
    "scaled2": {"fc1_bias": True, "fc2_bias": True, "scale_bias": True},
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("fmt", [MXFP8, UNQUANTIZED], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_several_groups(activation, fmt, bias):
    splits = (256, 0, 128) if fmt is MXFP8 else (37, 0, 130, 1)
    case = Case(ACTIVATIONS[activation], splits, 512, fmt=fmt, **BIASES[bias])
    assert_same(run(BACKEND, case), expected(case), case.live)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_dense_group(activation, bias):
    case = Case(
        ACTIVATIONS[activation],
        (256,),
        256,
        full=True,
        env=environment(EVERY_WRAPPER),
        grad_dtype=torch.bfloat16,
        accumulate=True,
        **BIASES[bias],
    )
    assert case.plan().layout.use_dense_single_group
    assert_same(run(BACKEND, case), expected(case, dense=True), case.live)


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradient_targets(grad_dtype, accumulate):
    case = Case(
        ACTIVATIONS["swiglu"],
        (128, 0, 128),
        384,
        grad_dtype=grad_dtype,
        accumulate=accumulate,
    )
    assert_same(run(BACKEND, case), expected(case), case.live)


def test_grouped_and_dense_accumulation_round_differently():
    # The two rules must be told apart, or the tests above could pass with either.
    case = Case(ACTIVATIONS["srelu"], (128,), 128, grad_dtype=torch.bfloat16, accumulate=True)
    grouped, dense = expected(case), expected(case, dense=True)
    assert not torch.equal(grouped["dw1"], dense["dw1"])


@pytest.mark.parametrize("prob_dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32])
def test_dtypes(dtype, prob_dtype):
    case = Case(
        ACTIVATIONS["swiglu"],
        (128, 128),
        256,
        dtype=dtype,
        prob_dtype=prob_dtype,
        fc1_bias=True,
        fc2_bias=True,
        scale_bias=True,
    )
    assert_same(run(BACKEND, case), expected(case), case.live)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_without_probabilities(activation):
    case = Case(ACTIVATIONS[activation], (128, 128), 256, unit_scale=True)
    got = run(BACKEND, case)
    assert got["dprob"] is None
    assert_same(got, expected(case), case.live)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_recomputed_activation(activation):
    case = Case(ACTIVATIONS[activation], (128, 256), 512, recompute=True)
    want = expected(case)
    assert_same(run(BACKEND, case), want, case.live)
    kept = expected(dataclasses.replace(case, recompute=False))
    assert not torch.equal(want["dw2"], kept["dw2"])


@pytest.mark.parametrize("interleave", [32, None])
def test_unquantized_gate_orders(interleave):
    spec = dataclasses.replace(ACTIVATIONS["swiglu"], interleave=interleave)
    case = Case(spec, (33, 95), 128, fmt=UNQUANTIZED)
    assert_same(run(BACKEND, case), expected(case), case.live)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_nan_in_a_live_row_reaches_the_scales(activation, monkeypatch):
    case = Case(ACTIVATIONS[activation], (128, 128), 256, ffn=128)
    clean = run(BACKEND, case, byte=0)["activated"]
    given_ = inputs(case)
    given_.groups[1].prob[40] = torch.nan
    monkeypatch.setattr(cases, "inputs", lambda _: given_)
    got = run(BACKEND, case, byte=0)
    # Row 168: its own 4 blocks, and rows 160 to 191 of every column; nothing else moves.
    moved = [(clean.row.scale != got["activated"].row.scale).nonzero().flatten()]
    moved.append((clean.column.scale != got["activated"].column.scale).nonzero().flatten())
    assert sorted(moved[0].tolist()) == [
        swizzled_offset(168, block, case.ffn // 32) for block in range(4)
    ]
    assert sorted(moved[1].tolist()) == sorted(
        4 * case.ffn + swizzled_offset(column, 1, 4) for column in range(case.ffn)
    )
    assert (got["activated"].row.scale[moved[0]] == 0xFF).all()
    assert (got["activated"].column.scale[moved[1]] == 0xFF).all()
    assert got["y"][168].isnan().all()
    assert got["y"][:168].isfinite().all()
    assert_same(got, expected(case), case.live)


def test_features_that_are_no_multiple_of_a_scale_tile():
    case = Case(ACTIVATIONS["clamped_qgeglu"], (128, 256), 384, hidden=320, ffn=192)
    assert_same(run(BACKEND, case), expected(case), case.live)


@settings(max_examples=15, deadline=None)
@given(
    tiles=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    padding=st.integers(0, 2),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    seed=st.integers(0, 5),
)
def test_any_splits(tiles, padding, activation, seed):
    splits = tuple(128 * tile for tile in tiles)
    case = Case(
        ACTIVATIONS[activation], splits, sum(splits) + 128 * padding, hidden=64, ffn=64, seed=seed
    )
    assert_same(run(BACKEND, case), expected(case), case.live)


@settings(max_examples=15, deadline=None)
@given(
    splits=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    padding=st.integers(0, 9),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
def test_any_splits_unquantized(splits, padding, activation):
    case = Case(
        ACTIVATIONS[activation],
        tuple(splits),
        sum(splits) + padding,
        hidden=64,
        ffn=64,
        fmt=UNQUANTIZED,
    )
    assert_same(run(BACKEND, case), expected(case), case.live)
