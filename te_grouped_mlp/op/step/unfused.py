# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A call that the fused op leaves to the three ops it was made of.

TE's fuser fuses once per type of recipe. A recipe of that type with another content, or quantizers
that an op keeps from one, meet the op that was fused for kernels which do not compute them. Then
the next step of the order takes the call, as it would have taken it at fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op import decisions, selection
from te_grouped_mlp.op.environment import Environment
from te_grouped_mlp.op.plan import Reject
from te_grouped_mlp.op.problem import Problem
from te_grouped_mlp.op.te import quantizers

Ops = Sequence[Any]


def takes(problem: Problem, env: Environment) -> bool:
    """Whether the content of the recipe is one that no backend computes, and says so.

    Args:
        problem: With a `recipe_detail`; without one there is nothing to ask.
        env: The machine.

    False where a backend was named: that one runs, or planning raises.
    """
    if env.switches.backend != selection.AUTO:
        return False
    refused = selection.refusals(problem, env)
    if selection.choose(problem, env) is not None:
        return False
    reason = next(iter(refused.values())).reason
    late = Reject(reason, f"{problem.recipe_detail}, and Transformer Engine does not fuse anew")
    steps = (*refused.items(), (selection.UPSTREAM, late))
    decisions.add(decisions.Decision(problem, decisions.UNFUSED, steps))
    return True


def forward(
    ops: Ops,
    contexts: Sequence[Any],
    input_: torch.Tensor,
    extra: Sequence[Sequence[torch.Tensor]],
    kwargs: Sequence[dict[str, Any]],
    prev_op_grad_output_quantizer: Any = None,
    next_op_input_quantizer: Any = None,
) -> tuple[torch.Tensor, list[Any]]:
    """Run the forward of each op, with its own context; arguments as `fuser_forward` has them.

    Raises:
        RuntimeError: An op announces a tensor that it would misread.
    """
    quantizers.refuse_carriers(ops[0], ops[2])
    outputs = []
    before = [prev_op_grad_output_quantizer, *(op.get_grad_output_quantizer() for op in ops[:-1])]
    after = [*(op.get_input_quantizer() for op in ops[1:]), next_op_input_quantizer]
    for index, op in enumerate(ops):
        input_, (output,) = op.fuser_forward(
            [contexts[index]],
            input_,
            basic_op_extra_inputs=[extra[index]],
            prev_op_grad_output_quantizer=before[index],
            next_op_input_quantizer=after[index],
            basic_op_kwargs=[kwargs[index]],
        )
        outputs.append(output)
    return input_, outputs


def backward(
    ops: Ops, contexts: Sequence[Any], grad_output: torch.Tensor
) -> tuple[torch.Tensor | None, list[Any], list[Any]]:
    """Run the backward of each op that needs one; the result is that of `fuser_backward`."""
    grad: torch.Tensor | None = grad_output
    parameters: list[Any] = [None] * len(ops)
    extra: list[Any] = [(None,) * op.num_extra_inputs for op in ops]
    for index in reversed(range(len(ops))):
        if not contexts[index].requires_grad:
            return None, parameters, extra
        grad, (parameters[index],), (extra[index],) = ops[index].fuser_backward(
            [contexts[index]], grad, basic_op_grad_extra_outputs=[()]
        )
    return grad, parameters, extra
