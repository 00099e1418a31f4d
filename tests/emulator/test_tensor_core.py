# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of the tensor cores, from operands that are laid out by a naive formula."""

from __future__ import annotations

import numpy as np
import pytest

from te_grouped_mlp.emulator import EmulationFault, Options
from te_grouped_mlp.emulator.faults import (
    IllegalOperand,
    MissingFence,
    OutOfBounds,
    Race,
    UnfinishedAsync,
)
from te_grouped_mlp.emulator.formats import E2M1, E4M3, E8M0
from tests.emulator.kernels import aligned, run
from tests.emulator.test_barriers import wait

_RANDOM = np.random.default_rng(3)


def _place(row: int, byte: int, swizzle: int) -> int:
    """Return where a byte of a row of 32 lies: atoms of 8 rows."""
    if swizzle == 0:
        return row // 8 * 256 + row % 8 * 16 + byte // 16 * 128 + byte % 16
    width = {6: 32, 4: 64, 2: 128}[swizzle]
    offset = row // 8 * 8 * width + row % 8 * width + byte
    return offset ^ (offset >> 7 & width // 16 - 1) << 4


def _mn_place(k: int, row: int, size: int) -> int:
    """Return where element (k, row) lies, rows innermost, in rows of 128 bytes with a swizzle."""
    per = 128 // size
    offset = row // per * 4096 + k % 8 * 128 + k // 8 * 1024 + row % per * size
    return offset ^ (offset >> 7 & 7) << 4


def _descriptor(offset: int, swizzle: int, leading: int, stride: int) -> int:
    """Return the descriptor of an operand at an offset into shared memory."""
    return (1024 + offset) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | swizzle << 61


_SETUP = """
setp.lt.u32 %p1, %r0, 32; @!%p1 bra MADE;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s+16], {columns};
setp.eq.b32 %p2, %r0, 0; @!%p2 bra MADE;
mbarrier.init.shared.b64 [%s], 1; fence.mbarrier_init.release.cluster; MADE:
mov.b32 %r1, %r0;
FILL: mul.wide.u32 %d5, %r1, 16; add.s64 %d5, %d1, %d5;
ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d5];
mad.lo.s32 %r6, %r1, 16, %s; st.shared.v4.b32 [%r6+1024], {{%r2, %r3, %r4, %r5}};
add.s32 %r1, %r1, 128; setp.lt.u32 %p3, %r1, {chunks}; @%p3 bra FILL;
{fence} bar.sync 0; ld.shared.b32 %r10, [%s+16];
{scales}
setp.eq.b32 %p2, %r0, 0; @!%p2 bra ISSUED;
mov.b64 %d6, {a}; mov.b64 %d7, {b}; mov.b32 %r11, {idesc};
{copies}
{mma}
{commit} ISSUED:
{wait}
shl.b32 %r12, %r0, 16; and.b32 %r12, %r12, 0x600000; add.s32 %r12, %r10, %r12;
mul.wide.u32 %d8, %r0, {row}; add.s64 %d8, %d0, %d8;
{loads}
bar.sync 0; @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@!%p1 bra DONE; {free} DONE: mov.b32 %r9, 0;
"""


def _load(n: int) -> str:
    """Return the stores of a row of n results."""
    lines = []
    for column in range(0, n, 16):
        names = ", ".join(f"%r{40 + i}" for i in range(16))
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{names}}}, [%r12+{column}];")
        lines.append("tcgen05.wait::ld.sync.aligned;")
        lines += [f"st.global.b32 [%d8+{4 * (column + i)}], %r{40 + i};" for i in range(16)]
    return "\n".join(lines)


def _run(
    image: np.ndarray, n: int, a: int, b: int, idesc: int, mma: str, **change: str
) -> np.ndarray:
    out = aligned((128, n), np.float32, -1)
    words: dict[str, object] = {
        "columns": 128, "chunks": image.nbytes // 16, "a": a, "b": b, "idesc": idesc, "mma": mma,
        "row": 4 * n, "loads": _load(n), "scales": "", "copies": "", "wait": wait(),
        "fence": "fence.proxy.async.shared::cta;",
        "commit": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%s];",
        "free": "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 128;",
    }  # fmt: skip
    schedule = str(change.pop("schedule", "late"))
    body = _SETUP.format(**words | change)
    options = Options(schedule=schedule)  # type: ignore[arg-type]
    run(body, out, image, threads=128, shared=2048 + image.nbytes, options=options)
    return out


_MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r10], %d6, %d7, %r11, {use};"
_PRODUCT = "setp.ne.b32 %p5, %r0, %r0; " + _MMA.format(use="%p5")


