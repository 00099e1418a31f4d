# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over experts' rows on a CPU: the documented order of additions, whatever the strides."""

from __future__ import annotations

import sys

import pytest
import torch

import te_grouped_mlp.op.kernels
from te_grouped_mlp.op.kernels import group_reductions
from tests.csrc import naive_mxfp8

SIZES = torch.tensor([128, 0, 40, 300])
LIVE, COLS = int(SIZES.sum()), 70


def matrix(dtype: torch.dtype = torch.float32, rows: int = LIVE + 9) -> torch.Tensor:
    values = torch.randn(rows, COLS, generator=torch.Generator().manual_seed(5))
    values[LIVE:] = torch.nan
    return values.to(dtype)


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory: None) -> None:
    del poisoned_memory


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_column_sums_add_in_the_documented_order(dtype: torch.dtype, weighted: bool) -> None:
    values = matrix(dtype)
    weights = torch.randn(len(values)).bfloat16() if weighted else None
    sums = group_reductions.column_sums(values, SIZES, weights=weights)
    given = None if weights is None else weights.float()
    assert torch.equal(sums, naive_mxfp8.column_sums(values, SIZES.tolist(), given))
    assert sums.dtype is torch.float32
    assert not sums[1].any()


def test_column_sums_without_sizes_are_those_of_one_expert() -> None:
    values = matrix()[:LIVE].double()
    one = group_reductions.column_sums(values)
    assert torch.equal(one, group_reductions.column_sums(values, torch.tensor([LIVE])))
    assert not group_reductions.column_sums(values[:0]).any()


def test_row_dots_are_zero_past_the_experts() -> None:
    values, table = matrix(torch.bfloat16), torch.randn(len(SIZES), COLS).bfloat16()
    dots = group_reductions.row_dots(values, table, SIZES)
    assert torch.equal(dots[:LIVE], naive_mxfp8.row_dots(values, table, SIZES.tolist()))
    assert not dots[LIVE:].any()
    assert not group_reductions.row_dots(values[:, :0], table[:, :0], SIZES).any()


LAYOUTS = {
    "rows apart": lambda values: torch.cat([values, values], 1)[:, :COLS],
    "transposed": lambda values: values.t().contiguous().t(),
    "every other row": lambda values: values.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout: str) -> None:
    values, weights, table = matrix(), torch.randn(LIVE + 9), torch.randn(len(SIZES), COLS)
    other = LAYOUTS[layout](values)
    apart = weights.repeat_interleave(3)[::3]
    for left, right in (
        (
            group_reductions.column_sums(values, SIZES, weights=weights),
            group_reductions.column_sums(other, SIZES, weights=apart),
        ),
        (
            group_reductions.row_dots(values, table, SIZES),
            group_reductions.row_dots(other, LAYOUTS["transposed"](table), SIZES),
        ),
    ):
        assert torch.equal(left, right)


def test_a_row_that_stands_for_all() -> None:
    """The gradient of a sum has no stride from row to row."""
    row = torch.randn(COLS)
    sums = group_reductions.column_sums(row.expand(LIVE, COLS), SIZES)
    assert torch.equal(sums, group_reductions.column_sums(row.repeat(LIVE, 1), SIZES))
    one = row[None].as_strided((1, COLS), (1, 1))
    assert torch.equal(group_reductions.column_sums(one)[0], row)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"dtype is {dtype}; allowed: torch.float32"):
        group_reductions.column_sums(torch.ones(4, 4, dtype=dtype))


def test_a_gpu_without_triton_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "group_reductions_kernels"
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"te_grouped_mlp.op.kernels.{name}", raising=False)
    monkeypatch.delattr(te_grouped_mlp.op.kernels, name, raising=False)
    with pytest.raises(ImportError, match="sums over the rows of CUDA tensors need Triton"):
        group_reductions._triton_kernels.__wrapped__()
