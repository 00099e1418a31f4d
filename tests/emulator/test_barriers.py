# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Barriers: what they order, and what misuses them."""

from __future__ import annotations

import numpy as np
import pytest

from te_grouped_mlp.emulator import EmulationFault, Options
from te_grouped_mlp.emulator.faults import (
    BarrierMisuse,
    Deadlock,
    MissingFence,
    OutOfBounds,
    Race,
)
from tests.emulator.kernels import run

_INIT = "setp.eq.b32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%s], {count}; bar.sync 0;"
_WAIT = """{{ .reg .pred p;
AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%s{at}], {parity}; @p bra ON; bra AGAIN; ON: }}"""


def wait(parity: int = 0, at: str = "") -> str:
    """Return a loop that waits for a phase of the barrier at the start of shared memory."""
    return _WAIT.format(parity=parity, at=at)


# Warp 0 writes and arrives, warp 1 waits and reads.
_HAND_OVER = (
    _INIT
    + "setp.ge.u32 %p2, %r0, 32; @%p2 bra READER;"
    + "shl.b32 %r1, %r0, 2; add.s32 %r1, %s, %r1; st.shared.b32 [%r1+64], %r0;"
    + "mbarrier.arrive.shared.b64 %d9, [%s]; bra DONE;"
    + "READER: {wait} ld.shared.b32 %r2, [%s+64]; DONE: mov.b32 %r3, 0;"
)


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_an_mbarrier_orders_what_it_should(schedule: str) -> None:
    options = Options(schedule=schedule)  # type: ignore[arg-type]
    run(_HAND_OVER.format(count=32, wait=wait()), threads=64, options=options)
    with pytest.raises(EmulationFault, match="shared memory 0x440"):
        run(_HAND_OVER.format(count=32, wait=""), threads=64, options=options)


def test_a_phase_that_never_ends_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match=r"warp 1 .* waits at mbarrier 0x400 of CTA 0 \(1 arrivals"):
        run(_HAND_OVER.format(count=33, wait=wait()), threads=64)
    with pytest.raises(Deadlock, match="a barrier .32 of 64 threads there"):
        run("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64;", threads=64)


def test_more_arrivals_than_expected() -> None:
    with pytest.raises(BarrierMisuse, match="31 more arrivals at mbarrier 0x400"):
        run(_INIT.format(count=1) + "mbarrier.arrive.shared.b64 %d9, [%s];")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mbarrier.arrive.shared.b64 %d9, [%s];", "no mbarrier was initialised at 0x400"),
        ("mbarrier.init.shared.b64 [%s], 0;", "count of 0"),
        (_INIT.format(count=1) + "mbarrier.inval.shared.b64 [%s]; " + wait(), "no mbarrier"),
        ("bar.sync 16, 32;", "barrier 16"),
        ("bar.sync 1, 33;", "33 threads"),
        ("bar.sync 1, 96;", "96 threads, in a CTA of 64"),
        ("setp.lt.u32 %p1, %r0, 32; @%p1 bar.arrive 1, 64;", "exits with 32 of 64 threads"),
        ("barrier.cluster.wait;", "without an arrival"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "twice without a wait"),
    ],
)
def test_misuse(body: str, message: str) -> None:
    with pytest.raises((BarrierMisuse, OutOfBounds), match=message):
        run(body, threads=64)


def test_counts_of_one_barrier_agree() -> None:
    body = "setp.lt.u32 %p1, %r0, 32; @%p1 bra A; bar.sync 1, 96; bra B; A: bar.sync 1, 64; B: ret;"
    with pytest.raises(BarrierMisuse, match="others said"):
        run(body, threads=96)


def test_an_mbarrier_is_used_after_its_initialisation() -> None:
    body = """
    setp.eq.b32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%s], 32; {barrier}
    setp.lt.u32 %p2, %r0, 32; @%p2 bra DONE; mbarrier.arrive.shared.b64 %d9, [%s]; DONE: ret;
    """
    run(body.format(barrier="bar.sync 0;"), threads=64)
    with pytest.raises(Race, match="used without order after its initialisation"):
        run(body.format(barrier=""), threads=64)


