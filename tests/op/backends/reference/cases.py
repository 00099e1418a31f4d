# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Cases for device operations: inputs, operands in a plan's layout, one whole step, the truth."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.base import DactEpilogue, Fc1Epilogue, GemmEpilogue
from te_grouped_mlp.op.backends.reference import capability
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import MXFP8, DType, Format
from te_grouped_mlp.op.layout import GroupLayout, Kernel, Output
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
    torch_dtype,
)
from tests.op.backends.reference import naive

ACTIVATIONS = {
    kind.name.lower(): ActivationSpec(
        kind,
        32 if kind.is_gated else None,
        **{each.name: each.trial for each in kind.row.parameters},
    )
    for kind in Activation
}
GATED = [name for name, spec in ACTIVATIONS.items() if spec.is_gated]

EVERY_WRAPPER = frozenset({"glu", "dglu", "srelu", "dsrelu", "quant"})
ALL = frozenset(Output)
ROWS = ("y", "dx", "dprob", "pre")
WHOLE = ("dw1", "dw2", "db1")


def environment(buffer_wrappers: Any = None, **changes: Any) -> Environment:
    """An environment without a GPU, in which the reference backend is named.

    Args:
        buffer_wrappers: Names of the wrappers that know runtime offsets; None for no frontend.
        **changes: Further fields.
    """
    wrappers: Any = Absent("not installed")
    if buffer_wrappers is not None:
        names = ("glu", "dglu", "srelu", "dsrelu", "quant", "wgrad")
        wrappers = {
            name: frozenset({RUNTIME_OFFSETS} if name in buffer_wrappers else ()) for name in names
        }
    fields = {
        "sm": Absent("no GPU"),
        "versions": {},
        "wrappers": wrappers,
        "switches": Switches(backend="reference"),
        "standalone": True,
    }
    return Environment(**(fields | changes))


@dataclass(frozen=True)
class Case:
    """One step. `rows` past the splits are padding; `tail` is what x, dy and prob hold there when
    the layout makes somebody read it."""

    activation: ActivationSpec
    splits: tuple[int, ...]
    rows: int
    hidden: int = 192
    ffn: int = 128
    fmt: Format = MXFP8
    dtype: DType = DType.BFLOAT16
    prob_dtype: DType = DType.FLOAT32
    unit_scale: bool = False
    fc1_bias: bool = False
    fc2_bias: bool = False
    scale_bias: bool = False
    grad_dtype: torch.dtype = torch.float32
    accumulate: bool = False
    recompute: bool = False
    full: bool = False
    tail: float = float("nan")
    seed: int = 0
    env: Environment = field(default_factory=environment)

    @property
    def live(self) -> int:
        return sum(self.splits)

    @property
    def wide(self) -> int:
        return self.ffn * self.activation.expansion

    def plan(self) -> Plan:
        problem = Problem(
            len(self.splits),
            LinearSpec(self.hidden, self.wide, has_bias=self.fc1_bias),
            LinearSpec(self.ffn, self.hidden, has_bias=self.fc2_bias, scale_bias=self.scale_bias),
            self.activation,
            RecipeKind.MXFP8 if self.fmt.is_block_scaled else RecipeKind.NONE,
            "",
            "cpu",
            self.dtype,
        )
        call = Call(
            rows=self.rows,
            dtype=self.dtype,
            prob_dtype=self.prob_dtype,
            rows_are_full=self.full,
            wanted=ALL - {Output.DPROB} if self.unit_scale else ALL,
            input_kind=TensorKind.PLAIN,
            unit_scale=self.unit_scale,
            deterministic=True,
            format=self.fmt,
        )
        plan = capability.plan(problem, call, self.env)
        assert isinstance(plan, Plan), plan
        return plan


@dataclass
class Inputs:
    """Valid rows only, one entry per group, each from a generator of its own."""

    groups: list[naive.Group]
    main1: torch.Tensor
    main2: torch.Tensor


