# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The TMA: copies of boxes between global and shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from te_grouped_mlp.emulator import barriers
from te_grouped_mlp.emulator.clocks import observe
from te_grouped_mlp.emulator.faults import IllegalOperand, Misaligned, MissingFence
from te_grouped_mlp.emulator.formats import F16, F32, U16, narrow_bf16, widen
from te_grouped_mlp.emulator.lanes import Value, first, spread
from te_grouped_mlp.emulator.memory import Allocation, Event
from te_grouped_mlp.emulator.tensor_map import (
    FOUR_BIT,
    MAP_BYTES,
    TensorMap,
    decode,
    swizzled,
)

if TYPE_CHECKING:
    from te_grouped_mlp.emulator.cta import Cta
    from te_grouped_mlp.emulator.warp import Warp


class Box:
    """The part of a box that lies inside of its tensor."""

    def __init__(self, warp: Warp, tensor: TensorMap, start: tuple[int, ...], what: str) -> None:
        if tensor.code == FOUR_BIT:
            start = (start[0] // 2, *start[1:])
        self.tensor = tensor
        spans = list(zip(start, tensor.box, tensor.dims, strict=True))
        low = [max(s, 0) for s, _, _ in spans]
        high = [min(s + b, d) for s, b, d in spans]
        self.extents = tuple(max(h - lo, 0) for lo, h in zip(low, high, strict=True))
        self.empty = 0 in self.extents
        self.inside = tuple(
            slice(lo - s, lo - s + e)
            for lo, (s, _, _), e in zip(low, spans, self.extents, strict=True)
        )[::-1]
        self.allocation: Allocation | None = None
        if not self.empty:
            address = tensor.address + sum(
                lo * s for lo, s in zip(low, tensor.strides, strict=True)
            )
            # Addresses wrap: a map of ragged rows counts them down from a huge extent.
            address &= (1 << 64) - 1
            reach = sum((e - 1) * s for e, s in zip(self.extents, tensor.strides, strict=True))
            high_end = address + reach + tensor.element
            name = f"{what} of {tensor} at {start}"
            self.allocation = warp.memory.find(address, high_end, name)
            self.offset = address - self.allocation.address + self.allocation.lead

    def select(self, array: np.ndarray, value: object = None) -> np.ndarray | None:
        """Return the view of an array with an element for each byte, (..., bytes); or set it."""
        t = self.tensor
        shape = (*self.extents[::-1], t.element)
        strides = [s * array.itemsize for s in (*t.strides[::-1], 1)]
        view = np.lib.stride_tricks.as_strided(array[self.offset :], shape, strides)
        if value is None:
            return view
        view[...] = value
        return None

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole box in bytes."""
        return (*self.tensor.box[::-1], self.tensor.element)


def _map(warp: Warp, address: int) -> TensorMap:
    """Return the map at an address, which must have been acquired if a kernel wrote it."""
    if address % 64:
        raise Misaligned(f"tensor map at {address:#x}")
    found = warp.machine.parameters
    if not found.address <= address <= found.address + found.size - MAP_BYTES:
        found = warp.memory.find(address, address + MAP_BYTES, "tensor map")
    at = address - found.address + found.lead
    if warp.cluster.clocks.active and found.from_kernel is not None:
        made = found.from_kernel[at : at + 64].any()
        if made and address not in warp.cluster.acquired:
            raise MissingFence(
                f"the tensor map at {address:#x}, which a kernel wrote, is not acquired"
            )
    tensor = decode(found.bytes[at : at + 64].tobytes())
    if not tensor.unit:
        raise NotImplementedError(f"{tensor}: element strides or interleaving")
    if any(s % 16 for s in tensor.strides[1:]):
        raise Misaligned(f"{tensor}: strides")
    return tensor


def acquire_map(warp: Warp, base: Value, offset: int, mask: np.ndarray) -> None:
    """`fence.proxy.tensormap`: later uses of a map see what was written to it."""
    warp.cluster.acquired.update((spread(base)[mask].astype(np.int64) + offset).tolist())


class _Load:
    """A load on its way to one CTA."""

    def __init__(self, box: Box, cta: Cta, offset: int, barrier: barriers.MBarrier) -> None:
        self.box, self.cta, self.offset, self.barrier = box, cta, offset, barrier

    def finish(self) -> None:
        """Let it come: zeros outside of the tensor."""
        box, size = self.box, self.box.tensor.box_bytes
        self.cta.cells(self.offset, size)
        data = np.zeros(-(-size // 16) * 16, np.uint8)
        if box.allocation is not None:
            data[:size].reshape(box.shape())[box.inside] = box.select(box.allocation.bytes)
        chunks = swizzled(self.offset, size, box.tensor.swizzle)
        if size % 16:
            raise IllegalOperand(f"{box.tensor}: a box of {size} bytes")
        self.cta.chunks[chunks] = data.view(np.uint64).reshape(-1, 2)
        self.barrier.transfer(size)


def load(
    warp: Warp, base: Value, offset: int, at: Value, coordinates: tuple[Value, ...],
    signal: Value, signal_offset: int, multicast: Value | None, group: int, mask: np.ndarray,
) -> None:  # fmt: skip
    """`cp.async.bulk.tensor` to shared memory, by each active lane."""
    for lane in np.flatnonzero(mask):
        box = Box(
            warp, tensor := _map(warp, int(spread(at)[lane])), _start(coordinates, lane), "load"
        )
        own, to = warp.place(int(spread(base)[lane]) + offset, "TMA load")
        if to % 128:
            raise Misaligned(f"TMA load to shared memory {to:#x}")
        barrier_cta, barrier_at = warp.place(int(spread(signal)[lane]) + signal_offset, "mbarrier")
        ranks = [own.rank]
        if multicast is not None:
            bits = int(spread(multicast)[lane])
            ranks = [cta.rank for cta in warp.cluster.ctas if bits >> cta.rank & 1]
        for rank in ranks:
            cta = warp.cluster.ctas[rank]
            # In a pair of CTAs, the barrier is the one of the half that the address names.
            to_rank = barrier_cta.rank if multicast is None else rank
            if multicast is not None and group == 2:
                to_rank = rank & ~1 | barrier_cta.rank & 1
            barrier = barriers.find(warp, to_rank << 24 | barrier_at, proxy=True)
            if box.allocation is not None:
                event = Event(
                    warp.cluster.serial,
                    barrier.agent,
                    barrier.phase + 1,
                    f"a TMA load of {warp.name}",
                )
                number = warp.memory.event(event)
                warp.memory.read(box.allocation, box.select, number, warp.clock, "TMA load")
            cells = cta.cells(to, tensor.box_bytes)
            cta.shared.write(cells, warp.clock, barrier.agent, barrier.phase + 1, proxy=True)
            warp.cluster.later("load", _Load(box, cta, to, barrier))
            warp.counts["written", "shared"] += tensor.box_bytes
        warp.counts["tma", "load"] += 1
        warp.counts["tma", "bytes"] += tensor.box_bytes
        warp.counts["read", "global"] += int(np.prod(box.extents)) * tensor.element
    warp.tick()


def _start(coordinates: tuple[Value, ...], lane: int) -> tuple[int, ...]:
    return tuple(int(c[lane]) if c.ndim else int(c) for c in coordinates)


class Groups:
    """The stores of a warp, in groups that complete in order."""

    def __init__(self, warp: Warp) -> None:
        self.reads = warp.cluster.clocks.agent(f"the TMA stores of {warp.name}")
        self.writes = warp.cluster.clocks.agent(f"the TMA stores of {warp.name}, writing")
        self.open: list[_Store] = []
        self.groups: list[list[_Store]] = []
        self.committed = 0

    @property
    def time(self) -> int:
        """The group that a store goes to."""
        return self.committed + 1


class _Store:
    """A store on its way."""

    def __init__(self, box: Box, cta: Cta, chunks: np.ndarray, reduce: bool) -> None:
        self.box, self.cta, self.chunks, self.reduce = box, cta, chunks, reduce
        self.finished = False

    def finish(self) -> None:
        """Let it happen, once."""
        if self.finished or self.box.allocation is None:
            return
        self.finished = True
        box = self.box
        data = self.cta.chunks[self.chunks].view(np.uint8).reshape(-1)[: box.tensor.box_bytes]
        new = data.reshape(box.shape())[box.inside]
        target = box.select(box.allocation.bytes)
        target[...] = _sum(target, new, box.tensor.code) if self.reduce else new


def _sum(old: np.ndarray, new: np.ndarray, code: int) -> np.ndarray:
    """Add the elements of two boxes, (..., bytes)."""
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    if code == 7:
        return (old.view(F32) + new.view(F32)).view(np.uint8)
    if code == 6:
        return (old.view(F16) + new.view(F16)).view(np.uint8)
    if code == 10:
        return narrow_bf16(widen(old.view(U16)) + widen(new.view(U16))).view(np.uint8)
    raise NotImplementedError(f"TMA reduction of element type {code}")


def store(
    warp: Warp, at: Value, coordinates: tuple[Value, ...], base: Value, offset: int, reduce: bool,
    mask: np.ndarray,
) -> None:  # fmt: skip
    """`cp.async.bulk.tensor` to global memory: one request a warp.

    Raises:
        IllegalOperand: The lanes ask for different boxes.
    """
    lane = first(mask)
    for value in (at, base, *coordinates):
        if value.ndim and (value[mask] != value[lane]).any():
            raise IllegalOperand("the lanes of a warp store different boxes")
    groups = _groups(warp)
    tensor = _map(warp, int(spread(at)[lane]))
    box = Box(warp, tensor, _start(coordinates, lane), "store")
    cta, start = warp.place(int(spread(base)[lane]) + offset, "TMA store")
    if start % 128:
        raise Misaligned(f"TMA store from shared memory {start:#x}")
    cells = cta.cells(start, tensor.box_bytes)
    chunks = swizzled(start, tensor.box_bytes, tensor.swizzle)
    if box.allocation is not None:
        inside = _touched(box, chunks, cta.granule)
        used = cells if inside is None else inside
        cta.shared.read(used, warp.clock, groups.reads, groups.time, proxy=True)
        event = Event(
            warp.cluster.serial, groups.writes, groups.time, f"a TMA store of {warp.name}", reduce
        )
        number = warp.memory.event(event)
        warp.memory.write(box.allocation, box.select, number, warp.clock, "TMA store")
    request = _Store(box, cta, chunks, reduce)
    groups.open.append(request)
    warp.cluster.later("store", request)
    moved = int(np.prod(box.extents)) * tensor.element
    warp.counts["tma", "store"] += 1
    warp.counts["tma", "bytes"] += moved
    warp.counts["written", "global"] += moved


def _touched(box: Box, chunks: np.ndarray, granule: int) -> np.ndarray | None:
    """Return the cells that are read if only a part of the box is, else None."""
    if box.extents == box.tensor.box:
        return None
    each = 16 // granule
    cells = (chunks[:, None] * each + np.arange(each)).reshape(-1)
    taken = np.zeros(len(chunks) * 16, bool)
    taken[: box.tensor.box_bytes].reshape(box.shape())[box.inside] = True
    return cells[taken.reshape(-1, granule).any(axis=1)]


def _groups(warp: Warp) -> Groups:
    if "stores" not in warp.streams:
        warp.streams["stores"] = Groups(warp)
    return warp.streams["stores"]


def commit(warp: Warp) -> None:
    """`cp.async.bulk.commit_group`."""
    groups = _groups(warp)
    groups.groups.append(groups.open)
    groups.open = []
    groups.committed += 1


def wait(warp: Warp, left: int, only_reads: bool) -> None:
    """`cp.async.bulk.wait_group`: all but the last groups have completed, or have read."""
    groups = _groups(warp)
    while len(groups.groups) > left:
        for each in groups.groups.pop(0):
            each.finish()
    done = groups.committed - left
    observe(warp.clock, groups.reads, done)
    if not only_reads:
        observe(warp.clock, groups.writes, done)
