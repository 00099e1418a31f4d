# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A step on a GPU that is not the current one gives the bits of a step on one that is."""

from __future__ import annotations

import os

import pytest
import torch

from te_grouped_mlp.op.tensors.memory import current_of
from tests.support import step
from tests.support.step import StepCase

os.environ.setdefault("NVTE_GROUPED_MLP_STANDALONE", "1")

pytestmark = pytest.mark.gpu

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
def test_the_block_runs_on_the_device_and_leaves_the_old_one() -> None:
    with torch.cuda.device(0):
        with current_of(torch.device("cuda", 1)):
            assert torch.cuda.current_device() == 1
            assert torch.empty(1, device="cuda").device.index == 1
        assert torch.cuda.current_device() == 0


@needs_two
def test_autograd_runs_a_backward_on_the_device_of_its_tensors() -> None:
    """What the guard of the backward costs nothing for."""
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.cuda.current_device())
            return grad

    with torch.cuda.device(0):
        x = torch.ones(4, device="cuda:1", requires_grad=True)
        Identity.apply(x).sum().backward()
    assert seen == [1]


@needs_two
@pytest.mark.sm90
@pytest.mark.usefixtures("fused_switch")
@pytest.mark.parametrize("mxfp8", [False, True], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
def test_a_step_beside_the_current_device(mxfp8: bool, delay: bool) -> None:
    case = StepCase(splits=(128, 256), hidden=256, ffn=256, mxfp8=mxfp8, delay=delay, bias=True)
    with torch.cuda.device(0):
        here, there = (step.run_step(case.but(device=f"cuda:{index}")) for index in range(2))
    assert here.keys() == there.keys()
    for name, value in here.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.cpu(), there[name].cpu()), name
