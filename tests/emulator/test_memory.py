# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Global and shared memory: what trips, and its repaired twin that does not."""

from __future__ import annotations

import numpy as np
import pytest

from te_grouped_mlp.emulator import GlobalMemory, Options, execute
from te_grouped_mlp.emulator.faults import Misaligned, OutOfBounds, Race, Unwritten
from tests.emulator.kernels import aligned, launch, run

_AT = "mul.wide.u32 %d9, %r0, 4; add.s64 %d9, %d0, %d9;"


def test_an_access_past_an_allocation_is_a_fault() -> None:
    out = np.zeros(31, np.uint32)
    body = f"{_AT} st.global.b32 [%d9], %r0;"
    with pytest.raises(OutOfBounds, match="4 bytes past array 0") as fault:
        run(body, out)
    assert fault.value.place.warp == 0
    assert fault.value.place.cta == (0, 0, 0)
    assert "st.global.b32" in fault.value.place.source
    run(body, np.zeros(32, np.uint32))


def test_an_address_of_nothing_is_a_fault() -> None:
    with pytest.raises(OutOfBounds, match="no allocation holds"):
        run("mov.b64 %d1, 4096; ld.global.b32 %r1, [%d1];")


@pytest.mark.parametrize("access", ["ld.global.v2.b32 {%r1, %r2}", "ld.global.b64 %d5"])
def test_a_misaligned_access_is_a_fault(access: str) -> None:
    array = aligned((8,), np.uint32)
    run(f"{access}, [%d0+8];", array)
    with pytest.raises(Misaligned, match="8 bytes"):
        run(f"{access}, [%d0+4];", array)


def test_unwritten_bytes_are_known_from_launch_to_launch() -> None:
    array = aligned((4,), np.uint32)
    memory = GlobalMemory()
    memory.register(array.ctypes.data, array.nbytes, name="fresh", written=False)
    read = launch("ld.global.b32 %r1, [%d0];", [array.ctypes.data])
    with pytest.raises(Unwritten, match="bytes of fresh"):
        execute(read, memory)
    report = execute(launch("st.global.b32 [%d0], 3;", [array.ctypes.data]), memory)
    assert report.allocations["fresh"].unwritten == 12
    assert report.allocations["fresh"].written == 4
    execute(read, memory)
    whole = launch("ld.global.v2.b32 {%r1, %r2}, [%d0];", [array.ctypes.data])
    with pytest.raises(Unwritten):
        execute(whole, memory)
    memory.take_for_written(array.ctypes.data)
    execute(whole, memory)


def test_bytes_written_twice_are_counted() -> None:
    out = np.zeros(64, np.uint8)
    body = "st.global.b32 [%d0], 1; st.global.b8 [%d0+1], %h1; st.global.b32 [%d0+8], 1;"
    report = run(f"mov.b16 %h1, 7; {body}", out)
    assert report.allocations["array 0"].written == 8
    assert report.allocations["array 0"].doubly_written == 1
    assert out[:4].tolist() == [1, 7, 0, 0]


def test_allocations_do_not_overlap() -> None:
    memory = GlobalMemory()
    memory.register(4096, 64, name="first")
    for address, size in ((4095, 2), (4159, 1), (4000, 500)):
        with pytest.raises(ValueError, match=r"second .* overlaps first"):
            memory.register(address, size, name="second")
    memory.register(4160, 8)
    memory.register(4168, 0)
    memory.forget(4096)
    memory.register(4096, 64)
    with pytest.raises(KeyError, match="0x1001"):
        memory.forget(4097)


def test_clusters_are_never_ordered() -> None:
    out = np.zeros(64, np.uint32)
    same = f"{_AT} st.global.b32 [%d9], %r0;"
    with pytest.raises(Race, match="store of array 0 that was written by warp 0"):
        run(same, out, grid=(2, 1, 1))
    run(same, out, grid=(2, 1, 1), options=Options(races=False))
    own = "mov.u32 %r1, %ctaid.x; mad.lo.s32 %r0, %r1, 32, %r0;"
    run(own + same, out, grid=(2, 1, 1))
    assert out.tolist() == list(range(64))
    run("atom.global.add.u32 %r1, [%d0], 1;", out, grid=(2, 1, 1))
    with pytest.raises(Race, match="read"):
        run(
            f"atom.global.add.u32 %r1, [%d0], 1; {_AT} ld.global.b32 %r1, [%d9];",
            out,
            grid=(2, 1, 1),
        )


