# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A drop-in for Transformer Engine's fused grouped MLP, and the tools around it.

This file runs at the start of every interpreter of an environment that has the package, so it
imports nothing: the public names are looked up when they are asked for.
"""

__version__ = "0.1.0"

# Public name -> the module that holds it.
_PUBLIC = {
    "activate": "te_grouped_mlp.integration.overlay",
    "assert_active": "te_grouped_mlp.integration.overlay",
    "assert_fused": "te_grouped_mlp.op.explain",
    "digest": "te_grouped_mlp.op.tensors.digest",
    "explain": "te_grouped_mlp.op.explain",
    "RowPadding": "te_grouped_mlp.op.row_padding",
    "row_multiple": "te_grouped_mlp.op.row_padding",
    "row_padding": "te_grouped_mlp.op.row_padding",
}
# Subpackage or module by the name under which users reach it -> where it lies.
_SUBMODULES = {
    "op": "te_grouped_mlp.op",
    "overlay": "te_grouped_mlp.integration.overlay",
    "patches": "te_grouped_mlp.patches",
    "standalone": "te_grouped_mlp.integration.standalone",
}

__all__ = [
    "RowPadding",
    "__version__",
    "activate",
    "assert_active",
    "assert_fused",
    "digest",
    "explain",
    "row_multiple",
    "row_padding",
]

# What type checkers read as true; `typing` itself would cost more than this whole module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from te_grouped_mlp.integration.overlay import activate, assert_active
    from te_grouped_mlp.op.explain import assert_fused as assert_fused
    from te_grouped_mlp.op.explain import explain as explain
    from te_grouped_mlp.op.row_padding import RowPadding as RowPadding
    from te_grouped_mlp.op.row_padding import row_multiple as row_multiple
    from te_grouped_mlp.op.row_padding import row_padding as row_padding
    from te_grouped_mlp.op.tensors.digest import digest as digest
else:

    def __getattr__(name):
        """Import a public name or a subpackage at its first use (PEP 562)."""
        import importlib

        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        if name in _SUBMODULES:
            return importlib.import_module(_SUBMODULES[name])
        raise AttributeError(f"module 'te_grouped_mlp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])
