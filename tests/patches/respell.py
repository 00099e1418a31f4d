# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Files in which one place of a patch is gone, said twice, somewhere else, or spelt otherwise.

The places are found by the edits themselves, so a new edit is covered as soon as it exists.
"""

from __future__ import annotations

import functools
import textwrap

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit
from te_grouped_mlp.patches.structure import own_part, parse, scope_body, walk

# `num_groups == 1` in other words: what stands in its place, and a statement in front of it.
SPELLINGS = {
    "reversed": ("(1 == num_groups)", ""),
    "less than two": ("(num_groups < 2)", ""),
    "not more": ("(not num_groups > 1)", ""),
    "bool": ("bool(num_groups == 1)", ""),
    "in a tuple": ("(num_groups in (1,))", ""),
    "in a list": ("([num_groups] == [1])", ""),
    "num_gemms": ("(self.num_gemms == 1)", ""),
    "num_tensors": ("(x.num_tensors == 1)", ""),
    "attribute by name": ("(getattr(self, 'num_groups') == 1)", ""),
    "length": ("(len(split_sizes) == 1)", ""),
    "elements": ("(split_sizes.numel() == 1)", ""),
    "shape": ("(split_sizes.shape[0] == 1)", ""),
    "size": ("(split_sizes.size(0) == 1)", ""),
    "truth": ("(not num_groups - 1)", ""),
    "looked up": ("{1: True}.get(num_groups, False)", ""),
    "indexed": ("(False, True)[num_groups]", ""),
    "operator": ("operator.eq(num_groups, 1)", ""),
    "method": ("num_groups.__eq__(1)", ""),
    "text": ("(str(num_groups) == '1')", ""),
    "walrus": ("((count := num_groups) == 1)", ""),
    "alias of the answer": ("single", "single = num_groups == 1"),
    "alias of the count": ("(count == 1)", "count = int(num_groups)"),
    "unpacked alias": ("(count == 1)", "count, rows = num_groups, 128"),
    "kept in an object": ("(self.count == 1)", "self.count = num_groups"),
    "alias of the splits": ("(len(parts) == 1)", "parts = split_sizes"),
    "lambda": ("one(num_groups)", "one = lambda count: count == 1"),
    "function": ("one(num_groups)", "def one(count):\n    return count == 1"),
    "match": (
        "single",
        "match num_groups:\n    case 1: single = True\n    case _: single = False",
    ),
}

ONE_GROUP = m.Comparison(
    left=m.Name("num_groups"),
    comparisons=[
        m.ComparisonTarget(operator=m.OneOf(m.Equal(), m.NotEqual()), comparator=m.Integer("1"))
    ],
)
CHANGES = ("gone", "twice", "moved")


@functools.cache
def _parsed(source: str) -> cst.Module:
    return parse(source.encode())


@functools.cache
def place(source: str, edit: Edit) -> tuple[cst.Module, cst.CSTNode]:
    """The file and the first statement that an edit finds in it."""
    module = _parsed(source)
    for statement in walk(scope_body(module, *edit.scope)):
        if edit.find(statement):
            return module, statement
        if edit.deep and isinstance(statement, cst.FunctionDef):
            for inner in walk(statement.body.body):
                if edit.find(inner):
                    return module, inner
    raise AssertionError(f"[{edit.place}] is not in the file")


def changed(source: str, edit: Edit, change: str) -> str:
    """The file with an edit's place gone, said twice, or in a function that nobody calls."""
    module, statement = place(source, edit)
    function = cst.ensure_type(cst.parse_statement("def moved(): pass"), cst.FunctionDef)
    new = {
        "gone": [cst.parse_statement("pass")],
        "twice": [statement, statement.deep_clone()],
        "moved": [function.with_changes(body=cst.IndentedBlock([statement]))],
    }[change]
    return _swapped(module, statement, new)


def matches_at(source: str, edit: Edit, pattern: m.BaseMatcherNode) -> bool:
    """Whether the file has the edit's place, with something that the pattern matches."""
    try:
        _, statement = place(source, edit)
    except AssertionError:
        return False
    return bool(m.findall(own_part(statement), pattern))


def respelt(source: str, edit: Edit, spelling: str, pattern: m.BaseMatcherNode) -> str:
    """The file with what the pattern matches at an edit's place spelt in another way."""
    module, statement = place(source, edit)
    found = m.findall(own_part(statement), pattern)[0]
    text, before = SPELLINGS[spelling]
    if m.matches(found, m.Comparison(comparisons=[m.ComparisonTarget(m.NotEqual())])):
        text = f"(not {text})"
    new = statement.deep_replace(found, cst.parse_expression(text))
    front = list(cst.parse_module(textwrap.dedent(before)).body)
    return _swapped(module, statement, [*front, new])


def _swapped(module: cst.Module, old: cst.CSTNode, new: list[cst.CSTNode]) -> str:
    result = module.deep_replace(old, cst.FlattenSentinel(new))  # type: ignore[arg-type]
    assert isinstance(result, cst.Module)
    return result.code
