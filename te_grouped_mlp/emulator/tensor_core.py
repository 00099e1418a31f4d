# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The tensor cores: products of matrices, copies of their scales, and commits.

Products are taken in float32 with numpy's order of summation, which is not the machine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from te_grouped_mlp.emulator import barriers
from te_grouped_mlp.emulator.clocks import observe
from te_grouped_mlp.emulator.faults import IllegalOperand
from te_grouped_mlp.emulator.formats import E2M1, E4M3, E5M2, E8M0, F16, F32, U8, U16, U32, widen
from te_grouped_mlp.emulator.lanes import Value, first
from te_grouped_mlp.emulator.tensor_memory import Count, TensorMemory, memory_of, stream_of

if TYPE_CHECKING:
    from te_grouped_mlp.emulator.cta import Cta
    from te_grouped_mlp.emulator.warp import Warp

# Swizzle of a shared memory descriptor -> bytes of a row of its atom, and the map's code for it.
_SWIZZLES = {0: (16, 0), 6: (32, 1), 4: (64, 2), 2: (128, 3)}
_TYPES = {"f16": {0: "f16", 1: "bf16"}, "mxf8f6f4": {0: "e4m3", 1: "e5m2"}, "mxf4nvf4": {1: "e2m1"}}


def _pair(warp: Warp, group: int) -> list[Cta]:
    rank = warp.cta.rank
    if group == 1:
        return [warp.cta]
    if (rank | 1) >= len(warp.cluster.ctas):
        raise IllegalOperand("cta_group::2 in a cluster of one CTA")
    return [warp.cluster.ctas[rank & ~1], warp.cluster.ctas[rank | 1]]


@dataclass(frozen=True)
class Descriptor:
    """A shared memory descriptor (PTX ISA 9.7.16.4.1); offsets in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        """Decode 64 bits.

        Raises:
            NotImplementedError: A base offset, or a swizzle with 32-byte atoms.
        """
        if bits >> 61 not in _SWIZZLES or bits >> 49 & 7 or bits >> 52 & 1:
            raise NotImplementedError(f"shared memory descriptor {bits:#018x}")
        fields = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(*fields, bits >> 61)

    def chunks(self, rows: int, mn_major: bool, size: int) -> np.ndarray:
        """Return the 16-byte chunks of an operand of `rows` by 32 bytes of K.

        (rows, 2) if it is K-major; else (elements of K, rows / elements of a chunk).
        """
        return _chunks(self, rows, mn_major, size)


@lru_cache(maxsize=4096)
def _chunks(d: Descriptor, rows: int, mn_major: bool, size: int) -> np.ndarray:
    width, code = _SWIZZLES[d.swizzle]
    if mn_major:
        k, row = np.arange(32 // size)[:, None], np.arange(0, rows, 16 // size)[None, :] * size
        offset = row // width * d.leading + row % width + k % 8 * width + k // 8 * d.stride
    else:
        row, byte = np.arange(rows)[:, None], np.array([[0, 16]])
        inner = byte // 16 * d.leading if code == 0 else byte
        offset = row // 8 * d.stride + row % 8 * width + inner
    chunk = (d.start + offset) // 16
    return chunk ^ ((chunk >> 3) & {0: 0, 1: 1, 2: 3, 3: 7}[code])


@dataclass(frozen=True)
class Product:
    """An instruction descriptor (PTX ISA 9.7.16.4.2), with the rows of one CTA."""

    m: int
    n: int
    types: tuple[str, str]
    mn_major: tuple[bool, bool]
    scale_ids: tuple[int, int]
    block: int

    @classmethod
    def decode(cls, bits: int, kind: str, ctas: int) -> Product:
        """Decode 32 bits.

        Raises:
            NotImplementedError: A type or shape that is not known.
        """
        scaled = kind != "f16"
        m = (bits >> 27 & 3) << 7 if scaled else (bits >> 24 & 31) << 4
        n = (bits >> 17 & 63) << 3
        codes = (bits >> 7 & 7, bits >> 10 & (3 if kind == "mxf4nvf4" else 7))
        known = _TYPES[kind]
        e8m0 = bits >> 23 & 1
        odd = scaled and bool(e8m0) != (kind == "mxf8f6f4")
        if (
            any(c not in known for c in codes)
            or m != 128 * ctas
            or odd
            or bits >> 13 & 3
            or bits & 0xC
        ):
            raise NotImplementedError(f"tcgen05.mma kind::{kind} with descriptor {bits:#010x}")
        if not scaled and bits >> 4 & 3 != 1:
            raise NotImplementedError(
                f"tcgen05.mma kind::f16 that accumulates in f16: {bits:#010x}"
            )
        ids = (bits >> 29 & 3, bits >> 4 & 3) if scaled else (0, 0)
        major = (bool(bits >> 15 & 1), bool(bits >> 16 & 1))
        block = {"mxf8f6f4": 32, "mxf4nvf4": 16}.get(kind, 0)
        return cls(m // ctas, n, (known[codes[0]], known[codes[1]]), major, ids, block)


def _widened(raw: np.ndarray, kind: str) -> np.ndarray:
    """Return elements of bytes (..., n) as float32."""
    if kind == "bf16":
        return widen(raw.view(U16))
    if kind == "f16":
        return raw.view(F16).astype(F32)
    if kind == "e2m1":
        return E2M1[np.stack([raw & U8(15), raw >> U8(4)], -1).reshape(*raw.shape[:-1], -1)]
    return (E4M3 if kind == "e4m3" else E5M2)[raw]


class _Operand:
    """A or B of one CTA."""

    def __init__(self, cta: Cta, bits: int, rows: int, mn_major: bool, kind: str) -> None:
        self.cta, self.kind, self.mn_major = cta, kind, mn_major
        self.size = 2 if kind in ("f16", "bf16") else 1
        self.chunks = Descriptor.decode(bits).chunks(rows, mn_major, self.size)
        low, high = int(self.chunks.min()), int(self.chunks.max())
        cta.cells(16 * low, 16 * (high - low + 1))

    def cells(self) -> np.ndarray:
        """Return the shadow's cells."""
        each = 16 // self.cta.granule
        return _granules(self.chunks.tobytes(), each)

    def values(self) -> np.ndarray:
        """Return it as (rows, K)."""
        raw = self.cta.chunks[self.chunks]
        values = _widened(raw.reshape(len(raw), -1).view(U8), self.kind)
        return values.T if self.mn_major else values


