# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of TE's fused grouped MLP file that several repairs refer to."""

from __future__ import annotations

import ast

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Mismatch, Module, Statement
from te_grouped_mlp.patches.group_count import Question, questions
from te_grouped_mlp.patches.structure import (
    contains,
    defines,
    has_definition,
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

_OFFSETS = f"{HELPERS_BEHIND}(type(activation_op))"

# What may ask about the group count, with its function: is there one count, are there three ops,
# the reset of the unit scale, and the one decision (upstream's own, or that of our helper).
_SAME_COUNT = "if int(split_sizes.numel()) != num_groups"
_SAME_SPLITS = (
    "if fc1_split_sizes.size() != fc2_split_sizes.size() "
    "or fc1_split_sizes.data_ptr() != fc2_split_sizes.data_ptr()"
)
KNOWN_QUESTIONS = frozenset(
    {
        (
            "validate_grouped_mlp_dims",
            "if fc1.out_features != expected_fc1_out_features or fc1.num_groups != fc2.num_groups",
        ),
        ("fuse_grouped_mlp_ops", "while len(window) == 3"),
        ("fuse_grouped_mlp_ops", "while ops and len(window) < 3"),
        (FORWARD[-1], _SAME_SPLITS),
        (FORWARD[-1], _SAME_COUNT),
        (BACKWARD[-1], _SAME_COUNT),
        (FORWARD[-1], "if unit_activation_scale and num_groups != 1"),
        (FORWARD[-1], f"{DENSE} = num_groups == 1 and {_OFFSETS}"),
        (BACKWARD[-1], f"{DENSE} = num_groups == 1 and {_OFFSETS}"),
        ("_tegm_dense_single_group", f"return num_groups == 1 and {_OFFSETS}"),
    }
)

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
        find=defines(HELPERS_BEHIND),
        after=text,
        blank_lines=2,
    )


def is_fused_mlp(module: Module) -> bool:
    """Whether the file has the joint op, forward and backward, that the repairs speak of."""
    return has_definition(module, *FORWARD) and has_definition(module, *BACKWARD)


def no_fused_mlp(module: Module) -> str | None:
    """The reason for a file without the joint op."""
    if is_fused_mlp(module):
        return None
    return f"the file has no joint forward and backward op ({BASE_CLASS})"


def syntax_tree(module: Module) -> ast.Module:
    """Return Python's own syntax tree of a file, which is walked much faster than LibCST's.

    Raises:
        Mismatch: this Python cannot parse the file.
    """
    try:
        return ast.parse(module.code)
    except SyntaxError as error:
        raise Mismatch((), f"this Python cannot parse the file: {error.msg}") from error


def unknown_questions(module: Module) -> list[Question]:
    """The statements that ask about the group count and are not among the known ones.

    Raises:
        Mismatch: this Python cannot parse the file.
    """
    found = questions(syntax_tree(module))
    return [q for q in found if (q.function, q.statement) not in KNOWN_QUESTIONS]


def check_questions(module: Module) -> None:
    """Refuse a file in which a shortcut is left that asks by itself.

    Raises:
        Mismatch: a statement asks about the group count and is not one of the known.
    """
    left = unknown_questions(module)
    if left:
        text = "the group count is asked for at a further place, in a way that is not known"
        raise Mismatch((), text, tuple((q.line, q.statement) for q in left), module.code)


def only_nvfp4_is_dense(module: Module) -> bool:
    """Whether the file is one of TE 2.17 and 2.18, where one MXFP8 group is like several.

    The kernels there have no row counts but the split sizes, and what compares the group count
    with one is reached under NVFP4 alone.
    """
    if not is_fused_mlp(module) or "single_group_runtime_offsets" in module.code:
        return False
    return all(question.nvfp4_only for question in unknown_questions(module))


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
