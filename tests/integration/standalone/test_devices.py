# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's functions on CUDA tensors: the CPU's bytes, without a wait for the GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import te_grouped_mlp.op
from te_grouped_mlp.integration.standalone import on_gpu
from tests.integration.standalone import device_cases as cases
from tests.integration.standalone.test_quantize import make_quantizer
from tests.support.gpu import no_waiting

REQUIRED = os.environ.get("TE_GROUPED_MLP_REQUIRE_KERNELS") == "1"


def test_without_a_gpu_the_interpreter_gives_the_cpus_bytes():
    if not REQUIRED:
        pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", cases.__name__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"{len(cases.CASES)} cases" in run.stdout


def test_a_cpu_imports_no_triton():
    program = (
        "import sys, te_grouped_mlp; te_grouped_mlp.activate(); import torch\n"
        "import transformer_engine.pytorch, transformer_engine_torch as tex\n"
        "before = 'triton' in sys.modules\n"
        "tex.splits_to_offsets(torch.tensor([1, 2]), 3)\n"
        "from tests.integration.standalone.test_quantize import make_quantizer\n"
        "tex.dequantize(tex.quantize(torch.ones(32, 32), make_quantizer(tex)), 4)\n"
        "assert before or 'triton' not in sys.modules\n"
        "assert not any(name.endswith('block_scale') for name in sys.modules)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_a_gpu_without_triton_is_told_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "te_grouped_mlp.op.kernels.block_scale", raising=False)
    monkeypatch.delattr(te_grouped_mlp.op.kernels, "block_scale", raising=False)
    with pytest.raises(ImportError, match="CUDA tensors need Triton"):
        on_gpu.block_scale.__wrapped__()


@pytest.mark.parametrize("arch", [90, 100])
def test_table_kernels_compile(arch, tmp_path, monkeypatch):
    if not REQUIRED:
        pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from te_grouped_mlp.integration.standalone import table_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for function, pointers, constants in (
        (table_kernels.running_sums, {"counts": "*i32", "out": "*i64"}, {"SIZE": 64}),
        (table_kernels.store_addresses, {"out": "*i64"}, {}),
    ):
        signature = {
            name: pointers.get(name, "constexpr" if name in constants else "i64")
            for name in function.arg_names
        }
        source = ASTSource(function, signature, constants)
        text = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
        assert f".target sm_{arch}" in text
        assert "st.global.b64" in text


def everything(tex, x, splits, noop):
    """Each function once, and buffers that show what it did."""
    both, compact = make_quantizer(tex, swizzled=True), make_quantizer(tex)
    groups, device = splits.numel(), x.device
    dense = tex.quantize(x, compact)
    tex.quantize(x, compact, dense, noop)
    back = tex.dequantize(dense, cases.BF16)
    sums, _ = tex.bgrad_quantize(x, both)
    parts = tex.split_quantize(x, [256, 0, 256], [both] * 3)
    packed = tex.grouped_mlp_experimental.swizzle_scales_and_pack_ptrs_for_discrete_weights(
        [dense._rowwise_data], [dense._rowwise_scale_inv], "mxfp8_rowwise", device
    )
    tex.swizzle_scales_for_gemm_(dense)
    some = tex.group_quantize(x, both, groups, splits, noop_flag=noop)
    some, group_sums = tex.bgrad_group_quantize(x, both, groups, splits)
    plain = tex.group_quantize(x, compact, groups, splits)
    one_way = tex.group_quantize(x, make_quantizer(tex, columnwise=False), groups, splits)
    values = tex.group_dequantize(one_way, cases.BF16).rowwise_data
    tex.grouped_swizzle_for_gemm(plain, True, True)
    equal = tex.group_quantize(x, compact, 4, None)
    tex.grouped_swizzle_for_gemm(equal, True, True)
    rows = tex.group_quantize(x, make_quantizer(tex, columnwise=False), groups, splits)
    tex.group_requantize_inplace(rows, both, groups, splits, cases.BF16)
    _, offsets = tex.splits_to_offsets_multi(
        splits, device, strides=[1, 256], include_leading_zero=[False, True],
        dtypes=[torch.int32, torch.int64], bulk_allocate=True,
    )  # fmt: skip
    where = tex.copy_data_ptrs_to_device([x] * 11, device)
    return [
        back, sums, parts[2]._columnwise_scale_inv, *packed, dense._columnwise_scale_inv,
        some.columnwise_scale_inv, group_sums, values, plain.scale_inv, equal.columnwise_scale_inv,
        rows.columnwise_scale_inv, tex.splits_to_offsets(splits, 256), *offsets, where,
    ]  # fmt: skip


def test_the_call_of_everything_is_one_that_a_cpu_takes(tex):
    """So that what tex refuses shows without a GPU."""
    x = torch.randn(512, 256, dtype=torch.bfloat16)
    assert everything(tex, x, torch.tensor([128, 0, 384]), torch.zeros(1))


@pytest.mark.gpu
@pytest.mark.standalone
class TestOnGpu:
    @pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
    def test_bytes_of_the_cpu(self, tex, case):
        cases.same(case(tex, "cuda"), case(tex, "cpu"))

    def test_sums_in_a_fixed_order(self, tex):
        first, second = (cases.sums(tex, "cuda") for _ in range(2))
        cases.same(first, {name: one.cpu() for name, one in second.items()})
        cases.near(first, cases.sums(tex, "cpu"))

    def test_nothing_waits(self, tex):
        x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
        splits = torch.tensor([128, 0, 384], device="cuda")
        noop = torch.zeros(1, device="cuda")
        everything(tex, x, splits, noop)
        with no_waiting():
            everything(tex, x, splits, noop)

    def test_a_graph_may_hold_everything(self, tex):
        x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
        splits = torch.tensor([128, 0, 384], device="cuda")
        noop = torch.zeros(1, device="cuda")
        first = everything(tex, x, splits, noop)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = everything(tex, x, splits, noop)
        for one in held:
            one.zero_()
        graph.replay()
        torch.cuda.synchronize()
        addresses = (3, 4)
        for index, (one, other) in enumerate(zip(held, first, strict=True)):
            if index not in addresses:
                assert torch.equal(one, other), index
        assert held[-1].tolist() == [x.data_ptr()] * 11
        assert held[4].tolist() == [held[5].data_ptr()]
