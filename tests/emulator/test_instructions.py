# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Instructions of single lanes and of a warp, against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from te_grouped_mlp.emulator.codegen import expression
from tests.emulator.kernels import run

_RANDOM = np.random.default_rng(1)
_U32 = np.concatenate(
    [
        np.array([0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32),
        _RANDOM.integers(0, 1 << 32, 55, dtype=np.uint32),
    ]
)
_OTHER = np.roll(_U32, 5)


def _wide(x: np.ndarray) -> list[int]:
    return [int(v) for v in x]


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def _divided(a: int, b: int) -> int:
    return -1 if b == 0 else int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


# Opcode -> the value in exact integers; the result is taken modulo its width.
_INTEGERS: dict[str, Callable[..., int]] = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: _signed(a) * _signed(b) >> 32,
    "mul.wide.u32": lambda a, b: a * b,
    "mul.wide.s32": lambda a, b: _signed(a) * _signed(b),
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "div.s32": lambda a, b: _divided(_signed(a), _signed(b)),
    "div.u32": lambda a, b: a // b if b else -1,
    "min.s32": lambda a, b: min(_signed(a), _signed(b)),
    "max.u32": max,
    "neg.s32": lambda a: -a,
    "clz.b32": lambda a: 32 - a.bit_length(),
    "shf.l.wrap.b32": lambda a, b, c: ((b << 32 | a) << c % 32) >> 32,
    "shf.r.wrap.b32": lambda a, b, c: (b << 32 | a) >> c % 32,
    "shf.r.clamp.b32": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "popc.b32": lambda a: a.bit_count(),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: _signed(a) >> min(b, 31),
    "prmt.b32": lambda a, b, c: _permuted(a, b, c),
}


