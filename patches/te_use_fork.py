# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""TE's own module hands over to our op where te-grouped-mlp is installed.

For installations whose interpreter runs no `.pth` file. TE's module looks for our package before
it registers its fusions; if it is there and takes this TE, the module is replaced, and upstream's
fusions are not registered. Without our package the file behaves as before.
"""

from __future__ import annotations

import ast

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Mismatch, Module, Patch, Statement, Target
from te_grouped_mlp.patches.expressions import expression
from te_grouped_mlp.patches.structure import Finder, contains, has_definition
from te_grouped_mlp.patches.te_sites import GLU_CLASS, only_nvfp4_is_dense, syntax_tree

_UNARY_CLASS = "GroupedMLP_CuTeGEMMUnary"
_REGISTER = "register_forward_backward_fusion"

_HAND_OVER = '''
def _tegm_use_fork():
    """Put te-grouped-mlp's op in this module's place, if it is installed and takes this TE."""
    try:
        from te_grouped_mlp.patches.hand_over import hand_over
    except ModuleNotFoundError as error:
        if error.name != "te_grouped_mlp":
            raise
        return False
    return hand_over(__name__)


_tegm_fork_in_use = _tegm_use_fork()
'''


def _registers(class_name: str) -> Finder:
    supported = m.Call(func=m.Attribute(m.Name(class_name), m.Name("is_supported")))

    def find(statement: Statement) -> bool:
        return (
            isinstance(statement, cst.If)
            and contains(statement, supported)
            and m.matches(
                statement.body,
                m.IndentedBlock(
                    [
                        m.SimpleStatementLine([m.Expr(m.Call(func=m.Name(_REGISTER)))]),
                    ]
                ),
            )
        )

    return Finder(f"`if {class_name}.is_supported()` over one call of {_REGISTER}", find)


def _unless_forked(statement: Statement) -> Statement:
    test = expression("not _tegm_fork_in_use and KNOWN", KNOWN=statement.test)
    return statement.with_changes(test=test)


def _not_needed(module: Module) -> str | None:
    if not (has_definition(module, GLU_CLASS) and has_definition(module, _UNARY_CLASS)):
        return f"the file has no classes {GLU_CLASS} and {_UNARY_CLASS}"
    if only_nvfp4_is_dense(module):
        return "our op does not take this TE, which is older than 2.19"
    return None


def _verify(module: Module) -> None:
    """No use of the registration may be left that does not ask, but for its import."""
    uses = [
        node.lineno
        for node in ast.walk(syntax_tree(module))
        if isinstance(node, ast.Name) and node.id == _REGISTER
    ]
    asked = [
        statement
        for statement in module.body
        if isinstance(statement, cst.If) and contains(statement, m.Name("_tegm_fork_in_use"))
    ]
    if len(uses) != len(asked):
        source = module.code
        lines = source.splitlines()
        places = tuple((number, lines[number - 1].strip()) for number in sorted(uses))
        raise Mismatch((), f"{_REGISTER} is used at a further place", places, source)


PATCH = Patch(
    name="te_use_fork",
    title="use the fork",
    target=Target.TE,
    versions=("2.19.0", "2.20.2"),
    looks_for="the registration of the two fused classes at the end of the module",
    changes="our op takes the module's place first, where te-grouped-mlp is installed",
    proof="tests/patches/test_use_fork.py",
    edits=(
        Edit(
            "hand over",
            (),
            find=_registers(GLU_CLASS),
            before=_HAND_OVER,
            blank_lines=2,
        ),
        Edit("GLU registration", (), find=_registers(GLU_CLASS), rewrite=_unless_forked),
        Edit("unary registration", (), find=_registers(_UNARY_CLASS), rewrite=_unless_forked),
    ),
    not_needed=_not_needed,
    verify=_verify,
)
