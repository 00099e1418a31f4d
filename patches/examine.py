# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The look at one file: what each repair finds in it, and the bytes that would come out."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from te_grouped_mlp.patches import manifest
from te_grouped_mlp.patches.base import Finding, Mismatch, Module, Patch, PatchError, State
from te_grouped_mlp.patches.structure import apply_patch, parse
from te_grouped_mlp.patches.tree import TreeFile, check_clean, check_writable, digest


@dataclass(frozen=True)
class Examined:
    """What was found in one file.

    Attributes:
        file: The file.
        data: Its bytes.
        original: Its bytes without our repairs.
        applied: Names of the repairs in it, by its record.
        new: Names of the repairs that were asked for and can be applied.
        result: The bytes with `applied` and `new`.
        findings: One per repair that was asked for.
        changed_since: Whether somebody changed the file after it was patched.
    """

    file: TreeFile
    data: bytes
    original: bytes
    applied: tuple[str, ...]
    new: tuple[str, ...]
    result: bytes
    findings: tuple[Finding, ...]
    changed_since: bool


def compose(
    original: bytes, patches: Sequence[Patch], leave_out: frozenset[tuple[str, str]] = frozenset()
) -> bytes:
    """Return a file's bytes with some repairs, in the order given.

    Args:
        original: The bytes without repairs.
        patches: The repairs.
        leave_out: Places to skip, each as the repair's name and its own; for tests.

    Raises:
        Mismatch: a repair does not fit.
    """
    module = parse(original)
    for patch in patches:
        module = apply_patch(module, patch, leave_out)
    return module.bytes


