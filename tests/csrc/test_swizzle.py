# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""swizzle_scales against the index formula, both ways."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors.capacity import span
from tests.csrc import calls, naive_mxfp8
from tests.csrc.naive_mxfp8 import COLUMN, POISON, ROW


def move(src, axis, rows, cols, splits, inverse):
    """Swizzles into poisoned memory."""
    dst = calls.poisoned(tuple(src.shape))
    held, where, groups = calls.host_splits(splits)
    _C.swizzle_scales(span(src), span(dst), axis, rows, cols, where, groups, inverse)
    del held
    return dst


@settings(max_examples=150, deadline=None)
@given(
    splits=st.none() | st.lists(st.sampled_from([0, 128, 256, 384]), min_size=1, max_size=4),
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    axis=st.sampled_from([ROW, COLUMN]),
    seed=st.integers(0, 1000),
)
def test_both_ways(splits, rows, cols, axis, seed):
    if splits is not None:
        rows = sum(splits) + 128 * (rows % 3)
    if axis == ROW:
        cols = naive_mxfp8.round_up(cols, 32)
    else:
        rows = naive_mxfp8.round_up(rows, 32)
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, cols // 32) if axis == ROW else (rows // 32, cols)
    scale = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    compact = naive_mxfp8.place_scales(scale, rows, cols, axis, False, splits)
    swizzled = naive_mxfp8.place_scales(scale, rows, cols, axis, True, splits)
    # Padding of the input must not get through: fill it with something else than zero.
    dirty_compact, dirty_swizzled = (
        torch.where(
            naive_mxfp8.place_scales(torch.ones_like(scale), rows, cols, axis, s, splits) == 1,
            b,
            77,
        )
        for s, b in ((False, compact), (True, swizzled))
    )
    assert torch.equal(move(dirty_compact, axis, rows, cols, splits, False), swizzled)
    assert torch.equal(move(dirty_swizzled, axis, rows, cols, splits, True), compact)


def test_the_group_extent_enters_the_column_layout():
    """The fault that a wrong row extent makes: the same scales, one group of 512 rows or 768."""
    scale = torch.randint(1, 255, (24, 256), dtype=torch.uint8)
    dense = move(scale, COLUMN, 768, 256, None, False).flatten()
    grouped = move(scale, COLUMN, 768, 256, [512], False).flatten()
    assert torch.equal(dense[: 4 * 512], grouped[: 4 * 512])
    assert not torch.equal(dense[: 8 * 512], grouped[: 8 * 512])
    assert (grouped[8 * 512 :] == POISON).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src": None}, r"src is None, allowed: \d+ bytes"),
        ({"dst": None}, r"dst is None, allowed: \d+ bytes"),
        ({"axis": -1}, r"axis is -1"),
        ({"rows": -1}, r"rows is -1"),
        ({"cols": 40}, r"cols is 40"),
        ({"rows": 40, "axis": 1}, r"rows is 40"),
        ({"num_groups": -3}, r"num_groups is -3"),
    ],
)
def test_bad_arguments(change, message):
    src, dst = calls.poisoned((128, 4)), calls.poisoned((128, 4))
    good = {
        "src": span(src),
        "dst": span(dst),
        "axis": 0,
        "rows": 128,
        "cols": 128,
        "splits": None,
        "num_groups": 0,
        "inverse": False,
    }
    with pytest.raises(ValueError, match=message):
        _C.swizzle_scales(**(good | change))


def test_in_place_is_refused():
    src = calls.poisoned((128, 4))
    with pytest.raises(ValueError, match="dst is in the memory of src"):
        _C.swizzle_scales(span(src), span(src), 0, 128, 128, None, 0, False)