def _permuted(a: int, b: int, c: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    out = []
    for i in range(4):
        nibble = c >> 4 * i & 15
        byte = source[nibble & 7]
        out.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


@pytest.mark.parametrize("op", _INTEGERS)
def test_integers_are_exact(op: str) -> None:
    function = _INTEGERS[op]
    count = function.__code__.co_argcount if hasattr(function, "__code__") else 2
    operands = [_U32, _OTHER, np.roll(_U32, 11)][:count]
    got = expression(op)(*operands)
    mask = (1 << 8 * got.dtype.itemsize) - 1
    assert got.dtype.itemsize == (8 if "wide" in op else 4)
    assert _wide(got) == [function(*v) & mask for v in zip(*map(_wide, operands), strict=True)]


@pytest.mark.parametrize("op", [op for op in _INTEGERS if op != "prmt.b32"])
def test_a_value_that_all_lanes_share_is_one_of_theirs(op: str) -> None:
    evaluate = expression(op)
    count = evaluate.__code__.co_argcount or 3
    operands = [_U32, _OTHER, np.roll(_U32, 11)]
    lanes = evaluate(*operands)
    assert count
    for i in range(0, 64, 7):
        assert evaluate(*(x[i] for x in operands)) == lanes[i]


def _run32(body: str, *inputs: np.ndarray, threads: int = 32) -> np.ndarray:
    """Run a body that stores %r9 of each thread; input i of each thread is in %r<i + 1>."""
    out = np.zeros(threads, np.uint32)
    loads = "".join(
        f"mul.wide.u32 %d40, %r0, 4; add.s64 %d41, %d{i + 1}, %d40;ld.global.b32 %r{i + 1}, [%d41];"
        for i in range(len(inputs))
    )
    store = "mul.wide.u32 %d40, %r0, 4; add.s64 %d40, %d0, %d40; st.global.b32 [%d40], %r9;"
    run(loads + body + store, out, *(i.view(np.uint32) for i in inputs), threads=threads)
    return out


_LANE = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize(
    ("shuffle", "source"),
    [
        ("up.b32 %r9, %r1, 3, 0", lambda i: np.where(i >= 3, i - 3, i)),
        ("down.b32 %r9, %r1, 3, 31", lambda i: np.where(i + 3 < 32, i + 3, i)),
        ("bfly.b32 %r9, %r1, 5, 31", lambda i: i ^ 5),
        ("idx.b32 %r9, %r1, 7, 31", lambda i: np.full_like(i, 7)),
        # Two segments of 16: the mask of the segment is in bits 8 to 12.
        ("idx.b32 %r9, %r1, 3, 0x101f", lambda i: i & 16 | 3),
        ("down.b32 %r9, %r1, 3, 0x100f", lambda i: np.where(i % 16 + 3 < 16, i + 3, i)),
    ],
)
def test_shuffles(shuffle: str, source: Callable[[np.ndarray], np.ndarray]) -> None:
    values = _U32[:32].copy()
    assert (_run32(f"shfl.sync.{shuffle}, -1;", values) == values[source(_LANE)]).all()


def test_any_logic_of_three() -> None:
    a, b, c = _U32[:32].copy(), _OTHER[:32].copy(), np.roll(_U32, 3)[:32].copy()
    for table, expected in (
        (0x96, a ^ b ^ c),
        (0xE8, a & b | a & c | b & c),
        (0xCA, a & b | ~a & c),
    ):
        assert (_run32(f"lop3.b32 %r9, %r1, %r2, %r3, {table};", a, b, c) == expected).all()


def test_votes_and_reductions() -> None:
    values = _U32[:32].copy()
    assert (_run32("redux.sync.add.u32 %r9, %r1, -1;", values) == values.sum(dtype=np.uint32)).all()
    assert (_run32("redux.sync.max.s32 %r9, %r1, -1;", values) == values.view(np.int32).max()).all()
    ballot = "setp.lt.u32 %p1, %r0, 5; vote.sync.ballot.b32 %r9, %p1, -1;"
    assert (_run32(ballot) == 31).all()
    floats = np.linspace(-3, 4, 32).astype(np.float32)
    body = "redux.sync.max.NaN.f32 %r9, %r1, -1;"
    assert (_run32(body, floats).view(np.float32) == floats.max()).all()
    floats[3] = np.nan
    assert np.isnan(_run32(body, floats).view(np.float32)).all()


def test_lanes_that_part_meet_again() -> None:
    body = """
    mov.b32 %r9, 100; setp.lt.u32 %p1, %r0, 10; @%p1 bra LOW;
    add.s32 %r9, %r9, %r0; bra DONE;
    LOW: mov.b32 %r2, 0;
    LOOP: add.s32 %r9, %r9, 2; add.s32 %r2, %r2, 1; setp.le.u32 %p2, %r2, %r0; @%p2 bra LOOP;
    DONE: vote.sync.ballot.b32 %r3, %p1, -1; popc.b32 %r3, %r3; add.s32 %r9, %r9, %r3;
    """
    expected = np.where(_LANE < 10, 100 + 2 * (_LANE + 1), 100 + _LANE) + 10
    assert (_run32(body) == expected).all()


def test_a_guard_leaves_the_other_lanes_alone() -> None:
    body = """
    mov.b32 %r9, 5; setp.gt.u32 %p1, %r0, 20;
    @!%p1 add.s32 %r9, %r9, %r0; @%p1 mov.b32 %r9, 1;
    """
    assert (_run32(body) == np.where(_LANE > 20, 1, 5 + _LANE)).all()


def test_lanes_may_end_early() -> None:
    out = np.zeros(40, np.uint32)
    body = """
    setp.ge.u32 %p1, %r0, 35; @%p1 ret;
    mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d0, %d1; st.global.b32 [%d1], 1;
    """
    run(body, out, threads=40)
    assert out.tolist() == [1] * 35 + [0] * 5


def test_moves_pack_and_unpack() -> None:
    body = """
    mov.b64 %d2, {%r1, %r2}; mov.b64 {%r3, %r4}, %d2; mov.b32 {%h1, %h2}, %r3;
    mov.b32 %r5, {%h2, %h1}; xor.b32 %r9, %r5, %r4;
    """
    a, b = _U32[:32].copy(), _OTHER[:32].copy()
    assert (_run32(body, a, b) == ((a >> 16 | a << 16) ^ b)).all()


def test_local_memory_is_of_each_lane() -> None:
    body = """
    .local .align 8 .b8 spill[16];
    mov.b64 %d5, spill; st.local.v2.b32 [%d5], {%r1, %r0}; ld.local.b32 %r2, [%d5+4];
    ld.local.b32 %r3, [%d5]; add.s32 %r9, %r2, %r3;
    """
    values = _U32[:32].copy()
    assert (_run32(body, values) == values + _LANE).all()


def test_atomics_take_every_lane() -> None:
    for kind, expected in (("add.u32", 496), ("max.u32", 31), ("min.s32", 0)):
        out = np.array([0], np.uint32)
        run(f"atom.global.{kind} %r1, [%d0], %r0;", out, grid=(1, 1, 1))
        assert out[0] == expected
    total = np.zeros(1, np.float32)
    run("atom.global.add.f32 %r1, [%d0], 0f3F000000;", total, grid=(6, 1, 1))
    assert total[0] == 32 * 6 / 2
    pairs = np.array([0x3F80_0000], np.uint32)
    # Each lane adds (1, 2), one bf16 above the other, to (0, 1).
    run("mov.b32 %r2, 0x3F804000; red.global.add.noftz.bf16x2 [%d0], %r2;", pairs, grid=(1, 1, 1))
    assert pairs[0] == 0x4204_4280  # 33 and 64
