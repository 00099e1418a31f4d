# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Small kernels, written as the body of an entry, over numpy arrays."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import numpy as np

from te_grouped_mlp.emulator import GlobalMemory, Launch, Options, Report, execute

# Array i's address is in %d<i>; %r0 is the thread's number, %s the address of shared memory.
_TEXT = """.version 9.1
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({parameters}
)
{{
.reg .pred %p<32>;
.reg .b16 %h<32>;
.reg .b32 %r<99>;
.reg .b32 %s;
.reg .b64 %d<64>;
.reg .b128 %q<4>;
mov.u32 %r0, %tid.x;
mov.b32 %s, smem;
{loads}
{body}
ret;
}}
"""


def launch(
    body: str,
    addresses: Sequence[int],
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    shared: int = 4096,
    maps: Sequence[bytes] = (),
) -> Launch:
    """Return a launch of a body; tensor map i is the parameter `m<i>`."""
    names = [f".param .u64 p{i}" for i in range(len(addresses))]
    names += [f".param .align 64 .b8 m{i}[128]" for i in range(len(maps))]
    loads = "\n".join(f"ld.param.b64 %d{i}, [p{i}];" for i in range(len(addresses)))
    text = _TEXT.format(parameters=",\n".join(names), loads=loads, body=body)
    values = [struct.pack("<Q", a) for a in addresses] + list(maps)
    return Launch(text, "k", grid, (threads, 1, 1), cluster, shared, tuple(values))


def run(body: str, *arrays: np.ndarray, options: Options | None = None, **shape: object) -> Report:
    """Run a body over arrays, all of whose bytes count as written."""
    memory = GlobalMemory()
    for number, array in enumerate(arrays):
        memory.register(array.ctypes.data, array.nbytes, name=f"array {number}")
    addresses = [a.ctypes.data for a in arrays]
    return execute(launch(body, addresses, **shape), memory, options or Options())  # type: ignore


def line_of(body: str, text: str) -> int:
    """Return the PTX line of the first line of a body that has a text, for no arrays."""
    whole = launch(body, ()).ptx.splitlines()
    return next(n for n, each in enumerate(whole, 1) if re.search(re.escape(text), each))


def aligned(shape: Sequence[int], dtype: object, fill: float = 0) -> np.ndarray:
    """Return an array at a multiple of 128 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize  # type: ignore[arg-type]
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 128
    array = raw[start : start + size].view(dtype).reshape(shape)  # type: ignore[arg-type]
    array[...] = fill
    return array


def tensor_map(
    array: np.ndarray, box: Sequence[int], swizzle: int = 0, code: int | None = None
) -> bytes:
    """Return the map of an array, with the box's innermost extent first."""
    codes = {"u1": 0, "u2": 1, "u4": 2, "f2": 6, "f4": 7}
    code = codes[array.dtype.str[1:]] if code is None else code
    dims, strides = array.shape[::-1], array.strides[::-1][1:]
    flags = 1 | (len(dims) - 1) << 4 | code << 7 | swizzle << 13
    raw = bytearray(128)
    struct.pack_into("<QI", raw, 0, array.ctypes.data, flags)
    for i, stride in enumerate(strides):
        struct.pack_into("<I", raw, 12 + 4 * i, stride >> 4)
    for i, (dim, extent) in enumerate(zip(dims, box, strict=True)):
        struct.pack_into("<I", raw, 32 + 4 * i, dim - 1)
        raw[55 + i] = extent - 1
    return bytes(raw)
