# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's recipe, read by its class and by every field of it.

The methods by which TE asks for a kind (`recipe.mxfp8()`) answer for subclasses too, and know no
field that a later version, or a user, adds. What is not known here is no recipe of ours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from transformer_engine.pytorch.quantization import get_fp8_torch_dtype

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


def read(recipe: Any) -> tuple[RecipeKind, str]:
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
