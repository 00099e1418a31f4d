# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The native backend on the benchmark's inputs: whole steps, and single kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_grouped_mlp.measure.bench.shapes import Inputs, Shape
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.base import DactEpilogue, Fc1Epilogue, GemmEpilogue
from te_grouped_mlp.op.backends.cutedsl import capability, keys
from te_grouped_mlp.op.backends.cutedsl.backend import CuteDslBackend
from te_grouped_mlp.op.backends.cutedsl.compile import target_arch
from te_grouped_mlp.op.backends.cutedsl.config import Op
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey
from te_grouped_mlp.op.backends.cutedsl.launch import launcher
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import UNQUANTIZED, DType
from te_grouped_mlp.op.layout import Kernel, Output
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand, Splits, WeightOperand
from te_grouped_mlp.op.tensors.stacking import Stacked

SPEC = ActivationSpec(Activation.SWIGLU, 32)
_VERSIONS = {"quack": "0.6.5", "cutlass_dsl": "4.8.1", "triton": "3.6.0"}
_BACKEND = CuteDslBackend()


def problem_of(shape: Shape) -> Problem:
    """The problem of a shape."""
    return Problem(
        shape.experts,
        LinearSpec(shape.hidden, 2 * shape.ffn),
        LinearSpec(shape.ffn, shape.hidden),
        SPEC,
        RecipeKind.NONE,
        "",
        "cuda",
        DType.BFLOAT16,
    )


def plan_of(shape: Shape, *, deterministic: bool = False) -> Plan:
    """A plan for training."""
    call = Call(
        rows=shape.tokens,
        dtype=DType.BFLOAT16,
        prob_dtype=DType.FLOAT32,
        rows_are_full=False,
        wanted=frozenset(Output),
        input_kind=TensorKind.PLAIN,
        unit_scale=False,
        deterministic=deterministic,
        format=UNQUANTIZED,
    )
    env = Environment((9, 0), _VERSIONS, Absent("none"), Switches(backend="cutedsl"), False)
    plan = capability.plan(problem_of(shape), call, env)
    assert isinstance(plan, Plan), plan
    return plan


