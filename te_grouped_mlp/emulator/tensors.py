# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU tensors in the place of CUDA's: how they pose, and which of their bytes have values."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.emulator.memory import GlobalMemory

POISON = 0xFF
"""What fresh memory holds: NaN in E8M0, E4M3, bf16, fp16 and fp32."""

ALIGNMENT = 512
"""Of an allocation, as CUDA's allocator of torch aligns."""

_RED_ZONE = 4096
"""Bytes around an allocation that belong to nobody."""

_CUDA = 2
"""DLPack's code of a CUDA device."""


class Claimed:
    """A CPU tensor that exports itself as CUDA's; it keeps the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # The struct begins with the address of the data; the device's type follows.
        ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8).value = _CUDA
        return capsule


def claimed(value: Any) -> Any:
    """Return a value with every CPU tensor in it, in tuples too, claimed to be CUDA's."""
    if isinstance(value, torch.Tensor):
        return Claimed(value)
    if isinstance(value, tuple):
        parts = [claimed(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield every tensor in values, nested ones too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


@dataclass
class _Allocation:
    """What is registered for one storage.

    Attributes:
        address, nbytes: The registered bytes.
        storage: The storage, while it lives.
        version: Torch's count of its changes when it was last looked at; None: it has values.
    """

    address: int
    nbytes: int
    storage: weakref.ref[Any]
    version: int | None


class Allocations:
    """Registers tensors with an emulated GPU's memory as launches are about to use them.

    An allocation is a whole storage, or the part of one that `empty` gave away. It is forgotten
    when the storage is gone, or has become another one at the same address.
    """

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._known: dict[int, _Allocation] = {}

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        poison: int = POISON,
    ) -> torch.Tensor:
        """Return a fresh tensor on the CPU: aligned, poisoned, unwritten, between red zones.

        Args:
            shape: Sizes.
            dtype: Any with a byte view.
            strides: In elements; contiguous without.
            poison: What every byte holds.
        """
        sizes = tuple(int(size) for size in shape)
        steps = tuple(strides) if strides is not None else _contiguous(sizes)
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        nbytes = (last + 1) * dtype.itemsize if all(sizes) else 0
        raw = torch.full((nbytes + 2 * _RED_ZONE + ALIGNMENT,), poison, dtype=torch.uint8)
        start = _RED_ZONE + -(raw.data_ptr() + _RED_ZONE) % ALIGNMENT
        out = torch.empty(0, dtype=dtype)
        out.set_(raw.untyped_storage(), start // dtype.itemsize, sizes, steps)
        if nbytes:
            self._add(out, raw.data_ptr() + start, nbytes, out._version)
        return out

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make what a launch may touch known, and forget what is gone."""
        for address in [a for a, each in self._known.items() if each.storage() is None]:
            self._forget(address)
        tables = []
        for tensor in tensors:
            self._update(tensor)
            if tensor.dtype is torch.int64 and tensor.dim() == 1:
                tables.append(tensor)
        for table in tables:
            self._register_members(table)

    @contextlib.contextmanager
    def watch(self, addresses: Iterable[int]) -> Iterator[None]:
        """Take fresh tensors for written when code changes them that torch does not count.

        Args:
            addresses: That the code may write to: of any byte of an allocation.
        """
        fresh = [each for each in self._known.values() if each.version is not None]
        given = list(addresses)
        seen = [
            (each, ctypes.string_at(each.address, each.nbytes))
            for each in fresh
            if any(each.address <= address < each.address + each.nbytes for address in given)
        ]
        yield
        for each, before in seen:
            if ctypes.string_at(each.address, each.nbytes) != before:
                self._take_for_written(each)

    def take_for_written(self) -> None:
        """Take every fresh tensor for written; its bytes stay as they are."""
        for known in self._known.values():
            if known.version is not None:
                self._take_for_written(known)

    def bytes_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return address and size of the allocation that a registered tensor lies in."""
        known = self._known[tensor.untyped_storage().data_ptr()]
        return known.address, known.nbytes

    def _update(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes:
            return
        known = self._known.get(key)
        if known is None or known.storage() is not storage:
            self._add(tensor, key, nbytes, None)
        elif known.version is not None and known.version != tensor._version:
            # Torch has written to it; how much cannot be told, so all of it.
            self._take_for_written(known)

    def _add(self, tensor: torch.Tensor, address: int, nbytes: int, version: int | None) -> None:
        storage = tensor.untyped_storage()
        end = address + nbytes
        # Memory that lives overlaps no other; what does was freed, and has not been forgotten yet.
        for key, each in list(self._known.items()):
            if each.address < end and address < each.address + each.nbytes:
                self._forget(key)
        name = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} at {address:#x}"
        self._memory.register(address, nbytes, name=name, written=version is None)
        key = storage.data_ptr()
        self._known[key] = _Allocation(address, nbytes, weakref.ref(storage), version)

    def _take_for_written(self, known: _Allocation) -> None:
        self._memory.take_for_written(known.address)
        known.version = None

    def _forget(self, key: int) -> None:
        self._memory.forget(self._known.pop(key).address)

    def _register_members(self, table: torch.Tensor) -> None:
        """Register what a table of addresses points to: the storages that hold them."""
        wanted = {int(value) for value in table.tolist()}
        missing = {each for each in wanted if each and not self._covers(each)}
        if not missing:
            return
        for tensor in _living_tensors():
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if any(start <= each < start + storage.nbytes() for each in missing):
                self._update(tensor)
                missing = {each for each in missing if not self._covers(each)}
                if not missing:
                    return

    def _covers(self, address: int) -> bool:
        return any(
            each.address <= address < each.address + each.nbytes for each in self._known.values()
        )


def _living_tensors() -> Iterator[torch.Tensor]:
    """Yield every CPU tensor of the process that has memory."""
    for found in gc.get_objects():
        # Proxies of other packages answer isinstance by importing what they stand for.
        if not issubclass(type(found), torch.Tensor) or found.device.type != "cpu":
            continue
        with contextlib.suppress(RuntimeError, NotImplementedError):
            found.untyped_storage().data_ptr()  # a wrapper of other tensors has none
            yield found


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))
