# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What was done to a tree, kept in the tree, and writing that all happens or does not.

Each package folder that was patched has a hidden folder with the file's original bytes and a
record. A change of several files goes through a journal: it is on disk before the first file is
replaced and gone after the last, so that whoever comes next after a crash can put everything
back. Files are replaced, never written in place: a reader sees the old or the new file, and a
hard link in an installer's cache keeps the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from te_grouped_mlp.patches.base import PatchError
from te_grouped_mlp.patches.tree import TreeFile, digest

FOLDER = ".te-grouped-mlp"
_RECORD = "record.json"
_ORIGINAL = "original"
_JOURNAL = "journal.json"


@dataclass(frozen=True)
class Record:
    """What a patched file is made of.

    Attributes:
        patches: Names of the repairs in it, in order.
        original: SHA-256 of the file before the first repair.
        current: SHA-256 of the file with all of them.
    """

    patches: tuple[str, ...]
    original: str
    current: str


@dataclass(frozen=True)
class Change:
    """One file's step from `old` to `new` bytes, and the record that belongs to the new ones.

    `record` is None if the new bytes are the original ones; `original` is what is kept otherwise.
    """

    file: TreeFile
    old: bytes
    new: bytes
    original: bytes
    record: Record | None


def folder(file: TreeFile) -> Path:
    """The hidden folder of a file's package."""
    return file.package / FOLDER


def load(file: TreeFile) -> tuple[Record, bytes] | None:
    """Read the record of a patched file and its original bytes; None if there is no record.

    Raises:
        PatchError: the record is damaged, or the kept original is not the one it names.
    """
    place = folder(file)
    if place.is_symlink():
        raise PatchError(f"{place} is a symbolic link; remove it")
    if not (place / _RECORD).is_file():
        return None
    try:
        fields = json.loads((place / _RECORD).read_text(encoding="utf-8"))
        record = Record(tuple(fields["patches"]), fields["original"], fields["current"])
        original = (place / _ORIGINAL).read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{place}: the record of the patches is damaged ({error})") from error
    if digest(original) != record.original:
        raise PatchError(f"{place / _ORIGINAL}: these are not the file's original bytes any more")
    return record, original