@dataclass
class Layer:
    """One layer's operands for the backend."""

    plan: Plan
    given: Inputs
    x: GroupedOperand
    dy: GroupedOperand
    w1: WeightOperand
    w2: WeightOperand
    dw1: torch.Tensor
    dw2: torch.Tensor
    accumulate: bool

    def forward(self) -> tuple[torch.Tensor, GroupedOperand, torch.Tensor]:
        """Return y and what the backward needs."""
        first = _BACKEND.fc1_act(
            self.plan, self.x, self.w1, Fc1Epilogue(None, self.given.prob, True, True)
        )
        y = torch.empty_like(self.given.x)
        kernel = Kernel.FC2_FORWARD
        _BACKEND.gemm(self.plan, kernel, first.activated, self.w2, y, GemmEpilogue())
        assert first.pre_activation is not None
        return y, first.activated, first.pre_activation

    def backward(
        self, activated: GroupedOperand, pre: torch.Tensor, *, dprob: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return dx and dprob; the weight gradients are in `dw1` and `dw2`."""
        epilogue = DactEpilogue(self.given.prob, dprob, False, True)
        column = dataclasses.replace(self.w2, axis=Axis.COLUMN)
        back = _BACKEND.dact_dgrad(self.plan, self.dy, column, pre, epilogue)
        target2 = WgradTarget(self.dw2, self.accumulate)
        _BACKEND.wgrad(self.plan, Kernel.FC2_WGRAD, activated, self.dy, target2)
        dx = torch.empty_like(self.given.x)
        column = dataclasses.replace(self.w1, axis=Axis.COLUMN)
        _BACKEND.gemm(self.plan, Kernel.FC1_DGRAD, back.grad, column, dx, GemmEpilogue())
        target1 = WgradTarget(self.dw1, self.accumulate)
        _BACKEND.wgrad(self.plan, Kernel.FC1_WGRAD, self.x, back.grad, target1)
        found = {"dx": dx, "dw1": self.dw1, "dw2": self.dw2}
        return found if back.dprob is None else {**found, "dprob": back.dprob}

    def step(self) -> dict[str, torch.Tensor]:
        """Forward and backward."""
        y, activated, pre = self.forward()
        return {"y": y, **self.backward(activated, pre)}


@dataclass
class UnitProbability:
    """The rewrite that clients use today for a deterministic gradient of the probability.

    The op runs with unit probabilities, and its output is multiplied by them in fp32. That output
    is kept for the backward.
    """

    layer: Layer

    def step(self) -> dict[str, torch.Tensor]:
        """Forward and backward."""
        layer = self.layer
        assert layer.given.prob is not None
        prob = layer.given.prob[:, None]
        unit = dataclasses.replace(layer, given=dataclasses.replace(layer.given, prob=None))
        kept, activated, pre = unit.forward()
        y = (kept.float() * prob).bfloat16()
        dy = layer.given.dy.float()
        dprob = (dy * kept.float()).sum(-1)
        scaled = dataclasses.replace(layer.dy, plain=(dy * prob).bfloat16())
        unit = dataclasses.replace(unit, dy=scaled)
        return {"y": y, "dprob": dprob, **unit.backward(activated, pre, dprob=False)}


def layer_of(
    given: Inputs, *, accumulate: bool, grad: torch.dtype, deterministic: bool = False
) -> Layer:
    """Wrap the inputs; weight gradients start at zero."""
    plan = plan_of(given.shape, deterministic=deterministic)
    splits = Splits(given.counts, given.ends, given.offsets, {}, None, given.offsets.int())

    def tokens(values: torch.Tensor) -> GroupedOperand:
        return GroupedOperand(UNQUANTIZED, tuple(values.shape), plan.layout, splits, plain=values)

    def weight(values: torch.Tensor) -> WeightOperand:
        return WeightOperand(UNQUANTIZED, tuple(values.shape[1:]), Axis.ROW, Stacked(values))

    return Layer(
        plan, given, tokens(given.x), tokens(given.dy), weight(given.w1), weight(given.w2),
        torch.zeros(given.w1.shape, dtype=grad, device="cuda"),
        torch.zeros(given.w2.shape, dtype=grad, device="cuda"), accumulate,
    )  # fmt: skip


def step_keys(shape: Shape, grad: DType, *, accumulate: bool) -> tuple[KernelKey, ...]:
    """What a step of `layer_of` compiles."""
    return keys.of_problem(problem_of(shape), target_arch(), grad=grad, accumulate=accumulate)


def part(given: Inputs, key: KernelKey, buffers: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Return one launch of a kernel on the inputs; `buffers` is kept between the parts."""
    shape, offsets = given.shape, given.offsets.to(torch.int32)
    wide, rows = 2 * shape.ffn, shape.tokens

    def buffer(name: str, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        if name not in buffers:
            buffers[name] = torch.randn(*size, device="cuda").to(dtype)
        return buffers[name]

    run = launcher(key, 0)
    pre, act = buffer("pre", rows, wide), buffer("act", rows, shape.ffn)
    out = buffer("out", rows, shape.hidden)
    prob = given.prob if key.scale else None
    if key.op is Op.FC1_ACT:
        return lambda: run(given.x, given.w1, pre, None, offsets, activated=act, prob=prob)
    if key.op is Op.FC2_FORWARD:
        return lambda: run(act, given.w2, out, None, offsets)
    if key.op is Op.FC1_DGRAD:
        return lambda: run(pre, given.w1, out, None, offsets)
    if key.op is Op.DACT_DGRAD:
        grad, partials = buffer("grad", rows, wide), None
        if key.dprob:
            count = -(-shape.ffn // run.tile.n)
            partials = torch.empty(count, rows, device="cuda").t()
        return lambda: run(given.dy, given.w2, grad, pre, offsets, prob=prob, row_partials=partials)
    left, right = (given.dy, act) if key.op is Op.FC2_WGRAD else (pre, given.x)
    name = key.op.value
    dtype = torch.float32 if key.out is DType.FLOAT32 else torch.bfloat16
    main = buffer(f"{name} {dtype}", shape.experts, left.shape[1], right.shape[1], dtype=dtype)
    return lambda: run(left.t(), right.t(), main, main if key.accumulate else None, offsets)


def part_flops(shape: Shape, op: Op) -> float:
    """Operations of one kernel."""
    wide = 2 if op in (Op.FC1_ACT, Op.FC1_DGRAD, Op.FC1_WGRAD) else 1
    return 2.0 * shape.tokens * shape.hidden * shape.ffn * wide


def part_bytes(shape: Shape, key: KernelKey) -> float:
    """Bytes that one kernel must move: each input read once, each output written once."""
    rows, hidden, ffn, wide = shape.tokens, shape.hidden, shape.ffn, 2 * shape.ffn
    weight1, weight2 = shape.experts * wide * hidden, shape.experts * ffn * hidden
    size = 4 if key.out is DType.FLOAT32 else 2
    grad = (2 if key.accumulate else 1) * size
    partials = 0
    if key.dprob and key.tile is not None:
        partials = 4 * rows * -(-ffn // key.tile.n)
    return float(
        {
            Op.FC1_ACT: 2 * (rows * (hidden + wide + ffn) + weight1),
            Op.FC2_FORWARD: 2 * (rows * (ffn + hidden) + weight2),
            Op.DACT_DGRAD: 2 * (rows * (hidden + 2 * wide) + weight2) + partials,
            Op.FC1_DGRAD: 2 * (rows * (wide + hidden) + weight1),
            Op.FC1_WGRAD: 2 * rows * (wide + hidden) + grad * weight1,
            Op.FC2_WGRAD: 2 * rows * (ffn + hidden) + grad * weight2,
        }[key.op]
    )
