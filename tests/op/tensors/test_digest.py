# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Equal bits have equal hashes, and others have not."""

from __future__ import annotations

import hashlib

import pytest
import torch

from te_grouped_mlp import digest

X = torch.tensor([[1.0, -0.0], [float("nan"), 3.0]])


def test_the_bytes_of_one_tensor_count() -> None:
    data = b"\x00\x01\x02\x03"
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert digest(tensor) == hashlib.blake2b(data, digest_size=8).hexdigest()
    assert digest(X) == digest(X.clone().requires_grad_()) == digest(X.T.contiguous().T)
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 3))
    assert digest(torch.tensor(1.0)) == digest(torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_every_dtype_has_bytes(dtype: torch.dtype) -> None:
    one, other = torch.zeros(3).to(dtype), torch.tensor([0.0, 0.0, 1.0]).to(dtype)
    assert digest(one) == digest(one.clone()) != digest(other)


def test_one_bit_is_another_hash() -> None:
    flipped = X.clone()
    flipped.view(torch.int32)[0, 1] ^= -(2**31)
    assert torch.equal(flipped[0], X[0])
    assert digest(flipped) != digest(X)
    assert digest([X, flipped]) != digest([X, X])


def test_names_count_and_the_order_of_a_mapping_does_not() -> None:
    y = X + 1
    assert digest({"a": X, "b": y}) == digest({"b": y, "a": X})
    assert digest({"a": X, "b": y}) != digest({"a": y, "b": X})
    assert digest([X, y]) == digest(each for each in (X, y)) != digest([y, X])
    assert len({digest([X]), digest([X, None]), digest([None, X]), digest([])}) == 4