@contextlib.contextmanager
def locked(files: Sequence[TreeFile]) -> Iterator[None]:
    """Keep a second process from changing the same packages at the same time.

    Raises:
        PatchError: another process holds one of them.
    """
    with contextlib.ExitStack() as stack:
        for file in files:
            handle = os.open(file.package, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise PatchError(f"{file.package}: another process is patching it") from error
        yield


def commit(changes: Sequence[Change]) -> None:
    """Write all files and records, or leave everything as it was.

    Raises:
        OSError: writing failed; everything has been put back.
    """
    changes = [change for change in changes if change.new != change.old]
    if not changes:
        return
    first = changes[0].file
    try:
        with _signals_as_exceptions():
            entries = [_prepare(change) for change in changes]
            _write_json(folder(first) / _JOURNAL, entries, first.package)
            for change in changes[1:]:
                pointer = [{"journal": str(first.package.absolute())}]
                _write_json(folder(change.file) / _JOURNAL, pointer, change.file.package)
            for change in changes:
                _replace(change.file.path, change.new, folder(change.file))
                _write_record(change)
            # From here on the change has happened; the pointers of the others lead nowhere.
            (folder(first) / _JOURNAL).unlink()
    except BaseException:
        for change in changes:
            recover(change.file)
        raise
    for change in changes:
        recover(change.file)


def recover(file: TreeFile) -> bool:
    """Undo a change that was interrupted, in all packages that it concerned.

    Returns:
        Whether there was one to undo.

    Raises:
        PatchError: a file is neither the old nor the new one.
    """
    package = file.package
    entries = _read_json(package / FOLDER / _JOURNAL, package)
    pointer = package / FOLDER / _JOURNAL
    if entries and "journal" in entries[0]:
        package = Path(entries[0]["journal"])
        entries = _read_json(package / FOLDER / _JOURNAL, package)
    for entry in entries:
        if digest(Path(entry["path"]).read_bytes()) not in (entry["old"], entry["new"]):
            raise PatchError(
                f"{entry['path']}: an interrupted change cannot be undone, because the file has "
                f"been changed since; its old bytes are {entry['kept']}"
            )
    for entry in entries:
        hidden = Path(entry["package"]) / FOLDER
        if digest(Path(entry["path"]).read_bytes()) == entry["new"]:
            _replace(Path(entry["path"]), Path(entry["kept"]).read_bytes(), hidden)
        if entry["record"] is None:
            (hidden / _RECORD).unlink(missing_ok=True)
        else:
            _replace(hidden / _RECORD, entry["record"].encode(), hidden)
    (package / FOLDER / _JOURNAL).unlink(missing_ok=True)
    pointer.unlink(missing_ok=True)
    for other in {file.package, *(Path(entry["package"]) for entry in entries)}:
        (other / FOLDER / _JOURNAL).unlink(missing_ok=True)
        _tidy(other)
    return bool(entries)


def _prepare(change: Change) -> dict[str, Any]:
    """Put on disk what undoing will need, before anything visible happens."""
    hidden = folder(change.file)
    hidden.mkdir(exist_ok=True)
    kept = hidden / f"before-{digest(change.old)[:16]}"
    _replace(kept, change.old, hidden)
    record = hidden / _RECORD
    original = hidden / _ORIGINAL
    if not original.is_file() or original.read_bytes() != change.original:
        _replace(original, change.original, hidden)
    return {
        "package": str(change.file.package.absolute()),
        "path": str(change.file.path.absolute()),
        "kept": str(kept.absolute()),
        "old": digest(change.old),
        "new": digest(change.new),
        "record": record.read_text(encoding="utf-8") if record.is_file() else None,
    }


_PATHS = ("package", "path", "kept", "journal")


def _write_json(path: Path, entries: Sequence[dict[str, Any]], start: Path) -> None:
    # Relative paths, so that an environment that was moved after a crash can still be mended.
    start = start.absolute()
    own = [
        {k: os.path.relpath(v, start) if k in _PATHS else v for k, v in entry.items()}
        for entry in entries
    ]
    _replace(path, json.dumps(own, indent=1).encode(), path.parent)


def _read_json(path: Path, start: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    start = start.absolute()
    return [
        {k: os.path.normpath(start / v) if k in _PATHS else v for k, v in entry.items()}
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


def _write_record(change: Change) -> None:
    hidden = folder(change.file)
    if change.record is None:
        (hidden / _RECORD).unlink(missing_ok=True)
    else:
        text = json.dumps(asdict(change.record), indent=1)
        _replace(hidden / _RECORD, text.encode(), hidden)


def _tidy(package: Path) -> None:
    """Remove what nothing needs any more, and the hidden folder with the last of it."""
    hidden = package / FOLDER
    if hidden.is_symlink() or not hidden.is_dir() or (hidden / _JOURNAL).exists():
        return
    for path in hidden.iterdir():
        if path.name.startswith(("before-", "new-")):
            path.unlink(missing_ok=True)
    if not (hidden / _RECORD).exists():
        (hidden / _ORIGINAL).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            hidden.rmdir()


def _replace(path: Path, data: bytes, hidden: Path) -> None:
    """Replace a file's content in one step, durable when this returns; mode and owner stay.

    The new content is written in the hidden folder first, so that a crash leaves no stray file
    elsewhere.
    """
    handle, name = tempfile.mkstemp(prefix="new-", dir=hidden)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if path.exists():
                status = path.stat()
                os.fchmod(file.fileno(), status.st_mode & 0o7777)
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
            else:
                os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Let a termination request undo what has begun instead of leaving it to the next command."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name)
        with contextlib.suppress(ValueError):  # not the main thread
            previous[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
