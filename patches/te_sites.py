# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of TE's fused grouped MLP file that several repairs refer to."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Module, Statement
from te_grouped_mlp.patches.structure import (
    contains,
    has_definition,
    is_definition,
    scope_body,
    target_of,
    walk,
)

BASE_CLASS = "_GroupedMLP_CuTeGEMMBase"
GLU_CLASS = "GroupedMLP_CuTeGEMMGLU"
FORWARD = (BASE_CLASS, "fuser_forward")
BACKWARD = (BASE_CLASS, "fuser_backward")

# The last of the module's capability questions; our helper functions go behind it.
HELPERS_BEHIND = "_cudnn_frontend_supports_single_group_runtime_offsets"

DENSE = "use_dense_single_group"

# A group count compared with one, as the file writes it.
ONE_GROUP = m.Comparison(
    left=m.Name("num_groups"),
    comparisons=[
        m.ComparisonTarget(operator=m.OneOf(m.Equal(), m.NotEqual()), comparator=m.Integer("1"))
    ],
)


def helper(text: str) -> Edit:
    """The edit that puts a repair's own functions into the module."""
    return Edit(
        "helper",
        (),
        find=lambda statement: is_definition(statement, HELPERS_BEHIND),
        after=text,
        blank_lines=2,
        wanted=f"behind the function {HELPERS_BEHIND}",
    )


def is_fused_mlp(module: Module) -> bool:
    """Whether the file has the joint op, forward and backward, that the repairs speak of."""
    return has_definition(module, *FORWARD) and has_definition(module, *BACKWARD)


def no_fused_mlp(module: Module) -> str | None:
    """The reason for a file without the joint op."""
    if is_fused_mlp(module):
        return None
    return f"the file has no joint forward and backward op ({BASE_CLASS})"


def assigned(module: Module, scope: tuple[str, ...], name: str) -> bool:
    """Whether a name is assigned in a function."""
    return any(target_of(s) == name for s in walk(scope_body(module, *scope)))


def resets_unit_scale(statement: Statement) -> bool:
    """The `if` that takes the unit activation scale back for several groups."""
    return (
        isinstance(statement, cst.If)
        and contains(statement, m.Name("unit_activation_scale"))
        and contains(statement, ONE_GROUP)
        and [target_of(s) for s in statement.body.body] == ["unit_activation_scale"]
    )
