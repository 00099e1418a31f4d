# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's quantizers, read: what they make, and copies of them for one call.

They decide what is quantized, not the recipe: TE keeps an op's quantizers when the next recipe is
of the same type, whatever its content.
"""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

from te_grouped_mlp.op.problem import RecipeKind
from te_grouped_mlp.op.te import recipes

_E4M3 = int(DType.kFloat8E4M3)
_ROLES = (
    ("input", "forward", 0),
    ("weight", "forward", 1),
    ("output gradient", "backward", 0),
)
"""What a GroupedLinear quantizes, with mode and index of its first expert's quantizer."""


def recipe_facts(fc1: Any, fc2: Any, recipe: Any) -> tuple[RecipeKind, str]:
    """Return kind and detail of a recipe for two GroupedLinears that may have quantizers.

    The first expert's stand for all of them, here and in the step, as in upstream's fused op.

    Args:
        fc1, fc2: The ops.
        recipe: In force, or asked about. What its content says of formats counts when the ops have
            no quantizers, or those of another type of recipe, which TE will replace.
    """
    kind, detail = recipes.read(recipe)
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
                return kind, f"{recipes.HYBRID}: {text}"
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
    made = getattr(dtype, "name", dtype)
    return type(quantizer).__name__ if made is None else f"{type(quantizer).__name__} to {made}"


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


def kept(op: Any, mode: str, index: int) -> Any:
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
    made = None if quantizer is None else getattr(quantizer, "dtype", None)
    if made is not None and int(made) != _E4M3:
        raise ValueError(f"{name} is a GroupedTensor of {_name(quantizer)}; allowed: kFloat8E4M3")
