# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Finding and changing statements in a LibCST module, with everything else left byte for byte.

Only statements are walked, never expressions: a place is a statement, and a file of 3000 lines
has few of those compared with its syntax nodes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m
import libcst.metadata

from te_grouped_mlp.patches.base import Edit, Mismatch, Module, Patch, Statement

_BLOCKS = ("body", "orelse", "handlers", "finalbody")
_DEFINITIONS = (cst.FunctionDef, cst.ClassDef)


def parse(data: bytes) -> cst.Module:
    """Parse a file.

    Raises:
        Mismatch: it is not Python that LibCST understands.
    """
    try:
        return cst.parse_module(data)
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        raise Mismatch((), f"is not valid Python: {str(error).splitlines()[0]}") from error


def apply_patch(
    module: cst.Module, patch: Patch, leave_out: frozenset[tuple[str, str]] = frozenset()
) -> cst.Module:
    """Return the module with every edit of a repair made.

    Args:
        module: The file; not changed.
        patch: The repair.
        leave_out: Places to skip, each as the repair's name and its own, for tests that show that
            each edit is needed. The final check of such a repair is skipped too.

    Raises:
        Mismatch: a place is missing or not unique, or the result is not whole.
    """
    edits = [edit for edit in patch.edits if (patch.name, edit.place) not in leave_out]
    for edit in edits:
        module = _apply_edit(module, edit, patch.mark(edit.place))
    if len(edits) == len(patch.edits):
        patch.verify(module)
    return module


def _apply_edit(module: cst.Module, edit: Edit, mark: str) -> cst.Module:
    found: list[Statement] = []

    def change(statement: Statement, inner: Statement) -> list[Statement]:
        found.append(statement)
        if edit.rewrite is not None:
            try:
                changed = edit.rewrite(inner)
            except Mismatch as error:
                raise _mismatch(module, edit, str(error), [statement]) from error
            if changed.deep_equals(inner):
                raise _mismatch(module, edit, "the rewrite changes nothing", [statement])
            return [_with_mark(changed, mark, 0)]
        before = edit.before if isinstance(edit.before, str) else edit.before(module)
        new = _parse_block(module, before or edit.after)
        new[0] = _with_mark(new[0], mark, edit.blank_lines)
        return [*new, inner] if before else [inner, *new]

    body = _in_scope(module.body, edit.scope, (), lambda block: _rewrite(block, edit, change))
    if len(found) != edit.count and (edit.count is not None or not found):
        number = {None: "at least one place", 1: "exactly one place"}.get(
            edit.count, f"{edit.count} places"
        )
        raise _mismatch(module, edit, f"expected {number}, found {len(found)}", found)
    return module.with_changes(body=body)


def _mismatch(module: cst.Module, edit: Edit, text: str, found: Sequence[Statement]) -> Mismatch:
    return mismatch_at(module, edit.scope, f"{edit.looked_for}: {text}", found)


def mismatch_at(
    module: Module, scope: tuple[str, ...], text: str, nodes: Sequence[cst.CSTNode]
) -> Mismatch:
    """Make the Mismatch that lists some nodes of the module with their lines."""
    if not nodes:
        return Mismatch(scope, text)
    wrapper = cst.metadata.MetadataWrapper(module, unsafe_skip_copy=True)
    positions = wrapper.resolve(cst.metadata.PositionProvider)
    numbers = sorted({positions[node].start.line for node in nodes})
    source = module.code
    lines = source.splitlines()
    return Mismatch(scope, text, tuple((n, lines[n - 1].strip()) for n in numbers), source)


def _in_scope(
    body: Sequence[Statement],
    scope: tuple[str, ...],
    outer: tuple[str, ...],
    change: Callable[[Sequence[Statement]], list[Statement]],
) -> list[Statement]:
    if not scope:
        return change(body)
    found = [i for i, s in enumerate(body) if is_definition(s, scope[0])]
    if len(found) != 1:
        raise Mismatch(outer, f"expected one definition of {scope[0]}, found {len(found)}")
    result = list(body)
    definition = result[found[0]]
    inner = _in_scope(definition.body.body, scope[1:], (*outer, scope[0]), change)
    result[found[0]] = definition.with_changes(body=definition.body.with_changes(body=inner))
    return result


def _rewrite(
    body: Sequence[Statement],
    edit: Edit,
    change: Callable[[Statement, Statement], list[Statement]],
) -> list[Statement]:
    result: list[Statement] = []
    for statement in body:
        inner = _descend(statement, edit, change)
        # The found statement itself may hold further places (an `if` with a changed test).
        result.extend(change(statement, inner) if edit.find(statement) else [inner])
    return result


