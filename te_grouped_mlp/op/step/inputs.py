# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of one forward call, checked; and the facts that planning needs of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op.environment import FULL_ROWS_SWITCH, Environment
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.layout import Output, is_single_group
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, TensorKind
from te_grouped_mlp.op.te import adapter, quantizers
from te_grouped_mlp.op.te.adapter import (
    GRAD_INPUT_BUFFER_KEY,
    OUTPUT_BUFFER_KEY,
    GroupedTensor,
    compute_dtype,
    parameters,
)
from te_grouped_mlp.op.te.probes import determinism_requested
from te_grouped_mlp.op.tensors import checks, experts, memory
from te_grouped_mlp.op.tensors.operands import torch_dtype
from te_grouped_mlp.op.tensors.tensor_dataclass import tensor_dataclass

_LARGEST_TILE = 256


@tensor_dataclass
class Inputs:
    """The checked arguments of one forward call.

    Attributes:
        x: (rows, in features), or a GroupedTensor.
        shape: The caller's shape of x.
        split_sizes: As given.
        prob: (rows,) detached, in the caller's dtype; None for a unit scale.
        bias_scale: (rows,) factor of FC2's bias, or None.
        output, grad_input: The caller's buffers, or None.
        weights: The weight parameters of FC1 and of FC2, as `parameters` returns them.
        held: What `experts.read` found in each.
    """

    x: torch.Tensor
    shape: tuple[int, ...]
    split_sizes: torch.Tensor
    prob: torch.Tensor | None
    bias_scale: torch.Tensor | None
    output: torch.Tensor | None
    grad_input: torch.Tensor | None
    weights: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
    held: experts.Held


def read_inputs(
    ops: Sequence[Any],
    problem: Problem,
    input_: torch.Tensor,
    extra: Sequence[Sequence[torch.Tensor]],
    kwargs: Sequence[dict[str, Any]],
) -> Inputs:
    """Check the arguments of a forward call; nothing is launched or changed.

    Raises:
        ValueError, TypeError, RuntimeError: As the functions of `checks` say.
    """
    if kwargs[0] or kwargs[2]:
        _check_buffer_owner(kwargs)
    quantizers.refuse_carriers(ops[0], ops[2])
    weights = parameters(ops[0]), parameters(ops[2])
    device = weights[0][0].device
    if weights[1][0].device != device:
        raise checks.elsewhere("FC2's weight", weights[1][0], device)
    features = problem.fc1.in_features
    checks.tokens("input", input_, features, device)
    shape = tuple(input_.shape)
    if isinstance(input_, GroupedTensor):
        if problem.format.is_block_scaled:
            quantizers.require_readable("input", input_, block_scaled=True)
        if len(shape) != 2:
            raise ValueError(f"input has shape {shape}; allowed: two dimensions (GroupedTensor)")
        experts.require_grouped_bytes("input", input_, 1, shape, device)
        x = input_
    else:
        x = input_.detach() if len(shape) == 2 else input_.reshape(-1, features)
    checks.rows("input", x.shape[0], problem.format.rows_multiple)
    checks.split_sizes(extra[0][0], extra[2][0], problem.num_groups, device)
    held = experts.read_parameters(ops, problem, weights, device)
    if problem.fc1.delay_wgrad or problem.fc2.delay_wgrad:
        _check_delayed(problem.fc1, weights[0], "FC1")
        _check_delayed(problem.fc2, weights[1], "FC2")
        _check_tied_linears(problem, *weights)
    unit = adapter.has_unit_scale(ops[1], problem.num_groups)
    prob = None if unit else checks.probabilities("probabilities", extra[1][0], x.shape[0], device)
    bias_scale = None
    if problem.fc2.scale_bias:
        checks.same_values(extra[1][0], extra[2][1])
        bias_scale = checks.probabilities("bias scale", extra[2][1], x.shape[0], device)
    if unit and bias_scale is not None:
        raise ValueError(
            "scale_bias of FC2 is True together with a unit activation scale; allowed: one of them"
        )
    return Inputs(
        x=x,
        shape=shape,
        split_sizes=extra[0][0],
        prob=prob,
        bias_scale=bias_scale,
        output=kwargs[2].get(OUTPUT_BUFFER_KEY),
        grad_input=kwargs[0].get(GRAD_INPUT_BUFFER_KEY),
        weights=weights,
        held=held,
    )


def _check_delayed(spec: LinearSpec, weights: Sequence[torch.Tensor], label: str) -> None:
    if not spec.delay_wgrad:
        return
    if len({id(weight) for weight in weights}) != len(weights):
        raise ValueError(
            f"delay_wgrad_compute of {label} is True and two experts share a weight; allowed: "
            "distinct weights, since the delayed gradients of tied ones would replace each other"
        )
    if spec.distributed:
        raise RuntimeError(
            f"delay_wgrad_compute of {label} is True with distributed weights; allowed: False"
        )


