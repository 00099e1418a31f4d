# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The installed wrappers: found, called in an order that is safe, and kept from growing.

A wrapper keeps one buffer of scheduler state and descriptors per kernel that it built, so two
launches of one kernel must not be in flight at once. On one stream they are not. A launch on
another stream than the one before it waits for that one; inside a capture, the wait becomes an edge
of the graph. What cannot be seen from here is a replay: beside another graph's, or beside an eager
launch on another stream, it shares the buffer of the kernels that both have.

Nothing here grows with the number of row counts or of captured graphs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op.backends.cudnn.signatures import takes, wrapper
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.tensors import memory

MEMO_LIMIT = 256
"""Entries that a wrapper may remember; it adds one for every new row count and drops none."""

_WORKSPACE_SIZE = "get_grouped_gemm_wgrad_workspace_size_sm100"


@dataclass(frozen=True)
class Lane:
    """Where a launch is queued.

    Attributes:
        stream: The torch stream; None on a CPU.
        capture: Identity of the capture that it belongs to; None when there is none.
    """

    stream: Any
    capture: int | None = None

    @property
    def handle(self) -> int | None:
        """The stream as the wrappers take it."""
        return None if self.stream is None else int(self.stream.cuda_stream)


def lane(device: torch.device) -> Lane:
    """Return where a launch on `device` would be queued now; never synchronises."""
    if device.type != "cuda":
        return Lane(None)
    stream = torch.cuda.current_stream(device)
    if not torch.cuda.is_current_stream_capturing():
        return Lane(stream)
    return Lane(stream, _capture_id(stream.cuda_stream))


def _capture_id(handle: int) -> int:
    # The frontend depends on this package, so it is there where its kernels are. Before CUDA 13 the
    # plain name is a query that fails where an edge of the graph has data.
    runtime = importlib.import_module("cuda.bindings.runtime")
    name = next(query for query in _CAPTURE_QUERIES if hasattr(runtime, query))
    error, _, identity, *_ = getattr(runtime, name)(handle)
    if int(error):
        raise RuntimeError(f"{name} of stream {handle} failed: {error}")
    return int(identity)


_CAPTURE_QUERIES = ("cudaStreamGetCaptureInfo_v3", "cudaStreamGetCaptureInfo")
_CAPTURES_KEPT = 16
"""Captures that may be under way at a time; identities are never used again."""

_last: dict[tuple[str, torch.device], dict[int | None, Any]] = {}
"""Wrapper and device to the stream of the latest launch, for each capture and for none."""


def launch(
    name: str, device: torch.device, at: Lane, arguments: dict[str, Any]
) -> Mapping[str, Any]:
    """Call a wrapper, after the launch before it if that one shares memory and is queued elsewhere.

    Args:
        name: Short name of the wrapper.
        device: Of the operands.
        at: Where the launch is queued.
        arguments: Keywords, made by `arguments`.

    Returns:
        The wrapper's outputs by name.
    """
    if arguments.get("descriptor_workspace") is None:
        take_turn(name, device, at)
    function = wrapper(name)
    outputs: Mapping[str, Any] = function(**arguments)
    forget_old_shapes(name, function)
    return outputs


def take_turn(name: str, device: torch.device, at: Lane) -> None:
    """Let the stream of `at` wait for the last launch of a wrapper, if that was on another one.

    An order across the border of a capture is not possible, nor is one with an earlier capture
    needed: its launches run when its graph is replayed.
    """
    streams = _last.setdefault((name, device), {})
    before = streams.pop(at.capture, None)
    streams[at.capture] = at.stream
    if len(streams) > _CAPTURES_KEPT:
        del streams[next(capture for capture in streams if capture not in (None, at.capture))]
    if before is not None and at.stream is not None and before != at.stream:
        at.stream.wait_stream(before)


def forget_old_shapes(name: str, function: Callable[..., Any]) -> None:
    """Empty a wrapper's memory of exact shapes when it has grown; built kernels are kept."""
    memo = getattr(function, "__globals__", {}).get(f"_{name}_wrapper_memo")
    if isinstance(memo, dict) and len(memo) > MEMO_LIMIT:
        memo.clear()


_workspaces: dict[tuple[Any, ...], tuple[int | None, torch.Tensor]] = {}
"""Where and for what to the capture that a buffer was made in, and the buffer."""


def wgrad_workspace(
    kernel: Kernel, groups: int, mode: str, device: torch.device, at: Lane
) -> torch.Tensor | None:
    """Return the memory for the descriptors of a weight gradient's launch.

    Args:
        kernel: FC1_WGRAD or FC2_WGRAD: the next launch may begin before this one has ended, so the
            two take turns with two buffers.
        groups: Number of experts.
        mode: "dense" or "discrete" target.
        device: Of the operands.
        at: Where the launch is queued. Every stream and every captured graph has its own buffer.

    Returns:
        uint8; None where the wrapper takes none. A graph's comes from the graph's own memory, which
        lasts as long as the graph. It is kept here until the stream belongs to another capture, so
        that no launch of its own gets it earlier.
    """
    if "descriptor_workspace" not in takes("wgrad"):
        return None
    size = getattr(importlib.import_module("cudnn"), _WORKSPACE_SIZE)(groups, output_mode=mode)
    key = (kernel, device, at.handle, at.capture is not None, size)
    entry = _workspaces.get(key)
    if entry is None or entry[0] != at.capture:
        entry = at.capture, memory.empty((size,), torch.uint8, device)
        _workspaces[key] = entry
    return entry[1]


_ones: dict[tuple[torch.device, int | None], list[torch.Tensor]] = {}
"""Device and stream to ones, each at least twice as many as those before them."""


def ones(count: int, device: torch.device, at: Lane) -> torch.Tensor:
    """Return fp32 ones (count,), to be read only.

    Taken from those that the stream has, since another could read them before they are written. A
    capture, before which torch waits for the device, takes those of any stream, so that a replay
    need not write them; what it makes is not kept. Replays read the others for ever, so none of
    these are freed; together they are at most twice as many as the largest count needs.
    """
    if at.capture is None:
        own = _ones.setdefault((device, at.handle), [])
        if not own or own[-1].numel() < count:
            room = max(_LEAST_ONES, count, 2 * own[-1].numel() if own else 0)
            own.append(torch.ones(room, dtype=torch.float32, device=device))
        return own[-1][:count]
    for key, own in _ones.items():
        if key[0] == device and own[-1].numel() >= count:
            return own[-1][:count]
    return torch.ones(count, dtype=torch.float32, device=device)


_LEAST_ONES = 1024
