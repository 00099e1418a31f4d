# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows of streams and captures; any GPU does, since no wrapper is launched.

A stand-in of the frontend gives the sizes of workspaces; streams, graphs and memory are real.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from te_grouped_mlp.op.backends.cudnn import outputs, streams
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.tensors.operands import Splits
from tests.support.gpu import no_waiting

pytestmark = pytest.mark.gpu

COUNT = 1 << 20
A_WHILE = 100_000_000
"""Cycles: long enough that work on another stream overtakes what does not wait."""


@pytest.fixture(autouse=True)
def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_last", "_workspaces", "_ones"):
        monkeypatch.setattr(streams, name, {})


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = ModuleType("cudnn")
    setattr(frontend, streams._WORKSPACE_SIZE, lambda groups, output_mode: 512 * groups)
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    monkeypatch.setattr(streams, "takes", lambda _: frozenset({"descriptor_workspace"}))


def test_a_capture_has_an_identity(device: torch.device) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    identities = []
    for _ in range(2):
        assert streams.lane(device).capture is None
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            main = streams.lane(device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other = streams.lane(device)
                torch.zeros(1, device=device)
            torch.cuda.current_stream().wait_stream(side)
        assert main.capture is not None
        assert main.capture == other.capture
        assert main.stream != other.stream
        identities.append(main.capture)
    assert identities[0] != identities[1]


def _overtaken(buffer: torch.Tensor, at: torch.device) -> torch.Tensor:
    """Write late on one stream and read on another, as two launches of one kernel would.

    Returns what the second one read.
    """
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    origin = torch.cuda.current_stream()
    for stream in (first, second):
        stream.wait_stream(origin)
    with torch.cuda.stream(first):
        streams.take_turn("glu", at, streams.lane(at))
        torch.cuda._sleep(A_WHILE)
        buffer.fill_(2)
    with torch.cuda.stream(second):
        streams.take_turn("glu", at, streams.lane(at))
        read = buffer.clone()
    for stream in (first, second):
        origin.wait_stream(stream)
    return read


def test_a_launch_waits_for_the_one_on_another_stream(device: torch.device) -> None:
    buffer = torch.zeros(COUNT, device=device)
    with no_waiting():
        read = _overtaken(buffer, device)
    torch.cuda.synchronize()
    assert bool((read == 2).all())


def test_the_wait_is_what_orders_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "take_turn", lambda *_: None)
    buffer = torch.zeros(COUNT, device=device)
    read = _overtaken(buffer, device)
    torch.cuda.synchronize()
    assert not bool((read == 2).all())


def test_in_a_graph_the_wait_is_an_edge(device: torch.device) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    buffer = torch.zeros(COUNT, device=device)
    # An eager launch before it, on a stream that is no part of the capture.
    streams.take_turn("glu", device, streams.lane(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = _overtaken(buffer, device)
    for _ in range(3):
        buffer.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert bool((read == 2).all())
    # And one after it, which must not wait for a stream of the capture that is over.
    streams.take_turn("glu", device, streams.lane(device))
    torch.cuda.synchronize()


@pytest.mark.usefixtures("workspaces")
def test_a_graphs_workspace_is_its_own(device: torch.device) -> None:
    """Nothing that runs between replays, or in another graph, gets the memory or changes it."""
    pytest.importorskip("cuda.bindings.runtime")
    kernels = (Kernel.FC1_WGRAD, Kernel.FC2_WGRAD)

    def launch(value: int) -> tuple[list[int], list[torch.Tensor]]:
        spaces = [
            streams.wgrad_workspace(kernel, 8, "dense", device, streams.lane(device))
            for kernel in kernels
        ]
        for offset, space in enumerate(spaces):
            assert space is not None
            space.fill_(value + offset)
        # What else a step allocates.
        fresh = [torch.full((512 * 8,), 99, dtype=torch.uint8, device=device) for _ in range(8)]
        read = [space.clone() for space in spaces if space is not None]
        del fresh
        return [space.data_ptr() for space in spaces if space is not None], read

    eager, _ = launch(1)
    graphs = []
    for value in (10, 20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            addresses, read = launch(value)
        graphs.append((graph, addresses, read, value))
    used = {*eager, *graphs[0][1], *graphs[1][1]}
    assert len(used) == 6
    assert all(address % 128 == 0 for address in used)
    for _ in range(2):
        for graph, _, read, value in graphs:
            noise = [torch.full((512 * 8,), 77, dtype=torch.uint8, device=device) for _ in range(8)]
            graph.replay()
            torch.cuda.synchronize()
            del noise
            assert [int(each.min()) for each in read] == [value, value + 1]
            assert [int(each.max()) for each in read] == [value, value + 1]


@pytest.mark.usefixtures("workspaces")
def test_memory_does_not_grow_with_graphs(device: torch.device) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    held = []
    for _ in range(12):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lane = streams.lane(device)
            streams.take_turn("glu", device, lane)
            space = streams.wgrad_workspace(Kernel.FC1_WGRAD, 4096, "dense", device, lane)
            assert space is not None
            space.fill_(1)
        del graph, space
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    # One workspace: that of the latest capture of each stream that torch captures on.
    assert max(held[2:]) <= held[1] + 4096 * 512


def test_ones_in_a_graph_stay_ones(device: torch.device) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    small = streams.ones(2048, device, streams.lane(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lane = streams.lane(device)
        kept = streams.ones(512, device, lane).clone()
        made = streams.ones(1 << 16, device, lane).clone()
    assert small.numel() == 2048
    # A larger count comes along, and what was handed out before stays.
    streams.ones(1 << 20, device, streams.lane(device))
    noise = [torch.zeros(2048, device=device) for _ in range(32)]
    graph.replay()
    torch.cuda.synchronize()
    del noise
    for found in (kept, made):
        assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cols", [64, 1500])
def test_the_tail_is_zeroed_by_what_the_device_holds(
    device: torch.device, dtype: torch.dtype, cols: int
) -> None:
    rows = 1024
    ends = torch.tensor([256, 512], dtype=torch.int32, device=device)
    splits = Splits(ends.long(), ends, torch.zeros(3, dtype=torch.int64, device=device), {}, None)
    out = torch.full((rows, cols), float("nan"), dtype=dtype, device=device)
    outputs.zero_tail(out, splits)  # builds the kernel
    with no_waiting():
        outputs.zero_tail(out, splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs.zero_tail(out, splits)
    for last in (512, 0, 513, rows):
        out.fill_(7)
        ends[1] = last
        graph.replay()
        torch.cuda.synchronize()
        assert bool((out[:last] == 7).all())
        assert bool((out[last:] == 0).all())
