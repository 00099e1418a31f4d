# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of Megatron-Core's experts file that the two repairs refer to."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Module, Statement
from te_grouped_mlp.patches.structure import has_definition, own_part, scope_body, walk

CLASS = "TEGroupedMLP"
FUSED = (CLASS, "_fused_forward")
SETTING = "deterministic_mode"
_TORCH_FLAG = "are_deterministic_algorithms_enabled"

# The expressions by which the file may ask whether determinism is wanted.
REQUEST = m.OneOf(
    m.Attribute(attr=m.Name(SETTING)),
    m.Call(
        func=m.Name("getattr"),
        args=[
            m.Arg(),
            m.Arg(m.OneOf(m.SimpleString(f'"{SETTING}"'), m.SimpleString(f"'{SETTING}'"))),
            m.ZeroOrMore(),
        ],
    ),
    m.Call(func=m.Attribute(attr=m.Name(_TORCH_FLAG))),
    m.Call(func=m.Name(_TORCH_FLAG)),
)

# Whatever names the setting or torch's flag, asked for in a known way or not.
NAMED = m.OneOf(
    m.Attribute(attr=m.Name(SETTING)),
    m.SimpleString(f'"{SETTING}"'),
    m.SimpleString(f"'{SETTING}'"),
    m.Name(_TORCH_FLAG),
)


def methods(module: Module) -> list[cst.FunctionDef]:
    """The methods of the experts class."""
    return [s for s in scope_body(module, CLASS) if isinstance(s, cst.FunctionDef)]


def requests(statement: Statement) -> list[cst.CSTNode]:
    """The determinism requests that a statement reads (an assignment's target is no read)."""
    if isinstance(statement, cst.FunctionDef):
        return []
    part = own_part(statement)
    match part:
        case cst.SimpleStatementLine(body=[cst.Assign() | cst.AnnAssign() as line]):
            part = line.value if line.value is not None else cst.Pass()
    return list(m.findall(part, REQUEST))


def request_statements(module: Module) -> list[tuple[str, Statement]]:
    """Every statement of the experts class that reads a request, with its method's name."""
    return [
        (method.name.value, statement)
        for method in methods(module)
        for statement in walk(method.body.body)
        if requests(statement)
    ]


def no_fused_experts(module: Module) -> str | None:
    """The reason for a file without experts on the operation fuser."""
    if has_definition(module, *FUSED):
        return None
    return f"the file has no {CLASS} with a path through the operation fuser"
