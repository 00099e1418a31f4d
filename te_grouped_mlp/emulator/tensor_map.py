# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor maps, and where the boxes that they describe lie in shared memory.

A map is decoded from the first 64 of its 128 bytes; a test compares the decoder with maps that a
driver made.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from te_grouped_mlp.emulator.faults import Misaligned

MAP_BYTES = 128
# Bytes of an element by its code; the 4-bit type counts pairs.
_SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2, 11: 1}
FOUR_BIT = 11


@dataclass(frozen=True)
class TensorMap:
    """A decoded map; extents in elements, strides in bytes, the innermost first.

    Attributes:
        code: Of the element type.
        element: Bytes of an element; 4-bit elements are taken in pairs.
        dims, box: Extents of the tensor and of a box.
        strides: Of each dimension; that of the innermost is an element.
        swizzle: 0 to 3: none, 32, 64 and 128 bytes.
        unit: Whether the box takes every element along each dimension, without interleaving.
    """

    address: int
    code: int
    element: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    unit: bool

    @property
    def box_bytes(self) -> int:
        """Return the bytes of a box in shared memory."""
        return self.element * int(np.prod(self.box))


@lru_cache(maxsize=4096)
def decode(raw: bytes) -> TensorMap:
    """Decode the bytes of a map.

    Raises:
        NotImplementedError: An element type or traversal that is not known.
        Misaligned: Address or strides are no multiples of 16.
    """
    address, flags = struct.unpack_from("<QI", raw)
    rank, code = (flags >> 4 & 7) + 1, flags >> 7 & 15
    if code not in _SIZES:
        raise NotImplementedError(f"tensor map with element type {code}")
    low, high = struct.unpack_from("<4I", raw, 12), struct.unpack_from("<I", raw, 28)[0]
    strides = [(w | (high >> (4 * i) & 15) << 32) << 4 for i, w in enumerate(low)][: rank - 1]
    dims = [d + 1 for d in struct.unpack_from("<5I", raw, 32)[:rank]]
    box = [b + 1 for b in raw[55:60][:rank]]
    if code == FOUR_BIT:
        dims[0], box[0] = dims[0] // 2, box[0] // 2
    if address % 16:
        raise Misaligned(f"tensor map of address {address:#x}")
    steps = struct.unpack_from("<I", raw, 52)[0]
    unit = flags >> 11 & 3 == 0 and steps & 0x7FFF == 0
    size = _SIZES[code]
    return TensorMap(
        address, code, size, tuple(dims), (size, *strides), tuple(box), flags >> 13 & 3, unit
    )


@lru_cache(maxsize=4096)
def swizzled(offset: int, size: int, swizzle: int) -> np.ndarray:
    """Return the 16-byte chunks of shared memory where those of a box lie, in the box's order."""
    chunk = offset // 16 + np.arange(-(-size // 16))
    mask = {0: 0, 1: 1, 2: 3, 3: 7}[swizzle]
    return chunk ^ ((chunk >> 3) & mask)