@lru_cache(maxsize=4096)
def _granules(chunks: bytes, each: int) -> np.ndarray:
    first_cell = np.frombuffer(chunks, np.int64)[:, None] * each
    return (first_cell + np.arange(each)).reshape(-1)


def _scales(tensor: TensorMemory, column: int, rows: int, identity: int, block: int) -> np.ndarray:
    """Return the factors of `rows` rows, (rows, blocks); every quarter holds a copy.

    Row r is in lane r % 32 of column r // 32: with blocks of 32 in byte `identity`, with blocks of
    16 in all four bytes.
    """
    words = tensor.words[:, column : column + -(-rows // 32)]
    quarters = words.reshape(4, 32, -1)
    if (quarters != quarters[0]).any():
        raise IllegalOperand(f"scales from column {column} differ between the quarters")
    flat = np.ascontiguousarray(quarters[0].T).reshape(-1)[:rows]
    raw = flat.view(U8).reshape(-1, 4)
    if block == 32:
        return E8M0[raw[:, identity : identity + 1]]
    return E4M3[raw & U8(0x7F)]


class _Multiply:
    """A product on its way."""

    def __init__(self, ctas: list[Cta], product: Product, column: int, accumulate: bool) -> None:
        self.ctas, self.product, self.column, self.accumulate = ctas, product, column, accumulate
        self.a: list[_Operand] = []
        self.b: list[_Operand] = []
        self.scales: tuple[int, int] | None = None

    def finish(self) -> None:
        """Let it happen."""
        b = np.concatenate([each.values() for each in self.b])
        for cta, operand in zip(self.ctas, self.a, strict=True):
            tensor, a, right = memory_of(cta), operand.values(), b
            if self.scales is not None:
                a = self._scaled(tensor, a, 0)
                right = self._scaled(tensor, b, 1)
            into = tensor.words[: len(a), self.column : self.column + len(b)]
            result = a @ right.T
            if self.accumulate:
                result += into.view(F32)
            into[...] = result.view(U32)

    def _scaled(self, tensor: TensorMemory, values: np.ndarray, side: int) -> np.ndarray:
        assert self.scales is not None
        block = self.product.block
        factors = _scales(
            tensor, self.scales[side], len(values), self.product.scale_ids[side], block
        )
        return values * np.repeat(factors, values.shape[1] // factors.shape[1], axis=1)


def multiply(
    warp: Warp, base: Value, offset: int, a: Value, b: Value, descriptor: Value, accumulate: Value,
    kind: str, scales: tuple | None, group: int, mask: np.ndarray,
) -> None:  # fmt: skip
    """`tcgen05.mma`, issued by one lane for its CTA or for a pair of CTAs.

    Where scales are given, `scales` is ((address, offset), (address, offset)) flattened.
    """
    lane = first(mask)
    pick = lambda value: int(value[lane]) if value.ndim else int(value)  # noqa: E731
    ctas, stream = _pair(warp, group), stream_of(warp, "tcgen05")
    product = Product.decode(pick(descriptor), kind, len(ctas))
    column = (pick(base) + offset) & 0xFFFF
    work = _Multiply(ctas, product, column, bool(pick(accumulate)))
    stream.time += 1
    for cta in ctas:
        work.a.append(_Operand(cta, pick(a), product.m, product.mn_major[0], product.types[0]))
        rows = product.n // len(ctas)
        work.b.append(_Operand(cta, pick(b), rows, product.mn_major[1], product.types[1]))
    clock = _issued(warp, stream)
    for each in (*work.a, *work.b):
        each.cta.shared.read(each.cells(), clock, stream.agent, stream.time, proxy=True)
    if scales is not None:
        work.scales = tuple(
            (pick(s) + o) & 0xFFFF for s, o in zip(scales[::2], scales[1::2], strict=True)
        )
    for cta in ctas:
        tensor = memory_of(cta)
        if work.scales is not None:
            for start, rows in zip(work.scales, (product.m, product.n), strict=True):
                cells = tensor.cells(start, -(-rows // 32))
                tensor.shadow.read(cells, clock, stream.agent, stream.time)
        cells = tensor.cells(column, product.n)
        if work.accumulate:
            tensor.shadow.read(cells, clock, stream.agent, stream.time)
        tensor.shadow.write(cells, clock, stream.agent, stream.time)
    warp.cluster.later("tensor", work)
    warp.counts["tensor", "mma"] += 1


def _issued(warp: Warp, stream: Count) -> np.ndarray:
    """Return what is ordered before an operation: with the earlier ones of its warp."""
    clock = warp.clock.copy()
    observe(clock, stream.agent, stream.time)
    return clock


class _CopyScales:
    """A copy of scales on its way."""

    def __init__(self, cta: Cta, chunks: np.ndarray, column: int) -> None:
        self.cta, self.chunks, self.column = cta, chunks, column

    def finish(self) -> None:
        """Let it happen: 32 rows of 16 bytes, for every quarter."""
        words = self.cta.chunks[self.chunks].view(U32)
        memory_of(self.cta).words[:, self.column : self.column + 4] = np.tile(words, (4, 1))


def copy(warp: Warp, base: Value, offset: int, source: Value, group: int, mask: np.ndarray) -> None:
    """`tcgen05.cp` of the shape 32x128b with warpx4."""
    lane = first(mask)
    column = ((int(base[lane]) if base.ndim else int(base)) + offset) & 0xFFFF
    d = Descriptor.decode(int(source[lane]) if source.ndim else int(source))
    if d.swizzle:
        raise NotImplementedError(f"tcgen05.cp with a swizzle: {d}")
    row = np.arange(32)
    chunks = (d.start + row // 8 * d.stride + row % 8 * 16) // 16
    stream = stream_of(warp, "tcgen05")
    stream.time += 1
    clock = _issued(warp, stream)
    for cta in _pair(warp, group):
        cta.cells(int(chunks.min()) * 16, int(chunks.max() - chunks.min() + 1) * 16)
        cells = _granules(chunks.tobytes(), 16 // cta.granule)
        cta.shared.read(cells, clock, stream.agent, stream.time, proxy=True)
        tensor = memory_of(cta)
        tensor.shadow.write(tensor.cells(column, 4), clock, stream.agent, stream.time)
        warp.cluster.later("tensor", _CopyScales(cta, chunks, column))


class _Commit:
    """An arrival that follows the operations before it."""

    def __init__(self, barrier: barriers.MBarrier, clock: np.ndarray) -> None:
        self.barrier, self.clock = barrier, clock

    def finish(self) -> None:
        """Arrive."""
        self.barrier.cta.cells(self.barrier.offset, 8)
        self.barrier.arrive(self.clock)


def commit(warp: Warp, base: Value, offset: int, multicast: Value | None, mask: np.ndarray) -> None:
    """`tcgen05.commit`: an arrival at a barrier, or at that of several CTAs, when all is done."""
    lane = first(mask)
    cta, at = warp.place((int(base[lane]) if base.ndim else int(base)) + offset, "mbarrier")
    ranks = [cta.rank]
    if multicast is not None:
        bits = int(multicast[lane]) if multicast.ndim else int(multicast)
        ranks = [c.rank for c in warp.cluster.ctas if bits >> c.rank & 1]
    clock = _issued(warp, stream_of(warp, "tcgen05"))
    for rank in ranks:
        barrier = barriers.find(warp, rank << 24 | at, proxy=True)
        warp.cluster.later("tensor", _Commit(barrier, clock))
    warp.tick()
