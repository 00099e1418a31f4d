# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine announces as available in standalone: MXFP8 alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_REASON = (
    "{} is not available in standalone, which implements MXFP8 and runs Transformer Engine without "
    "its compiled extension; install the extension to use it"
)


def lacking(words: str) -> Any:
    """Return what makes a question about the support of a recipe that standalone has not."""

    def make(module: ModuleType, original: Any) -> Any:
        del module, original

        def check_support() -> tuple[bool, str]:
            return False, _REASON.format(words)

        return check_support

    return make


def check_recipe_support(module: ModuleType, original: Any) -> Any:
    """Refuse NVFP4 where the other recipes are refused: before a region has been entered."""

    def check_recipe_support(recipe: Any) -> None:
        if recipe.nvfp4():
            supported, reason = module.check_nvfp4_support()
            if not supported:
                raise RuntimeError(reason)
        original(recipe)

    return check_recipe_support


def is_fp8_available(module: ModuleType, original: Any) -> Any:
    """Answer for the recipe of the region that is being entered.

    Transformer Engine asks this one question for every recipe; outside a region it is one about
    FP8 with a scale for each tensor.
    """
    del original

    def is_fp8_available(cls: Any) -> tuple[bool, str]:
        state = cls.quantization_state
        recipe = state.fp8_recipe if state.fp8_enabled else None
        if recipe is not None and (recipe.mxfp8() or recipe.custom()):
            support: tuple[bool, str] = module.check_mxfp8_support()
            return support
        unsupported: tuple[bool, str] = module.check_fp8_support()
        return unsupported

    return classmethod(is_fp8_available)