def inputs(case: Case) -> Inputs:
    """Values of order one; a group's values depend on its index and size alone."""
    dtype, prob_dtype = torch_dtype(case.dtype), torch_dtype(case.prob_dtype)
    groups = []
    for index, size in enumerate(case.splits):
        generator = torch.Generator().manual_seed(1000 * case.seed + index)

        def normal(*shape, scale=1.0, generator=generator):
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        groups.append(
            naive.Group(
                w1=normal(case.wide, case.hidden, scale=case.hidden**-0.5),
                w2=normal(case.hidden, case.ffn, scale=case.ffn**-0.5),
                b1=normal(case.wide) if case.fc1_bias else None,
                b2=normal(case.hidden) if case.fc2_bias else None,
                x=normal(size, case.hidden),
                dy=normal(size, case.hidden),
                prob=None
                if case.unit_scale
                else torch.rand(size, generator=generator).to(prob_dtype),
                bias_scale=torch.rand(size, generator=generator).to(prob_dtype)
                if case.scale_bias
                else None,
            )
        )
    generator = torch.Generator().manual_seed(77 + case.seed)
    count = len(case.splits)
    main1 = torch.randn(count, case.wide, case.hidden, generator=generator).to(case.grad_dtype)
    main2 = torch.randn(count, case.hidden, case.ffn, generator=generator).to(case.grad_dtype)
    return Inputs(groups, main1, main2)


