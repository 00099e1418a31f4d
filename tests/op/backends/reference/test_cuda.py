# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors are copied to the host and back: the same bits, on the device they came from."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.op.backends.reference.arguments import moved
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from tests.op.backends.reference.cases import ACTIVATIONS, Case, assert_same, run

HOST = torch.device("cpu")


class OnDevice:
    """The reference backend fed with tensors of another device."""

    def __init__(self, device: str) -> None:
        self.inner = ReferenceBackend()
        self.device = torch.device(device)

    def _there(self, *values):
        return [moved(value, self.device) for value in values]

    def fc1_act(self, plan, *arguments):
        result = self.inner.fc1_act(plan, *self._there(*arguments))
        assert result.pre_activation.device.type == self.device.type
        return moved(result, HOST)

    def gemm(self, plan, kernel, a, w, out, epilogue):
        a, w, there, epilogue = self._there(a, w, out.clone(), epilogue)
        self.inner.gemm(plan, kernel, a, w, there, epilogue)
        out.copy_(there)

    def dact_dgrad(self, plan, *arguments):
        result = self.inner.dact_dgrad(plan, *self._there(*arguments))
        assert result.dprob.device.type == self.device.type
        return moved(result, HOST)

    def wgrad(self, plan, kernel, x, dy, target):
        members = self._there(*(member.clone() for member in target.members()))
        there = WgradTarget(tuple(members), target.accumulate)
        self.inner.wgrad(plan, kernel, *self._there(x, dy), there)
        for member, result in zip(target.members(), members, strict=True):
            member.copy_(result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fmt", [MXFP8, UNQUANTIZED], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_cuda_tensors(activation, fmt):
    case = Case(
        ACTIVATIONS[activation],
        (128, 0, 256),
        512,
        fmt=fmt,
        fc1_bias=True,
        fc2_bias=True,
        scale_bias=True,
        accumulate=True,
    )
    assert_same(run(OnDevice("cuda"), case), run(ReferenceBackend(), case), case.live)