# Each CTA of a pair writes to the other's shared memory and waits for the other's value.
_PAIR = """
mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1;
setp.eq.b32 %p1, %r0, 0; @!%p1 bra MADE; mbarrier.init.shared.b64 [%s], 1; MADE:
{fence} {arrive} barrier.cluster.wait;
setp.eq.b32 %p1, %r0, 0; @!%p1 bra SENT;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%s], 4;
mapa.shared::cluster.u32 %r3, %s, %r2; add.s32 %r4, %r1, 70; add.s32 %r5, %r3, 16;
st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r4, [%r3]; SENT:
{wait} ld.shared.b32 %r6, [%s+16];
mul.wide.u32 %d9, %r1, 4; add.s64 %d9, %d0, %d9; st.global.b32 [%d9], %r6;
{end}
"""
_END = "barrier.cluster.arrive; barrier.cluster.wait;"


def _pair(**change: str) -> np.ndarray:
    words = {"fence": "fence.mbarrier_init.release.cluster;", "end": _END, "wait": wait()}
    words["arrive"] = "barrier.cluster.arrive.relaxed;"
    out = np.zeros(2, np.uint32)
    options = Options(schedule="late")
    run(_PAIR.format(**words | change), out, grid=(2, 1, 1), cluster=(2, 1, 1), options=options)
    return out


def test_a_pair_of_ctas_exchanges_values() -> None:
    assert _pair().tolist() == [71, 70]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"fence": ""}, (Race, MissingFence)),
        ({"fence": "", "arrive": "barrier.cluster.arrive;"}, MissingFence),
        ({"wait": ""}, EmulationFault),
    ],
    ids=["nothing-released", "not-visible", "not-waited"],
)
def test_what_a_pair_of_ctas_needs(change: dict[str, str], kind: type[EmulationFault]) -> None:
    with pytest.raises(kind):
        _pair(**change)


def test_a_cta_may_not_leave_early() -> None:
    body = """
    mov.u32 %r1, %cluster_ctarank; mov.b32 %r2, 1; setp.eq.b32 %p1, %r1, 1; @%p1 bra DONE;
    mapa.shared::cluster.u32 %r3, %s, %r2;
    mbarrier.arrive.shared::cluster.b64 _, [%r3]; DONE: {end}
    """
    with pytest.raises((OutOfBounds, BarrierMisuse), match="has exited|no mbarrier"):
        run(body.format(end=""), grid=(2, 1, 1), cluster=(2, 1, 1))


def test_clusters_are_cancelled_and_taken_over() -> None:
    out = np.zeros(8, np.uint32)
    body = (
        _INIT.format(count=1)
        + """
    fence.mbarrier_init.release.cluster;
    mov.u32 %r1, %ctaid.x; mov.b32 %r2, 0;
    NEXT: mul.wide.u32 %d9, %r1, 4; add.s64 %d9, %d0, %d9; add.s32 %r5, %r1, 1;
    setp.eq.b32 %p1, %r0, 0; @%p1 st.global.b32 [%d9], %r5;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d8, [%s], 16;
    @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
        [%s+16], [%s];
    AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%s], %r2; @!%p2 bra AGAIN;
    ld.shared.v2.b64 {%d2, %d3}, [%s+16]; fence.proxy.async.shared::cta; bar.warp.sync -1;
    mov.b128 %q0, {%d2, %d3}; xor.b32 %r2, %r2, 1;
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %q0;
    @%p3 bra NEXT;
    """
    )
    report = run(body, out, grid=(8, 1, 1), options=Options(resident_clusters=2))
    assert out.tolist() == list(range(1, 9))
    assert report.clusters == 2
    with pytest.raises(MissingFence, match="proxy fence"):
        run(body.replace("fence.proxy.async.shared::cta;", ""), out, grid=(8, 1, 1))