def _f16(n: int, swizzle: int, mn_major: bool = False) -> tuple[np.ndarray, np.ndarray, dict]:
    """Return operands in shared memory, A B^T, and the arguments of `_run`."""
    a, b = (_RANDOM.standard_normal((rows, 16)).astype(np.float16) for rows in (128, n))
    image = aligned((32768,), np.uint8)
    for base, matrix in ((0, a), (16384, b)):
        raw = matrix.view(np.uint8).reshape(len(matrix), 32)
        for row in range(len(matrix)):
            for byte in range(32):
                at = _place(row, byte, swizzle)
                if mn_major:
                    at = _mn_place(byte // 2, row, 2) + byte % 2
                image[base + at] = raw[row, byte]
    width = {0: 0, 6: 32, 4: 64, 2: 128}[swizzle]
    leading, stride = (4096, 1024) if mn_major else (128, 8 * width or 256)
    idesc = 1 << 4 | n // 8 << 17 | 8 << 24 | (3 << 15 if mn_major else 0)
    first, second = (_descriptor(1024 + o, swizzle, leading, stride) for o in (0, 16384))
    expected = a.astype(np.float64) @ b.T.astype(np.float64)
    return image, expected, {"n": n, "a": first, "b": second, "idesc": idesc}


@pytest.mark.parametrize(
    ("swizzle", "mn_major"), [(0, False), (6, False), (4, False), (2, False), (2, True)]
)
def test_products_of_f16(swizzle: int, mn_major: bool) -> None:
    image, expected, arguments = _f16(48, swizzle, mn_major)
    got = _run(image, mma=_PRODUCT, **arguments)
    assert np.abs(got - expected).max() < 1e-5


def test_products_accumulate() -> None:
    image, expected, arguments = _f16(16, 2)
    twice = _PRODUCT + "setp.eq.b32 %p5, %r0, %r0; " + _MMA.format(use="%p5")
    assert np.abs(_run(image, mma=twice, **arguments) - 2 * expected).max() < 1e-5


@pytest.mark.parametrize("block", [32, 16])
def test_products_with_block_scales(block: int) -> None:
    n, kind = 32, {32: "mxf8f6f4", 16: "mxf4nvf4"}[block]
    image = aligned((32768,), np.uint8)
    values, raw = [], []
    for base, rows in ((0, 128), (16384, n)):
        codes = _RANDOM.integers(0, 256, (rows, 32), dtype=np.uint8)
        if block == 32:
            codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
            values.append(E4M3[codes])
        else:
            values.append(E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(rows, 64)])
        for row in range(rows):
            for byte in range(32):
                image[base + _place(row, byte, 0)] = codes[row, byte]
        raw.append(_RANDOM.integers(120, 134, (rows, 4), dtype=np.uint8))
        if block == 16:
            raw[-1] = _RANDOM.integers(0x28, 0x48, (rows, 4), dtype=np.uint8)
    identity = 1 if block == 32 else 0
    for base, scales in ((24576, raw[0]), (28672, raw[1])):
        for row, factors in enumerate(scales):
            at = base + row % 32 // 8 * 128 + row % 32 % 8 * 16 + row // 32 * 4
            image[at : at + 4] = factors
    scaled = []
    for value, factors in zip(values, raw, strict=True):
        each = E8M0[factors[:, 1:2]] if block == 32 else E4M3[factors]
        scaled.append(
            value.astype(np.float64) * np.repeat(each, value.shape[1] // each.shape[1], 1)
        )
    types = 0 if block == 32 else 1 << 7 | 1 << 10
    idesc = (
        types
        | n // 8 << 17
        | 1 << 27
        | (1 << 23 if block == 32 else 0)
        | identity << 29
        | identity << 4
    )
    descriptors = [_descriptor(1024 + o, 0, 128, 256) for o in (0, 16384)]
    copy = "mov.b64 %d9, {}; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r{}], %d9;"
    copies = "add.s32 %r20, %r10, 64; add.s32 %r21, %r10, 80;"
    for register, offset in ((20, 24576), (21, 28672)):
        copies += copy.format(_descriptor(1024 + offset, 0, 0, 128), register)
    mma = (
        f"setp.ne.b32 %p5, %r0, %r0; tcgen05.mma.cta_group::1.kind::{kind}.block_scale.block{block}"
        " [%r10], %d6, %d7, %r11, [%r20], [%r21], %p5;"
    )
    got = _run(image, n, *descriptors, idesc, mma, copies=copies)
    expected = scaled[0] @ scaled[1].T
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"wait": ""}, Race),
        ({"fence": ""}, MissingFence),
        ({"free": "mov.b32 %r1, 0;"}, UnfinishedAsync),
        ({"columns": "32"}, IllegalOperand),
        ({"columns": "48"}, IllegalOperand),
        ({"loads": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r12+160];"}, OutOfBounds),
        ({"loads": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r10];"}, IllegalOperand),
        ({"loads": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r12+20];"}, EmulationFault),
    ],
    ids=["wait", "fence", "free", "other-free", "columns", "bounds", "lanes", "unwritten"],
)
@pytest.mark.parametrize("schedule", ["late", "eager"])
def test_what_a_product_needs(
    change: dict[str, str], kind: type[EmulationFault], schedule: str
) -> None:
    image, _, arguments = _f16(16, 2)
    with pytest.raises(kind):
        _run(image, mma=_PRODUCT, schedule=schedule, **arguments, **change)


def test_a_load_ends_before_the_columns_are_written_again() -> None:
    image, _, arguments = _f16(16, 2)
    again = (
        "{load} {wait} bar.sync 0; setp.eq.b32 %p2, %r0, 0; @!%p2 bra AGAIN; " + _PRODUCT
        + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%s]; AGAIN: "
        + wait(1)
    )  # fmt: skip
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r40}, [%r12];"
    for middle, fails in (
        ("", True),
        ("tcgen05.wait::ld.sync.aligned;", False),
        ("add.s32 %r41, %r40, 1;", False),
    ):
        loads = again.replace("{load}", load).replace("{wait}", middle)
        if fails:
            with pytest.raises(Race, match="was read by tcgen05.ld"):
                _run(image, mma=_PRODUCT, loads=loads, **arguments)
        else:
            _run(image, mma=_PRODUCT, loads=loads, **arguments)


def test_unknown_descriptors_are_refused() -> None:
    image, _, arguments = _f16(16, 2)
    with pytest.raises(NotImplementedError, match=r"PTX line \d+: tcgen05.mma.*descriptor"):
        _run(image, mma=_PRODUCT, **arguments | {"idesc": arguments["idesc"] ^ 1 << 24})
    with pytest.raises(NotImplementedError, match="shared memory descriptor"):
        _run(image, mma=_PRODUCT, **arguments | {"a": arguments["a"] | 1 << 61})
