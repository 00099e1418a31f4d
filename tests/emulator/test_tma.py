# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor maps and the copies by them, against numpy and against maps that a driver made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from te_grouped_mlp.emulator import EmulationFault, GlobalMemory, Launch, Options, Report, execute
from te_grouped_mlp.emulator.faults import (
    BarrierMisuse,
    IllegalOperand,
    Misaligned,
    MissingFence,
    OutOfBounds,
    Race,
    UnfinishedAsync,
    Unwritten,
)
from te_grouped_mlp.emulator.tensor_map import decode
from tests.emulator.kernels import aligned, launch, tensor_map
from tests.emulator.test_barriers import wait

# Element types in the numbering of the driver's interface -> bytes.
_SIZES = {0: 1, 1: 2, 2: 4, 6: 2, 7: 4, 9: 2, 10: 4, 11: 4}
_MAPS = json.loads((Path(__file__).parent / "driver_maps.json").read_text())


def test_maps_of_a_driver_are_decoded() -> None:
    assert len(_MAPS) > 100
    for kind, address, dims, strides, box, swizzle, unit, raw in _MAPS:
        found = decode(bytes.fromhex(raw))
        assert (found.address, found.element) == (address, _SIZES[kind])
        assert (list(found.dims), list(found.box)) == (dims, box)
        assert list(found.strides) == [found.element, *strides]
        assert (found.swizzle, found.unit) == (swizzle, unit)


_LOAD = "cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"


def copy_box(
    source: bytes, to: bytes, size: int, at: tuple[int, ...], to_at: tuple[int, ...] | None = None,
    *, waits: str = wait(at="+8192"), expected: int | None = None, store: str = _STORE,
    init: str = "fence.mbarrier_init.release.cluster;", end: str = "cp.async.bulk.wait_group 0;",
    between: str = "", commit: str = "cp.async.bulk.commit_group;",
) -> str:  # fmt: skip
    """Return a body that loads a box by map 0 and stores it by map 1."""
    coordinates = ", ".join(map(str, at))
    target = ", ".join(map(str, at if to_at is None else to_at))
    return f"""
    mov.b64 %d10, m0; cvta.param.u64 %d10, %d10; mov.b64 %d11, m1; cvta.param.u64 %d11, %d11;
    setp.eq.b32 %p1, %r0, 0; @!%p1 bra MADE; mbarrier.init.shared.b64 [%s+8192], 1; {init} MADE:
    bar.sync 0; setp.eq.b32 %p1, %r0, 0; @!%p1 bra SENT;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%s+8192], {size if expected is None else expected};
    {_LOAD.format(rank=len(at))} [%s], [%d10, {{{coordinates}}}], [%s+8192]; SENT:
    {waits} {between} setp.eq.b32 %p1, %r0, 0; @!%p1 bra DONE;
    {store.format(rank=len(at))} [%d11, {{{target}}}], [%s]; {commit} {end} DONE:
    """


