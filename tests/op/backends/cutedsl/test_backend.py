# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Results reach targets that TMA cannot address: a kernel writes beside them, and that is copied.

The kernels are stood in for by what they compute, on CPU tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from te_grouped_mlp.op.backends.base import GemmEpilogue
from te_grouped_mlp.op.backends.cutedsl import arguments, backend
from te_grouped_mlp.op.formats import UNQUANTIZED
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis
from tests.op.backends.reference import cases

CASE = cases.Case(cases.ACTIVATIONS["srelu"], (3, 0, 5), 10, hidden=128, ffn=64, fmt=UNQUANTIZED)
ENDS = (0, 3, 3, 8)


def misaligned(*shape: int, dtype: torch.dtype = torch.bfloat16, fill: float = 7.0) -> Any:
    """A contiguous tensor that begins one element past an aligned address."""
    raw = torch.full((int(torch.Size(shape).numel()) + 1,), fill, dtype=dtype)
    out = raw[1:].view(shape)
    assert out.is_contiguous()
    assert not arguments.is_addressable(out)
    return out


@dataclasses.dataclass
class Launcher:
    """Stands for a compiled kernel; its output must be addressable."""

    adds: bool = False

    def __call__(self, a: Any, b: Any, out: Any, added: Any, offsets: Any, **_rest: Any) -> None:
        assert arguments.is_addressable(out)
        assert (added is not None) == self.adds
        for group, (start, stop) in enumerate(zip(ENDS, ENDS[1:], strict=False)):
            if a.dim() == 2 and b.dim() == 3:
                out[start:stop] = a[start:stop].float() @ b[group].float().t()
            else:
                product = a[:, start:stop].float() @ b[:, start:stop].float().t()
                out[group] = product + (out[group].float() if self.adds else 0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "require_bf16", lambda *_: None)
    monkeypatch.setattr(backend, "target_arch", lambda: 9)
    monkeypatch.setattr(
        backend,
        "launcher_of",
        lambda _problem, _index, key, _arch, *rest: Launcher(
            adds=key is backend.keys.wgrad and rest[2]
        ),
    )


def operand(features: int, seed: int) -> Any:
    plan = CASE.plan()
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, features, generator=generator).bfloat16() for n in CASE.splits]
    return plan, parts, cases.token_operand(CASE, plan.layout, parts)


def test_an_output_is_written_and_its_tail_is_kept(no_gpu: None) -> None:
    plan, parts, a = operand(CASE.ffn, 1)
    weights = [torch.randn(CASE.hidden, CASE.ffn).bfloat16() for _ in CASE.splits]
    w = cases.weight_operand(CASE, weights, Axis.ROW)
    out = misaligned(CASE.rows, CASE.hidden)
    native = backend.CuteDslBackend()
    native.gemm(plan, Kernel.FC2_FORWARD, a, w, out, GemmEpilogue(zero_tail=False))
    rows = [part.float() @ weight.float().t() for part, weight in zip(parts, weights, strict=True)]
    assert torch.equal(out[: CASE.live], torch.cat(rows).bfloat16())
    assert (out[CASE.live :] == 7.0).all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradients_are_written(no_gpu: None, dtype: torch.dtype, accumulate: bool) -> None:
    plan, x_parts, x = operand(CASE.ffn, 2)
    _, dy_parts, dy = operand(CASE.hidden, 3)
    members = tuple(misaligned(CASE.hidden, CASE.ffn, dtype=dtype, fill=float(n)) for n in range(3))
    native = backend.CuteDslBackend()
    native.wgrad(plan, Kernel.FC2_WGRAD, x, dy, WgradTarget(members, accumulate))
    for index, member in enumerate(members):
        product = dy_parts[index].float().t() @ x_parts[index].float()
        assert torch.equal(member, (product + (index if accumulate else 0)).to(dtype))
