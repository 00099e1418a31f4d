# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every place of a file that asks something about the group count, however it is spelt.

A repair that puts one decision in the place of many comparisons is whole only if no comparison is
left, in any spelling. So this does not look for a spelling: it follows the group count (its names,
lengths of per-group tensors, and whatever is assigned from them or receives them as an argument)
and reports each statement in which a value could depend on how large it is. What only hands the
count on (`range(n)`, `view(n, -1)`, `[None] * n`, a message) is no question. The caller knows
which of the questions may stay.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COUNTS = frozenset({"num_groups", "num_gemms", "num_tensors"})
_LENGTHS = frozenset({"numel", "nelement", "__len__"})
_ARITHMETIC = frozenset({"int", "float", "abs", "min", "max"})
# Calls whose answer depends on a value: the comparisons of `operator`, of objects and of torch,
# and looking the value up.
_ASKING = frozenset(
    {"bool", "eq", "ne", "lt", "le", "gt", "ge", "is_", "is_not", "equal", "isclose"}
    | {"contains", "get", "count", "index", "not_", "truth"}
    | {f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "contains", "bool")}
    | {"__getitem__"}
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Question:
    """One statement that asks about the group count.

    Attributes:
        line: Where the expression that asks stands.
        function: The innermost named function around it; empty at module level.
        statement: The statement, for a compound one its head; as `ast.unparse` writes it.
        nvfp4_only: Whether it is reached, or true, under NVFP4 alone.
    """

    line: int
    function: str
    statement: str
    nvfp4_only: bool


def questions(tree: ast.Module) -> list[Question]:
    """Return the questions of a file in source order, one per statement and line."""
    return _Search(tree).run()


