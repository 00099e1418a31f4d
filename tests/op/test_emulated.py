# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What an emulated GPU changes for the op: which backends take CPU tensors, and where memory is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import emulated, environment, selection
from te_grouped_mlp.op.backends import GPU_ONLY
from te_grouped_mlp.op.backends.cutedsl import arguments
from te_grouped_mlp.op.tensors import memory


class Gpu:
    """An emulated GPU that only says so."""

    sm = (10, 0)

    def compiled(self, function: Any) -> Callable[..., Any]:
        return function

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), 7, dtype=dtype)

    def active_clusters(self, size: int) -> int:
        return 3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    # What another test entered, or nothing, is put back.
    monkeypatch.setattr(emulated, "_device", None)
    found = Gpu()
    emulated.enter(found)
    return found


def test_the_machine_is_its(gpu: Gpu) -> None:
    assert emulated.device() is gpu
    env = environment.current()
    assert env.emulated
    assert env.sm == gpu.sm


def test_backends_of_a_gpu_are_asked_about_cpu_tensors(gpu: Gpu) -> None:
    env = environment.current()
    assert GPU_ONLY.issubset(selection.candidates(env, "cpu"))
    with environment.override(emulated=False):
        assert GPU_ONLY.isdisjoint(selection.candidates(environment.current(), "cpu"))


def test_fresh_memory_is_its(gpu: Gpu) -> None:
    assert memory.empty((2, 3), torch.int32, "cpu").eq(7).all()


def test_our_kernels_take_cpu_tensors(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(2, 2, dtype=torch.bfloat16)
    arguments.require_bf16("x", values)
    monkeypatch.setattr(emulated, "_device", None)
    with pytest.raises(ValueError, match="on cpu"):
        arguments.require_bf16("x", values)
