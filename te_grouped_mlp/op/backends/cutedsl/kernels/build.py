# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A key becomes a compiled kernel."""

from dataclasses import replace
from typing import Any

from cutlass import BFloat16, Float32

from te_grouped_mlp.op.backends.cutedsl.config import Op
from te_grouped_mlp.op.backends.cutedsl.kernels import dact_dgrad, fc1_act, gemm, rows, wgrad
from te_grouped_mlp.op.backends.cutedsl.kernels.quack_base import (
    Epilogue,
    Operands,
    compile_kernel,
)
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey
from te_grouped_mlp.op.formats import DType

_ROWS = {
    Op.REDUCE_ROW_PARTIALS: rows.compile_reduce_row_partials,
    Op.ZERO_TAIL: rows.compile_zero_tail,
}
_TYPES = {DType.BFLOAT16: BFloat16, DType.FLOAT32: Float32}


def build(key: KernelKey) -> Any:
    """Compile the kernel of `key` for the process's target; see `quack_base.compile_kernel`."""
    if key.op in _ROWS:
        return _ROWS[key.op]()
    assert key.tile is not None
    gated = key.spec is not None and key.spec.is_gated
    cls, operands, values = _PARTS[key.op](key, gated)
    width = key.spec.interleave if gated else None
    traits = {
        "spec": key.spec,
        "round_to_odd": key.round_to_odd,
        "pair_width": width,
        "EpilogueArguments": cls.EpilogueArguments,
    }
    epilogue = type(f"{cls.__name__}_{key.op.value}", (cls,), traits)
    operands = replace(operands, reversed_experts=key.reversed_experts)
    return compile_kernel(epilogue, key.tile, operands, values, key.arch)


def _fc1_act(key: KernelKey, gated: bool) -> tuple[type[Epilogue], Operands, dict[str, Any]]:
    values: dict[str, Any] = {"activated": (BFloat16, "n")}
    if key.bias:
        values["bias"] = (Float32, 2)
    if key.scale:
        values["prob"] = _TYPES[key.scale]
    operands = Operands(d=BFloat16 if key.pre_activation else None)
    return fc1_act.FC1ActGated if gated else fc1_act.FC1ActUnary, operands, values


def _gemm(key: KernelKey, gated: bool) -> tuple[type[Epilogue], Operands, dict[str, Any]]:
    values: dict[str, Any] = {}
    if key.bias:
        values["bias"] = (Float32, 2)
    if key.scale:
        values["bias_scale"] = _TYPES[key.scale]
    dgrad = key.op is Op.FC1_DGRAD
    operands = Operands(majors="knn" if dgrad else "kkn", b_transposed=dgrad)
    return gemm.GatedDgrad if dgrad and gated else gemm.Gemm, operands, values


def _dact(key: KernelKey, gated: bool) -> tuple[type[Epilogue], Operands, dict[str, Any]]:
    values: dict[str, Any] = {}
    if key.scale:
        values["prob"] = _TYPES[key.scale]
    if key.dprob:
        values["row_partials"] = Float32
    if key.activated:
        values["activated"] = (BFloat16, "n")
    operands = Operands(c=BFloat16, majors="knn", b_transposed=True, packed=gated)
    return dact_dgrad.DactGated if gated else dact_dgrad.DactUnary, operands, values


def _wgrad(key: KernelKey, gated: bool) -> tuple[type[Epilogue], Operands, dict[str, Any]]:
    out = _TYPES[key.out]
    operands = Operands(d=out, c=out if key.accumulate else None, majors="mnn", varlen="k")
    return wgrad.GatedWgrad if gated else wgrad.Wgrad, operands, {}


_PARTS = {
    Op.FC1_ACT: _fc1_act,
    Op.FC2_FORWARD: _gemm,
    Op.FC1_DGRAD: _gemm,
    Op.DACT_DGRAD: _dact,
    Op.FC1_WGRAD: _wgrad,
    Op.FC2_WGRAD: _wgrad,
}
