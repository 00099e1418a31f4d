# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP8 in Triton: the bytes of the C++ kernels, without a GPU in the interpreter and as code."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

if os.environ.get("TE_GROUPED_MLP_REQUIRE_KERNELS") != "1":
    pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from te_grouped_mlp.op.kernels import block_scale
from te_grouped_mlp.op.kernels import block_scale_kernels as kernels
from tests.op import block_scale_cases as cases
from tests.op.block_scale_cases import SMALL, Case
from tests.support.gpu import no_waiting

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_interpreted_kernels_give_the_bytes_of_the_cpp_kernels():
    run = subprocess.run(
        [sys.executable, "-m", cases.__name__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"{len(SMALL)} cases" in run.stdout


KINDS = ("normal", "wide", "bits", "special")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGE = [
    *(Case(1024, 416, (128, 0, 384, 256, 0), dtype=d, kind=k) for d in TYPES for k in KINDS),
    *(Case(1024, 1056, (256, 640), e5m2=True, dtype=d, kind=k) for d in TYPES for k in KINDS),
    *(Case(1056, 320, members=3, nan_in_scale=True, dtype=d, kind=k) for d in TYPES for k in KINDS),
    *(Case(640, 512, (128,) * 5, swizzled=False, two_d=True, kind=k) for k in KINDS),
    Case(4096, 2048, (1024,) * 4, kind="normal"),
    Case(4096, 2048, tuple([128] * 31), kind="normal"),
    Case(256, 96, (128, 128), extra_stride=1),
]


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda case: case.id)
    def test_bytes(self, case):
        cases.check(case, "cuda")

    def test_pairs(self):
        cases.check_pairs("cuda")
        cases.check_stray_ends("cuda")

    def test_integers_give_what_the_device_converts(self, monkeypatch):
        monkeypatch.setattr(block_scale, "_hardware", lambda: False)
        for case in (*SMALL, Case(512, 256, (128, 256), kind="wide")):
            cases.check(case, "cuda")

    @pytest.mark.parametrize(("rows", "cols", "warps"), [(64, 128, 4), (128, 128, 8), (32, 64, 2)])
    def test_configurations_agree(self, rows, cols, warps):
        config = block_scale.Config(rows, cols, warps)
        x = cases.source_of(Case(512, 352), "cuda")
        ends = torch.tensor([128, 512], dtype=torch.int32, device="cuda")
        results = []
        for each in (block_scale.QUANTIZE, config):
            out = {name: torch.full_like(x, 7, dtype=torch.uint8) for name in ("row_data",)}
            out["row_scale"] = torch.full((512 * 12,), 7, dtype=torch.uint8, device="cuda")
            out["column_values"] = torch.zeros(512, 352, dtype=torch.bfloat16, device="cuda")
            block_scale.quantize(x, ends, **out, config=each)
            results.append([one.view(torch.uint8) for one in out.values()])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))

    def test_a_graph_may_hold_every_call_and_none_synchronises(self):
        case = Case(512, 256, (128, 256), kind="normal")
        x = cases.source_of(case, "cuda")
        want = cases.expected(case, x.cpu(), True)
        ends = torch.tensor(case.splits).cumsum(0).int().cuda()
        got = {name: torch.empty_like(one, device="cuda") for name, one in want.items()}
        moved = torch.empty_like(got["row_scale"])
        back = torch.empty(512, 256, dtype=torch.bfloat16, device="cuda")

        def step():
            block_scale.quantize(x, ends, **got)
            block_scale.swizzle(
                got["row_scale"], ends, 512, 256, moved, axis_column=False, inverse=True
            )
            block_scale.dequantize(
                got["column_data"], got["column_scale"], ends, back, axis_column=True
            )

        step()
        with no_waiting():
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for one in (*got.values(), moved, back):
            one.zero_()
        graph.replay()
        torch.cuda.synchronize()
        live = 384 * 256
        assert torch.equal(got["column_data"][:live].cpu(), want["column_data"][:live])
        assert torch.equal(back.view(-1)[:live].cpu(), want["column_values"][:live])

    def test_sizes_share_one_kernel(self):
        def call(rows, cols, splits):
            x = torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda")
            ends = torch.tensor(splits, dtype=torch.int32, device="cuda").cumsum(0).int()
            out = torch.empty_like(x)
            block_scale.quantize(x, ends, row_values=out)

        call(256, 256, [128, 128])
        held = sum(len(v[0]) for v in kernels.quantize_tiles.device_caches.values())
        for size in (1, 2, 3, 17):
            call(128 * size, 64 * size, [128 * size, 0])
        assert sum(len(v[0]) for v in kernels.quantize_tiles.device_caches.values()) == held


OUTPUTS = {
    "row_data": "*u8", "row_scale": "*u8", "column_data": "*u8", "column_scale": "*u8",
    "row_values": "*bf16", "column_values": "*bf16",
}  # fmt: skip
FORMS = {
    "values and column bytes": ("row_values", "column_data", "column_scale"),
    "values": ("row_values", "column_values"),
    "paired values": ("row_values", "column_values"),
    "bytes": ("row_data", "row_scale", "column_data", "column_scale"),
    "everything": tuple(OUTPUTS),
}
COMMON = {"noop": None, "GROUPS": 8, "E5M2": False, "SWIZZLED": True, "HARDWARE": True}


