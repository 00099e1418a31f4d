# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How many bytes a tensor has, whatever its shape says."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.op.tensors import capacity


def test_memory_counts_from_the_tensors_first_element() -> None:
    whole = torch.zeros(10)
    assert [capacity.held(each) for each in (whole, whole[4:], whole[10:])] == [40, 24, 0]


def test_a_tensor_behind_the_end_of_its_storage_has_none() -> None:
    part = torch.zeros(10)[8:]
    part.untyped_storage().resize_(4 * 8)
    assert capacity.held(part) == 0
    with pytest.raises(ValueError, match="part of shape .2,. has 0 bytes of memory"):
        capacity.require_memory("part", part)


def test_an_address_ends_where_the_storage_does() -> None:
    part = torch.zeros(10)[2:8]
    address = part.data_ptr()
    assert capacity.span(part) == (address, 24)
    assert capacity.span(part, skip=8) == (address + 8, 16)
    part.untyped_storage().resize_(4 * 5)
    assert capacity.span(part) == (part.data_ptr(), 12)
    assert capacity.span(None) is None
