# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The note that a self-test leaves for `doctor`, among the user's caches; without torch or TE."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import te_grouped_mlp
from te_grouped_mlp.op.environment import Environment, cache_home
from te_grouped_mlp.op.packages import Absent

COMMAND = "te-grouped-mlp selftest"

_FILE = "selftest.json"
_BLACKWELL = 10
_KEY = ("sm", "backend", "format")
_TEXTS = (*_KEY, "date")


def path() -> Path:
    """Return the note's file; it need not exist.

    Raises:
        RuntimeError: The user has no home.
    """
    return cache_home() / _FILE


def versions(env: Environment) -> dict[str, str | None]:
    """Return the versions that a result depends on; None stands for an absence."""
    found = {
        name: None if isinstance(version, Absent) else version
        for name, version in env.versions.items()
    }
    return {"te_grouped_mlp": te_grouped_mlp.__version__, **found}


def sm(env: Environment) -> str | None:
    """Return the compute capability, such as "100"; None without a GPU."""
    return None if isinstance(env.sm, Absent) else f"{env.sm[0]}{env.sm[1]}"


def read() -> list[dict[str, Any]]:
    """Return the entries, oldest first; none where the file is absent or is no such file."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))["entries"]
        return [entry for entry in found if _is_entry(entry)]
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return []


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), (str, type(None))) for name in _TEXTS)
        and isinstance(entry.get("ok"), bool)
        and isinstance(entry.get("versions"), dict)
    )


def write(entries: Sequence[Mapping[str, Any]]) -> Path:
    """Put entries in the place of older ones with the same capability, backend and format.

    Args:
        entries: Each with sm, backend, format, ok, date and versions, and what else is worth it.

    Returns:
        The file.

    Raises:
        OSError, RuntimeError: It cannot be written.
    """
    new = {tuple(entry[name] for name in _KEY) for entry in entries}
    kept = [entry for entry in read() if tuple(entry.get(name) for name in _KEY) not in new]
    target = path()
    # The kernel cache, which lies there too, wants a folder that nobody else may write to.
    target.parent.mkdir(0o700, parents=True, exist_ok=True)
    # Another process sees the old file or the new one.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_FILE)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"entries": [*kept, *entries]}, file, indent=2)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return target


def here(env: Environment) -> list[dict[str, Any]]:
    """Return the entries of this compute capability, each with ``current``: equal versions."""
    now = versions(env)
    return [
        {**entry, "current": entry["versions"] == now}
        for entry in read()
        if entry.get("sm") == sm(env)
    ]


def lines(env: Environment) -> list[str]:
    """Say what self-tests found on this machine, and what to do where there is no good one.

    Args:
        env: The machine as it is now.

    Returns:
        A line for each entry; one with the remedy where a Blackwell GPU has none; else nothing.
    """
    found = [_line(entry, versions(env)) for entry in here(env)]
    if not found and not isinstance(env.sm, Absent) and env.sm[0] == _BLACKWELL:
        return [f"selftest: has not run on this machine; run: {COMMAND}"]
    return found


def _line(entry: Mapping[str, Any], now: Mapping[str, str | None]) -> str:
    short = " --quick" if entry.get("quick") else ""
    verdict = "passed" if entry["ok"] else "FAILED"
    what = (
        f"selftest{short}: {entry['backend']} {entry['format']} {verdict} here on {entry['date']}"
    )
    then = entry["versions"]
    changed = [
        f"{name} {then.get(name) or 'absent'}, now {now.get(name) or 'absent'}"
        for name in dict.fromkeys((*now, *then))
        if then.get(name) != now.get(name)
    ]
    if changed:
        return f"{what} with other versions ({'; '.join(changed)}); run again: {COMMAND}"
    what += " with these versions"
    return what if entry["ok"] else f"{what}; {COMMAND} --json shows where"
