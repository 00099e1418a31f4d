# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Column sums and row dot products: one fixed order of additions, reproduced step by step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors.capacity import span
from tests.csrc import calls, naive_mxfp8
from tests.csrc.naive_mxfp8 import POISON

DTYPES = tuple(calls.SOURCE_TYPES)
SPLITS = st.none() | st.lists(st.integers(0, 200), min_size=1, max_size=3)


def source(splits, rows, cols, extra, dtype, seed):
    """A strided view with a NaN tail past the valid rows."""
    live = rows if splits is None else sum(splits)
    wide = calls.sample(live + (0 if splits is None else rows), cols + extra, dtype, "normal", seed)
    wide[live:] = float("nan")
    return wide[:, extra:]


def geometry(x):
    return span(x), calls.SOURCE_TYPES[x.dtype], *x.shape, x.stride(0)


@settings(max_examples=40, deadline=None)
@given(
    splits=SPLITS,
    rows=st.integers(1, 300),
    cols=st.integers(1, 600),
    extra=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_column_sums(splits, rows, cols, extra, dtype, weighted, seed):
    x = source(splits, rows, cols, extra, dtype, seed)
    weights = torch.randn(x.shape[0], generator=torch.Generator().manual_seed(seed))
    wanted = naive_mxfp8.column_sums(x, splits, weights if weighted else None)
    held, where, groups = calls.host_splits(splits)
    for _, threads in calls.each_level_and_threads():
        out = calls.poisoned((max(groups, 1), cols), torch.float32)
        if weighted:
            _C.weighted_column_sums(*geometry(x), span(weights), where, groups, span(out), threads)
        else:
            _C.column_sums(*geometry(x), where, groups, span(out), threads)
        assert calls.same_bytes(out, wanted)


@settings(max_examples=40, deadline=None)
@given(
    splits=SPLITS,
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    extra=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_row_dots(splits, rows, cols, extra, dtype, seed):
    x = source(splits, rows, cols, extra, dtype, seed)
    held, where, groups = calls.host_splits(splits)
    table = torch.randn(max(groups, 1), cols, generator=torch.Generator().manual_seed(seed))
    wanted = naive_mxfp8.row_dots(x, table, splits)
    for _, threads in calls.each_level_and_threads():
        out = calls.poisoned((x.shape[0],), torch.float32)
        _C.row_dots(*geometry(x), span(table), where, groups, span(out), threads)
        assert calls.same_bytes(out[: len(wanted)], wanted)
        assert (out[len(wanted) :].view(torch.uint8) == POISON).all()


def test_sums_are_close_to_exact():
    """The order is a choice, the sum is not: against float64."""
    x = calls.sample(700, 65, torch.bfloat16, "normal", 1)
    weights, table = torch.randn(700), torch.randn(1, 65)
    sums, weighted, dots = torch.empty(65), torch.empty(65), torch.empty(700)
    _C.column_sums(*geometry(x), None, 0, span(sums), 0)
    _C.weighted_column_sums(*geometry(x), span(weights), None, 0, span(weighted), 0)
    _C.row_dots(*geometry(x), span(table), None, 0, span(dots), 0)
    exact = x.double()
    torch.testing.assert_close(sums, exact.sum(0).float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(weighted, (exact.t() @ weights.double()).float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(dots, (exact @ table[0].double()).float(), rtol=0, atol=1e-4)


def test_an_empty_group_sums_to_zero():
    held, where, groups = calls.host_splits([0, 0])
    out = calls.poisoned((2, 8), torch.float32)
    _C.column_sums(None, 0, 0, 8, 8, where, groups, span(out), 1)
    assert calls.same_bytes(out, torch.zeros(2, 8))


@pytest.mark.parametrize("name", ["column_sums", "weighted_column_sums", "row_dots"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src": None}, r"src is None, allowed: \d+ bytes"),
        ({"src_dtype": 5}, r"src_dtype is 5"),
        ({"rows": -4}, r"rows is -4"),
        ({"row_stride": 1}, r"row_stride is 1"),
        ({"out_f32": None}, r"out_f32 is None, allowed: \d+ bytes"),
        ({"threads": 5000}, r"threads is 5000"),
        ({"weights_f32": None}, r"weights_f32 is None, allowed: \d+ bytes"),
        ({"table_f32": None}, r"table_f32 is None, allowed: \d+ bytes"),
    ],
)
def test_bad_arguments(name, change, message):
    extra = {"weighted_column_sums": "weights_f32", "row_dots": "table_f32"}.get(name)
    if next(iter(change)) in ("weights_f32", "table_f32") and extra not in change:
        change, message = {"num_groups": 1}, r"splits is None"
    x, out = torch.zeros(4, 4), calls.poisoned((4,), torch.float32)
    good = {
        "src": span(x),
        "src_dtype": 0,
        "rows": 4,
        "cols": 4,
        "row_stride": 4,
        "splits": None,
        "num_groups": 0,
        "out_f32": span(out),
        "threads": 1,
    }
    if extra:
        good[extra] = span(x)
    with pytest.raises(ValueError, match=message):
        getattr(_C, name)(**(good | change))
    assert (out.view(torch.uint8) == POISON).all()
