# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether Transformer Engine's own fused grouped MLP may run in standalone."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

# Fuse functions by the class they build, newest name first.
_FUSE_FUNCTIONS = {
    "GroupedMLP_CuTeGEMMGLU": ("fuse_glu_ops", "fuse_ops"),
    "GroupedMLP_CuTeGEMMUnary": ("fuse_unary_activation_ops", "fuse_srelu_ops"),
}
_PUBLIC_NAME = "transformer_engine.pytorch.ops.fused.grouped_mlp"

_allowed = False
_modules: list[ModuleType] = []


def guarded_is_supported(module: ModuleType, original: Any) -> Any:
    """Return an `is_supported` class method that says no unless upstream's op is allowed."""
    del module
    inner = original.__func__

    @functools.wraps(inner)
    def is_supported(cls: type) -> bool:
        return _allowed and inner(cls)

    # Tests clear the cache of upstream's capability functions.
    is_supported.cache_clear = inner.cache_clear  # type: ignore[attr-defined]
    return classmethod(is_supported)


def remember(module: ModuleType) -> None:
    """Bring a newly loaded upstream module into line with what is allowed."""
    _modules.append(module)
    _sync(module)


def allow(allowed: bool) -> None:
    """Set what is allowed and bring every loaded upstream module into line."""
    global _allowed
    _allowed = bool(allowed)
    for module in _modules:
        _sync(module)


def _sync(module: ModuleType) -> None:
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    registered = OperationFuser.forward_backward_fusion_functions
    for class_name, fuse_names in _FUSE_FUNCTIONS.items():
        fuse = next((vars(module)[name] for name in fuse_names if name in vars(module)), None)
        if fuse is None:
            continue
        fused_class = vars(module)[class_name]
        if not hasattr(fused_class.is_supported, "cache_clear"):
            continue  # our own class, in a tree patched to use the fork
        fused_class.is_supported.cache_clear()
        # A copy under a private name belongs to whoever loaded it; only the public one registers.
        if module.__name__ == _PUBLIC_NAME and fused_class.is_supported():
            if fuse not in registered:
                registered.insert(0, fuse)
        elif fuse in registered:
            registered.remove(fuse)