def compiled(function, arch, pointers, constants, config):
    """The kernel's metadata and texts for an architecture, its pointers 16-byte aligned."""
    constants = {**constants, "ROWS": config.rows, "COLS": config.cols}
    constants = {name: one for name, one in constants.items() if name in function.arg_names}
    constants |= {name: None for name in OUTPUTS if name in function.arg_names} | constants
    for name in pointers:
        constants.pop(name, None)
    signature = {
        name: pointers.get(name, "constexpr" if name in constants else "i32")
        for name in function.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name in pointers
    }
    source = ASTSource(function, signature, constants, aligned)
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options={"num_warps": config.warps})


def wide_accesses(ptx, kind):
    """How many bytes each thread's widest global accesses of a kind move, one entry for each."""
    found = re.findall(rf"\b{kind}\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in found]


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_quantization_is_wide_and_keeps_its_registers(form, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"src": "*bf16", "group_end_offsets": "*i32"} | {
        name: OUTPUTS[name] for name in FORMS[form]
    }
    gate_linear_interleaved = form.startswith("paired")
    constants = {
        **COMMON,
        "STRIDE": 16,
        "TWO_D": False,
        "NAN": False,
        "INTERLEAVED": gate_linear_interleaved,
    }
    config = block_scale.QUANTIZE
    kernel = compiled(kernels.quantize_tiles, arch, pointers, constants, config)
    text = kernel.asm["ptx"]
    assert ".local" not in text
    assert wide_accesses(text, "ld").count(16) == config.rows * config.cols // config.warps // 256
    assert max(wide_accesses(text, "st")) >= 8
    assert "satfinite.e4m3x2" in text
    assert spilled_bytes(kernel, tmp_path) == 0


def test_compiled_dequantization_is_wide_and_keeps_its_registers(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"data": "*u8", "scale": "*u8", "group_end_offsets": "*i32", "out": "*bf16"}
    constants = {**COMMON, "COLUMN": True}
    config = block_scale.DEQUANTIZE
    kernel = compiled(kernels.dequantize_tiles, 90, pointers, constants, config)
    assert wide_accesses(kernel.asm["ptx"], "st").count(16) > 0
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("column", [False, True])
def test_scale_movers_compile_without_spills(column, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = block_scale.Config(128, 128, 4)
    pointers = {"scale": "*u8", "group_end_offsets": "*i32", "out": "*u8"}
    constants = {"GROUPS": 8, "COLUMN": column, "INVERSE": False}
    kernel = compiled(kernels.swizzle_tiles, arch, pointers, constants, config)
    assert spilled_bytes(kernel, tmp_path) == 0
    pointers = {"table": "*i64", "out": "*u8"}
    kernel = compiled(kernels.swizzle_listed_tiles, arch, pointers, {"COLUMN": column}, config)
    assert spilled_bytes(kernel, tmp_path) == 0


def spilled_bytes(kernel, folder):
    """The stack of the machine code, by the assembler that comes with Triton."""
    (folder / "code.ptx").write_text(kernel.asm["ptx"])
    target = re.search(r"\.target (sm_\w+)", kernel.asm["ptx"]).group(1)
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    newer = os.path.join(tools, "ptxas-blackwell")
    use = newer if target >= "sm_100" and len(target) > 5 and os.path.exists(newer) else None
    run = subprocess.run(
        [use or os.path.join(tools, "ptxas"), "-v", f"-arch={target}", str(folder / "code.ptx"),
         "-o", str(folder / "code.cubin")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    stack, stores, loads = map(
        int,
        re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            run.stderr,
        ).groups(),
    )
    return stack + stores + loads


class TestBadInput:
    x = torch.zeros(128, 64)
    values = torch.zeros(128, 64, dtype=torch.bfloat16)
    ends = torch.tensor([128], dtype=torch.int32)

    @pytest.mark.parametrize(
        ("error", "words", "change"),
        [
            (TypeError, "src is torch.float64", {"src": x.double()}),
            (ValueError, "src has 1 dimensions", {"src": x.view(-1)}),
            (ValueError, "columns a multiple of 32", {"src": torch.zeros(128, 40)}),
            (ValueError, "column stride 128", {"src": torch.zeros(64, 128).t()}),
            (TypeError, "group_end_offsets is torch.int64", {"group_end_offsets": ends.long()}),
            (ValueError, "group_end_offsets has 0 elements", {"group_end_offsets": ends[:0]}),
            (ValueError, "members is 2", {"members": 2}),
            (ValueError, "members is 3 for 128 rows", {"members": 3, "group_end_offsets": None}),
            (ValueError, "row_scale is None", {"row_data": torch.zeros(128, 64).byte()}),
            (TypeError, "row_values is torch.float32", {"row_values": x}),
            (ValueError, "row_values has 64 elements", {"row_values": values[:1]}),
        ],
    )
    def test_refused_by_name(self, error, words, change):
        arguments = {
            "src": self.x,
            "group_end_offsets": self.ends,
            "row_values": self.values,
            **change,
        }
        with pytest.raises(error, match=re.escape(words)):
            block_scale.quantize(
                arguments.pop("src"), arguments.pop("group_end_offsets"), **arguments
            )

    def test_dequantize_and_swizzle_refuse_small_buffers(self):
        data, scale = torch.zeros(128 * 64).byte(), torch.zeros(512).byte()
        with pytest.raises(ValueError, match="scale has 8 elements"):
            block_scale.dequantize(data, scale[:8], None, self.values, axis_column=True)
        with pytest.raises(ValueError, match="out has 8 elements"):
            block_scale.swizzle(scale, None, 128, 64, scale[:8], axis_column=False)