class _Search:
    """The names that stand for a group count or a per-group tensor, found to a fixed point.

    A name counts in every function that sees it under that name: too many names make a question
    more, never one less.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents = {c: node for node in ast.walk(tree) for c in ast.iter_child_nodes(node)}
        self.functions: dict[str, list[_Function]] = {}
        self.outermost: dict[ast.AST, ast.AST] = {}
        for node in tree.body:
            self._place(node, tree)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions.setdefault(node.name, []).append(node)
        # (outermost function, name), or (None, name) for an attribute or a module's name.
        self.counts: set[tuple[ast.AST | None, str]] = set()
        self.tensors: set[tuple[ast.AST | None, str]] = set()

    def _place(self, node: ast.AST, outer: ast.AST) -> None:
        if outer is self.tree and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            outer = node
        self.outermost[node] = outer
        for child in ast.iter_child_nodes(node):
            self._place(child, outer)

    def run(self) -> list[Question]:
        known = -1
        while known != len(self.counts) + len(self.tensors):
            known = len(self.counts) + len(self.tensors)
            for node in ast.walk(self.tree):
                self._follow(node)
        found: dict[tuple[int, str, str], Question] = {}
        for node in ast.walk(self.tree):
            if self._asks(node):
                question = self._question(node)
                found.setdefault((question.line, question.function, question.statement), question)
        return sorted(found.values(), key=lambda q: (q.line, q.statement))

    # ------------------------------------------------------------------ what stands for a count

    def _is_count(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return name in COUNTS or self._known(self.counts, node, name)
            case ast.Attribute(attr=name):
                return name in COUNTS or (None, name) in self.counts
            case ast.Call(func=ast.Name(id="len")):
                return True
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
                return name in COUNTS
            case ast.Call(func=ast.Name(id=name), args=args) if name in _ARITHMETIC:
                return any(self._is_count(arg) for arg in args)
            case ast.Call(func=ast.Attribute(attr=name)) if name in _LENGTHS:
                return True
            case ast.Call(func=ast.Attribute(value=value, attr="size")):
                return self._is_tensor(value)
            case ast.Subscript(value=ast.Attribute(value=value, attr="shape")):
                return self._is_tensor(value)
            case ast.Subscript(value=ast.Call() as call):
                return self._is_count(call)
            case ast.NamedExpr(value=value) | ast.UnaryOp(operand=value):
                return self._is_count(value)
            case ast.BinOp(left=left, right=right):
                return self._is_count(left) or self._is_count(right)
            case ast.IfExp(body=body, orelse=orelse):
                return self._is_count(body) or self._is_count(orelse)
        return False

    def _is_tensor(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return "split" in name or self._known(self.tensors, node, name)
            case ast.Attribute(attr=name):
                return "split" in name or (None, name) in self.tensors
            case ast.NamedExpr(value=value) | ast.Subscript(value=value):
                return self._is_tensor(value)
        return False

    def _known(self, names: set[tuple[ast.AST | None, str]], node: ast.AST, name: str) -> bool:
        return (self.outermost[node], name) in names or (None, name) in names

    def _follow(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, value)
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
            case ast.Call():
                self._pass_arguments(node)

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        match target, value:
            case (
                (ast.Tuple(elts=names) | ast.List(elts=names)),
                (ast.Tuple(elts=values) | ast.List(elts=values)),
            ):
                for name, part in zip(names, values, strict=False):
                    self._bind(name, part)
            case ((ast.Name(id=name) | ast.Attribute(attr=name)), ast.Lambda()):
                lambdas = self.functions.setdefault(name, [])
                if value not in lambdas:
                    lambdas.append(value)
            case ((ast.Name() | ast.Attribute()), _):
                self._learn(target, self._is_count(value), self._is_tensor(value))

    def _learn(self, target: ast.AST, count: bool, tensor: bool) -> None:
        match target:
            case ast.Attribute(attr=name):
                key: tuple[ast.AST | None, str] = (None, name)
            case ast.Name(id=name) | ast.arg(arg=name):
                outer = self.outermost[target]
                key = (None if outer is self.tree else outer, name)
            case _:
                return
        if count:
            self.counts.add(key)
        if tensor:
            self.tensors.add(key)

    def _pass_arguments(self, call: ast.Call) -> None:
        match call.func:
            case ast.Name(id=name):
                skip = 0
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                skip = 1
            case _:
                return
        for function in self.functions.get(name, ()):
            parameters = [*function.args.posonlyargs, *function.args.args]
            named = {p.arg: p for p in [*parameters, *function.args.kwonlyargs]}
            bound = 0 if isinstance(function, ast.Lambda) else skip
            given = list(zip(parameters[bound:], call.args, strict=False))
            given += [(named[k.arg], k.value) for k in call.keywords if k.arg in named]
            for parameter, value in given:
                self._learn(parameter, self._is_count(value), self._is_tensor(value))

    # --------------------------------------------------------------------------- what is a question

    def _holds_count(self, node: ast.AST) -> bool:
        return any(self._is_count(part) for part in ast.walk(node))

    def _asks(self, node: ast.AST) -> bool:
        match node:
            case ast.Compare():
                return self._holds_count(node)
            case ast.Match(subject=subject):
                return self._holds_count(subject)
            case ast.If(test=test) | ast.While(test=test):
                return self._is_count(test)
            case ast.IfExp(test=test) | ast.Assert(test=test):
                return self._is_count(test)
            case ast.comprehension(ifs=tests) | ast.BoolOp(values=tests):
                return any(self._is_count(test) for test in tests)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._is_count(operand)
            case ast.Subscript(slice=ast.Slice()):
                return False
            case ast.Subscript(slice=index):
                return self._is_count(index)
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args):
                return name in _ASKING and any(self._is_count(x) for x in (value, *args))
            case ast.Call(func=ast.Name(id=name), args=args):
                return name in _ASKING and any(self._is_count(x) for x in args)
        return False

    # ------------------------------------------------------------------------------ how it is told

    def _question(self, node: ast.AST) -> Question:
        statement = node
        line = getattr(node, "lineno", 0)
        while not isinstance(statement, ast.stmt):
            statement = self.parents[statement]
            line = line or getattr(statement, "lineno", 0)
        names = [f.name for f in self._around(statement) if isinstance(f, ast.FunctionDef)]
        only = _names_nvfp4(_head(statement)) or self._below_nvfp4(statement)
        return Question(line, names[0] if names else "", _text(statement), only)

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def _below_nvfp4(self, statement: ast.AST) -> bool:
        """Whether an enclosing branch, or a return before it, keeps everything else away."""
        inner = statement
        for outer in self._around(statement):
            if isinstance(outer, ast.If) and inner in outer.body and _names_nvfp4(outer.test):
                return True
            body = getattr(outer, "body", None)
            if isinstance(body, list) and inner in body:
                for before in body[: body.index(inner)]:
                    if (
                        isinstance(before, ast.If)
                        and isinstance(before.test, ast.UnaryOp)
                        and _names_nvfp4(before.test.operand)
                        and isinstance(before.body[-1], ast.Return)
                    ):
                        return True
            inner = outer
        return False


def _names_nvfp4(test: ast.AST) -> bool:
    """Whether a test can hold only under NVFP4, or (in a disjunction) only fail under it.

    `count == 1 and isinstance(q, NVFP4Quantizer)` is the first, `count != 1 or not isinstance(...)`
    the second; both take the shortcut under NVFP4 alone.
    """
    match test:
        case ast.Name(id="use_nvfp4"):
            return True
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id="NVFP4Quantizer")]):
            return True
        case ast.BoolOp(op=ast.And(), values=values):
            return any(_names_nvfp4(value) for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(
                isinstance(v, ast.UnaryOp) and isinstance(v.op, ast.Not) and _names_nvfp4(v.operand)
                for v in values
            )
    return False


def _head(statement: ast.AST) -> ast.AST:
    match statement:
        case ast.If(test=test) | ast.While(test=test):
            return test
        case ast.Match(subject=subject):
            return subject
    return statement


def _text(statement: ast.AST) -> str:
    match statement:
        case ast.If(test=test):
            return f"if {ast.unparse(test)}"
        case ast.While(test=test):
            return f"while {ast.unparse(test)}"
        case ast.Match(subject=subject):
            return f"match {ast.unparse(subject)}"
    return ast.unparse(statement).splitlines()[0]