class Examination:
    """The look at one file; a class because each repair is tried on what the others made."""

    def __init__(self, file: TreeFile, patches: Sequence[Patch], chosen: set[str]) -> None:
        self.file = file
        self.patches = patches
        self.chosen = chosen
        self.data = file.path.read_bytes()
        self.text = self.data.decode("utf-8", errors="replace")
        self.marks = {patch.name: patch.marks_in(self.text) for patch in patches}
        self.original = self.data
        self.applied: tuple[str, ...] = ()
        self.changed_since = False
        self._read_record()
        self.accepted: list[Patch] = []
        self.new: list[str] = []

    def _read_record(self) -> None:
        loaded = manifest.load(self.file)
        # A record without marks is left over from a file that an installer has replaced.
        if loaded is None or not any(self.marks.values()):
            return
        record, self.original = loaded
        self.applied = record.patches
        self.changed_since = record.current != digest(self.data)

    def run(self) -> Examined:
        """Try every repair that was asked for, in order."""
        findings = []
        try:
            base = module = parse(self.original)
        except Mismatch as error:
            return self._result(self.data, [self._unknown(p, error) for p in self._asked()])
        for patch in self.patches:
            finding, module = self._try(patch, base, module)
            if patch.name in self.chosen:
                findings.append(finding)
        result = module.bytes if self.new else self.data
        if self.new:
            findings = self._with_obstacles(findings, result)
        return self._result(result, findings)

    def _asked(self) -> list[Patch]:
        return [patch for patch in self.patches if patch.name in self.chosen]

    def _result(self, result: bytes, findings: Sequence[Finding]) -> Examined:
        return Examined(
            self.file,
            self.data,
            self.original,
            self.applied,
            tuple(self.new),
            result,
            tuple(findings),
            self.changed_since,
        )

    def _finding(self, patch: Patch, state: State, line: int | None, reason: str) -> Finding:
        return Finding(patch.name, state, self.file.path, line, reason)

    def _unknown(self, patch: Patch, error: Mismatch) -> Finding:
        places = [(self._original_line(n, error.source), text) for n, text in error.places]
        listed = "; ".join(f"line {number}: {text}" for number, text in places)
        reason = f"{error}: {listed}" if listed else str(error)
        line = places[0][0] if places else self._line_of(error.scope)
        return self._finding(patch, State.UNKNOWN, line, reason)

    def _original_line(self, number: int, source: str) -> int:
        """Where a line of a text with some edits stands in the file as it is."""
        new, old = source.splitlines(), self.text.splitlines()
        matcher = difflib.SequenceMatcher(None, new, old)
        for _, first, behind, old_first, old_behind in matcher.get_opcodes():
            if first < number <= behind:
                return max(min(old_first + number - first, old_behind), 1)
        return 1

    def _try(self, patch: Patch, base: Module, module: Module) -> tuple[Finding, Module]:
        marks = self.marks[patch.name]
        if self.changed_since:
            reason = "the file has been changed since te-grouped-mlp patched it"
            return self._finding(patch, State.UNKNOWN, self._first_change(), reason), module
        if patch.name in self.applied:
            self.accepted.append(patch)
            finding = self._finding(patch, State.APPLIED, min(marks.values(), default=1), "")
            return finding, apply_patch(module, patch)
        if marks:
            return self._judge_marks(patch, marks), module
        try:
            nothing = patch.not_needed(module)
        except Mismatch as error:
            return self._unknown(patch, error), module
        if nothing is not None:
            if patch.builds_on and self._would_fit_on(patch, base):
                nothing = f"{patch.builds_on} must be applied first, or with it"
                return self._finding(patch, State.UNKNOWN, 1, nothing), module
            return self._finding(patch, State.ABSENT, None, nothing), module
        try:
            changed = apply_patch(module, patch)
        except Mismatch as error:
            return self._unknown(patch, self._explain(patch, base, error)), module
        finding = self._finding(
            patch, State.APPLICABLE, self._line_for(patch, base), self._claim(patch)
        )
        if patch.name not in self.chosen:
            return finding, module
        self.accepted.append(patch)
        self.new.append(patch.name)
        return finding, changed

    def _judge_marks(self, patch: Patch, marks: dict[str, int]) -> Finding:
        """A file that carries marks, but no record of who put them there."""
        missing = [place for place in patch.places if place not in marks]
        line = min(marks.values())
        if missing:
            reason = f"{len(marks)} of {len(patch.places)} places are marked; not [{missing[0]}]"
            return self._finding(patch, State.PARTIAL, line, reason)
        return self._finding(patch, State.APPLIED, line, "without a record, so not revertible")

    def _would_fit_on(self, patch: Patch, base: Module) -> bool:
        below = [p for p in self.patches if p.name == patch.builds_on]
        if not below or below[0] in self.accepted:
            return False
        try:
            module = apply_patch(base, below[0])
            return below[0].not_needed(base) is None and patch.not_needed(module) is None
        except Mismatch:
            return False

    def _explain(self, patch: Patch, base: Module, error: Mismatch) -> Mismatch:
        """Say whether another repair is in the way, or is missing."""
        if self._would_fit_on(patch, base):
            return Mismatch(error.scope, f"{patch.builds_on} must be applied first, or with it")
        for other in self.accepted:
            needed = [p for p in self.accepted if p.name in (other.builds_on, patch.builds_on)]
            without = [p for p in needed if p is not other]
            if _fits(base, [*without, patch]) and not _fits(base, [*without, other, patch]):
                text = f"conflicts with {other.name}: {error}"
                return Mismatch(error.scope, text, error.places, error.source)
        return error

    def _claim(self, patch: Patch) -> str:
        version = self.file.version
        if patch.claims(version):
            return f"proven for {version}"
        known = ", ".join(patch.versions)
        return f"fits by structure; proven for {known}, not for {version or 'an unknown version'}"

    def _with_obstacles(self, findings: list[Finding], result: bytes) -> list[Finding]:
        """Turn what can be applied into a refusal where the file must not be written."""
        try:
            if any(self.marks.values()) and not self.applied:
                raise PatchError(
                    f"{self.file.path}: the file carries marks of our patches, but the tree has "
                    "no record of them; restore the original file first"
                )
            check_writable(self.file)
            if not self.applied:
                check_clean(self.file, self.data)
            if _compiles(self.data) and not _compiles(result):
                raise PatchError(f"{self.file.path}: the patched file would not compile")
        except PatchError as error:
            return [
                self._finding(_named(self.patches, f.patch), State.UNKNOWN, f.line, str(error))
                if f.state is State.APPLICABLE
                else f
                for f in findings
            ]
        return findings

    def _line_of(self, scope: tuple[str, ...]) -> int:
        try:
            node: ast.AST = ast.parse(self.text)
        except SyntaxError as error:
            return error.lineno or 1
        line = 1
        for name in scope:
            inner = [n for n in getattr(node, "body", []) if getattr(n, "name", None) == name]
            if not inner:
                break
            node, line = inner[0], inner[0].lineno
        return line

    def _line_for(self, patch: Patch, base: Module) -> int:
        """Where the repair's first place is: its function, or its own line in the module."""
        scope = next((edit.scope for edit in patch.edits if edit.scope), ())
        if scope or not _fits(base, [patch]):
            return self._line_of(scope)
        return min(patch.marks_in(apply_patch(base, patch).code).values())

    def _first_change(self) -> int:
        """The first line that is not what we wrote; 1 if an older version wrote it."""
        named = [patch for patch in self.patches if patch.name in self.applied]
        try:
            expected = compose(self.original, named).splitlines()
        except Mismatch:
            return 1
        for number, (ours, found) in enumerate(
            zip(expected, self.data.splitlines(), strict=False), 1
        ):
            if ours != found:
                return number
        return min(len(expected), self.data.count(b"\n")) + 1


def _named(patches: Sequence[Patch], name: str) -> Patch:
    return next(patch for patch in patches if patch.name == name)


def _fits(base: Module, patches: Sequence[Patch]) -> bool:
    try:
        for patch in patches:
            base = apply_patch(base, patch)
    except Mismatch:
        return False
    return True


def _compiles(data: bytes) -> bool:
    try:
        compile(data, "<patched>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
