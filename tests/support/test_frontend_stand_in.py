# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of the frontend's wrappers, against formulas written out in Python."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.csrc import naive_mxfp8 as naive
from tests.support import frontend_stand_in
from tests.support.frontend_machine import Block
from tests.support.frontend_signatures import VERSIONS, signature
from tests.support.frontend_stand_in import StandIn
from tests.support.frontend_tiles import Quantized

ROWS, HIDDEN, FFN = 512, 128, 128
SPLITS = [256, 0, 128]
LIVE = sum(SPLITS)
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E4M3 = 0


@pytest.fixture
def cudnn() -> StandIn:
    return frontend_stand_in.build(unwritten_byte=naive.POISON)


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _kernel_view(scales: torch.Tensor, outer: int, inner: int, count: int = 1) -> torch.Tensor:
    view = scales.view(count, -(-outer // 128), -(-inner // 128), 32, 4, 4)
    return view.permute(3, 4, 1, 5, 2, 0).view(E8M0)


@dataclass
class Operands:
    """Quantized inputs of one call, and the values that they stand for."""

    kwargs: dict[str, Any]
    a: torch.Tensor
    weights: list[torch.Tensor]
    keep: list[torch.Tensor]


def _operands(n: int, k: int, *, forward: bool, stacked: bool = False) -> Operands:
    """Tokens (ROWS, k) and weights (n, k) forward or (k, n) backward, one per expert."""
    x = _draw(ROWS, k)
    data, scales = naive.quantize(x, E4M3, naive.ROW, True)
    _, logical = naive.quantize_axis(x, E4M3, naive.ROW)
    kwargs: dict[str, Any] = {
        "a_tensor": data.view(FP8).view(1, ROWS, k).permute(1, 2, 0),
        "sfa_tensor": _kernel_view(scales, ROWS, k),
        "padded_offsets": torch.tensor(SPLITS).cumsum(0).int(),
        "alpha_tensor": torch.ones(len(SPLITS)),
        "sf_vec_size": 32,
    }
    axis, shape = (naive.ROW, (n, k)) if forward else (naive.COLUMN, (k, n))
    datas, all_scales, values = [], [], []
    for index in range(len(SPLITS)):
        w = _draw(*shape, seed=index + 1) / k**0.5
        each, scale = naive.quantize(w, E4M3, axis, True)
        datas.append(each)
        all_scales.append(scale)
        values.append(naive.dequantize(each, naive.quantize_axis(w, E4M3, axis)[1], E4M3, axis))
    keep = [torch.stack(datas), torch.stack(all_scales)]
    if stacked:
        order = (1, 2, 0) if forward else (2, 1, 0)
        kwargs["b_tensor"] = keep[0].view(FP8).permute(order)
        kwargs["sfb_tensor"] = _kernel_view(keep[1], n, k, len(SPLITS))
    else:
        kwargs["b_ptrs"] = torch.tensor([each.data_ptr() for each in keep[0]])
        kwargs["sfb_ptrs"] = torch.tensor([each.data_ptr() for each in keep[1]])
        kwargs.update(n=n, b_dtype=FP8, b_major="k" if forward else "n")
    a = naive.dequantize(data, logical, E4M3, naive.ROW)
    return Operands(kwargs, a, [v.T if forward else v for v in values], keep)


def _product(operands: Operands, rows: int = LIVE) -> torch.Tensor:
    """Every valid row times the weights of its expert, fp32."""
    out, start = [], 0
    for index, size in enumerate(SPLITS):
        out.append(operands.a[start : start + size] @ operands.weights[index])
        start += size
    return torch.cat(out).float()


def _quantized(**more: Any) -> dict[str, Any]:
    return {
        "norm_const_tensor": torch.ones(1),
        "d_dtype": FP8,
        "discrete_col_sfd": True,
        **more,
    }


def _assert_stored(
    data: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, axis: int
) -> None:
    """Compare an output with the naive quantization, unwritten bytes included."""
    whole = torch.zeros(ROWS, values.shape[1])
    whole[:LIVE] = values
    expected = naive.quantize(whole, E4M3, axis, True, SPLITS)
    assert torch.equal(data.view(torch.uint8)[:, :, 0], expected[0])
    flat = scales.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).reshape(-1)
    assert torch.equal(flat, expected[1].flatten())


def _gates(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = c.double().view(c.shape[0], -1, 2, 32)
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


@pytest.mark.parametrize("stacked", [False, True], ids=["discrete", "stacked"])
def test_glu_writes_the_live_rows_and_no_other_byte(cudnn: StandIn, stacked: bool) -> None:
    operands = _operands(2 * FFN, HIDDEN, forward=True, stacked=stacked)
    bias, prob = _draw(len(SPLITS), 2 * FFN), _draw(ROWS, 1, 1).abs()
    out = cudnn.module.grouped_gemm_glu_wrapper_sm100(
        **operands.kwargs, **_quantized(bias_tensor=bias.T, prob_tensor=prob)
    )
    rows = torch.repeat_interleave(torch.arange(len(SPLITS)), torch.tensor(SPLITS))
    h = _product(operands) + bias[rows]
    gate, linear = _gates(h)
    d = (linear * (gate * gate.sigmoid()) * prob[:LIVE, 0].double()).float()
    assert torch.equal(out["c_tensor"][:LIVE, :, 0], h.bfloat16())
    assert (out["c_tensor"][LIVE:, :, 0].view(torch.uint8) == naive.POISON).all()
    _assert_stored(out["d_tensor"], out["sfd_row_tensor"], d, naive.ROW)
    _assert_stored(out["d_col_tensor"], out["sfd_col_tensor"], d, naive.COLUMN)


def test_runtime_offsets_write_every_row_of_one_expert(cudnn: StandIn) -> None:
    operands = _operands(2 * FFN, HIDDEN, forward=True)
    tables = {name: operands.kwargs[name][:1] for name in ("b_ptrs", "sfb_ptrs", "alpha_tensor")}
    out = cudnn.module.grouped_gemm_glu_wrapper_sm100(
        **{**operands.kwargs, **tables, "padded_offsets": torch.tensor([256]).int()},
        **_quantized(use_single_group_runtime_offsets=True),
    )
    expected = (operands.a @ operands.weights[0]).float().bfloat16()
    assert torch.equal(out["c_tensor"][:, :, 0], expected)
    with pytest.raises(ValueError, match="use_single_group_runtime_offsets is True"):
        cudnn.module.grouped_gemm_glu_wrapper_sm100(
            **operands.kwargs, **_quantized(use_single_group_runtime_offsets=True)
        )


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_dglu_squares_alpha_and_adds_to_dprob(cudnn: StandIn, alpha: float) -> None:
    operands = _operands(FFN, HIDDEN, forward=False)
    operands.kwargs["alpha_tensor"] *= alpha
    c = _draw(ROWS, 2 * FFN).bfloat16()
    prob, dprob = _draw(ROWS, 1, 1).abs(), torch.ones(ROWS, 1, 1)
    out = cudnn.module.grouped_gemm_dglu_wrapper_sm100(
        **operands.kwargs,
        **_quantized(
            c_tensor=c.view(ROWS, -1, 1),
            beta_tensor=torch.ones(len(SPLITS)),
            prob_tensor=prob,
            dprob_tensor=dprob,
            generate_dbias=True,
        ),
    )
    g = (_product(operands) * alpha**2).double()
    gate, linear = _gates(c[:LIVE])
    s = gate.sigmoid()
    assert out["dprob_tensor"] is dprob
    wanted = 1 + (g * (linear * (gate * s))).sum(1).float()
    assert torch.equal(dprob[:LIVE, 0, 0], wanted)
    assert torch.equal(dprob[LIVE:], torch.ones(ROWS - LIVE, 1, 1))
    gp = g * prob[:LIVE, 0].double()
    parts = (gp * (linear * s * (1 + gate * (1 - s))), gp * (gate * s))
    d = torch.stack([p.view(LIVE, -1, 32) for p in parts], 2).reshape(LIVE, -1).float()
    _assert_stored(out["d_row_tensor"], out["sfd_row_tensor"], d, naive.ROW)
    _assert_stored(out["d_col_tensor"], out["sfd_col_tensor"], d, naive.COLUMN)
    assert torch.equal(out["dbias_tensor"][:, :, 0], naive.column_sums(d, SPLITS).bfloat16())


def test_dsrelu_gives_the_activated_columns_again(cudnn: StandIn) -> None:
    operands = _operands(FFN, HIDDEN, forward=False)
    operands.kwargs["alpha_tensor"] *= 2
    c, prob = _draw(ROWS, FFN).bfloat16(), _draw(ROWS, 1, 1).abs()
    out = cudnn.module.grouped_gemm_dsrelu_wrapper_sm100(
        **operands.kwargs, **_quantized(c_tensor=c.view(ROWS, -1, 1), prob_tensor=prob)
    )
    g, r = (_product(operands) * 2).double(), c[:LIVE].double().relu()
    p = prob[:LIVE, 0].double()
    assert torch.equal(out["dprob_tensor"][:LIVE, 0, 0], (g * (r * r)).sum(1).float())
    _assert_stored(out["d_row_tensor"], out["sfd_row_tensor"], (g * p * (2 * r)).float(), naive.ROW)
    _assert_stored(
        out["d_srelu_tensor"], out["sfd_col_d_srelu_tensor"], (r * r * p).float(), naive.COLUMN
    )


def test_quant_writes_into_the_given_tensor(cudnn: StandIn) -> None:
    operands = _operands(HIDDEN, FFN, forward=True)
    bias, prob = _draw(len(SPLITS), HIDDEN), _draw(ROWS, 1, 1).abs()
    buffer = torch.full((ROWS, HIDDEN), 7.0, dtype=torch.bfloat16)
    view = buffer.as_strided((ROWS, HIDDEN, 1), (HIDDEN, 1, ROWS * HIDDEN))
    call = cudnn.module.grouped_gemm_quant_wrapper_sm100
    out = call(**operands.kwargs, d_tensor=view, bias_tensor=bias.T, prob_tensor=prob)
    rows = torch.repeat_interleave(torch.arange(len(SPLITS)), torch.tensor(SPLITS))
    # With a bias the probability acts on the bias alone; without one, on the product.
    expected = _product(operands) + prob[:LIVE, 0] * bias[rows]
    assert out["d_tensor"] is view
    assert torch.equal(buffer[:LIVE], expected.bfloat16())
    assert (buffer[LIVE:] == 7.0).all()
    out = call(**operands.kwargs, prob_tensor=prob)
    expected = _product(operands) * prob[:LIVE, 0]
    assert torch.equal(out["d_tensor"][:LIVE, :, 0], expected.bfloat16())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("mode", ["dense", "discrete"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad(cudnn: StandIn, mode: str, accumulate: bool, dtype: torch.dtype) -> None:
    sides = [_draw(ROWS, FFN), _draw(ROWS, HIDDEN)]
    axis = naive.COLUMN
    stored = [naive.quantize(side, E4M3, axis, True, SPLITS) for side in sides]
    exact = []
    for side, (data, _) in zip(sides, stored, strict=True):
        scale = naive.quantize_axis(side[:LIVE], E4M3, axis)[1]
        exact.append(naive.dequantize(data[:LIVE], scale, E4M3, axis))
    out = torch.full((len(SPLITS), FFN, HIDDEN), 3.0, dtype=dtype)
    target = (
        {"wgrad_tensor": out}
        if mode == "dense"
        else {"wgrad_ptrs": torch.tensor([member.data_ptr() for member in out])}
    )
    cudnn.module.grouped_gemm_wgrad_wrapper_sm100(
        stored[0][0].view(FP8).T,
        stored[1][0].view(FP8),
        stored[0][1],
        stored[1][1],
        torch.tensor(SPLITS).cumsum(0).int(),
        output_mode=mode,
        wgrad_dtype=dtype,
        sf_vec_size=32,
        accumulate_on_output=accumulate,
        **target,
    )
    start = 0
    for index, size in enumerate(SPLITS):
        rows = slice(start, start + size)
        start += size
        wanted = (exact[0][rows].T @ exact[1][rows]).float().to(dtype)
        if accumulate:
            wanted = torch.full_like(wanted, 3.0) + wanted
        assert torch.equal(out[index], wanted)


def _spilled(spill: str | bool, splits: list[int]) -> tuple[dict[str, Any], StandIn, Operands]:
    cudnn = frontend_stand_in.build(spill_256=spill, unwritten_byte=naive.POISON)
    operands = _operands(FFN, HIDDEN, forward=True)
    operands.kwargs["padded_offsets"] = torch.tensor(splits).cumsum(0).int()
    prob = torch.ones(ROWS, 1, 1)
    out = cudnn.module.grouped_gemm_srelu_wrapper_sm100(
        **operands.kwargs, **_quantized(prob_tensor=prob)
    )
    return out, cudnn, operands


@pytest.mark.parametrize(("spill", "owner"), [("first", 1), ("last", 0)])
def test_spilled_tile_lands_in_the_neighbour(spill: str, owner: int) -> None:
    out, cudnn, operands = _spilled(spill, [128, 256, 128])
    rows = slice(128, 256)
    wanted = (operands.a[rows] @ operands.weights[owner]).float().bfloat16()
    assert torch.equal(out["c_tensor"][rows, :, 0], wanted)
    # The last expert is odd too, and the buffer ends with it: 128 rows of 4 row scales each, one
    # tile of column scales.
    assert cudnn.machine.out_of_bounds == [("sfd_row:d", 512), ("sfd_col:d", 512)]


def test_spilled_column_scales_land_in_the_own_experts_next_column_tile() -> None:
    """Row tile T/128 of column tile j has the address of row tile 0 of column tile j + 1."""
    machine = frontend_stand_in.build(spill_256=True, unwritten_byte=naive.POISON).machine
    target = Quantized(machine, 512, 256)
    values = _draw(128, 256)
    target.store(values, Block(0, 128, 256, extent=128, spilled=True))
    scales = target.column_scale.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).reshape(-1, 512)
    _, alone = naive.quantize(values, E4M3, naive.COLUMN, True)
    written = [index for index in range(8) if (scales[index] != naive.POISON).any()]
    assert written == [1, 2]
    assert torch.equal(scales[1:3].flatten(), alone.flatten())


def test_without_spill_an_odd_expert_is_exact() -> None:
    out, cudnn, operands = _spilled(False, [128, 256, 128])
    ends = [0, 128, 384, 512]
    for index in range(3):
        rows = slice(ends[index], ends[index + 1])
        wanted = (operands.a[rows] @ operands.weights[index]).float().bfloat16()
        assert torch.equal(out["c_tensor"][rows, :, 0], wanted)
    assert cudnn.machine.out_of_bounds == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padded_offsets": torch.tensor([256, 256, 384])}, "padded_offsets is"),
        ({"padded_offsets": torch.tensor([256, 256, 300]).int()}, "padded_offsets is"),
        ({"padded_offsets": torch.tensor([256, 256, 640]).int()}, "padded_offsets is"),
        ({"padded_offsets": torch.tensor([256, 256]).int()}, "padded_offsets is 2"),
        ({"sf_vec_size": 16}, "sf_vec_size is 16"),
        ({"b_major": "n"}, "b_major is n"),
        ({"norm_const_tensor": None}, "norm_const_tensor is None"),
        ({"d_dtype": torch.bfloat16}, "d_dtype is torch.bfloat16"),
        ({"alpha_tensor": torch.ones(2)}, "alpha_tensor is 2"),
        ({"act_func": "dswiglu"}, "act_func is dswiglu"),
        ({"b_ptrs": torch.zeros(3, dtype=torch.int64)}, "b_ptrs has an address that is null"),
        ({"n": None}, "n is None"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_argument_is_named(cudnn: StandIn, changes: dict[str, Any], message: str) -> None:
    operands = _operands(2 * FFN, HIDDEN, forward=True)
    kwargs = {**operands.kwargs, **_quantized(), **changes}
    with pytest.raises(ValueError, match=message):
        cudnn.module.grouped_gemm_glu_wrapper_sm100(**kwargs)


def test_buffer_rows_that_are_no_multiple_of_256_are_refused(cudnn: StandIn) -> None:
    operands = _operands(2 * FFN, HIDDEN, forward=True)
    kwargs = dict(operands.kwargs)
    kwargs["a_tensor"] = kwargs["a_tensor"][:384]
    kwargs["sfa_tensor"] = kwargs["sfa_tensor"][:, :, :3]
    with pytest.raises(ValueError, match=r"a_tensor.shape\[0\] is 384"):
        cudnn.module.grouped_gemm_glu_wrapper_sm100(**kwargs, **_quantized())


def test_row_major_scales_are_refused(cudnn: StandIn) -> None:
    operands = _operands(2 * FFN, HIDDEN, forward=True)
    kwargs = {**operands.kwargs, "sfa_tensor": torch.zeros(ROWS, HIDDEN // 32).to(E8M0)}
    with pytest.raises(ValueError, match="sfa_tensor has shape"):
        cudnn.module.grouped_gemm_glu_wrapper_sm100(**kwargs, **_quantized())


# Argument -> the wrappers that have it, by release.
FACTS = {
    "use_single_group_runtime_offsets": lambda v: (
        {"glu", "dglu", "quant"} if v >= "1.27.0" else set()
    ),
    "deterministic": lambda v: (
        ({"dsrelu"} if v >= "1.28.0" else set())
        | ({"dglu"} if v in ("1.29.1", "1.31.0", "1.32.0") else set())
    ),
    "tanh_clamp_scale": lambda v: {"srelu", "dsrelu"} if v >= "1.29.0" else set(),
    "situ_beta1": lambda v: {"glu", "dglu", "glu_hadamard"} if v >= "1.28.0" else set(),
    "descriptor_workspace": lambda v: {"wgrad"} if v >= "1.30.0" else set(),
    "d_tensor": lambda v: {"quant"} if v >= "1.26.0" else set(),
    "linear_offset": lambda v: {"glu", "dglu"} if v >= "1.24.0" else set(),
    "generate_amax": lambda v: {"quant"} if v >= "1.31.0" else set(),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("argument", FACTS)
def test_signatures_by_release(version: str, argument: str) -> None:
    module = vars(frontend_stand_in.build(version).module)
    having = {
        name.split("_wrapper")[0].removeprefix("grouped_gemm_")
        for name, each in module.items()
        if name.endswith("_wrapper_sm100") and argument in inspect.signature(each).parameters
    }
    assert having == FACTS[argument](version)


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("version", ["1.26.0", "1.32.0"])
def test_a_feature_can_be_forced(version: str, present: bool) -> None:
    built = frontend_stand_in.build(version, runtime_offsets=present, deterministic=present)
    for name in ("glu", "dglu", "quant"):
        wrapper = getattr(built.module, f"grouped_gemm_{name}_wrapper_sm100")
        parameters = inspect.signature(wrapper).parameters
        assert ("use_single_group_runtime_offsets" in parameters) == present
    parameters = inspect.signature(built.module.grouped_gemm_dglu_wrapper_sm100).parameters
    assert ("deterministic" in parameters) == present


def test_an_argument_of_another_release_is_refused() -> None:
    old = frontend_stand_in.build("1.26.0").module
    with pytest.raises(TypeError, match="use_single_group_runtime_offsets"):
        old.grouped_gemm_quant_wrapper_sm100(
            None, None, None, None, use_single_group_runtime_offsets=True
        )


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="version is '9.9.9'"):
        frontend_stand_in.build("9.9.9")
    with pytest.raises(ValueError, match="wrapper is 'x'"):
        signature("x", "1.32.0")
    with pytest.raises(ValueError, match="spill is 'twice'"):
        frontend_stand_in.build(spill_256="twice")


def test_installed_package_is_what_others_find() -> None:
    code = """
import importlib.metadata
from tests.support import frontend_stand_in
stand_in = frontend_stand_in.install("1.29.1")
from cudnn import grouped_gemm_glu_wrapper_sm100
import cudnn
assert cudnn is stand_in.module
assert importlib.metadata.version("nvidia-cudnn-frontend") == "1.29.1" == cudnn.__version__
try:
    frontend_stand_in.install("1.32.0")
except RuntimeError as error:
    assert "one release only" in str(error)
else:
    raise AssertionError("two releases in one process")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
