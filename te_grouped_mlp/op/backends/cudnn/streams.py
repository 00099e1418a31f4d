# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The installed wrappers: found, called in an order that is safe, and kept from growing.

A wrapper keeps one buffer of scheduler state and descriptors per kernel that it built, so two
launches of one kernel must not be in flight at once. On one stream they are not. A launch on
another stream than the one before it waits for that one; inside a capture, the wait becomes an edge
of the graph. What cannot be seen from here are two graphs that are replayed side by side.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op import memory
from te_grouped_mlp.op.backends.cudnn.signatures import takes, wrapper
from te_grouped_mlp.op.layout import Kernel

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
    # The frontend depends on this package, so it is there where its kernels are.
    runtime = importlib.import_module("cuda.bindings.runtime")
    error, _, identity, *_ = runtime.cudaStreamGetCaptureInfo(handle)
    if int(error):
        raise RuntimeError(f"cudaStreamGetCaptureInfo of stream {handle} failed: {error}")
    return int(identity)


_last: dict[tuple[str, torch.device, int | None], Any] = {}
"""Wrapper, device and capture to the stream of the latest launch."""


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
    found: Mapping[str, Any] = function(**arguments)
    forget_old_shapes(name, function)
    return found


def take_turn(name: str, device: torch.device, at: Lane) -> None:
    """Let the stream of `at` wait for the last launch of a wrapper, if that was on another one.

    An order across the border of a capture is not possible, nor is one with an earlier capture
    needed: its launches run when its graph is replayed.
    """
    key = (name, device, at.capture)
    before, _last[key] = _last.get(key), at.stream
    if before is not None and at.stream is not None and before != at.stream:
        at.stream.wait_stream(before)


def forget_old_shapes(name: str, function: Callable[..., Any]) -> None:
    """Empty a wrapper's memory of exact shapes when it has grown; built kernels are kept."""
    memo = getattr(function, "__globals__", {}).get(f"_{name}_wrapper_memo")
    if isinstance(memo, dict) and len(memo) > MEMO_LIMIT:
        memo.clear()


_workspaces: dict[tuple[Kernel, torch.device, Any, int | None, int], torch.Tensor] = {}


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
        uint8, never freed, since a replay uses it again; None where the wrapper takes none.
    """
    if "descriptor_workspace" not in takes("wgrad"):
        return None
    size = getattr(importlib.import_module("cudnn"), _WORKSPACE_SIZE)(groups, output_mode=mode)
    key = (kernel, device, at.handle, at.capture, size)
    if key not in _workspaces:
        _workspaces[key] = memory.empty((size,), torch.uint8, device)
    return _workspaces[key]


_ones: dict[tuple[int, torch.device, int | None], torch.Tensor] = {}


def ones(count: int, device: torch.device, at: Lane) -> torch.Tensor:
    """Return fp32 ones (count,), to be read only.

    Kept for the next call on the same stream, since another could read them before they are
    written. A capture, before which torch waits for the device, takes those of any stream, so that
    a replay need not write them; what it makes is not kept.
    """
    if at.capture is None:
        key = (count, device, at.handle)
        if key not in _ones:
            _ones[key] = torch.ones(count, dtype=torch.float32, device=device)
        return _ones[key]
    kept = (each for key, each in _ones.items() if key[:2] == (count, device))
    found = next(kept, None)
    return torch.ones(count, dtype=torch.float32, device=device) if found is None else found
