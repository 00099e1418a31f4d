# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a mutation is, how it is applied, and the list of all of them."""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LISTS = ("step", "tensors", "choice", "backends", "integration", "commands")
"""The modules of this folder that hold a tuple ``MUTATIONS`` each."""


class CannotApplyError(ValueError):
    """A mutation does not fit the source any more; the message names it."""


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: Says what is wrong then; no two share one.
        file: Relative to the root of the repository.
        function: Qualified name of the function or class that is changed.
        old: Text that stands exactly once in it.
        new: What takes its place.
        test: The pytest node that must fail.
    """

    name: str
    file: str
    function: str
    old: str
    new: str
    test: str

    def apply(self, source: str) -> str:
        """Return the source with the fault in it.

        Raises:
            CannotApplyError: There is no such function, the text does not stand in it exactly
                once, or what comes out is not Python or is the same program.
        """
        start, end = self._extent(source)
        body = source[start:end]
        if body.count(self.old) != 1:
            raise self._error(f"{self.old!r} stands {body.count(self.old)} times in it")
        changed = source[:start] + body.replace(self.old, self.new) + source[end:]
        try:
            same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
        except SyntaxError as error:
            raise self._error(f"the result is not Python: {error}") from None
        if same:
            raise self._error("the result is the same program")
        return changed

    def _extent(self, source: str) -> tuple[int, int]:
        """Return where the function begins and ends, decorators included."""
        found = [node for name, node in _definitions(ast.parse(source)) if name == self.function]
        if len(found) != 1:
            raise self._error(f"{len(found)} definitions have that name")
        node = found[0]
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        assert node.end_lineno is not None
        lines = source.splitlines(keepends=True)
        return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))

    def _error(self, text: str) -> CannotApplyError:
        return CannotApplyError(f"{self.name!r} ({self.file}, {self.function}): {text}")


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Definition]]:
    """Yield every function and class of a module with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def every() -> tuple[Mutation, ...]:
    """Return all mutations, in the order of the lists."""
    modules = (importlib.import_module(f"{__package__}.{name}") for name in LISTS)
    return tuple(itertools.chain.from_iterable(module.MUTATIONS for module in modules))


def unfit(mutations: Iterable[Mutation], root: Path) -> list[str]:
    """Return what is wrong with mutations: names used twice, tests and texts that are gone.

    Args:
        mutations: To look at.
        root: Of a source tree; it is only read.
    """
    wrong, seen, sources = [], set(), {}
    for mutation in mutations:
        if mutation.name in seen:
            wrong.append(f"{mutation.name!r} is listed twice")
        seen.add(mutation.name)
        if not _has_test(mutation.test, root, sources):
            wrong.append(f"{mutation.name!r}: there is no test {mutation.test}")
        try:
            mutation.apply(_read(root / mutation.file, sources))
        except CannotApplyError as error:
            wrong.append(str(error))
        except OSError:
            wrong.append(f"{mutation.name!r}: there is no file {mutation.file}")
    return wrong


def _read(path: Path, sources: dict[Path, str]) -> str:
    if path not in sources:
        sources[path] = path.read_text()
    return sources[path]


def _has_test(node: str, root: Path, sources: dict[Path, str]) -> bool:
    """Whether the file of a pytest node has its function; parameters are not looked at."""
    file, _, test = node.partition("::")
    function = test.partition("[")[0].rpartition("::")[2]
    path = root / file
    return path.is_file() and (not test or f"def {function}(" in _read(path, sources))
