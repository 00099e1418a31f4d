# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine quantizes: its recipe, its quantizers, and tensors that arrive quantized.

Quantizers decide what is quantized, not the recipe: TE keeps an op's quantizers when the next
recipe is of the same type, whatever its content. A recipe is its class and every field: the methods
by which TE asks for a kind (`recipe.mxfp8()`) answer for subclasses too, and know no field that a
later version, or a user, adds. What is not known here is no recipe of ours.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import get_fp8_torch_dtype
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

from te_grouped_mlp.op.problem import RecipeKind

HYBRID = "gradients in another format than E4M3"

# `margin` is delayed scaling's, and `fp8_dpa` and `fp8_mha` concern attention alone.
_EVERYWHERE = {"_cached_repr", "fp8_format", "fp8_dpa", "fp8_mha", "backward_override"}
KNOWN_FIELDS: dict[type, frozenset[str]] = {
    MXFP8BlockScaling: frozenset(_EVERYWHERE | {"margin", "enable_2d_quantization"}),
    NVFP4BlockScaling: frozenset(
        _EVERYWHERE
        | {"fp4_format", "fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"}
        | {"disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"}
        | {"row_scaled_activation", "nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"}
        | {"nvfp4_4over6_err_mode"}
    ),
}
"""The attributes of a recipe of Transformer Engine 2.19 and 2.20, by its class."""

_OFF = (None, False, 0, "", "none")

_E4M3 = int(DType.kFloat8E4M3)
_ROLES = (
    ("input", "forward", 0),
    ("weight", "forward", 1),
    ("output gradient", "backward", 0),
)
"""What a GroupedLinear quantizes, with mode and index of its first expert's quantizer."""


def read_recipe(recipe: Any) -> tuple[RecipeKind, str]:
    """Return the kind of a recipe, and what of its content matters, for messages.

    Args:
        recipe: A TE recipe, or None outside autocast.

    Returns:
        OTHER for what is not exactly a recipe that is known here, however it answers. The detail is
        empty where there is nothing to say.
    """
    if recipe is None:
        return RecipeKind.NONE, ""
    cls = type(recipe)
    known = KNOWN_FIELDS.get(cls)
    if known is None:
        return RecipeKind.OTHER, _describe(cls)
    unknown = vars(recipe).keys() - known
    if unknown:
        changed = sorted(name for name in unknown if not _is_off(recipe, name))
        if changed:
            values = ", ".join(f"{name} is {getattr(recipe, name)!r}" for name in changed)
            return RecipeKind.OTHER, f"{cls.__name__} whose {values}, which is not known here"
    if recipe.backward_override is not None:
        return RecipeKind.OTHER, f"backward_override is {recipe.backward_override!r}"
    if issubclass(cls, MXFP8BlockScaling):
        grad_dtype = get_fp8_torch_dtype(recipe, fprop_tensor=False)
        return RecipeKind.MXFP8, "" if grad_dtype == torch.float8_e4m3fn else HYBRID
    return RecipeKind.NVFP4, _nvfp4_detail(recipe)


def _describe(cls: type) -> str:
    bases = [base.__name__ for base in cls.__mro__ if base in KNOWN_FIELDS]
    if bases:
        return f"{cls.__name__}, a subclass of {bases[0]} that is not known here"
    return cls.__name__


def _is_off(recipe: Any, name: str) -> bool:
    """Whether an unknown field stands at a default that asks for nothing.

    Being the default is not enough: TE takes defaults from environment variables.
    """
    value = getattr(recipe, name)
    if not isinstance(value, bool | int | str | None):
        return False
    fields = {field.name: field.default for field in dataclasses.fields(recipe)}
    return value in _OFF and value == fields.get(name, value)


def _nvfp4_detail(recipe: Any) -> str:
    if recipe.disable_rht:
        return "rht disabled"
    if recipe.row_scaled_activation:
        return "row_scaled_activation is True"
    if recipe.nvfp4_4over6 != "none":
        return f"nvfp4_4over6 is {recipe.nvfp4_4over6!r}"
    return ""


