# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Where weight and bias gradients go, and in which order they are handed to autograd."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch

from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.tensors import checks, memory, stacking
from te_grouped_mlp.op.tensors.tensor_dataclass import tensor_dataclass

_MAIN_GRAD = operator.attrgetter("main_grad")


@tensor_dataclass
class WgradTarget:
    """Where the weight gradients of one linear go.

    Attributes:
        out: (G, N, K) tensor, or G tensors (N, K); written in place, owned by the caller.
        accumulate: Add to the content instead of replacing it.
    """

    out: torch.Tensor | tuple[torch.Tensor, ...]
    accumulate: bool

    def members(self) -> tuple[torch.Tensor, ...]:
        """Return one (N, K) tensor per expert."""
        return tuple(self.out.unbind(0)) if isinstance(self.out, torch.Tensor) else self.out

    def pieces(self) -> Sequence[torch.Tensor]:
        """Return the same memory in few tensors: one where the experts lie without gaps."""
        if isinstance(self.out, torch.Tensor):
            return (self.out,)
        stacked = stacking.as_stacked_view(self.out)
        return (stacked.values,) if stacked is not None else self.out


def main_grad_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return the ``main_grad`` of a parameter, refreshed from its FSDP owner where there is one.

    Raises:
        RuntimeError: There is none.
    """
    # The instance's own attributes first: looking for an absent one on a tensor is slow.
    own = parameter.__dict__
    main_grad = None if "__fsdp_param__" in own else own.get("main_grad")
    if main_grad is None:
        if hasattr(parameter, "__fsdp_param__"):
            parameter.main_grad = parameter.get_main_grad()
        main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            f"{name}.main_grad is missing; accumulate_into_main_grad=True needs a tensor of shape "
            f"{tuple(parameter.shape)} there"
        )
    assert isinstance(main_grad, torch.Tensor)
    return main_grad


def main_grad_target(
    spec: LinearSpec,
    parameters: Sequence[torch.Tensor],
    num_groups: int,
    label: str,
    *,
    writes: bool = True,
) -> WgradTarget:
    """Return the ``main_grad`` buffers as a target; never copies, never synchronises.

    Args:
        spec: The linear.
        parameters: One grouped weight, or one weight per expert.
        num_groups: Number of experts.
        label: "FC1" or "FC2", for messages.
        writes: The target is about to be written: look for storages that were made shorter, too.

    Raises:
        RuntimeError: A ``main_grad`` is missing, has another shape, device or kind of dtype, is no
            view of (G, N, K), or has less memory than that takes.
    """
    shape = (spec.out_features, spec.in_features)
    accumulate = not getattr(parameters[0], "overwrite_main_grad", False)
    if spec.single_grouped_weight:
        grad = main_grad_of(parameters[0], f"{label} weight")
        stacked = (num_groups, *shape)
        # Any shape of as many elements will do.
        allowed = tuple(grad.shape) if grad.numel() == math.prod(stacked) else stacked
        checks.gradient(f"{label} weight.main_grad", grad, allowed, parameters[0].device)
        return WgradTarget(grad.view(stacked), accumulate)
    try:
        grads = list(map(_MAIN_GRAD, parameters))
    except AttributeError:
        grads = [parameter.__dict__.get("main_grad") for parameter in parameters]
    if type(None) in map(type, grads) or hasattr(parameters[0], "__fsdp_param__"):
        # One is missing, or lies elsewhere than usual: one after the other.
        names = (f"{label} weight{index}" for index in range(len(parameters)))
        grads = list(map(main_grad_of, parameters, names))
    check = functools.partial(checks.gradient, shape=shape, device=parameters[0].device)
    stacking.require(f"{label} weight{{}}.main_grad", grads, check, cut=writes)
    return WgradTarget(tuple(grads), accumulate)


def fresh_target(
    spec: LinearSpec, num_groups: int, dtype: torch.dtype, device: torch.device
) -> WgradTarget:
    """Return a new (G, N, K) buffer as a target that is overwritten."""
    shape = (num_groups, spec.out_features, spec.in_features)
    return WgradTarget(memory.empty(shape, dtype, device), accumulate=False)


def in_registration_order(
    spec: LinearSpec,
    weight_grads: Sequence[torch.Tensor | None],
    bias_grad: torch.Tensor | None,
    num_groups: int,
) -> list[torch.Tensor | None]:
    """Return one gradient per parameter, in the order in which GroupedLinear registers them.

    Args:
        spec: The linear.
        weight_grads: One entry per weight parameter.
        bias_grad: (G, N), or None.
        num_groups: Number of experts.

    Returns:
        Weights then biases, except that one grouped weight follows per-expert biases.
    """
    weights = list(weight_grads)
    if not spec.has_bias:
        return weights
    if spec.single_grouped_bias:
        return [*weights, bias_grad]
    biases = [None] * num_groups if bias_grad is None else list(bias_grad.unbind(0))
    return [*biases, *weights] if spec.single_grouped_weight else [*weights, *biases]