def _run(body: str, maps: list[bytes], *arrays: np.ndarray, **options: object) -> Report:
    memory = GlobalMemory()
    for number, array in enumerate(arrays):
        memory.register(array.ctypes.data, array.nbytes, name=f"array {number}")
    what = launch(body, [], maps=maps, shared=8200)
    return execute(what, memory, Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_a_box_comes_and_goes(swizzle: int, schedule: str) -> None:
    # As many bytes a row as the swizzle has.
    width = {0: 64, 1: 16, 2: 32, 3: 64}[swizzle]
    source = aligned((40, 128), np.float16, np.random.default_rng(0).standard_normal((40, 128)))
    out = aligned((40, 128), np.float16, -1)
    maps = [tensor_map(array, (width, 8), swizzle) for array in (source, out)]
    report = _run(copy_box(*maps, width * 16, (64, 16)), maps, source, out, schedule=schedule)
    expected = np.full_like(out, -1)
    expected[16:24, 64 : 64 + width] = source[16:24, 64 : 64 + width]
    assert (out == expected).all()
    assert (report.tma_loads, report.tma_stores, report.tma_bytes) == (1, 1, 2 * width * 16)


def test_a_swizzle_moves_chunks_as_the_isa_says() -> None:
    """Chunk c of row r lies at chunk c ^ (r % 8): the store without a swizzle shows it."""
    source = aligned((8, 64), np.float16, np.arange(512).reshape(8, 64))
    out = aligned((8, 64), np.float16)
    maps = [tensor_map(source, (64, 8), 3), tensor_map(out, (64, 8), 0)]
    _run(copy_box(*maps, 1024, (0, 0)), maps, source, out)
    for row in range(8):
        for chunk in range(8):
            moved = (chunk ^ row) * 8
            assert (out[row, moved : moved + 8] == source[row, chunk * 8 : chunk * 8 + 8]).all()


def test_outside_of_the_tensor_are_zeros_and_nothing_is_stored() -> None:
    source, out = aligned((10, 3, 32), np.uint32, 7), aligned((10, 5, 32), np.uint32, 9)
    maps = [tensor_map(array, (32, 2, 4)) for array in (source, out)]
    _run(copy_box(*maps, 1024, (16, 2, 8), (16, -1, 7)), maps, source, out)
    expected = np.full_like(out, 9)
    # Of the box, columns 16 to 31, row 2 and planes 8 and 9 exist; they go to row -1, which does
    # not, and what was outside goes to row 0.
    expected[7:10, 0, 16:] = 0
    assert (out == expected).all()


def test_reductions_add() -> None:
    for kind, code in ((np.float32, 7), (np.float16, 6), (np.uint16, 10)):
        source, out = (
            aligned((8, 16), kind, 0x3F80 if kind is np.uint16 else 1.5),
            aligned((8, 16), kind),
        )
        maps = [tensor_map(array, (16, 8), 0, code) for array in (source, out)]
        store = "cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group"
        body = copy_box(*maps, source.nbytes, (0, 0), store=store)
        for _ in range(2):
            _run(body, maps, source, out)
        assert (out == (0x4000 if kind is np.uint16 else 3)).all()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"waits": ""}, (Race, Unwritten)),
        ({"init": ""}, MissingFence),
        ({"end": ""}, UnfinishedAsync),
        ({"commit": ""}, UnfinishedAsync),
        ({"expected": 1023}, EmulationFault),
        ({"between": "st.shared.b32 [%s], 3; bar.sync 0;"}, MissingFence),
        ({"between": "st.shared.b32 [%s], 3; fence.proxy.async.shared::cta;"}, ()),
    ],
    ids=["wait", "init-fence", "bulk-wait", "commit", "bytes", "proxy-fence", "fenced"],
)
@pytest.mark.parametrize("schedule", ["late", "eager"])
def test_what_a_copy_needs(change: dict, kind: type[EmulationFault], schedule: str) -> None:
    source, out = aligned((8, 64), np.float16, 1), aligned((8, 64), np.float16)
    maps = [tensor_map(array, (64, 8), 3) for array in (source, out)]
    body = copy_box(*maps, 1024, (0, 0), **change)
    if kind == ():
        _run(body, maps, source, out, schedule=schedule)
        return
    with pytest.raises(kind):
        _run(body, maps, source, out, schedule=schedule)


