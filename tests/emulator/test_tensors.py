# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which tensors an emulated GPU takes for memory, and for written."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

pytest.importorskip("numpy")

from te_grouped_mlp.emulator.memory import GlobalMemory
from te_grouped_mlp.emulator.tensors import ALIGNMENT, POISON, Allocations, Claimed, claimed


class Memory(GlobalMemory):
    """Keeps what is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[int, bool]] = {}

    def register(self, address: int, nbytes: int, *, name: str = "", written: bool = True) -> None:
        super().register(address, nbytes, name=name, written=written)
        self.known[address] = (nbytes, written)

    def take_for_written(self, address: int) -> None:
        super().take_for_written(address)
        self.known[address] = (self.known[address][0], True)

    def forget(self, address: int) -> None:
        super().forget(address)
        del self.known[address]


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def allocations(memory: Memory) -> Allocations:
    return Allocations(memory)


@pytest.mark.parametrize("strides", [None, (1, 6)])
def test_a_fresh_tensor_is_aligned_poisoned_and_unwritten(
    allocations: Allocations, memory: Memory, strides: tuple[int, int] | None
) -> None:
    out = allocations.empty((6, 4), torch.bfloat16, strides)
    assert out.data_ptr() % ALIGNMENT == 0
    assert out.stride() == (strides or (4, 1))
    assert out.isnan().all()
    assert memory.known == {out.data_ptr(): (48, False)}


def test_its_neighbours_belong_to_nobody(allocations: Allocations, memory: Memory) -> None:
    out = allocations.empty((8,), torch.float32)
    allocations.register([out])
    assert memory.known == {out.data_ptr(): (32, False)}
    assert ctypes.string_at(out.data_ptr() - 64, 64) == bytes([POISON]) * 64


def test_what_torch_writes_has_values(allocations: Allocations, memory: Memory) -> None:
    out = allocations.empty((8,), torch.float32)
    out[2:4].zero_()
    allocations.register([out])
    assert memory.known == {out.data_ptr(): (32, True)}


def test_what_other_code_writes_has_values(allocations: Allocations, memory: Memory) -> None:
    read, written = (allocations.empty((8,), torch.float32) for _ in range(2))
    with allocations.watch([read.data_ptr(), written.data_ptr() + 4]):
        ctypes.memset(written.data_ptr() + 8, 0, 4)
    assert memory.known == {read.data_ptr(): (32, False), written.data_ptr(): (32, True)}


def test_a_view_stands_for_its_storage(allocations: Allocations, memory: Memory) -> None:
    whole = torch.zeros(10, 10)
    allocations.register([whole[3:5, 2:]])
    assert memory.known == {whole.data_ptr(): (400, True)}


def test_what_a_table_points_to_is_known(allocations: Allocations, memory: Memory) -> None:
    members = [torch.zeros(16) for _ in range(3)]
    table = torch.tensor([member.data_ptr() for member in members])
    allocations.register([table])
    assert {member.data_ptr() for member in members} <= memory.known.keys()


def test_what_is_gone_is_forgotten(allocations: Allocations, memory: Memory) -> None:
    gone = torch.zeros(1000)
    allocations.register([gone])
    del gone
    gc.collect()
    allocations.register([])
    assert not memory.known


def test_claimed_tensors_say_they_are_cudas() -> None:
    first, (second, none) = claimed((torch.zeros(3), (torch.ones(2), None)))
    assert isinstance(first, Claimed)
    assert isinstance(second, Claimed)
    assert none is None
    assert first.__dlpack_device__() == (2, 0)
    assert "dltensor" in repr(first.__dlpack__())
