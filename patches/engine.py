# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Check, apply, diff and revert: the repairs, run over the files of a tree.

A patched file is always a function of its original bytes and the set of repairs in it, made in
the set's fixed order. So it does not matter in which order they were asked for, and taking one out
means making the file anew without it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from te_grouped_mlp.patches import all_patches, manifest
from te_grouped_mlp.patches.base import BadTreeError, Finding, Patch, PatchError, State
from te_grouped_mlp.patches.examine import Examination, Examined, compose
from te_grouped_mlp.patches.tree import TreeFile, check_writable, digest, locate


def select(only: Iterable[str], patches: Sequence[Patch] | None = None) -> tuple[Patch, ...]:
    """Return the repairs with the given names, all if there are none.

    Raises:
        BadTreeError: a name is unknown.
    """
    known = all_patches() if patches is None else tuple(patches)
    wanted = set(only)
    unknown = sorted(wanted - {patch.name for patch in known})
    if unknown:
        names = ", ".join(patch.name for patch in known)
        raise BadTreeError(f"there is no patch {unknown[0]!r}; the patches are {names}")
    return tuple(patch for patch in known if not wanted or patch.name in wanted)


def check(
    root: Path, only: Iterable[str] = (), patches: Sequence[Patch] | None = None
) -> list[Finding]:
    """Say for each repair what it finds in a tree. Writes nothing, but undoes a torn change.

    Args:
        root: The tree.
        only: Names of repairs; all if empty.
        patches: The repairs to choose from; the project's own by default.

    Raises:
        BadTreeError: there is no such tree, or no such repair.
        PatchError: a record in the tree is damaged.
    """
    files = locate(root)
    with manifest.locked(files):
        return _findings(_examine_all(files, only, patches), files, only, patches)


def apply(
    root: Path, only: Iterable[str] = (), patches: Sequence[Patch] | None = None
) -> list[Finding]:
    """Make the repairs in every file of a tree, or in none. See `check` for the arguments.

    Returns:
        What holds afterwards.

    Raises:
        BadTreeError: there is no such tree, or no such repair.
        PatchError: a file is not as expected, or cannot be written. Nothing was written.
    """
    files = locate(root)
    with manifest.locked(files):
        examined = _examine_all(files, only, patches)
        _refuse(_findings(examined, files, only, patches), bool(tuple(only)))
        manifest.commit([_change(e, e.applied + e.new, e.result) for e in examined if e.new])
        return _findings(_examine_all(files, only, patches), files, only, patches)


def diff(root: Path, only: Iterable[str] = (), patches: Sequence[Patch] | None = None) -> str:
    """Return the repairs as a unified diff against the original files, for `patch -p1`.

    The same before and after `apply`. See `apply` for the arguments and what it raises.
    """
    files = locate(root)
    with manifest.locked(files):
        examined = _examine_all(files, only, patches)
        _refuse(_findings(examined, files, only, patches), bool(tuple(only)))
    return "".join(_unified(e) for e in examined)


def revert(
    root: Path, only: Iterable[str] = (), patches: Sequence[Patch] | None = None
) -> list[Finding]:
    """Take repairs out of every file of a tree, or out of none. See `check` for the arguments.

    Returns:
        What holds afterwards.

    Raises:
        BadTreeError: there is no such tree, or no such repair.
        PatchError: a file was changed since, has no record, or another repair builds on the one
            that would go. Nothing was written.
    """
    files = locate(root)
    chosen = {patch.name for patch in select(only, patches)}
    with manifest.locked(files):
        examined = _examine_all(files, only, patches)
        changes = []
        for item in examined:
            _refuse_revert(item)
            kept = tuple(name for name in item.applied if name not in chosen)
            if kept != item.applied:
                changes.append(_change(item, kept, _without(item, kept, patches)))
        manifest.commit(changes)
        return _findings(_examine_all(files, only, patches), files, only, patches)


def _examine_all(
    files: Sequence[TreeFile], only: Iterable[str], patches: Sequence[Patch] | None
) -> list[Examined]:
    known = select((), patches)
    chosen = {patch.name for patch in select(only, patches)}
    examined = []
    for file in files:
        manifest.recover(file)
        if file.path.exists() or file.path.is_symlink():
            own = [patch for patch in known if patch.target is file.target]
            examined.append(Examination(file, own, chosen).run())
    return examined


def _findings(
    examined: Sequence[Examined],
    files: Sequence[TreeFile],
    only: Iterable[str],
    patches: Sequence[Patch] | None,
) -> list[Finding]:
    found = {finding.patch: finding for item in examined for finding in item.findings}
    packages = {file.target: file.package for file in files}
    result = []
    for patch in select(only, patches):
        package = packages.get(patch.target)
        reason = (
            f"{package} has no {patch.target.value}"
            if package is not None
            else f"the tree has no {patch.target.package}"
        )
        absent = Finding(patch.name, State.ABSENT, None, None, reason)
        result.append(found.get(patch.name, absent))
    return result


def _change(item: Examined, names: tuple[str, ...], new: bytes) -> manifest.Change:
    order = [patch.name for patch in all_patches()]
    names = tuple(sorted(names, key=lambda n: order.index(n) if n in order else len(order)))
    record = manifest.Record(names, digest(item.original), digest(new)) if names else None
    return manifest.Change(item.file, item.data, new, item.original, record)


def _without(item: Examined, kept: tuple[str, ...], patches: Sequence[Patch] | None) -> bytes:
    check_writable(item.file)
    if not kept:
        return item.original
    named = [patch for patch in select((), patches) if patch.name in kept]
    for patch in named:
        gone = patch.builds_on in item.applied and patch.builds_on not in kept
        if gone:
            raise PatchError(
                f"{item.file.path}: {patch.name} builds on {patch.builds_on}; revert both"
            )
    return compose(item.original, named)


def _refuse(findings: Sequence[Finding], named: bool) -> None:
    bad = [f for f in findings if f.state in (State.PARTIAL, State.UNKNOWN)]
    if named:
        bad += [f for f in findings if f.state is State.ABSENT]
    if bad:
        lines = [f"{f.place or f.patch}: {f.patch} ({f.state.value}): {f.reason}" for f in bad]
        raise PatchError("\n".join(lines))


def _refuse_revert(item: Examined) -> None:
    for finding in item.findings:
        unrecorded = finding.state is State.APPLIED and not item.applied
        torn = finding.state is State.PARTIAL
        if unrecorded or torn or item.changed_since:
            raise PatchError(f"{finding.place}: {finding.patch}: {finding.reason}")


def _unified(item: Examined) -> str:
    name = f"{item.file.target.package}/{item.file.target.value}"
    old = item.original.decode("utf-8").splitlines(keepends=True)
    new = item.result.decode("utf-8").splitlines(keepends=True)
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    ended = [x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in lines]
    return "".join(ended)
