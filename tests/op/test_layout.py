# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The single-group decision: its truth table, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from te_grouped_mlp.op.layout import (
    GroupLayout,
    Kernel,
    Launch,
    LayoutMismatchError,
    Output,
    RowExtent,
    is_single_group,
)

PACKED, BUFFER = RowExtent.PACKED, RowExtent.BUFFER
EITHER = Launch(Kernel.FC1_ACT, frozenset(RowExtent))
ONLY_PACKED = Launch(Kernel.DACT_DGRAD, frozenset({PACKED}))
ONLY_BUFFER = Launch(Kernel.FC2_WGRAD, frozenset({BUFFER}))


def decide(num_groups=1, buffer_rows=256, rows_are_full=True, launches=(EITHER,), **options):
    return GroupLayout.decide(
        num_groups=num_groups,
        buffer_rows=buffer_rows,
        rows_are_full=rows_are_full,
        launches=launches,
        **options,
    )


@pytest.mark.parametrize(
    ("num_groups", "full", "launches", "old"),
    list(
        itertools.product(
            [1, 2, 64], [False, True], [(EITHER,), (EITHER, ONLY_PACKED)], [False, True]
        )
    ),
)
def test_truth_table(num_groups, full, launches, old):
    layout = decide(num_groups, 256, full, launches, single_group_is_always_dense=old)
    sound = num_groups == 1 and full and ONLY_PACKED not in launches
    dense = num_groups == 1 if old else sound
    assert layout.extent is (BUFFER if dense else PACKED)
    assert layout.use_dense_single_group == dense
    assert (layout.num_groups, layout.buffer_rows) == (num_groups, 256)


def test_one_launch_that_knows_packed_alone_decides_for_all():
    for position in range(3):
        launches = [EITHER, EITHER]
        launches.insert(position, ONLY_PACKED)
        assert not decide(launches=launches).use_dense_single_group


def test_no_launches_put_no_bound():
    assert decide(launches=()).use_dense_single_group


@pytest.mark.parametrize(
    ("num_groups", "full", "launches"),
    [
        (1, False, (ONLY_BUFFER,)),
        (2, True, (EITHER, ONLY_BUFFER)),
        (1, True, (ONLY_PACKED, ONLY_BUFFER)),
    ],
)
def test_without_a_common_extent_the_launch_is_named(num_groups, full, launches):
    with pytest.raises(ValueError, match=r"launches \['fc2_wgrad'\] cannot use packed rows"):
        decide(num_groups, 256, full, launches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_groups": 0}, "num_groups is 0; at least 1 is allowed"),
        ({"buffer_rows": -1}, "buffer_rows is -1; at least 0 is allowed"),
    ],
)
def test_bad_counts_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        decide(**arguments)


def test_an_empty_buffer_may_be_dense():
    assert decide(buffer_rows=0).use_dense_single_group


def test_extent_written_differs_from_the_layout_under_the_old_decision_alone():
    old = decide(
        rows_are_full=False,
        launches=(EITHER, ONLY_PACKED),
        single_group_is_always_dense=True,
    )
    assert old.extent is BUFFER
    assert old.extent_written(EITHER) is BUFFER
    assert old.extent_written(ONLY_PACKED) is PACKED
    sound = decide(launches=(EITHER, ONLY_PACKED))
    assert sound.extent_written(EITHER) is sound.extent_written(ONLY_PACKED) is PACKED


@pytest.mark.parametrize(
    "changes", [{"extent": PACKED}, {"buffer_rows": 384}, {"num_groups": 2}], ids=str
)
def test_another_layout_is_a_mismatch(changes):
    plan = decide()
    plan.require(dataclasses.replace(plan), "x")
    with pytest.raises(LayoutMismatchError, match="x was made for .*, but the plan has"):
        plan.require(dataclasses.replace(plan, **changes), "x")


def test_layouts_are_values():
    assert decide() == decide()
    assert hash(decide()) == hash(decide())
    with pytest.raises(dataclasses.FrozenInstanceError):
        decide().extent = PACKED


def test_launch_needs_an_extent():
    with pytest.raises(ValueError, match="extents of fc1_act is empty"):
        Launch(Kernel.FC1_ACT, frozenset())


def test_launch_cannot_vouch_for_another_launches_output():
    with pytest.raises(ValueError, match=r"deterministic of fc1_act names \['dprob'\]"):
        Launch(
            Kernel.FC1_ACT,
            frozenset({PACKED}),
            outputs=frozenset({Output.Y}),
            deterministic=frozenset({Output.Y, Output.DPROB}),
        )


def test_launch_that_is_not_deterministic_says_why():
    outputs = frozenset({Output.DPROB})
    with pytest.raises(ValueError, match="cause of dact_dgrad is empty"):
        Launch(Kernel.DACT_DGRAD, frozenset({PACKED}), outputs=outputs)
    assert Launch(Kernel.DACT_DGRAD, frozenset({PACKED}), outputs=outputs, cause="atomics").cause


def test_is_single_group():
    assert [is_single_group(count) for count in (1, 2, 64)] == [True, False, False]
