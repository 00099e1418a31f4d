# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's ops and tensors, read into the project's own records."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.distributed_weight import is_distributed_weight
from transformer_engine.pytorch.ops import basic
from transformer_engine.pytorch.ops._common import get_dummy_wgrads_for_params
from transformer_engine.pytorch.ops.basic.grouped_linear import (
    GRAD_INPUT_BUFFER_KEY,
    OUTPUT_BUFFER_KEY,
)
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
from transformer_engine.pytorch.utils import clear_tensor_data

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.environment import Switches
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.layout import is_single_group
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import LinearSpec, Problem, RecipeKind
from te_grouped_mlp.op.step import split_guard
from te_grouped_mlp.op.te import quantizers
from te_grouped_mlp.op.te.quantizers import flag
from te_grouped_mlp.op.tensors.operands import Splits

__all__ = [
    "GRAD_INPUT_BUFFER_KEY",
    "OUTPUT_BUFFER_KEY",
    "GroupedLinear",
    "GroupedTensor",
    "activation_kind",
    "activation_spec",
    "clear_tensor_data",
    "compute_dtype",
    "has_unit_scale",
    "sizes_on_host",
    "is_gemm_ready",
    "is_quantized",
    "leader",
    "linear_spec",
    "packed_bias",
    "parameters",
    "placeholder_grads",
    "problem_of",
    "read_splits",
]

UNIT_SCALE_ATTRIBUTE = "_grouped_mlp_unit_activation_scale"

GroupedLinear = basic.GroupedLinear


def leader(op: Any) -> torch.Tensor:
    """Return the first weight parameter of a GroupedLinear."""
    name = "weight" if op.single_grouped_weight else "weight0"
    weight = op._parameters.get(name)
    if weight is None:
        weight = getattr(op, name)
    assert isinstance(weight, torch.Tensor)
    return weight


def parameters(op: Any) -> Sequence[torch.Tensor]:
    """Return the weight parameters of a GroupedLinear: one grouped weight, or one per expert."""
    if op.single_grouped_weight:
        return [leader(op)]
    return discrete(op, "weight")


def discrete(op: Any, kind: str) -> Sequence[torch.Tensor]:
    """Return a GroupedLinear's parameters of a kind ("weight", "bias") that has one per expert."""
    names, take = _names(kind, op.num_groups)
    try:
        # Not getattr: a module looks in three places, for hundreds of weights at every call.
        parameters = take(op._parameters)
    except KeyError:
        # Parametrizations and FSDP put something else than a parameter there.
        return [getattr(op, name) for name in names]
    # One name gives the bare value.
    return parameters if isinstance(parameters, tuple) else (parameters,)


@functools.cache
def _names(kind: str, num_groups: int) -> tuple[tuple[str, ...], Callable[[Any], Any]]:
    """Return the names of parameters, and what takes them all out of a dictionary at once."""
    names = tuple(f"{kind}{index}" for index in range(num_groups))
    return names, operator.itemgetter(*names)


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight parameter is stored quantized."""
    if type(weight) is torch.nn.Parameter:
        return False
    if isinstance(weight, GroupedTensor):
        return weight.quantizer is not None
    return isinstance(weight, QuantizedTensorStorage)


def linear_spec(op: Any) -> LinearSpec:
    """Read a GroupedLinear."""
    return LinearSpec(*_linear_facts(op, leader(op)))


def _linear_facts(op: Any, weight: torch.Tensor) -> tuple[Any, ...]:
    """Return the fields of a LinearSpec in their order."""
    return (
        op.in_features,
        op.out_features,
        bool(op.has_bias),
        bool(op._scale_bias),
        bool(op.single_grouped_weight),
        bool(op.single_grouped_bias),
        is_quantized(weight),
        bool(op._accumulate_into_main_grad),
        op.need_backward_dw(),
        is_distributed_weight(weight),
    )


def activation_kind(op: Any) -> Activation | None:
    """Return which scaled activation an op is, also of a user's subclass; None for another op."""
    return _kind_of(type(op))  # type: ignore[arg-type]  # a class can be hashed


@functools.lru_cache(maxsize=256)
def _kind_of(op_type: type) -> Activation | None:
    known = {getattr(basic, kind.value, None): kind for kind in Activation}
    return next((known[cls] for cls in op_type.__mro__ if cls in known), None)


def activation_spec(op: Any) -> ActivationSpec:
    """Read a scaled activation.

    Raises:
        TypeError: The op is none.
    """
    kind, values = _activation_facts(op)
    return ActivationSpec(kind, **dict(values))


