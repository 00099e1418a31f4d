# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of one linear: computed now or put off, and what autograd is given for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op.backends.checked import CheckedBackend
from te_grouped_mlp.op.layout import Kernel, Output
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.step.saved import Owners
from te_grouped_mlp.op.te.adapter import clear_tensor_data, placeholder_grads
from te_grouped_mlp.op.tensors import capacity, gradients, stacking, weights
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.memory import current_of
from te_grouped_mlp.op.tensors.operands import GroupedOperand, QuantizedCopy, torch_dtype

_WANTED = {Kernel.FC1_WGRAD: Output.DW1, Kernel.FC2_WGRAD: Output.DW2}


Targets = tuple[WgradTarget | None, WgradTarget | None]


def main_grad_targets(plan: Plan, owners: Owners, *, writes: bool = True) -> Targets:
    """Look at the ``main_grad`` buffers that a backward writes; as upstream, those of this moment.

    Args:
        plan: The plan of the call.
        owners: The weight parameters of FC1 and of FC2, as the forward used them.
        writes: This is that backward; not the forward, which looks at them too.

    Returns:
        One target per linear. None where the gradient goes elsewhere: to autograd, to the owner of
        a distributed weight, or to FSDP, which provides the buffer only when it is written.

    Raises:
        RuntimeError: A ``main_grad`` is missing, has another shape, device or kind of dtype,
            or less memory than that takes.
    """
    problem = plan.problem
    targets: list[WgradTarget | None] = []
    for kernel, spec, weights_of, label in (
        (Kernel.FC1_WGRAD, problem.fc1, owners[0], "FC1"),
        (Kernel.FC2_WGRAD, problem.fc2, owners[1], "FC2"),
    ):
        here = _WANTED[kernel] in plan.call.wanted and spec.main_grad and not spec.distributed
        if here and not hasattr(weights_of[0], "__fsdp_param__"):
            targets.append(
                gradients.main_grad_target(
                    spec, weights_of, problem.num_groups, label, writes=writes
                )
            )
        else:
            targets.append(None)
    return targets[0], targets[1]


def parameter_grads(
    op: Any,
    owners: Sequence[torch.Tensor],
    plan: Plan,
    run: CheckedBackend,
    kernel: Kernel,
    x: GroupedOperand | None,
    dy: GroupedOperand | None,
    bias_grad: torch.Tensor | None,
    target: WgradTarget | None,
    *,
    owns_x: bool,
) -> list[torch.Tensor | None]:
    """Compute, or put off, the weight gradients of one linear.

    Args:
        op: The GroupedLinear, whose queue takes what is put off.
        owners: Its weight parameters, as the forward had them.
        plan: The plan of the call.
        run: Its device operations.
        kernel: FC1_WGRAD or FC2_WGRAD.
        x, dy: Column copies of input and output gradient; unused when no weight gradient is wanted.
        bias_grad: fp32 (G, N), or None.
        target: What `main_grad_targets` returned for it.
        owns_x: Free the buffers of `x` after use; they were allocated by the op.

    Returns:
        One entry per parameter of `op`, in registration order; None where autograd gets nothing.
    """
    spec = plan.problem.fc1 if kernel is Kernel.FC1_WGRAD else plan.problem.fc2
    if bias_grad is not None:
        bias_grad = bias_grad.to(torch_dtype(plan.call.dtype))
    weight_grads: Sequence[torch.Tensor | None] = [None] * len(owners)
    if _WANTED[kernel] in plan.call.wanted:
        assert x is not None
        assert dy is not None
        weight_grads = _weight_grads(op, owners, plan, run, kernel, x, dy, target, owns_x=owns_x)
    return gradients.in_registration_order(spec, weight_grads, bias_grad, plan.problem.num_groups)


def _weight_grads(
    op: Any,
    owners: Sequence[torch.Tensor],
    plan: Plan,
    run: CheckedBackend,
    kernel: Kernel,
    x: GroupedOperand,
    dy: GroupedOperand,
    target: WgradTarget | None,
    *,
    owns_x: bool,
) -> Sequence[torch.Tensor | None]:
    problem, groups = plan.problem, plan.problem.num_groups
    spec = problem.fc1 if kernel is Kernel.FC1_WGRAD else problem.fc2
    if target is None and spec.main_grad and not spec.distributed:
        label = "FC1" if kernel is Kernel.FC1_WGRAD else "FC2"
        target = gradients.main_grad_target(spec, owners, groups, label)
    elif target is None:
        dtype, device = torch_dtype(plan.call.dtype), dy.splits.sizes.device
        target = gradients.fresh_target(spec, groups, dtype, device)
    # A queue that was closed since the forward takes nothing.
    delays = spec.delay_wgrad and op.need_backward_dw()
    if delays:
        # Only column copies are read then; the others need not wait with them.
        x, dy = x.without_row(), dy.without_row()
        # TE's queue calls the function with the list and clears its first entry afterwards.
        entry = [[], None, list(target.members())]

        def later(*_: Any) -> None:
            _require_memory(x, dy, target)
            with current_of(dy.splits.sizes.device):
                run.wgrad(kernel, x, dy, target)

        op.wgrad_store.put(entry, later)
    else:
        run.wgrad(kernel, x, dy, target)
        if owns_x and isinstance(x.column, QuantizedCopy):
            clear_tensor_data(x.column.data, x.column.scale)
        if spec.distributed:
            weights.finalize_grads(owners, target.members())
    if spec.main_grad or spec.distributed:
        return placeholder_grads(owners)
    if delays:
        return [None] * len(owners)
    return _as_parameters(spec, target)


def _require_memory(x: GroupedOperand, dy: GroupedOperand, target: WgradTarget) -> None:
    """Check what a delayed weight gradient has waited with.

    Raises:
        ValueError: The memory of a tensor was freed or cut since.
    """
    for name, operand in (("x", x), ("dy", dy)):
        held = operand.column
        for part in (held.data, held.scale) if isinstance(held, QuantizedCopy) else ():
            capacity.require_memory(f"{name} of a delayed weight gradient", part)
        if operand.plain is not None:
            capacity.require_memory(f"{name} of a delayed weight gradient", operand.plain)
    name = "target{} of a delayed weight gradient"
    stacking.require(name, target.members(), capacity.require_memory)


def _as_parameters(spec: LinearSpec, target: WgradTarget) -> Sequence[torch.Tensor]:
    if spec.single_grouped_weight:
        assert isinstance(target.out, torch.Tensor)
        return [target.out]
    return target.members()
