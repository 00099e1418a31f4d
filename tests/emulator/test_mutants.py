# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The score's own parts, on a small kernel: mutants, what is of no use, what is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from te_grouped_mlp.emulator import GlobalMemory, Launch, Options, execute
from tests.emulator.kernels import aligned, launch, tensor_map
from tests.emulator.mutants import SCHEDULES, Idle, alarm, mutants
from tests.emulator.test_barriers import wait
from tests.emulator.test_tma import copy_box


@pytest.fixture
def copy() -> tuple[Launch, GlobalMemory, np.ndarray, np.ndarray]:
    """A kernel that copies a box through shared memory, and some fences that it does not need."""
    source, out = aligned((8, 64), np.float16, 1), aligned((8, 64), np.float16)
    maps = [tensor_map(array, (64, 8), 3) for array in (source, out)]
    memory = GlobalMemory()
    for array in (source, out):
        memory.register(array.ctypes.data, array.nbytes)
    between = "st.shared.b32 [%s+4096], 1; fence.proxy.async.shared::cta; "
    body = copy_box(
        *maps, 1024, (0, 0),
        init="fence.mbarrier_init.release.cluster; fence.mbarrier_init.release.cluster;",
        between=between + "st.shared.b32 [%s], 3; fence.proxy.async.shared::cta;",
        end="cp.async.bulk.wait_group 0; " + wait(0, "+8192"),
    )  # fmt: skip
    body = body.replace("bar.sync 0;", f"bar.sync 0; {wait(1, '+8192')}", 1)
    # A line each, as lines are what the reasons go by.
    return launch(body.replace(";", ";\n"), [], maps=maps, shared=8200), memory, source, out


def test_what_is_of_no_use_is_told_by_its_reason(copy: tuple) -> None:
    what, memory, _, _ = copy
    reasons = Idle(what, memory).reasons
    found = [(m.kind, reasons.get(m.instruction.line)) for m in mutants(what)]
    assert [reason for kind, reason in found if kind == "init fence"] == [
        "another one does the same",
        "another one does the same",
    ]
    assert [reason for kind, reason in found if kind == "proxy fence"] == [
        "only one proxy touches what it fences",
        None,
    ]
    assert [reason for kind, reason in found if kind == "mbarrier wait"] == [
        "meets new barriers only",
        None,
        "drain at the end",
    ]
    assert [reason for kind, reason in found if kind == "bulk wait"] == ["drain at the end"]


def test_what_is_of_use_is_missed(copy: tuple) -> None:
    what, memory, _, out = copy
    restore = memory.snapshot()
    execute(what, memory)
    right = out.copy()
    reasons = Idle(what, memory).reasons

    def fresh() -> GlobalMemory:
        restore()
        return memory

    def noticed(program: object) -> list[str]:
        runs = (
            alarm(what, program, fresh, lambda: bool((out != right).any()), each)  # type: ignore[arg-type]
            for each in SCHEDULES[:6]
        )
        return [each for each in runs if each]

    # The lanes of a warp have one order, so that a barrier of a single warp cannot be missed.
    tried = [m for m in mutants(what) if m.kind != "barrier"]
    results = {m.instruction.line: noticed(m.program) for m in tried}
    assert len(results) == 8
    for line, alarms in results.items():
        if reasons.get(line) != "drain at the end":
            assert bool(alarms) == (line not in reasons), (line, alarms)
    restore()
    assert (out == 0).all()
    assert execute(what, memory, Options()).tma_stores == 1