def _check_tied_linears(
    problem: Problem, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
) -> None:
    """Refuse a weight of both linears whose delayed gradient would replace the other one."""
    specs = (problem.fc1, problem.fc2)
    if not any(spec.delay_wgrad and not spec.main_grad for spec in specs):
        return
    if set(map(id, first)) & set(map(id, second)):
        raise ValueError(
            "delay_wgrad_compute is True and FC1 and FC2 share a weight; allowed: distinct "
            "weights, or gradients that are accumulated into main_grad"
        )


def _check_buffer_owner(kwargs: Sequence[dict[str, Any]]) -> None:
    for key, index, owner in ((OUTPUT_BUFFER_KEY, 0, "FC2"), (GRAD_INPUT_BUFFER_KEY, 2, "FC1")):
        if key in kwargs[index]:
            wrong = "FC1" if owner == "FC2" else "FC2"
            raise ValueError(f"{key!r} buffer was given to {wrong}; allowed: on {owner} only")


def read_call(
    contexts: Sequence[Any],
    problem: Problem,
    inputs: Inputs,
    prob: torch.Tensor,
    sizes_on_host: tuple[int, ...] | None,
    env: Environment,
) -> Call:
    """Collect the facts of one call.

    Args:
        contexts: Of FC1, the activation and FC2.
        problem: The facts of the ops.
        inputs: The checked arguments.
        prob: The probabilities as given; only requires_grad is read.
        sizes_on_host: The split sizes where the host can read them.
        env: The machine.

    Raises:
        ValueError: Splits that the host can read do not fit the buffer or a promise about it.
    """
    rows = inputs.x.shape[0]
    if sizes_on_host is not None:
        checks.split_values(sizes_on_host, rows, problem.format.rows_multiple)
    return Call(
        rows=rows,
        dtype=DType.of(compute_dtype(inputs.weights[0][0])),
        prob_dtype=DType.FLOAT32 if inputs.prob is None else DType.of(inputs.prob.dtype),
        rows_are_full=_rows_are_full(sizes_on_host, rows, inputs.prob is None, env),
        wanted=_wanted(contexts, problem, inputs, prob),
        input_kind=(
            TensorKind.PREQUANTIZED if isinstance(inputs.x, GroupedTensor) else TensorKind.PLAIN
        ),
        unit_scale=inputs.prob is None,
        deterministic=determinism_requested(env.switches),
        format=problem.format,
        split_multiple=None if sizes_on_host is None else math.gcd(*sizes_on_host, _LARGEST_TILE),
    )


def _rows_are_full(
    sizes_on_host: tuple[int, ...] | None, rows: int, unit: bool, env: Environment
) -> bool:
    switches = env.switches
    if env.treat_rows_as_full is not None:
        return env.treat_rows_as_full
    if sizes_on_host is None:
        return unit or switches.full_rows
    if unit:
        checks.full_rows(sizes_on_host, rows, "the unit activation scale")
    if switches.full_rows and is_single_group(len(sizes_on_host)):
        checks.full_rows(sizes_on_host, rows, f"{FULL_ROWS_SWITCH}=1")
    return sum(sizes_on_host) == rows


def _wanted(
    contexts: Sequence[Any], problem: Problem, inputs: Inputs, prob: torch.Tensor
) -> frozenset[Output]:
    fc1, fc2 = contexts[0].requires_grad, contexts[2].requires_grad
    return _outputs(
        fc1,
        fc1 and inputs.weights[0][0].requires_grad,
        problem.fc1.has_bias,
        fc2 and inputs.weights[1][0].requires_grad,
        problem.fc2.has_bias,
        contexts[1].requires_grad and prob.requires_grad and inputs.prob is not None,
    )


@functools.cache
def _outputs(
    dx: bool, dw1: bool, bias1: bool, dw2: bool, bias2: bool, dprob: bool
) -> frozenset[Output]:
    wanted = {
        Output.Y: True,
        Output.DX: dx,
        Output.DW1: dw1,
        Output.DB1: dw1 and bias1,
        Output.DW2: dw2,
        Output.DB2: dw2 and bias2,
        Output.DPROB: dprob,
    }
    return frozenset(output for output, asked in wanted.items() if asked)


def output_buffer(plan: Plan, inputs: Inputs) -> torch.Tensor:
    """Check the caller's buffers, and return the one of the output.

    Returns:
        The caller's buffer, or a fresh one: (rows, FC2 out features) in the compute dtype.

    Raises:
        ValueError, TypeError: A caller's buffer does not fit, or shares memory with the input.
    """
    problem, call = plan.problem, plan.call
    dtype, device = torch_dtype(call.dtype), inputs.x.device
    read = [] if isinstance(inputs.x, GroupedTensor) else [inputs.x]
    if inputs.grad_input is not None:
        shape = (call.rows, problem.fc1.in_features)
        others = [*read, *(buffer for buffer in (inputs.output,) if buffer is not None)]
        checks.buffer("grad_input", inputs.grad_input, shape, dtype, device, others)
    shape = (call.rows, problem.fc2.out_features)
    if inputs.output is None:
        return memory.empty(shape, dtype, device)
    return checks.buffer("output", inputs.output, shape, dtype, device, read)
