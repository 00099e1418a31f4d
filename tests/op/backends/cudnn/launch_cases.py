# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every launch that the backend can make, as values, and how to make one. Imports no pytest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.base import DactEpilogue, Fc1Epilogue, GemmEpilogue
from te_grouped_mlp.op.backends.cudnn import capability
from te_grouped_mlp.op.backends.cudnn.backend import CudnnBackend
from te_grouped_mlp.op.environment import Environment
from te_grouped_mlp.op.layout import Kernel, Output, RowExtent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis
from tests.op.backends.cudnn import operands
from tests.op.backends.cudnn.facts import call, problem

ROWS, H, FFN, GROUPS = 1024, 512, 320, 3
SPLITS = (256, 0, 512)
GATED = tuple(kind for kind in Activation if kind.is_gated)
UNARY = tuple(kind for kind in Activation if not kind.is_gated)


@dataclass(frozen=True)
class LaunchCase:
    """One launch.

    Attributes:
        kernel: Which operation.
        kind: The activation.
        stacked: Weights, or weight gradients, lie in one buffer; else behind tables.
        full: One expert that fills its buffer.
        bias: FC1's or FC2's bias.
        scaled: FC2's bias is scaled.
        prob: Dtype of the probabilities, or None for a unit scale.
        bias_grad, dprob, deterministic, activated: Of the launch through the derivative.
        dtype, accumulate: Of a weight gradient.
    """

    kernel: Kernel
    kind: Activation = Activation.SWIGLU
    stacked: bool = True
    full: bool = False
    bias: bool = False
    scaled: bool = False
    prob: torch.dtype | None = torch.float32
    dprob: bool = True
    bias_grad: bool = False
    deterministic: bool = False
    activated: bool = False
    dtype: torch.dtype = torch.float32
    accumulate: bool = False

    @property
    def id(self) -> str:
        """A name for people: what differs from the defaults."""
        parts = [self.kernel.value]
        for each in dataclasses.fields(self)[1:]:
            value = getattr(self, each.name)
            if value == each.default:
                continue
            if isinstance(value, bool):
                parts.append(each.name if value else f"no_{each.name}")
            elif isinstance(value, Activation):
                parts.append(value.name.lower())
            else:
                parts.append(f"{each.name}_{str(value).removeprefix('torch.')}")
        return "-".join(parts)


def cases() -> list[LaunchCase]:
    """Return all of them."""
    return [*_forward(), *_products(), *_derivatives(), *_weight_gradients()]


def _forward() -> Iterator[LaunchCase]:
    kernel = Kernel.FC1_ACT
    for kind, stacked, bias in itertools.product(Activation, (True, False), (False, True)):
        yield LaunchCase(kernel, kind, stacked, bias=bias)
    for kind in GATED:
        yield LaunchCase(kernel, kind, full=True)
    for stacked, prob in itertools.product((True, False), (torch.bfloat16, None)):
        yield LaunchCase(kernel, stacked=stacked, prob=prob)
    yield LaunchCase(kernel, Activation.SRELU, prob=torch.bfloat16)


def _products() -> Iterator[LaunchCase]:
    for stacked in (True, False):
        yield LaunchCase(Kernel.FC1_DGRAD, stacked=stacked)
        for bias, scaled in ((False, False), (True, False), (True, True)):
            yield LaunchCase(Kernel.FC2_FORWARD, stacked=stacked, bias=bias, scaled=scaled)


def _derivatives() -> Iterator[LaunchCase]:
    kernel = Kernel.DACT_DGRAD
    for kind, stacked in itertools.product(Activation, (True, False)):
        for bias_grad, deterministic in itertools.product((False, True), (False, True)):
            if not (kind.is_gated and bias_grad and deterministic):
                yield LaunchCase(
                    kernel, kind, stacked, bias_grad=bias_grad, deterministic=deterministic
                )
    for kind in GATED:
        yield LaunchCase(kernel, kind, full=True, deterministic=True)
    yield LaunchCase(kernel, dprob=False)
    yield LaunchCase(kernel, prob=None, dprob=False)
    yield LaunchCase(kernel, Activation.SRELU, activated=True, deterministic=True)


