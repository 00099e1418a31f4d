# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Launches of the backends over random operands, each beside the reference backend's result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_grouped_mlp.emulator.launch_cases import FFN, GROUPS, ROWS, SPLITS, H, LaunchCase
from te_grouped_mlp.emulator.launch_results import (
    ATOMIC_BOUND,
    BOUNDS,
    INTERLEAVE,
    Values,
    in_blocks,
    interleaved,
    interleaved_operand,
    plain_values,
    values_of,
)
from te_grouped_mlp.op import environment, execution, selection
from te_grouped_mlp.op.activations import ActivationSpec
from te_grouped_mlp.op.backends.base import Backend, DactEpilogue, Fc1Epilogue, GemmEpilogue
from te_grouped_mlp.op.environment import Environment
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED, DType, Format
from te_grouped_mlp.op.layout import Kernel, Output, RowExtent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
)
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape

NATIVE_SPLITS = (200, 0, 120)
"""For kernels that take any number of rows."""

_DTYPES = {torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16}
_NAN = float("nan")


@dataclass
class Prepared:
    """A launch with its operands.

    Attributes:
        case: Which launch.
        plan: Of the call that it belongs to.
        run: Makes the launch on a backend, over new outputs; returns its results.
    """

    case: LaunchCase
    plan: Plan
    run: Callable[[Backend], Values]