def recipe_facts(fc1: Any, fc2: Any, recipe: Any) -> tuple[RecipeKind, str]:
    """Return kind and detail of a recipe for two GroupedLinears that may have quantizers.

    The first expert's stand for all of them, here and in the step, as in upstream's fused op.

    Args:
        fc1, fc2: The ops.
        recipe: In force, or asked about. What its content says of formats counts when the ops have
            no quantizers, or those of another type of recipe, which TE will replace.
    """
    kind, detail = read_recipe(recipe)
    if kind is not RecipeKind.MXFP8:
        return kind, detail
    # Each forward asks: first whether all are as usual.
    if _make_e4m3(fc1) and _make_e4m3(fc2):
        return kind, ""
    for label, op in (("FC1", fc1), ("FC2", fc2)):
        for role, mode, index in _ROLES:
            quantizer = op.get_quantizer(mode, index)
            if type(quantizer) is MXFP8Quantizer and int(quantizer.dtype) == _E4M3:
                continue
            if quantizer is None or not isinstance(recipe, type(op._fp8_metas[mode]["recipe"])):
                return kind, detail
            text = f"{label} quantizes its {role} by {_name(quantizer)}"
            if type(quantizer) is MXFP8Quantizer and mode == "backward":
                return kind, f"{HYBRID}: {text}"
            return RecipeKind.OTHER, text
    return kind, ""


def _make_e4m3(op: Any) -> bool:
    get = op.get_quantizer
    x, weight, dy = get("forward", 0), get("forward", 1), get("backward", 0)
    if not type(x) is type(weight) is type(dy) is MXFP8Quantizer:
        return False
    return bool(x.dtype == weight.dtype == dy.dtype == _E4M3)


def _name(quantizer: Any) -> str:
    dtype = getattr(quantizer, "dtype", None)
    name = getattr(dtype, "name", dtype)
    return type(quantizer).__name__ if name is None else f"{type(quantizer).__name__} to {name}"


def own(quantizer: Any, *, row: bool, column: bool, swizzled: bool) -> Any:
    """Return a copy with the usages of one call, so that an op's own quantizer is not changed.

    Args:
        quantizer: Of an op, or kept by a forward.
        row, column: The copies that it makes.
        swizzled: Whether it makes scales in tile order.
    """
    copy = quantizer.copy()
    copy.set_usage(rowwise=row, columnwise=column)
    if swizzled:
        copy.optimize_for_gemm = True
    copy.internal = True
    return copy


def copied(op: Any, mode: str, index: int) -> Any:
    """Return a copy of a quantizer of an op, for a later pass; None without one.

    Between the passes of a call TE may replace the op's quantizers, or drop them.
    """
    quantizer = op.get_quantizer(mode, index)
    return None if quantizer is None else quantizer.copy()


def require_readable(name: str, tensor: Any, *, block_scaled: bool) -> None:
    """Check a token tensor that may arrive quantized.

    Args:
        name: For the message.
        tensor: Any; only a GroupedTensor is looked at.
        block_scaled: Whether the step's operands are MXFP8.

    Raises:
        ValueError: It is quantized and the step's operands are not, or it holds another format than
            E4M3, whose bytes the kernels would misread.
    """
    if not isinstance(tensor, GroupedTensor):
        return
    if not block_scaled:
        raise ValueError(f"{name} is a GroupedTensor; allowed without a recipe: a plain tensor")
    quantizer = tensor.quantizer
    dtype = None if quantizer is None else getattr(quantizer, "dtype", None)
    if dtype is not None and int(dtype) != _E4M3:
        raise ValueError(f"{name} is a GroupedTensor of {_name(quantizer)}; allowed: kFloat8E4M3")


# Token tensors that only claim to be bf16 ---------------------------------------------------------

CARRIER_INPUT = "ep_mxfp8_carrier_input"
CARRIER_GRAD = "ep_mxfp8_carrier_grad"

_DECODER = "mxfp8_carrier_to_grouped"
"""Its name in ``transformer_engine.pytorch.ep``, as proposed and not merged."""


def flag(op: Any, name: str) -> bool:
    """Whether an op has an attribute that is true. A module is slow to say that it has none."""
    return (name in op.__dict__ or hasattr(type(op), name)) and bool(getattr(op, name))


def te_decodes_carriers() -> bool:
    """Whether TE has the proposed function that decodes a carrier; no released version has."""
    return hasattr(importlib.import_module("transformer_engine.pytorch.ep"), _DECODER)


def refuse_carriers(fc1: Any | None, fc2: Any) -> None:
    """Refuse ops that announce a token tensor which only claims to be bf16.

    Args:
        fc1: Announces the input; None in a backward, which does not read it.
        fc2: Announces the output gradient.

    Raises:
        RuntimeError: One announces it.
    """
    for op, attribute in ((fc1, CARRIER_INPUT), (fc2, CARRIER_GRAD)):
        if op is not None and flag(op, attribute):
            raise RuntimeError(
                f"{attribute} is set on {type(op).__name__}, but no released Transformer Engine "
                "has a function that decodes such a tensor (proposed, and not merged: "
                f"transformer_engine.pytorch.ep.{_DECODER}); allowed: a plain tensor "
                "or a GroupedTensor, without the announcement"
            )