def _descend(
    node: Statement,
    edit: Edit,
    change: Callable[[Statement, Statement], list[Statement]],
) -> Statement:
    if isinstance(node, cst.SimpleStatementLine) or (
        isinstance(node, _DEFINITIONS) and not edit.deep
    ):
        return node
    changed: dict[str, Any] = {}
    for name in _BLOCKS:
        part = getattr(node, name, None)
        if isinstance(part, cst.IndentedBlock):
            changed[name] = part.with_changes(body=_rewrite(part.body, edit, change))
        elif isinstance(part, cst.If):  # an elif
            inner = _descend(part, edit, change)
            if edit.find(part):
                if edit.rewrite is None:
                    raise Mismatch(edit.scope, f"[{edit.place}] is an elif, so nothing fits there")
                inner = change(part, inner)[0]
            changed[name] = inner
        elif isinstance(part, (cst.Else, cst.Finally)):
            changed[name] = _descend(part, edit, change)
        elif isinstance(part, (list, tuple)):
            changed[name] = [_descend(handler, edit, change) for handler in part]
    return node.with_changes(**changed)


def _parse_block(module: cst.Module, text: str) -> list[Statement]:
    source = textwrap.dedent(text).strip("\n").replace("\n", module.default_newline)
    parsed = cst.parse_module(source + module.default_newline, module.config_for_parsing)
    return list(parsed.body)


def _with_mark(statement: Statement, mark: str, blank_lines: int) -> Statement:
    blank = [cst.EmptyLine(indent=False)] * blank_lines
    line = cst.EmptyLine(comment=cst.Comment(mark))
    return statement.with_changes(leading_lines=[*blank, *statement.leading_lines, line])


# ---------------------------------------------------------------------------- looking at a file


def scope_body(module: Module, *scope: str) -> list[Statement]:
    """Return the statements of a definition.

    Raises:
        Mismatch: the definition is missing or not unique.
    """
    found: list[Statement] = []

    def remember(body: Sequence[Statement]) -> list[Statement]:
        found.extend(body)
        return list(body)

    _in_scope(module.body, scope, (), remember)
    return found


def has_definition(module: Module, *scope: str) -> bool:
    """Whether exactly one such definition exists."""
    try:
        scope_body(module, *scope)
    except Mismatch:
        return False
    return True


def walk(body: Sequence[Statement]) -> Iterator[Statement]:
    """Yield every statement below a body in source order, without nested definitions' bodies."""
    for statement in body:
        yield statement
        if isinstance(statement, (cst.SimpleStatementLine, *_DEFINITIONS)):
            continue
        for name in _BLOCKS:
            part = getattr(statement, name, None)
            if isinstance(part, cst.IndentedBlock):
                yield from walk(part.body)
            elif isinstance(part, (cst.Else, cst.Finally)):
                yield from walk(part.body.body)
            elif isinstance(part, cst.If):
                yield from walk([part])
            elif isinstance(part, (list, tuple)):
                for handler in part:
                    yield from walk(handler.body.body)


def own_part(statement: Statement) -> cst.CSTNode:
    """The part of a statement that belongs to it alone: an `if`'s test, a plain line's all."""
    if isinstance(statement, (cst.If, cst.While)):
        return statement.test
    if isinstance(statement, cst.For):
        return statement.iter
    if isinstance(statement, cst.SimpleStatementLine):
        return statement
    return cst.Pass()


def is_definition(statement: Statement, name: str) -> bool:
    """Whether a statement defines a function or class of that name."""
    return isinstance(statement, _DEFINITIONS) and statement.name.value == name


def target_of(statement: Statement) -> str | None:
    """The target of a plain assignment: `name`, or `name[key]` for a literal key; else None."""
    match statement:
        case cst.SimpleStatementLine(body=[cst.Assign(targets=[cst.AssignTarget(target=target)])]):
            pass
        case cst.SimpleStatementLine(body=[cst.AnnAssign(target=target)]):
            pass
        case _:
            return None
    match target:
        case cst.Name(value=name):
            return str(name)
        case cst.Subscript(
            value=cst.Name(value=name),
            slice=[cst.SubscriptElement(slice=cst.Index(value=cst.SimpleString() as key))],
        ):
            return f"{name}[{key.evaluated_value!s}]"
    return None


def value_of(statement: Statement) -> cst.BaseExpression:
    """The right-hand side of a plain assignment (one for which `target_of` gives a name)."""
    value = statement.body[0].value
    assert isinstance(value, cst.BaseExpression)
    return value


@dataclass(frozen=True)
class Finder:
    """A test of a statement that can say what it looks for."""

    wanted: str
    test: Callable[[Statement], bool]

    def __call__(self, statement: Statement) -> bool:
        """Whether the statement is what is looked for."""
        return self.test(statement)


def assigns(name: str) -> Finder:
    """Make a finder of assignments to `name` or `name[key]`."""
    return Finder(f"an assignment to {name}", lambda statement: target_of(statement) == name)


def assigns_call(name: str, callee: str) -> Finder:
    """Make a finder of assignments to `name` whose value calls `callee`."""
    return Finder(
        f"an assignment to {name} that calls {callee}",
        lambda s: target_of(s) == name and contains(s, m.Call(func=m.Name(callee))),
    )


def defines(name: str) -> Finder:
    """Make a finder of the definition of a function or class."""
    return Finder(f"the definition of {name}", lambda s: is_definition(s, name))


def contains(statement: Statement, pattern: m.BaseMatcherNode) -> bool:
    """Whether the statement's own part has a node that the pattern matches."""
    part = own_part(statement)
    return bool(m.findall(part, pattern))