def _weight_gradients() -> Iterator[LaunchCase]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, stacked, accumulate in itertools.product(dtypes, (True, False), (False, True)):
        yield LaunchCase(Kernel.FC2_WGRAD, stacked=stacked, dtype=dtype, accumulate=accumulate)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values and strides of a tensor, one element further in memory."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    raw = torch.empty((last + 2) * size, dtype=torch.uint8)[size:].view(tensor.dtype)
    return raw.as_strided(tensor.shape, tensor.stride(), raw.storage_offset()).copy_(tensor)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps between the rows."""
    wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], 1, dtype=torch.uint8)
    return wide[:, : tensor.shape[1]].view(tensor.dtype)


# Name -> the keywords that a fault in a builder would give instead.
FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "int64 offsets": lambda given: {"padded_offsets": given["padded_offsets"].long()},
    "rows with gaps": lambda given: {"a_tensor": _spread(given["a_tensor"])},
    "block of 16": lambda _: {"sf_vec_size": 16},
    "narrow tile": lambda _: {"mma_tiler_mn": (256, 64)},
    "bf16 prob": lambda given: {"prob_tensor": given["prob_tensor"].bfloat16()},
    "fewer probs": lambda given: {"prob_tensor": given["prob_tensor"][:-256]},
    "fewer pre-activations": lambda given: {"c_tensor": given["c_tensor"][:-256]},
    "no norm": lambda _: {"norm_const_tensor": None},
    "wrong activation": lambda _: {"act_func": "swiglu"},
    "no beta": lambda _: {"beta_tensor": None},
    "any order": lambda _: {"deterministic": False},
    "tall weights": lambda given: {"b_tensor": given["b_tensor"].transpose(0, 1)},
    "column-major output": lambda given: {"d_tensor": given["d_tensor"].transpose(0, 1)},
    "misaligned descriptors": lambda given: {
        "descriptor_workspace": given["descriptor_workspace"][8:]
    },
    "misaligned prob": lambda given: {"prob_tensor": _shifted(given["prob_tensor"])},
    "misaligned pre-activations": lambda given: {"c_tensor": _shifted(given["c_tensor"])},
    "misaligned scales": lambda given: {"sfa_tensor": _shifted(given["sfa_tensor"])},
    "misaligned offsets": lambda given: {"padded_offsets": _shifted(given["padded_offsets"])},
    "misaligned bias": lambda given: {"bias_tensor": _shifted(given["bias_tensor"])},
    "int64 ends": lambda given: {"offsets_tensor": given["offsets_tensor"].long()},
}


HOST = capability.Host(device="cpu", standalone=True)


class Maker:
    """Makes launches over operands of arbitrary bytes."""

    def __init__(self, env: Environment) -> None:
        self._backend, self._env = CudnnBackend(), env

    def run(self, case: LaunchCase) -> Any:
        """Make one launch; returns what the operation returns."""
        run = {
            Kernel.FC1_ACT: self._fc1,
            Kernel.FC2_FORWARD: self._gemm,
            Kernel.FC1_DGRAD: self._gemm,
            Kernel.DACT_DGRAD: self._dact,
            Kernel.FC2_WGRAD: self._wgrad,
        }[case.kernel]
        return run(case, self._plan(case))

    def _plan(self, case: LaunchCase) -> Plan:
        spec = ActivationSpec(case.kind, 32 if case.kind.is_gated else None)
        facts = problem(
            num_groups=1 if case.full else GROUPS,
            fc1=LinearSpec(H, FFN * spec.expansion, has_bias=True),
            fc2=LinearSpec(FFN, H),
            activation=spec,
            device="cpu",
        )
        without = [Output.DB2]
        without += [] if case.bias_grad else [Output.DB1]
        without += [] if case.dprob else [Output.DPROB]
        asked = call(
            *without, rows=ROWS, rows_are_full=case.full, deterministic=case.deterministic,
            unit_scale=case.prob is None,
        )  # fmt: skip
        plan = capability.plan(facts, asked, self._env, HOST)
        assert isinstance(plan, Plan), plan
        assert plan.layout.use_dense_single_group == case.full
        return plan

    def _tokens(self, plan: Plan, cols: int) -> Any:
        full = plan.layout.extent is RowExtent.BUFFER
        return operands.tokens(cols, plan.layout, operands.splits(*((ROWS,) if full else SPLITS)))

    def _weights(self, plan: Plan, case: LaunchCase, out: int, width: int, axis: Axis) -> Any:
        groups = plan.layout.num_groups
        return operands.weights(groups, out, width, axis, stacked=case.stacked, swizzled=True)

    def _prob(self, case: LaunchCase) -> torch.Tensor | None:
        return None if case.prob is None else torch.ones(ROWS, dtype=case.prob)

    def _fc1(self, case: LaunchCase, plan: Plan) -> Any:
        wide = plan.problem.fc1.out_features
        groups = plan.layout.num_groups
        bias = torch.zeros(groups, wide, dtype=torch.bfloat16) if case.bias else None
        w = self._weights(plan, case, wide, H, Axis.ROW)
        epilogue = Fc1Epilogue(bias, self._prob(case), want_column=True, want_pre_activation=True)
        return self._backend.fc1_act(plan, self._tokens(plan, H), w, epilogue)

    def _gemm(self, case: LaunchCase, plan: Plan) -> None:
        wide = plan.problem.fc1.out_features
        forward = case.kernel is Kernel.FC2_FORWARD
        shape, axis, k = ((H, FFN), Axis.ROW, FFN) if forward else ((wide, H), Axis.COLUMN, wide)
        bias = torch.zeros(GROUPS, H, dtype=torch.bfloat16) if case.bias else None
        epilogue = GemmEpilogue(bias, self._prob(case) if case.scaled else None)
        out = torch.zeros(ROWS, H, dtype=torch.bfloat16)
        w = self._weights(plan, case, *shape, axis)
        self._backend.gemm(plan, case.kernel, self._tokens(plan, k), w, out, epilogue)

    def _dact(self, case: LaunchCase, plan: Plan) -> Any:
        wide = plan.problem.fc1.out_features
        pre = torch.zeros(ROWS, wide, dtype=torch.bfloat16)
        epilogue = DactEpilogue(
            self._prob(case), want_dprob=case.dprob, want_bias_grad=case.bias_grad,
            want_column=True, want_activated=case.activated,
        )  # fmt: skip
        w = self._weights(plan, case, H, FFN, Axis.COLUMN)
        return self._backend.dact_dgrad(plan, self._tokens(plan, H), w, pre, epilogue)

    def _wgrad(self, case: LaunchCase, plan: Plan) -> None:
        out: Any = torch.zeros(GROUPS, H, FFN, dtype=case.dtype)
        target = WgradTarget(out if case.stacked else tuple(out.unbind(0)), case.accumulate)
        x, dy = self._tokens(plan, FFN), self._tokens(plan, H)
        self._backend.wgrad(plan, Kernel.FC2_WGRAD, x, dy, target)
