# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A backend for CPU tensors whose plans read values, so that this way runs without a GPU.

The reference's arithmetic over exact copies, under the native backend's name; `block_scale` is
replaced by the C++ kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import environment
from te_grouped_mlp.op.backends.reference import arguments, capability
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.environment import Environment
from te_grouped_mlp.op.plan import Plan, Reject
from te_grouped_mlp.op.problem import Call, Problem
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    DequantizedCopy,
    GroupedOperand,
    WeightOperand,
)
from tests.support import backends

NAME = "cutedsl"


class ValuesBackend(ReferenceBackend):
    """The reference backend, under the native one's name; its plans read values."""

    name = NAME
    refusal = staticmethod(capability.refusal)

    def plan(self, problem: Problem, call: Call, env: Environment) -> Plan | Reject:
        """Plan as the reference does."""
        plan = capability.plan(problem, call, env)
        if isinstance(plan, Reject):
            return plan
        reuses = env.switches.reuse_weights
        return dataclasses.replace(plan, backend=NAME, reads_values=True, reuses_weights=reuses)


class Calls(list[str]):
    """The names of the functions of `block_scale` that were called."""


@contextlib.contextmanager
def in_use(monkeypatch: pytest.MonkeyPatch, **switches: Any) -> Iterator[Calls]:
    """Make it the backend that runs, over CPU tensors."""
    calls = Calls()
    backend = ValuesBackend()
    backends.install(monkeypatch, NAME, backend, backend)
    stand_in = _block_scale(calls)
    monkeypatch.setitem(sys.modules, "te_grouped_mlp.op.kernels.block_scale", stand_in)
    monkeypatch.setattr("te_grouped_mlp.op.kernels.block_scale", stand_in, raising=False)
    monkeypatch.setattr(arguments, "read", _read(arguments.read))
    monkeypatch.setattr(arguments, "read_weight", _read_weight(arguments.read_weight))
    current = environment.current().switches
    with environment.override(switches=dataclasses.replace(current, backend=NAME, **switches)):
        yield calls


def _read(original: Any) -> Any:
    def read(operand: GroupedOperand, axis: Axis, segment: Any, name: str) -> torch.Tensor:
        copy = operand.row if axis is Axis.ROW else operand.column
        if isinstance(copy, DequantizedCopy):
            return copy.values[segment.span].double()
        return original(operand, axis, segment, name)

    return read


def _read_weight(original: Any) -> Any:
    def read_weight(w: WeightOperand, axis: Axis, group: int, name: str) -> torch.Tensor:
        if w.format.is_block_scaled and not len(w.scale):
            assert w.axis is axis
            return w.data[group].double()
        return original(w, axis, group, name)

    return read_weight


def _block_scale(calls: Calls) -> ModuleType:
    """`block_scale` over the C++ kernels, of which TE's quantizer is a caller in standalone."""
    module = ModuleType("te_grouped_mlp.op.kernels.block_scale")

    def parts(rows: int, ends: torch.Tensor | None, members: int) -> list[slice]:
        if ends is None:
            each = rows // members
            return [slice(i * each, (i + 1) * each) for i in range(members)]
        marks = [0, *ends.tolist()]
        return [slice(a, b) for a, b in zip(marks, marks[1:], strict=False)]

    def quantize(src: torch.Tensor, ends: Any, *, members: int = 1, **given: Any) -> None:
        from te_grouped_mlp.integration.standalone.tex import mxfp8
        from te_grouped_mlp.integration.standalone.tex.codes import COLUMN, ROW

        calls.append("quantize")
        assert not given.pop("paired", False)
        assert not given.pop("nan_in_scale", False)
        quantizer = _quantizer(given.pop("two_d", False))
        scale_at = 0
        for span in parts(src.shape[0], ends, members):
            rows, cols = src[span].shape
            made = mxfp8.allocate((rows, cols), quantizer, flat=False)
            mxfp8.run_quantize(src[span], made, quantizer, swizzled=True)
            for axis, data, scale, name in (
                (ROW, made.row_data, made.row_scale, "row"),
                (COLUMN, made.column_data, made.column_scale, "column"),
            ):
                values = given.get(f"{name}_values")
                if values is not None:
                    mxfp8.Operand(data, scale, rows, cols, axis, True, 0).dequantize(
                        torch.bfloat16, values[span]
                    )
                if given.get(f"{name}_data") is not None:
                    assert axis == COLUMN
                    given[f"{name}_data"][span] = data
                    given[f"{name}_scale"][scale_at : scale_at + scale.numel()] = scale.view(-1)
            scale_at += made.column_scale.numel()

    def dequantize(
        data: torch.Tensor, scale: torch.Tensor, ends: Any, out: torch.Tensor, *,
        axis_column: bool, members: int = 1, swizzled: bool = True,
    ) -> None:  # fmt: skip
        from te_grouped_mlp.integration.standalone.tex import mxfp8

        calls.append("dequantize")
        at, axis = 0, int(axis_column)
        for span in parts(data.shape[0], ends, members):
            rows, cols = data[span].shape
            size = mxfp8.scale_shape(rows, cols, axis)
            mxfp8.Operand(data[span], scale[at:], rows, cols, axis, swizzled, 0).dequantize(
                torch.bfloat16, out[span]
            )
            at += size[0] * size[1]

    module.quantize, module.dequantize = quantize, dequantize  # type: ignore[attr-defined]
    return module


def _quantizer(two_d: bool) -> Any:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    quantizer = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True)
    quantizer.optimize_for_gemm = True
    quantizer.with_2d_quantization = two_d
    return quantizer
