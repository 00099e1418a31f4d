# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Both passes, and a weight gradient put off, run with the device of their tensors as the current.

Here the devices are counted only; `gpu/test_devices.py` has two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.tensors import memory
from tests.support import step
from tests.support.step import StepCase

OTHER = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device of a machine with several, in a list of one."""
    now = [0]

    @contextlib.contextmanager
    def changed(to: torch.device) -> Iterator[None]:
        before, now[0] = now[0], to.index
        try:
            yield
        finally:
            now[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", changed)
    return now


@pytest.mark.parametrize("method", ["fuser_forward", "fuser_backward"])
def test_a_pass_runs_on_the_device_of_its_tensor(current: list[int], method: str) -> None:
    seen = []

    class Contexts:
        """The first thing that a pass looks at."""

        def __getitem__(self, _: int) -> Any:
            seen.append(current[0])
            raise LookupError("far enough")

    from transformer_engine.pytorch.ops.fused.grouped_mlp import GroupedMLP_CuTeGEMMGLU

    op: Any = object.__new__(GroupedMLP_CuTeGEMMGLU)
    # The forward looks at its ops first.
    vars(op).update(_modules={}, _parameters={}, _buffers={}, basic_ops=(Contexts(),) * 3)
    vars(op)["_problem"] = lambda ops: ops[0][0]
    with pytest.raises(LookupError, match="far enough"):
        getattr(op, method)(
            Contexts(), SimpleNamespace(device=OTHER), basic_op_extra_inputs=[], basic_op_kwargs=[]
        )
    assert seen == [1]
    assert current == [0]


def test_a_weight_gradient_that_was_put_off_runs_there_too(
    current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever calls `backward_dw` has a current device of his own."""
    from te_grouped_mlp.op.step import weight_gradient

    seen, queue = [], []
    spec = SimpleNamespace(main_grad=False, distributed=False, delay_wgrad=True)
    splits = SimpleNamespace(sizes=SimpleNamespace(device=OTHER))
    operand = SimpleNamespace(splits=splits, column=None, plain=None)
    operand.without_row = lambda: operand
    plan: Any = SimpleNamespace(
        problem=SimpleNamespace(num_groups=1, fc1=spec, fc2=spec),
        call=SimpleNamespace(dtype=None),
    )
    op = SimpleNamespace(
        need_backward_dw=lambda: True,
        wgrad_store=SimpleNamespace(put=lambda entry, run: queue.append((entry, run))),
    )
    target = SimpleNamespace(members=tuple)
    monkeypatch.setattr(weight_gradient, "torch_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(weight_gradient.gradients, "fresh_target", lambda *_: target)
    run: Any = SimpleNamespace(wgrad=lambda *_: seen.append(current[0]))
    weight_gradient._weight_grads(
        op, [torch.empty(0)], plan, run, Kernel.FC1_WGRAD, operand, operand, None, owns_x=False
    )  # type: ignore[arg-type]
    assert seen == []
    ((entry, later),) = queue
    later(*entry)
    assert (seen, current) == ([1], [0])


def test_the_device_is_left_alone_where_it_is_right(
    current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", None)
    for right in (torch.device("cuda", 0), torch.device("cpu")):
        with memory.current_of(right):
            assert current == [0]


@pytest.mark.usefixtures("fused_switch")
def test_nothing_asks_for_a_device_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("asked"))
    step.run_step(StepCase())
