# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of reductions: on a GPU against float64, and without one as compiled code."""

from __future__ import annotations

import os
import re

import pytest
import torch

if os.environ.get("TE_GROUPED_MLP_REQUIRE_KERNELS") != "1":
    pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from te_grouped_mlp.op.kernels import group_reductions_kernels as kernels

SIZES = (1, 0, 31, 32, 127, 0, 128, 129, 1500)
LIVE = sum(SIZES)

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def ends():
    return torch.tensor(SIZES).cumsum(0).int().cuda()


def rows(extra, *shape, tail=float("nan"), dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    out = torch.full((LIVE + extra, *shape), tail)
    out[:LIVE] = torch.randn(LIVE, *shape, generator=generator)
    return out.to(dtype).cuda()


def by_expert(values):
    return values[:LIVE].double().cpu().split(SIZES)


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("scaled", [False, True])
    @pytest.mark.parametrize("cols", [64, 192, 520])
    def test_column_sums(self, cols, scaled):
        dy = rows(40, cols, dtype=torch.bfloat16)
        scale = rows(40) if scaled else None
        got = kernels.column_sums(dy, scale, ends())
        values = dy.double() * (1.0 if scale is None else scale.double()[:, None])
        want = torch.stack([part.sum(0) for part in by_expert(values)])
        assert got.dtype is torch.float32
        # A sum of 1500 values of order one; its terms cancel, so the bound is absolute.
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-6, atol=1e-4)
        assert not got[1].any()

    @pytest.mark.parametrize("cols", [64, 192, 520])
    def test_row_dots(self, cols):
        dy = rows(40, cols, dtype=torch.bfloat16)
        bias = torch.randn(len(SIZES), cols).bfloat16().cuda()
        got = kernels.row_dots(dy, bias, ends())
        want = torch.cat(
            [part @ b.double().cpu() for part, b in zip(by_expert(dy), bias, strict=True)]
        )
        torch.testing.assert_close(got[:LIVE].double().cpu(), want, rtol=1e-5, atol=1e-4)
        assert not got[LIVE:].any()

    def test_padding_and_other_experts_are_invisible(self):
        bias = torch.randn(len(SIZES), 192).cuda()
        first = None
        for extra, tail in ((0, 0.0), (128, float("nan")), (700, float("inf")), (0, 0.0)):
            dy, scale = rows(extra, 192, tail=tail), rows(extra, tail=tail)
            sums = kernels.column_sums(dy, scale, ends())
            dots = kernels.row_dots(dy, bias, ends())[:LIVE]
            if first is None:
                first = sums, dots
            assert torch.equal(sums, first[0])
            assert torch.equal(dots, first[1])
        alone = torch.tensor((*[0] * (len(SIZES) - 1), SIZES[-1])).cumsum(0).int().cuda()
        last = rows(0, 192)[-SIZES[-1] :].contiguous()
        scale = rows(0)[-SIZES[-1] :].contiguous()
        assert torch.equal(kernels.column_sums(last, scale, alone)[-1], first[0][-1])


KERNELS = {
    "_partial_sums": (
        {"values": "*bf16", "weights": "*fp32", "group_end_offsets": "*i32", "parts": "*fp32"},
        {"WEIGHTED": True, "SEGMENTS": 16, "ROWS": 64, "COLUMNS": 64},
    ),
    "_join_parts": ({"parts": "*fp32", "out": "*fp32"}, {"SEGMENTS": 16, "BLOCK": 256}),
    "_row_dots": (
        {"values": "*bf16", "table": "*bf16", "group_end_offsets": "*i32", "out": "*fp32"},
        {"GROUPS": 8, "BLOCK": 16, "WIDE": 128},
    ),
}


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_sums_have_no_atomics(name, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers, constants = KERNELS[name]
    function = getattr(kernels, name)
    signature = {
        argument: pointers.get(argument, "constexpr" if argument in constants else "i32")
        for argument in function.arg_names
    }
    source = ASTSource(function, signature, constants)
    text = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
    assert f".target sm_{arch}" in text
    assert not re.search(r"^\s*(?:@!?%\w+\s+)?(?:red|atom)\.", text, re.MULTILINE)