def test_a_load_over_what_is_still_read_is_a_race() -> None:
    """One stage, loaded twice: the second load needs to know that the first was read."""
    source, out = aligned((16, 64), np.float16, 1), aligned((8, 64), np.float16)
    maps = [tensor_map(array, (64, 8), 3) for array in (source, out)]
    body = """
    mov.b64 %d10, m0; setp.eq.b32 %p1, %r0, 0; @!%p1 bra MADE;
    mbarrier.init.shared.b64 [%s+8192], 1; mbarrier.init.shared.b64 [%s+8200], 32;
    fence.mbarrier_init.release.cluster; MADE: bar.sync 0;
    setp.ge.u32 %p2, %r0, 32; @%p2 bra READER;
    setp.eq.b32 %p1, %r0, 0; @!%p1 bra DONE;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%s+8192], 1024;
    {load} [%s], [%d10, {{0, 0}}], [%s+8192]; {empty}
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%s+8192], 1024;
    {load} [%s], [%d10, {{0, 8}}], [%s+8192]; bra DONE;
    READER: {first} ld.shared.b32 %r1, [%s]; {fence}
    mbarrier.arrive.shared.b64 %d9, [%s+8200]; {second}
    DONE: mov.b32 %r2, 0;
    """
    words = {
        "load": _LOAD.format(rank=2), "empty": wait(0, "+8200"), "first": wait(0, "+8192"),
        "second": wait(1, "+8192"), "fence": "fence.proxy.async.shared::cta;",
    }  # fmt: skip

    def what(**change: str) -> Launch:
        return launch(body.format(**words | change), [], 64, maps=maps, shared=8300)

    memory = GlobalMemory()
    memory.register(source.ctypes.data, source.nbytes)
    memory.register(out.ctypes.data, out.nbytes)
    execute(what(), memory)
    for schedule in ("late", "eager"):
        options = Options(schedule=schedule)  # type: ignore[arg-type]
        with pytest.raises((Race, BarrierMisuse)):
            execute(what(empty=""), memory, options)
        with pytest.raises(MissingFence, match="written, but was read"):
            execute(what(fence=""), memory, options)


def test_addresses_of_maps_and_boxes_are_checked() -> None:
    source, out = aligned((8, 64), np.float16, 1), aligned((8, 64), np.float16)
    good = [tensor_map(array, (64, 8), 3) for array in (source, out)]
    odd = [tensor_map(source[:, 1:], (56, 8)), good[1]]
    with pytest.raises(Misaligned, match="tensor map of address"):
        _run(copy_box(*odd, 56 * 16, (0, 0)), odd, source, out)
    with pytest.raises(Misaligned, match="TMA load to shared memory"):
        _run(
            copy_box(*good, 1024, (0, 0)).replace("[%s], [%d10", "[%s+64], [%d10"),
            good,
            source,
            out,
        )
    large = [tensor_map(np.lib.stride_tricks.as_strided(source, (16, 64)), (64, 16), 3), good[1]]
    with pytest.raises(OutOfBounds, match="past array 0"):
        _run(copy_box(*large, 2048, (0, 0)), large, source, out)
    body = copy_box(*good, 1024, (0, 0)).replace("@!%p1 bra DONE;", "")
    with pytest.raises(IllegalOperand, match="different boxes"):
        _run(body.replace("{0, 0}], [%s];", "{%r0, 0}], [%s];"), good, source, out)


def test_a_map_that_a_kernel_wrote_is_acquired() -> None:
    source, out = aligned((8, 64), np.float16, 1), aligned((8, 64), np.float16)
    built = aligned((128,), np.uint8)
    maps = [tensor_map(source, (64, 8), 3), tensor_map(out, (64, 8), 3)]
    memory = GlobalMemory()
    for array in (source, out, built):
        memory.register(array.ctypes.data, array.nbytes)
    words = "".join(
        f"ld.param.b64 %d2, [m0+{i}]; st.global.b64 [%d0+{i}], %d2;" for i in range(0, 128, 8)
    )
    one = "setp.eq.b32 %p1, %r0, 0; @!%p1 bra DONE;"
    execute(launch(f"{one} {words} DONE:", [built.ctypes.data], maps=maps), memory)
    memory.take_for_written(built.ctypes.data)
    acquire = "fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;"
    body = copy_box(*maps, 1024, (0, 0)).replace(
        "mov.b64 %d10, m0; cvta.param.u64 %d10, %d10;", "mov.b64 %d10, %d0; @"
    )
    for text, fails in ((body.replace("@", "", 1), True), (body.replace("@", acquire, 1), False)):
        what = launch(text, [built.ctypes.data], maps=maps, shared=8200)
        if fails:
            with pytest.raises(MissingFence, match="is not acquired"):
                execute(what, memory)
        else:
            execute(what, memory)
            assert (out == 1).all()
