# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a repair is, what can be said about a tree, and how a refusal looks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

# A LibCST statement. Typed loosely so that this module, which the command line imports for its
# help text, does not need LibCST.
Statement = Any
Module = Any


class Target(Enum):
    """The upstream file that a repair changes, as a path below its package folder."""

    TE = "pytorch/ops/fused/grouped_mlp.py"
    MEGATRON = "transformer/moe/experts.py"

    @property
    def distribution(self) -> str:
        """The name under which package registries know the project."""
        return "transformer-engine" if self is Target.TE else "megatron-core"

    @property
    def package(self) -> str:
        """The package folder's path below a site-packages folder or a checkout."""
        return "transformer_engine" if self is Target.TE else "megatron/core"


class State(Enum):
    """What one repair finds in one tree."""

    ABSENT = "absent"  # nothing here that it repairs
    APPLICABLE = "applicable"  # every place was found, none is changed yet
    APPLIED = "applied"
    PARTIAL = "partial"  # some of its places carry its mark, others do not
    UNKNOWN = "unknown"  # the tree is not what the repair expects


@dataclass(frozen=True)
class Finding:
    """The answer for one repair and one file.

    Attributes:
        patch: Name of the repair.
        state: What was found.
        file: The file that was looked at, or None if the tree has none.
        line: The line of the first place, counted from 1, or None.
        reason: One sentence.
    """

    patch: str
    state: State
    file: Path | None
    line: int | None
    reason: str

    @property
    def place(self) -> str:
        """The file and line as `path:line`, or an empty text."""
        if self.file is None:
            return ""
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"


class PatchError(Exception):
    """The tree is refused. The text names the file and the place; nothing was written."""


class BadTreeError(PatchError):
    """The arguments are wrong: no such folder, no upstream package in it, an unknown name."""


class Mismatch(Exception):
    """A place was not found as expected.

    Attributes:
        scope: Names of the definitions that enclose the place, outermost first.
        places: The statements in the way, each as its line and its text.
        source: The text in which the lines are counted: the file with the edits made so far.
    """

    def __init__(
        self,
        scope: tuple[str, ...],
        text: str,
        places: tuple[tuple[int, str], ...] = (),
        source: str = "",
    ) -> None:
        super().__init__(text)
        self.scope = scope
        self.places = places
        self.source = source


@dataclass(frozen=True)
class Edit:
    """One named place and what happens there.

    A tree is refused if the place is not there `count` times, or if a rewrite changes nothing.
    Exactly one of `before`, `after` and `rewrite` is given. The first statement that is new or
    changed gets the repair's mark, with the place's name, as a comment line of its own.

    Attributes:
        place: The place's name, unique within its repair.
        scope: Names of the enclosing definitions, outermost first; empty for the module.
        find: Whether a statement is the place. Statements inside nested definitions of the scope
            are not asked unless `deep` is set.
        before: Source text of statements to put in front of the place, or what makes it for a file.
        after: Source text of statements to put behind the place.
        rewrite: Makes the changed statement of the found one.
        blank_lines: Empty lines in front of inserted text.
        count: How many statements must be the place; None for at least one.
        deep: Whether statements inside nested definitions of the scope are asked too.
        wanted: What the place is, for the refusal; by default what its finder says.
    """

    place: str
    scope: tuple[str, ...]
    find: Callable[[Statement], bool]
    before: str | Callable[[Module], str] = ""
    after: str = ""
    rewrite: Callable[[Statement], Statement] | None = None
    blank_lines: int = 0
    count: int | None = 1
    deep: bool = False
    wanted: str = ""

    @property
    def looked_for(self) -> str:
        """The place's name, with what it is."""
        wanted = self.wanted or getattr(self.find, "wanted", "")
        return f"[{self.place}] ({wanted})" if wanted else f"[{self.place}]"


def _nothing(module: Module) -> str | None:  # noqa: ARG001 - the signature of `not_needed`
    return None


def _pass(module: Module) -> None:  # noqa: ARG001 - the signature of `verify`
    return


@dataclass(frozen=True)
class Patch:
    """One repair.

    Attributes:
        name: Its name on the command line, equal to its module's.
        title: Its name in the marks that it leaves.
        target: The file that it changes.
        versions: The published versions for which it is proven. For other trees the match is by
            structure only.
        looks_for: What it expects in the tree, in a sentence.
        changes: What it puts there, in a sentence.
        proof: The test that proves it.
        edits: The places.
        not_needed: Gives the reason why a file has nothing to repair, else None; raises Mismatch
            for a file that seems to have nothing to repair, but asks in a way that is not known.
        verify: Looks at the changed file and raises Mismatch if the result is not whole (for
            example a further place that the edits do not cover).
        builds_on: The repair that must be there first in trees where it is applicable.
    """

    name: str
    title: str
    target: Target
    versions: tuple[str, ...]
    looks_for: str
    changes: str
    proof: str
    edits: tuple[Edit, ...]
    not_needed: Callable[[Module], str | None] = _nothing
    verify: Callable[[Module], None] = _pass
    builds_on: str = ""

    @property
    def places(self) -> tuple[str, ...]:
        """The names of its places, in order."""
        return tuple(edit.place for edit in self.edits)

    def mark(self, place: str) -> str:
        """The comment that shows in a file that `place` has been changed."""
        return f"# te-grouped-mlp: {self.title} [{place}]"

    def marks_in(self, text: str) -> dict[str, int]:
        """Return the places of this repair whose marks stand in `text`, with their first line."""
        pattern = re.compile(rf"^[ \t]*# te-grouped-mlp: {re.escape(self.title)} \[([^\]]+)\]")
        found: dict[str, int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            match = pattern.match(line)
            if match is not None:
                found.setdefault(match.group(1), number)
        return found

    def claims(self, version: str | None) -> bool:
        """Whether the repair is proven for a published version; `0.19.x` stands for a series."""
        if version is None:
            return False
        return any(
            version == known or (known.endswith(".x") and version.startswith(known[:-1]))
            for known in self.versions
        )