def _activation_facts(op: Any) -> tuple[Activation, tuple[tuple[str, Any], ...]]:
    kind = _kind_of(type(op))  # type: ignore[arg-type]  # a class can be hashed
    if kind is None:
        allowed = ", ".join(kind.value for kind in Activation if hasattr(basic, kind.value))
        raise TypeError(f"activation is {type(op).__name__}; allowed: {allowed}")
    values: list[tuple[str, Any]] = [("recompute", flag(op, "activation_recompute_in_mlp"))]
    for parameter in kind.row.parameters:
        values.append((parameter.name, parameter.read(op)))
    if kind.row.is_gated:
        values.append(("interleave", op.glu_interleave_size or None))
    return kind, tuple(values)


def has_unit_scale(activation: Any, num_groups: int) -> bool:
    """Whether the probabilities of one group are one by agreement and their tensor is unused."""
    return flag(activation, UNIT_SCALE_ATTRIBUTE) and is_single_group(num_groups)


def problem_of(fc1: Any, activation: Any, fc2: Any, recipe: Any) -> Problem:
    """Read the three ops and the recipe.

    Args:
        fc1, activation, fc2: GroupedLinear, scaled activation, GroupedLinear.
        recipe: A TE recipe, or None outside autocast.

    Returns:
        One record for all ops with equal facts, so that what is known of it is found by identity.
    """
    weight = leader(fc1)
    kind, detail = quantizers.recipe_facts(fc1, fc2, recipe)
    return _problem_of(
        fc1.num_groups,
        _linear_facts(fc1, weight),
        _linear_facts(fc2, leader(fc2)),
        _activation_facts(activation),
        kind,
        detail,
        weight.device.type,
        weight.dtype,
    )


@functools.lru_cache(maxsize=256)
def _problem_of(
    num_groups: int,
    fc1: tuple[Any, ...],
    fc2: tuple[Any, ...],
    activation: tuple[Activation, tuple[tuple[str, Any], ...]],
    recipe: RecipeKind,
    detail: str,
    device: str,
    dtype: torch.dtype,
) -> Problem:
    spec = ActivationSpec(activation[0], **dict(activation[1]))
    linears = LinearSpec(*fc1), LinearSpec(*fc2)
    return Problem(num_groups, *linears, spec, recipe, detail, device, DType.of(dtype))


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return autocast's dtype where autocast is on, else the dtype of the weights."""
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def sizes_on_host(split_sizes: torch.Tensor, switches: Switches) -> tuple[int, ...] | None:
    """Return the split sizes where the host may read them: CPU tensors, or when checks are on.

    Synchronises with a GPU only under NVTE_GROUPED_MLP_CHECK=1.
    """
    if split_sizes.device.type == "cpu" or switches.check:
        return tuple(split_sizes.tolist())
    return None


def read_splits(
    split_sizes: torch.Tensor,
    sizes_on_host: tuple[int, ...] | None,
    plan: Plan,
    device: torch.device,
) -> Splits:
    """Compute every offset that a step needs, in one tex call; never synchronises.

    Sizes that the host did not read are checked on the device first (`split_guard`).

    Args:
        split_sizes: int32 or int64 (G,).
        sizes_on_host: The result of `sizes_on_host`.
        plan: Of the call; quantizing tokens takes element offsets of each width, the kernels on
            plain values take int32 row offsets.
        device: The op's device.
    """
    quantized = plan.call.format.is_block_scaled
    unique = plan.problem.token_widths if quantized else (1,)
    more = len(unique)
    split_sizes, fault = split_sizes.contiguous(), None
    if sizes_on_host is None:
        split_sizes, fault = split_guard.checked(split_sizes, plan)
    sizes, (group_end_offsets, group_offsets, *rest) = tex.splits_to_offsets_multi(
        split_sizes,
        device,
        strides=[1, 1, *unique],
        include_leading_zero=[False] + [True] * (1 + more),
        dtypes=[torch.int32, torch.int64] + [torch.int64 if quantized else torch.int32] * more,
        bulk_allocate=True,
    )
    elements = dict(zip(unique, rest, strict=True)) if quantized else {}
    return Splits(
        sizes,
        group_end_offsets,
        group_offsets,
        elements,
        sizes_on_host,
        None if quantized else rest[0],
        fault,
    )


def packed_bias(op: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Return all biases as (G, N), a view where TE stores them so; None without a bias."""
    if not op.has_bias:
        return None
    bias: torch.Tensor = op._get_packed_bias_tensor(dtype)
    return bias.detach()


def placeholder_grads(weights: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return what autograd gets for weights whose gradient went to ``main_grad``.

    Sets ``grad_added_to_main_grad`` where a parameter has it, as Megatron expects.
    """
    return list(get_dummy_wgrads_for_params(list(weights)))


def is_gemm_ready(tensor: torch.Tensor) -> bool:
    """Whether a token tensor arrived with both quantized copies, which then are the caller's."""
    return isinstance(tensor, GroupedTensor) and bool(tensor._with_gemm_swizzled_scales)