_EXCHANGE = """
shl.b32 %r1, %r0, 2; add.s32 %r2, %s, %r1; st.shared.b32 [%r2], %r0;
{barrier}
xor.b32 %r3, %r1, 128; add.s32 %r3, %s, %r3; ld.shared.b32 %r4, [%r3];
mul.wide.u32 %d9, %r0, 4; add.s64 %d9, %d0, %d9; st.global.b32 [%d9], %r4;
"""


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_warps_that_exchange_need_a_barrier(schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    options = Options(schedule=schedule, seed=4)  # type: ignore[arg-type]
    with pytest.raises((Race, Unwritten), match=r"shared memory 0x4[08]0"):
        run(_EXCHANGE.format(barrier=""), out, threads=64, options=options)
    run(_EXCHANGE.format(barrier="bar.sync 0;"), out, threads=64, options=options)
    assert out.tolist() == [i ^ 32 for i in range(64)]


def test_a_read_that_a_write_may_overtake_is_a_race() -> None:
    body = """
    setp.lt.u32 %p1, %r0, 32; @!%p1 bra SECOND;
    st.shared.b32 [%s], 5; bar.sync 1, 64; ld.shared.b32 %r1, [%s]; {first} bra DONE;
    SECOND: bar.sync 1, 64; {second} st.shared.b32 [%s], 6;
    DONE: mov.b32 %r2, 0;
    """
    with pytest.raises(Race, match="(is written, but was read)|(is read, but was written)"):
        run(body.format(first="", second=""), threads=64)
    run(body.format(first="bar.arrive 2, 64;", second="bar.sync 2, 64;"), threads=64)


def test_shared_memory_has_an_end_and_an_alignment() -> None:
    with pytest.raises(OutOfBounds, match="CTA 0 has"):
        run("st.shared.b32 [%s+4096], 1;")
    run("st.shared.b32 [%s+4092], 1;")
    with pytest.raises(Misaligned):
        run("ld.shared.b32 %r1, [%s+2];")
    with pytest.raises(Unwritten, match="shared memory 0x404"):
        run("st.shared.b32 [%s], 1; ld.shared.v2.b32 {%r1, %r2}, [%s];")


def test_small_elements_of_two_warps_are_apart() -> None:
    body = "add.s32 %r1, %s, %r0; mov.b16 %h1, 1; shr.u32 %r2, %r0, 5; setp.eq.b32 %p1, %r2, 1; "
    body += "mad.lo.s32 %r3, %r2, 2, %s; st.shared.b16 [%r3], %h1;"
    run(body, threads=64)


def test_local_memory_has_an_end() -> None:
    with pytest.raises(OutOfBounds, match="local memory, which has 8 bytes"):
        run(".local .align 8 .b8 a[8]; mov.b64 %d1, a; ld.local.b32 %r1, [%d1+8];")


def test_a_copy_of_bytes_is_counted_by_space() -> None:
    source, out = aligned((32,), np.uint32, 5), aligned((32,), np.uint32)
    body = "mul.wide.u32 %d9, %r0, 4; add.s64 %d8, %d1, %d9; add.s64 %d9, %d0, %d9;"
    report = run(f"{body} ld.global.b32 %r1, [%d8]; st.global.b32 [%d9], %r1;", out, source)
    assert (report.bytes_read, report.bytes_written) == ({"global": 128}, {"global": 128})
    assert report.instructions == 10
    assert report.as_json()["allocations"]["array 0"]["written"] == 128  # type: ignore[index]
    assert "array 0: 128 of 128 bytes written" in str(report)