class Maker:
    """Makes launches over random operands; rows past the live ones hold NaN."""

    def __init__(self, env: Environment, seed: int = 0) -> None:
        """Make one for a machine; it must be one that emulates a GPU."""
        self._env = env
        self._random = torch.Generator().manual_seed(seed)

    @classmethod
    def of(cls, case: LaunchCase, seed: int = 0) -> Maker:
        """Return one for a launch in this process, with its backend named."""
        env = environment.current()
        named = dataclasses.replace(env.switches, backend=case.backend)
        return cls(dataclasses.replace(env, switches=named), seed)

    def run(self, case: LaunchCase) -> Values:
        """Make one launch; returns its results."""
        return self.prepare(case).run(execution.backend(case.backend))

    def prepare(self, case: LaunchCase) -> Prepared:
        """Draw the operands of a launch."""
        plan = self._plan(case)
        make = {
            Kernel.FC1_ACT: self._fc1,
            Kernel.FC2_FORWARD: self._gemm,
            Kernel.FC1_DGRAD: self._gemm,
            Kernel.DACT_DGRAD: self._dact,
            Kernel.FC1_WGRAD: self._wgrad,
            Kernel.FC2_WGRAD: self._wgrad,
        }[case.kernel]
        return Prepared(case, plan, make(case, plan))

    # What is asked ------------------------------------------------------------------------------

    def _plan(self, case: LaunchCase) -> Plan:
        spec = ActivationSpec(case.kind, INTERLEAVE if case.kind.is_gated else None)
        mxfp8 = case.backend == "cudnn"
        problem = Problem(
            num_groups=1 if case.full else GROUPS,
            fc1=LinearSpec(H, FFN * spec.expansion, has_bias=True),
            fc2=LinearSpec(FFN, H),
            activation=spec,
            recipe=RecipeKind.MXFP8 if mxfp8 else RecipeKind.NONE,
            recipe_detail="",
            device="cpu",
            dtype=DType.BFLOAT16,
        )
        without = {Output.DB2}
        without |= set() if case.bias_grad else {Output.DB1}
        without |= set() if case.dprob else {Output.DPROB}
        call = Call(
            rows=ROWS if mxfp8 else sum(NATIVE_SPLITS) + 64,
            dtype=DType.BFLOAT16,
            prob_dtype=_DTYPES[case.prob or torch.float32],
            rows_are_full=case.full,
            wanted=frozenset(Output) - without,
            input_kind=TensorKind.PLAIN,
            unit_scale=case.prob is None,
            deterministic=case.deterministic,
            format=MXFP8 if mxfp8 else UNQUANTIZED,
        )
        plan = selection.capability(case.backend).plan(problem, call, self._env)
        if not isinstance(plan, Plan):
            raise ValueError(f"{case.name} cannot be planned: {plan}")
        assert plan.layout.use_dense_single_group == case.full
        return plan

    # Operands -----------------------------------------------------------------------------------

    def _splits(self, plan: Plan) -> Splits:
        sizes = SPLITS if plan.call.format.is_block_scaled else NATIVE_SPLITS
        if plan.layout.extent is RowExtent.BUFFER:
            sizes = (ROWS,)
        values = torch.tensor(sizes)
        ends = values.cumsum(0).int()
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends.long()))
        return Splits(values, ends, offsets, {}, tuple(sizes))

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random) * scale

    def _padded(self, plan: Plan, splits: Splits, width: int) -> torch.Tensor:
        """Return (rows, width) bf16 values of order one, NaN past the live rows."""
        out = torch.full((plan.layout.buffer_rows, width), _NAN)
        live = int(splits.group_end_offsets[-1])
        out[:live] = self._normal(live, width)
        return out.bfloat16()

    def _tokens(self, plan: Plan, splits: Splits, width: int) -> GroupedOperand:
        rows, fmt = plan.layout.buffer_rows, plan.call.format
        shape = (rows, width)
        if not fmt.is_block_scaled:
            values = self._padded(plan, splits, width)
            return GroupedOperand(fmt, shape, plan.layout, splits, plain=values)
        row = self._copy(rows, width, Axis.ROW, fmt)
        column = self._copy(rows, width, Axis.COLUMN, fmt)
        live = int(splits.group_end_offsets[-1])
        for copy in (row, column):
            copy.data[live:] = 0xFF
        return GroupedOperand(fmt, shape, plan.layout, splits, row, column)

    def _copy(
        self, rows: int, cols: int, axis: Axis, fmt: Format, exponent: int = 0
    ) -> QuantizedCopy:
        """Return random E4M3 values of order one, times two to the power of about `exponent`."""
        shape = (row_scale_shape if axis is Axis.ROW else column_scale_shape)(rows, cols, fmt)
        data = torch.empty(rows, cols, dtype=torch.uint8)
        data.copy_(self._normal(rows, cols).to(torch.float8_e4m3fn).view(torch.uint8))
        low = 126 + exponent
        scale = torch.randint(low, low + 3, (shape[0] * shape[1],), generator=self._random)
        return QuantizedCopy(data, scale.to(torch.uint8), axis, swizzled=True)

    def _weights(
        self, plan: Plan, case: LaunchCase, out: int, width: int, axis: Axis
    ) -> WeightOperand:
        groups, fmt = plan.layout.num_groups, plan.call.format
        contracted = width if axis is Axis.ROW else out
        if not fmt.is_block_scaled:
            values = self._normal(groups, out, width, scale=contracted**-0.5).bfloat16()
            members = _placed(list(values), case)
            return WeightOperand(fmt, (out, width), axis, tuple(members))
        copies = [self._copy(out, width, axis, fmt, exponent=-5) for _ in range(groups)]
        data = _placed([copy.data for copy in copies], case)
        scale = _placed([copy.scale for copy in copies], case)
        return WeightOperand(fmt, (out, width), axis, tuple(data), tuple(scale), swizzled=True)

    def _prob(self, case: LaunchCase, plan: Plan, splits: Splits) -> torch.Tensor | None:
        if case.prob is None:
            return None
        out = torch.full((plan.layout.buffer_rows,), _NAN)
        live = int(splits.group_end_offsets[-1])
        out[:live] = torch.rand(live, generator=self._random) + 0.25
        return out.to(case.prob)

    # Launches -----------------------------------------------------------------------------------

    def _fc1(self, case: LaunchCase, plan: Plan) -> Callable[[Backend], Values]:
        wide, groups = plan.problem.fc1.out_features, plan.layout.num_groups
        splits = self._splits(plan)
        bias = self._normal(groups, wide).bfloat16() if case.bias else None
        prob = self._prob(case, plan, splits)
        epilogue = Fc1Epilogue(bias, prob, want_column=True, want_pre_activation=True)
        x, w = self._tokens(plan, splits, H), self._weights(plan, case, wide, H, Axis.ROW)

        def run(backend: Backend) -> Values:
            found = backend.fc1_act(plan, x, w, epilogue)
            assert found.pre_activation is not None
            pre = in_blocks(found.pre_activation, plan, backend)
            return {
                **values_of("activated", found.activated, plan),
                "pre_activation": plain_values(pre, splits, plan),
            }

        return run

    def _gemm(self, case: LaunchCase, plan: Plan) -> Callable[[Backend], Values]:
        wide, groups = plan.problem.fc1.out_features, plan.layout.num_groups
        splits = self._splits(plan)
        forward = case.kernel is Kernel.FC2_FORWARD
        shape, axis, k = ((H, FFN), Axis.ROW, FFN) if forward else ((wide, H), Axis.COLUMN, wide)
        bias = self._normal(groups, H).bfloat16() if case.bias else None
        scale = self._prob(case, plan, splits) if case.scaled else None
        epilogue = GemmEpilogue(bias, scale)
        a, w = self._tokens(plan, splits, k), self._weights(plan, case, *shape, axis)

        def run(backend: Backend) -> Values:
            out = torch.full((plan.layout.buffer_rows, H), _NAN, dtype=torch.bfloat16)
            given = interleaved_operand(a, plan, backend) if not forward else a
            backend.gemm(plan, case.kernel, given, w, out, epilogue)
            tail = out[int(splits.group_end_offsets[-1]) :].double()
            return {"out": plain_values(out, splits, plan), "tail": (tail, 0.0)}

        return run

    def _dact(self, case: LaunchCase, plan: Plan) -> Callable[[Backend], Values]:
        wide, splits = plan.problem.fc1.out_features, self._splits(plan)
        pre = self._padded(plan, splits, wide)
        epilogue = DactEpilogue(
            self._prob(case, plan, splits), want_dprob=case.dprob,
            want_bias_grad=case.bias_grad, want_column=True, want_activated=case.activated,
        )  # fmt: skip
        dy, w = self._tokens(plan, splits, H), self._weights(plan, case, H, FFN, Axis.COLUMN)

        def run(backend: Backend) -> Values:
            given = interleaved(pre, plan, backend)
            found = backend.dact_dgrad(plan, dy, w, given, epilogue)
            values = values_of("grad", found.grad, plan, backend)
            if found.activated is not None:
                values |= values_of("activated", found.activated, plan)
            if found.dprob is not None:
                values["dprob"] = plain_values(found.dprob, splits, plan)
            if found.bias_grad is not None:
                bound = ATOMIC_BOUND if plan.call.format.is_block_scaled else 4e-3
                values["bias_grad"] = (found.bias_grad.double(), bound)
            return values

        return run

    def _wgrad(self, case: LaunchCase, plan: Plan) -> Callable[[Backend], Values]:
        first = case.kernel is Kernel.FC1_WGRAD
        wide, splits = plan.problem.fc1.out_features, self._splits(plan)
        shape = (wide, H) if first else (H, FFN)
        dy, x = self._tokens(plan, splits, shape[0]), self._tokens(plan, splits, shape[1])
        fill = self._normal(plan.layout.num_groups, *shape).to(case.dtype)
        if not case.accumulate:
            fill = torch.full_like(fill, _NAN)

        def run(backend: Backend) -> Values:
            members = _placed([part.clone() for part in fill], case)
            stacked = case.stacked and not case.descending
            target = torch.stack(members) if stacked else tuple(members)
            given = interleaved_operand(dy, plan, backend) if first else dy
            backend.wgrad(plan, case.kernel, x, given, WgradTarget(target, case.accumulate))
            out = target if isinstance(target, torch.Tensor) else torch.stack(target)
            return {"out": (out.double(), BOUNDS[case.dtype])}

        return run


def _placed(members: list[torch.Tensor], case: LaunchCase) -> list[torch.Tensor]:
    """Return copies of equal tensors: in one buffer, in either order, or in places of their own."""
    count = len(members)
    step = 1 if case.stacked else 2
    buffer = members[0].new_empty((step * count, *members[0].shape))
    places = list(buffer[::step])
    if case.descending:
        places.reverse()
    for place, member in zip(places, members, strict=True):
        place.copy_(member)
    return places
