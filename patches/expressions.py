# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Making the changed statement of a found one, in the layout that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Mismatch, Statement


def replace(
    statement: Statement,
    pattern: m.BaseMatcherNode,
    new: Callable[[cst.CSTNode], cst.CSTNode],
    wanted: str,
    times: int | None = 1,
) -> Statement:
    """Replace every node of the statement's own part that the pattern matches.

    Args:
        statement: The statement.
        pattern: What to replace.
        new: Makes the node to put in a found one's place.
        wanted: What the pattern matches, for the refusal.
        times: How many there must be; None for at least one.

    Raises:
        Mismatch: there are more or fewer.
    """
    count = 0

    def swap(node: cst.CSTNode, _: object) -> cst.CSTNode:
        nonlocal count
        count += 1
        return new(node)

    if isinstance(statement, (cst.If, cst.While)):
        result = statement.with_changes(test=m.replace(statement.test, pattern, swap))
    else:
        result = m.replace(statement, pattern, swap)
    if count != times and not (times is None and count):
        raise Mismatch((), f"expected {times or 'at least one'} of {wanted}, found {count}")
    return result


def change_value(
    statement: Statement, new: Callable[[cst.BaseExpression], cst.BaseExpression]
) -> Statement:
    """Replace the right-hand side of a plain assignment."""
    line = statement.body[0]
    return statement.with_changes(body=[line.with_changes(value=new(line.value))])


def expression(text: str, **parts: cst.BaseExpression) -> cst.BaseExpression:
    """Parse an expression; names that are keys of `parts` become those nodes in parentheses."""
    parsed = cst.parse_expression(text)

    def fill(node: cst.CSTNode, _: object) -> cst.CSTNode:
        assert isinstance(node, cst.Name)
        return parenthesised(parts[node.value])

    if not parts:
        return parsed
    names = [m.Name(key) for key in parts]
    pattern = names[0] if len(names) == 1 else m.OneOf(*names)
    result = m.replace(parsed, pattern, fill)
    assert isinstance(result, cst.BaseExpression)
    return result


def parenthesised(node: cst.BaseExpression) -> cst.BaseExpression:
    """The same expression with parentheses round it, unless it is atomic or has them."""
    if node.lpar or isinstance(node, (cst.Name, cst.Attribute, cst.Subscript, cst.Call)):
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def with_keyword(call: cst.Call, keyword: str, value: str) -> cst.Call:
    """Add a keyword argument at the end of a call, in the layout of the arguments before it."""
    args = list(call.args)
    new = cst.Arg(
        keyword=cst.Name(keyword),
        value=cst.parse_expression(value),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    args, comma = _append_layout(args)
    return call.with_changes(args=[*args, new.with_changes(comma=comma)])


def with_keyword_parameter(function: Statement, name: str) -> Statement:
    """Add a keyword-only parameter without default to a function that has keyword-only ones."""
    params = function.params
    if not params.kwonly_params:
        raise Mismatch((function.name.value,), "expected keyword-only parameters")
    star = params.star_arg
    first = star.comma if isinstance(star, cst.ParamStar) else None
    known, comma = _append_layout(list(params.kwonly_params), first)
    new = cst.Param(cst.Name(name), comma=comma)
    return function.with_changes(params=params.with_changes(kwonly_params=[*known, new]))


def _append_layout(
    items: list[Any], before: cst.Comma | None = None
) -> tuple[list[Any], cst.Comma | cst.MaybeSentinel]:
    """Make room behind a comma-separated list.

    Args:
        items: The list, not empty.
        before: The comma in front of it, whose layout serves where the list has only one item.

    Returns:
        The list with a separator at its end, and the comma for the item that comes behind it.
    """
    last = items[-1]
    separator = items[-2].comma if len(items) > 1 else before
    if isinstance(last.comma, cst.Comma) and separator is not None:
        return [*items[:-1], last.with_changes(comma=separator)], last.comma
    separator = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [*items[:-1], last.with_changes(comma=separator)], cst.MaybeSentinel.DEFAULT
