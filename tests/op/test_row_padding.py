# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows on the multiples that the kernels want."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformer_engine.common import recipe as recipes

from te_grouped_mlp import row_multiple, row_padding
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.packages import Absent
from tests.support import step

MXFP8 = recipes.MXFP8BlockScaling


@pytest.mark.parametrize(
    ("recipe", "backend", "sm", "expected"),
    [
        (None, None, (10, 0), 1),
        (None, "cudnn", (10, 0), 1),
        (MXFP8, None, Absent("none"), 128),
        (MXFP8, None, (9, 0), 128),
        (MXFP8, None, (10, 3), 256),
        (MXFP8, "cutedsl", (10, 0), 128),
        (MXFP8, "cudnn", (9, 0), 256),
    ],
)
def test_row_multiple(recipe: Any, backend: str | None, sm: Any, expected: int) -> None:
    with environment.override(sm=sm):
        assert row_multiple(recipe and recipe(), backend=backend) == expected


@pytest.mark.parametrize(
    ("recipe", "backend", "named"),
    [
        (recipes.DelayedScaling, None, "recipe is DelayedScaling; allowed: None, MXFP8Block"),
        (recipes.NVFP4BlockScaling, None, "recipe is NVFP4BlockScaling"),
        (MXFP8, "upstream", "backend is 'upstream'; allowed: None, cudnn"),
    ],
)
def test_row_multiple_of_what_is_never_fused(recipe: Any, backend: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        row_multiple(recipe(), backend=backend)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("multiple", [1, 128, 256])
@pytest.mark.parametrize("sizes", [[5, 0, 256, 3], [0, 0], [300], [128, 256]])
def test_rows_stand_in_their_groups(sizes: list[int], multiple: int, dtype: torch.dtype) -> None:
    rows = sum(sizes) + 7
    padding = row_padding(torch.tensor(sizes, dtype=dtype), rows, multiple)
    assert padding.split_sizes.dtype is dtype
    x = torch.arange(1.0, rows + 1, dtype=torch.float64)[:, None].requires_grad_()
    padded = padding.pad(x)
    assert len(padded) == padding.rows
    assert padding.rows % multiple == 0
    whole = [-(-size // multiple) * multiple for size in sizes]
    assert padding.split_sizes.tolist() == whole
    pieces = padded.split([*whole, padding.rows - sum(whole)])
    # Seven rows belong to no group: they stand first in the tail.
    for piece, own in zip(pieces, x.split([*sizes, 7]), strict=True):
        assert torch.equal(piece[: len(own)], own)
        assert not piece[len(own) :].any()
    weight = torch.randn(padding.rows, 1, dtype=torch.float64)
    back = padding.unpad(padded * weight)
    back.sum().backward()
    assert torch.equal(x.grad, weight[padding.position])
    assert torch.equal(back, x * weight[padding.position])


@pytest.mark.parametrize(
    ("sizes", "rows", "multiple", "named"),
    [
        (torch.tensor([1, 2]), 3, 0, "multiple is 0"),
        (torch.tensor([1, 3]), 3, 128, r"split_sizes is \[1, 3\]"),
        (torch.tensor([4, -1]), 3, 128, r"split_sizes is \[4, -1\]"),
        (torch.tensor([1.0]), 3, 128, "split_sizes is torch.float32"),
        (torch.tensor([[1]]), 3, 128, r"shape \(1, 1\)"),
    ],
)
def test_bad_sizes_are_named(sizes: Any, rows: int, multiple: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        row_padding(sizes, rows, multiple)


def test_other_rows_are_named() -> None:
    padding = row_padding(torch.tensor([1, 2]), 3, 4)
    with pytest.raises(ValueError, match=r"shape \(4,\); allowed: 3 rows"):
        padding.pad(torch.zeros(4))
    with pytest.raises(ValueError, match=r"shape \(3, 2\); allowed: 12 rows"):
        padding.unpad(torch.zeros(3, 2))


@pytest.mark.usefixtures("fused_switch", "poisoned_memory")
def test_a_step_of_odd_sizes_equals_the_one_padded_by_hand() -> None:
    """Padding adds nothing: rows of zeros inside a group, and whatever is in the tail."""
    sizes, rows = [100, 0, 129], 229
    case = step.StepCase(splits=(128, 0, 256), buffer_rows=640, hidden=128, ffn=64, bias=True)
    padding = row_padding(torch.tensor(sizes), rows, 128)
    assert padding.rows == case.buffer_rows
    given = step.make_inputs(case)
    with torch.no_grad():
        x, prob, dy = (padding.unpad(each) for each in (given.x, given.prob, given.dy))
        given.x.copy_(padding.pad(x))
        given.prob.copy_(padding.pad(prob))
        given.dy.copy_(padding.pad(dy))
    model = step.make_model(case)
    expected = step.collect(case, model, given, step.run_model(model, case, given))
    again = step.make_inputs(case)
    leaves = x.requires_grad_(), prob.requires_grad_()
    again.x, again.prob = padding.pad(leaves[0], float("nan")), padding.pad(leaves[1])
    # NaN in the tail alone: inside a group it would be computed with.
    live = torch.arange(padding.rows) < int(padding.split_sizes.sum())
    again.x = again.x.where(~(live[:, None] & again.x.isnan()), 0.0)
    twin = step.make_model(case)
    y = padding.unpad(step.forward(twin, case, again))
    y.backward(dy)
    assert step.same_bits(y.detach(), padding.unpad(expected["y"]))
    assert step.same_bits(leaves[0].grad, padding.unpad(expected["dx"]))
    assert step.same_bits(leaves[1].grad, padding.unpad(expected["dprob"]))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert step.same_bits(one.grad, other.grad)
