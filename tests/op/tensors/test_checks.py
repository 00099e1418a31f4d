# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tensors share memory, and which two are the same probabilities."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.op.tensors import checks

HOST = torch.device("cpu")
ROWS, COLS = 4, 8
SIZE = ROWS * COLS


def buffer(
    start: int, other: torch.Tensor, storage: torch.Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """Check a (ROWS, COLS) buffer that begins `start` values into a storage against a tensor."""
    out = storage.view(dtype)[start : start + SIZE].view(ROWS, COLS)
    checks.buffer("output", out, (ROWS, COLS), dtype, HOST, [other])


# Rows 0, 2, 4 and 6 of eight: what it spans is twice what it holds, less one row.
def every_second_row(storage: torch.Tensor, start: int = 0) -> torch.Tensor:
    return storage[start : start + 2 * SIZE].view(2 * ROWS, COLS)[::2]


BEFORE, INSIDE, LAST, AFTER = 0, SIZE + COLS, 3 * SIZE - COLS - 1, 3 * SIZE - COLS


@pytest.mark.parametrize("start", [1, SIZE, INSIDE, LAST])
def test_a_buffer_within_the_span_of_a_strided_tensor_is_refused(start: int) -> None:
    """`other` lies from SIZE on; its span ends one row before 3 SIZE."""
    storage = torch.zeros(4 * SIZE)
    with pytest.raises(ValueError, match="output shares memory"):
        buffer(start, every_second_row(storage, SIZE), storage)


@pytest.mark.parametrize("start", [BEFORE, AFTER])
def test_a_buffer_that_ends_or_begins_where_another_does_is_taken(start: int) -> None:
    storage = torch.zeros(4 * SIZE)
    buffer(start, every_second_row(storage, SIZE), storage)


def test_columns_count_by_their_stride() -> None:
    """A transposed tensor's last element is not at the end of its first dimension."""
    storage = torch.zeros(4 * SIZE)
    other = storage[: 2 * SIZE].view(COLS, 2 * ROWS).t()[:, 1::2]
    with pytest.raises(ValueError, match="output shares memory"):
        buffer(SIZE + COLS, other, storage)


@pytest.mark.parametrize(("count", "shares"), [(SIZE + 1, True), (SIZE, False)])
def test_bytes_are_compared_not_elements(count: int, shares: bool) -> None:
    """Eight bytes an element in front of a buffer of four: the element counts agree."""
    storage = torch.zeros(4 * SIZE)
    other = storage.view(torch.float64)[:count]
    if shares:
        with pytest.raises(ValueError, match="output shares memory"):
            buffer(2 * SIZE, other, storage)
    else:
        buffer(2 * SIZE, other, storage)


def test_one_repeated_value_spans_one() -> None:
    storage = torch.zeros(4 * SIZE)
    buffer(1, storage[:1].expand(SIZE), storage)
    with pytest.raises(ValueError, match="output shares memory"):
        buffer(0, storage[:1].expand(SIZE), storage)


def test_what_is_empty_shares_nothing() -> None:
    storage = torch.zeros(4 * SIZE)
    buffer(0, storage[4:4], storage)


# The probabilities of the activation and the scale of the bias -----------------------------------


def test_the_same_probabilities_in_another_shape() -> None:
    prob = torch.rand(8, requires_grad=True)
    checks.same_values(prob, prob)
    checks.same_values(prob, prob.view(2, 4))
    checks.same_values(prob.detach(), prob.detach())


OTHERS = {
    "elsewhere": lambda prob: prob.detach().clone().requires_grad_(),
    "fewer": lambda prob: prob[:4],
    "of another stride": lambda prob: prob.as_strided((8,), (2,)),
    "of another type": lambda prob: prob.detach().view(torch.int32),
    "without a gradient": lambda prob: prob.detach(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_probabilities_at_the_same_address(kind: str) -> None:
    prob = torch.rand(16)[:8].requires_grad_()
    other = OTHERS[kind](prob)
    if kind == "of another type":
        # All but the type agree.
        prob = prob.detach()
    for first, second in ((prob, other), (other, prob)):
        with pytest.raises(ValueError, match="another tensor than the probabilities"):
            checks.same_values(first, second)
