# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's rewrite and its guards are skipped where our op runs.

An op that declares `DETERMINISTIC_DPROB` gives a bit-exact probability gradient or raises by
itself, with biases, zero-copy buffers and all. Every place of the experts class that asks for
determinism therefore also asks whether that op is there: the places of `megatron_deterministic`,
and those of trees that came with a rewrite of their own.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Module, Patch, Statement, Target
from te_grouped_mlp.patches.expressions import change_value, expression, replace
from te_grouped_mlp.patches.megatron_sites import (
    CLASS,
    NAMED,
    REQUEST,
    no_fused_experts,
    request_statements,
    requests,
)
from te_grouped_mlp.patches.structure import Finder, defines, is_definition, mismatch_at

_ACTIVE = "_tegm_op_active"

_HELPER = f'''
def {_ACTIVE}():
    """Whether the fused op that TE uses keeps the promise DETERMINISTIC_DPROB."""
    import sys

    module = sys.modules.get("transformer_engine.pytorch.ops.fused.grouped_mlp")
    return bool(getattr(module, "DETERMINISTIC_DPROB", False))
'''


def _unless_active(node: cst.CSTNode) -> cst.BaseExpression:
    assert isinstance(node, cst.BaseExpression)
    return expression(f"(KNOWN and not {_ACTIVE}())", KNOWN=node)


def _skip(statement: Statement) -> Statement:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Assign() | cst.AnnAssign()]):
            return change_value(statement, _skip_in)
    return _skip_in(statement)


def _skip_in(node: Statement) -> Statement:
    return replace(node, REQUEST, _unless_active, "a request for determinism", times=None)


def _not_needed(module: Module) -> str | None:
    reason = no_fused_experts(module)
    if reason is None and "DETERMINISTIC_DPROB" in module.code:
        return "the file already asks for DETERMINISTIC_DPROB"
    if reason is None and not request_statements(module):
        return f"{CLASS} has no deterministic rewrite to skip (megatron_deterministic brings one)"
    return reason


def _verify(module: Module) -> None:
    """Every request must have become part of a question that also asks for the op."""
    asked = m.BooleanOperation(
        left=REQUEST,
        operator=m.And(),
        right=m.UnaryOperation(m.Not(), m.Call(func=m.Name(_ACTIVE))),
    )
    further: list[cst.CSTNode] = []
    for statement in module.body:
        if m.matches(statement, m.SimpleStatementLine([m.OneOf(m.Import(), m.ImportFrom())])):
            continue
        known: list[cst.CSTNode] = []
        if is_definition(statement, CLASS):
            known += m.findall(statement, asked)
            known += [
                target
                for target in m.findall(statement, m.AssignTarget())
                if m.matches(cst.ensure_type(target, cst.AssignTarget).target, REQUEST)
            ]
        inside = {id(name) for node in known for name in m.findall(node, NAMED)}
        further += [name for name in m.findall(statement, NAMED) if id(name) not in inside]
    if further:
        raise mismatch_at(module, (CLASS,), "determinism is asked for at a further place", further)


PATCH = Patch(
    name="megatron_skip_when_active",
    title="skip where the op is deterministic",
    target=Target.MEGATRON,
    versions=("0.18.x", "0.19.x"),
    looks_for=f"every place of {CLASS} that asks for determinism, ours and Megatron's own",
    changes="it is skipped where the fused op declares DETERMINISTIC_DPROB",
    proof="tests/patches/test_published_megatron.py",
    edits=(
        Edit(
            "helper",
            (),
            find=defines(CLASS),
            before=_HELPER,
            blank_lines=2,
        ),
        Edit(
            "request",
            (CLASS,),
            find=Finder("a statement that asks for determinism", lambda s: bool(requests(s))),
            rewrite=_skip,
            count=None,
            deep=True,
        ),
    ),
    not_needed=_not_needed,
    verify=_verify,
    builds_on="megatron_deterministic",
)
