# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiles, tile by tile, and what a key depends on. No kernel package is needed."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.cutedsl import config, keys, launch
from te_grouped_mlp.op.backends.cutedsl.config import Op, Tile
from te_grouped_mlp.op.formats import DType
from tests.op.backends.cutedsl.problems import ACTIVATIONS, problem_of


def rows_of_a_box(tile: Tile, rank: int) -> list[int]:
    """Weight rows, in TE's order, that belong to the columns which CTA `rank` loads of tile 0.

    Column 2j is gate j and column 2j + 1 linear j; gate j is row 64 (j // 32) + j % 32.
    """
    columns = range(rank * tile.n_slice, (rank + 1) * tile.n_slice)
    return [64 * (c // 2 // 32) + 32 * (c % 2) + c // 2 % 32 for c in columns]


def rows_of_one_load(tile: Tile, rank: int) -> list[int]:
    """What a box (2, 32, n / 64) over strides (32, 1, 64) holds, if it must start on a period."""
    first = rank * tile.n_slice // config.PERIOD * config.PERIOD
    count = -(-tile.n_slice // config.PERIOD)
    box = [
        first + 64 * outer + 32 * half + inner
        for outer in range(count)
        for inner in range(32)
        for half in range(2)
    ]
    return box[: tile.n_slice]


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("n", range(32, 257, 32))
def test_a_tile_is_allowed_where_its_boxes_hold_whole_periods(n, cluster):
    tile = Tile(128, n, cluster, 1)
    right = all(rows_of_a_box(tile, r) == rows_of_one_load(tile, r) for r in range(cluster))
    refused = bool(config.refusal(Op.FC1_ACT, tile, 9))
    if not right:
        assert refused
    if tile.n_slice % config.PERIOD == 0:
        assert right
        assert not refused


def test_the_default_of_the_main_loops_library_is_refused():
    assert "96" in config.refusal(Op.FC1_ACT, Tile(128, 192, 2, 1, pingpong=True), 9)
    assert not config.refusal(Op.FC2_FORWARD, Tile(128, 192, 2, 1, pingpong=True), 9)


def test_a_tile_that_spills_is_refused_for_the_activation_gradient():
    assert "192" in config.refusal(Op.DACT_DGRAD, Tile(128, 192, 2, 1, pingpong=True), 9)
    assert not config.refusal(Op.DACT_DGRAD, Tile(128, 128, 2, 1, pingpong=True), 9)


@pytest.mark.parametrize(
    ("tile", "registers"),
    [
        (Tile(128, 128, pingpong=True), 128),
        (Tile(128, 192, pingpong=True), 192),
        (Tile(128, 256), 128),
        (Tile(256, 128), 128),
        (Tile(64, 256, pingpong=True), 128),
    ],
    ids=str,
)
def test_accumulators(tile, registers):
    assert tile.accumulators == registers


@pytest.mark.parametrize("arch", [9, 10])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("op", [op for op in Op if op not in config.ROW_OPS])
def test_every_choice_is_allowed(op, bias, arch):
    for n in (64, 192, 384, 768, 1536, 2048, 4096, 7168, 8192, 28672):
        for k in (64, 768, 2048, 4096, 14336):
            tile = config.choose(op, arch, n=n, k=k, bias=bias)
            assert not config.refusal(op, tile, arch)
            assert not (tile.pingpong and arch == 10)


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match="arch is 12; allowed: 9, 10"):
        config.choose(Op.FC1_ACT, 12, n=64, k=64)


def test_nothing_that_chooses_or_keys_a_kernel_knows_a_token_count():
    makers = (keys.fc1_act, keys.gemm, keys.dact_dgrad, keys.wgrad, config.choose)
    for maker in makers:
        names = set(inspect.signature(maker).parameters)
        assert names.isdisjoint({"rows", "tokens", "call", "splits", "plan"})
    assert {field.name for field in dataclasses.fields(keys.KernelKey)} == {
        "op", "arch", "tile", "spec", "bias", "scale", "pre_activation", "dprob", "activated",
        "out", "accumulate", "round_to_odd", "reversed_experts",
    }  # fmt: skip


def test_parameters_that_a_kind_does_not_use_make_no_second_kernel():
    one = problem_of(ActivationSpec(Activation.SWIGLU, 32))
    other = problem_of(ActivationSpec(Activation.SWIGLU, 32, alpha=3.0, beta1=9.0))
    assert keys.of_problem(one, 9) == keys.of_problem(other, 9)
    used = problem_of(ActivationSpec(Activation.SITU_GLU, 32, beta1=9.0))
    assert keys.of_problem(used, 9) != keys.of_problem(problem_of(ACTIVATIONS["situ_glu"]), 9)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, each.name) for kind in Activation for each in kind.row.parameters]
)
def test_each_parameter_that_a_kind_uses_makes_another_kernel(kind, name):
    """Its value is a constant of the code."""
    spec = ActivationSpec(kind, 32 if kind.is_gated else None)
    changed = dataclasses.replace(spec, **{name: 0.625})
    one, other = (keys.of_problem(problem_of(each), 9) for each in (spec, changed))
    differ = [key.op for key, twin in zip(one, other, strict=True) if key != twin]
    assert differ == [Op.FC1_ACT, Op.DACT_DGRAD]


def test_plain_products_behind_gated_activations_share_their_kernels():
    swiglu = keys.of_problem(problem_of(ACTIVATIONS["swiglu"]), 9)
    situ = keys.of_problem(problem_of(ACTIVATIONS["situ_glu"]), 9)
    same = [one.op for one, other in zip(swiglu, situ, strict=True) if one == other]
    assert same == [Op.FC2_FORWARD, Op.FC2_WGRAD, Op.FC1_DGRAD, Op.FC1_WGRAD, *config.ROW_OPS]
    halves = keys.of_problem(problem_of(ActivationSpec(Activation.SWIGLU, None)), 9)
    assert halves[4] != swiglu[4]
    assert halves[1] == swiglu[1]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_training_needs_each_kernel_once(name):
    found = keys.of_problem(problem_of(ACTIVATIONS[name]), 9, prob=DType.BFLOAT16)
    assert sorted(key.op.value for key in found) == sorted(op.value for op in Op)


def test_the_order_in_memory_changes_nothing_else_of_a_kernel():
    up = keys.of_problem(problem_of(ACTIVATIONS["swiglu"], bias=True), 9)
    down = keys.of_problem(problem_of(ACTIVATIONS["swiglu"], bias=True), 9, reversed_experts=True)
    assert [key.op for key in up if key.reversed_experts] == []
    assert [key.op for key in down if not key.reversed_experts] == list(config.ROW_OPS)
    assert [dataclasses.replace(key, reversed_experts=False) for key in down] == list(up)


@pytest.mark.parametrize("reversed_experts", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
def test_a_first_step_compiles_for_the_order_of_its_weights(
    monkeypatch, main_grad, reversed_experts
):
    wanted = []
    monkeypatch.setattr(launch.kernels, "compile_ahead", wanted.extend)
    monkeypatch.setattr(launch.kernels, "target_arch", lambda: 9)
    problem = problem_of(ACTIVATIONS["swiglu"])
    problem = dataclasses.replace(
        problem, fc1=dataclasses.replace(problem.fc1, main_grad=main_grad)
    )
    launch.prepare(problem, DType.FLOAT32, reversed_experts)
    assert {key.op for key in wanted} == set(Op)
    assert {key.reversed_experts for key in wanted if key.tile is not None} == {reversed_experts}
    count = len(wanted)
    launch.prepare(problem, DType.FLOAT32, reversed_experts)
    assert len(wanted) == count