def splits_of(sizes: tuple[int, ...]) -> Splits:
    """The Splits record of host sizes."""
    counts = torch.tensor(sizes, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Splits(counts, offsets[1:].to(torch.int32), offsets, {}, sizes)


def swizzle(scale: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Logical scales in tile order, by the index formula; padding is zero."""
    logical = scale if axis is Axis.ROW else scale.t()
    outer, inner = torch.meshgrid(*(torch.arange(n) for n in logical.shape), indexing="ij")
    tiles = -(-logical.shape[1] // 4)
    offset = (outer // 128 * tiles + inner // 4) * 512
    offset += outer % 32 * 16 + outer % 128 // 32 * 4 + inner % 4
    out = torch.zeros(-(-logical.shape[0] // 128) * tiles * 512, dtype=torch.uint8)
    out[offset.reshape(-1)] = logical.reshape(-1)
    return out


def compact(scale: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Logical scales as a padded matrix, flat."""
    multiples = (128, 4) if axis is Axis.ROW else (4, 128)
    shape = [-(-n // m) * m for n, m in zip(scale.shape, multiples, strict=True)]
    out = torch.zeros(shape, dtype=torch.uint8)
    out[: scale.shape[0], : scale.shape[1]] = scale
    return out.reshape(-1)


def token_operand(
    case: Case, layout: GroupLayout, parts: list[torch.Tensor], tail: float | None = None
) -> GroupedOperand:
    """An operand as a quantizer with this layout makes it: 0xFF wherever it does not write."""
    cols, splits = parts[0].shape[1], splits_of(case.splits)
    values = torch.cat(parts)
    dense = layout.use_dense_single_group
    if dense:
        padding = torch.full((case.rows - case.live, cols), case.tail if tail is None else tail)
        parts = [torch.cat([values, padding.to(values.dtype)])]
    operand = {"format": case.fmt, "shape": (case.rows, cols), "layout": layout, "splits": splits}
    if not case.fmt.is_block_scaled:
        plain = torch.full((case.rows, cols), torch.nan).to(values.dtype)
        live = torch.cat(parts)
        plain[: len(live)] = live
        return GroupedOperand(**operand, plain=plain)
    # Row and column scales of 128 rows take the same number of bytes.
    width = -(-cols // 128) * 4
    copies = {}
    for axis in Axis:
        data = torch.full((case.rows, cols), 0xFF, dtype=torch.uint8)
        scale = torch.full((case.rows * width,), 0xFF, dtype=torch.uint8)
        start = 0
        for part in parts:
            codes, scales = naive.quantize(part, axis is Axis.ROW, nan_in_scale=False)
            data[start : start + len(part)] = codes
            tiles = swizzle(scales, axis)
            scale[start * width : start * width + len(tiles)] = tiles
            start += len(part)
        copies[axis.value] = QuantizedCopy(data, scale, axis, swizzled=True)
    return GroupedOperand(**operand, **copies)


def weight_operand(
    case: Case, members: list[torch.Tensor], axis: Axis, swizzled: bool = False
) -> WeightOperand:
    """The weights of one pass, with compact or swizzled scales."""
    shape = tuple(members[0].shape)
    if not case.fmt.is_block_scaled:
        return WeightOperand(case.fmt, shape, axis, tuple(members))
    pairs = [naive.quantize(member, axis is Axis.ROW, nan_in_scale=False) for member in members]
    arrange = swizzle if swizzled else compact
    data = tuple(codes for codes, _ in pairs)
    scale = tuple(arrange(scales, axis) for _, scales in pairs)
    return WeightOperand(case.fmt, shape, axis, data, scale, swizzled)


def run(backend: Any, case: Case, plan: Plan | None = None, byte: int | None = 0xFF) -> dict:
    """One step through the backend's operations over poisoned memory; every output by name."""
    with memory.poisoned(byte):
        return _run(backend, case, plan or case.plan(), inputs(case))


def _run(backend: Any, case: Case, plan: Plan, given: Inputs) -> dict:
    layout, groups = plan.layout, given.groups
    x = token_operand(case, layout, [g.x for g in groups])
    dy = token_operand(case, layout, [g.dy for g in groups])
    w1, w2 = [g.w1 for g in groups], [g.w2 for g in groups]
    prob = None if case.unit_scale else _per_row(case, [g.prob for g in groups])
    scale = _per_row(case, [g.bias_scale for g in groups]) if case.scale_bias else None
    b1 = torch.stack([g.b1 for g in groups]) if case.fc1_bias else None
    b2 = torch.stack([g.b2 for g in groups]) if case.fc2_bias else None
    dtype = torch_dtype(case.dtype)

    forward = backend.fc1_act(
        plan,
        x,
        weight_operand(case, w1, Axis.ROW),
        Fc1Epilogue(b1, prob, want_column=not case.recompute, want_pre_activation=True),
    )
    y = memory.empty((case.rows, case.hidden), dtype, "cpu")
    w2_row = weight_operand(case, w2, Axis.ROW, swizzled=True)
    backend.gemm(
        plan, Kernel.FC2_FORWARD, forward.activated, w2_row, y, GemmEpilogue(b2, scale, True)
    )
    backward = backend.dact_dgrad(
        plan,
        dy,
        weight_operand(case, w2, Axis.COLUMN, swizzled=True),
        forward.pre_activation,
        DactEpilogue(prob, prob is not None, True, True, want_activated=case.recompute),
    )
    dx = memory.empty((case.rows, case.hidden), dtype, "cpu")
    w1_column = weight_operand(case, w1, Axis.COLUMN)
    backend.gemm(plan, Kernel.FC1_DGRAD, backward.grad, w1_column, dx, GemmEpilogue())
    dw1, dw2 = given.main1.clone(), given.main2.clone()
    activated = backward.activated if case.recompute else forward.activated
    targets = (WgradTarget(dw2, case.accumulate), WgradTarget(dw1.unbind(0), case.accumulate))
    backend.wgrad(plan, Kernel.FC2_WGRAD, activated, dy, targets[0])
    backend.wgrad(plan, Kernel.FC1_WGRAD, x, backward.grad, targets[1])
    return {
        "y": y,
        "dx": dx,
        "dprob": backward.dprob,
        "db1": backward.bias_grad,
        "dw1": dw1,
        "dw2": dw2,
        "pre": forward.pre_activation,
        "activated": forward.activated,
        "grad": backward.grad,
    }


def _per_row(case: Case, parts: list[torch.Tensor]) -> torch.Tensor:
    values = torch.full((case.rows,), case.tail).to(torch_dtype(case.prob_dtype))
    values[: case.live] = torch.cat(parts)
    return values


def expected(case: Case, *, dense: bool = False) -> dict:
    """The valid rows of every output, and the whole weight and bias gradients, by `naive`.

    Args:
        case: The case; a dense one has a single group.
        dense: Round as dense products do.
    """
    given, spec = inputs(case), case.activation
    numbers = naive.Numbers(case.fmt.is_block_scaled, torch_dtype(case.dtype))
    steps = [
        naive.step(
            group, spec.kind.value, asdict(spec), numbers, dense=dense, recompute=case.recompute
        )
        for group in given.groups
    ]
    found = {name: torch.cat([step[name] for step in steps]) for name in ROWS}
    found["db1"] = torch.stack([step["db1"] for step in steps])
    for name, main in (("dw1", given.main1), ("dw2", given.main2)):
        found[name] = torch.stack(
            [
                content
                if case.accumulate and not size
                else naive.into_target(content, step[name], accumulate=case.accumulate, dense=dense)
                for content, step, size in zip(main, steps, case.splits, strict=True)
            ]
        )
    return found


def assert_same(got: dict, want: dict, live: int) -> None:
    """Compare valid rows and whole gradients bitwise; NaN equals NaN."""
    for name in ROWS + WHOLE:
        if got[name] is None:
            continue
        rows = slice(live if name in ROWS else None)
        left, right = got[name][rows], want[name][rows]
        assert left.dtype == right.dtype, name
        torch.testing.assert_close(
            left, right, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
