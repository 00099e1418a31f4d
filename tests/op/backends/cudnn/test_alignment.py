# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a kernel cannot address is copied, and nothing else."""

from __future__ import annotations

import torch

from te_grouped_mlp.op.backends.cudnn import alignment
from te_grouped_mlp.op.tensors.operands import Axis, QuantizedCopy


def _aligned(count: int) -> torch.Tensor:
    memory = torch.arange(count + 16, dtype=torch.uint8)
    start = -memory.data_ptr() % alignment.BYTES
    return memory[start : start + count]


def test_only_what_is_strided_or_misaligned_is_copied() -> None:
    memory = _aligned(64)
    assert alignment.readable(memory) is memory
    for other in (memory[1:], memory[::2]):
        copied = alignment.readable(other)
        assert copied.is_contiguous()
        assert alignment.is_aligned(copied)
        assert torch.equal(copied, other)


def test_scales_alone_are_copied() -> None:
    data, scale = _aligned(64), _aligned(64)
    copy = QuantizedCopy(data, scale, Axis.ROW, True)
    assert alignment.readable_scales(copy) is copy
    moved = alignment.readable_scales(QuantizedCopy(data, scale[1:], Axis.ROW, True))
    assert moved.data is data
    assert torch.equal(moved.scale, scale[1:])
    assert alignment.is_aligned(moved.scale)
