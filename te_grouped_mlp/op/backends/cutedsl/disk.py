# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Entries of the kernel cache: whose they may be, whether they are whole, who writes them now.

An entry is executed, so it is taken only from where nobody but this user and root can write. It is
some files and a list of their SHA-256 sums (`sha256sum --check` reads it), written last: what a
killed process left without a list, and what does not agree with it, is no entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import os
import pwd
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_LIST = ".sha256"
_LOCK_SECONDS = 120.0
_POLL_SECONDS = 0.02


class DistrustedError(RuntimeError):
    """A file or folder that another user could change; the text names it and says why."""


def trusted_folder(path: Path) -> Path:
    """Return the real path of a folder that only this user and root can change.

    Folders that are missing are made, with mode 0700. Looked at is every folder from the root
    down, or from the home folder down where that is this user's. One in between may be writable by
    others if it is sticky, as /tmp is.

    Raises:
        DistrustedError: One of them belongs to another user, or others may write to it.
        OSError: It cannot be made, or is no folder.
    """
    real = Path(os.path.realpath(path))
    anchor = _home_of(real)
    for folder in reversed((real, *real.parents)):
        if anchor is not None and not folder.is_relative_to(anchor):
            continue
        # Asked first, since making one may fail in other ways where it exists.
        if not os.path.lexists(folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{folder} is no folder")
        _require_trust(folder, status, sticky=folder != real)
    return real


def _home_of(path: Path) -> Path | None:
    """Return the home folder if `path` lies below it and it is this user's."""
    try:
        home = Path(os.path.realpath(Path.home()))
        own = os.lstat(home).st_uid == os.geteuid()
    except (OSError, RuntimeError):
        return None
    return home if own and path.is_relative_to(home) else None


def _require_trust(path: Path, status: os.stat_result, sticky: bool = False) -> None:
    """Raise DistrustedError unless this user and root alone can change what has that status.

    Args:
        path: For the message.
        status: What was found.
        sticky: Others may write if they cannot replace what is not theirs.
    """
    me, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, me):
        raise DistrustedError(
            f"{path} belongs to user {status.st_uid}; allowed: user {me} and root"
        )
    if sticky and mode & stat.S_ISVTX:
        return
    by_group = mode & stat.S_IWGRP and not _is_private(status.st_gid)
    if by_group or mode & stat.S_IWOTH:
        raise DistrustedError(
            f"{path} has mode {mode:04o}, so that others may write to it; allowed: its owner alone"
        )


def _is_private(gid: int) -> bool:
    """Whether a group is the one that a system gave this user, and nobody else is in it."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    others = set(group.gr_mem) - {user.pw_name}
    return user.pw_gid == gid and group.gr_name == user.pw_name and not others


def entry(folder: Path, name: str) -> frozenset[str] | None:
    """Return the names of an entry's files, each of them whole; None without such an entry.

    Args:
        folder: Of `trusted_folder`.
        name: The entry's.

    Raises:
        DistrustedError: A file belongs to another user, or others may write to it.
    """
    try:
        # A list of which the end is gone has no line break after its last line.
        *lines, rest = _read(folder / (name + _LIST)).decode("ascii").split("\n")
        pairs = [line.split("  ", 1) for line in lines]
        whole = not rest and all(
            hashlib.sha256(_read(folder / file)).hexdigest() == digest for digest, file in pairs
        )
    except (OSError, ValueError):
        return None
    return frozenset(file for _, file in pairs) if whole and pairs else None


def _read(path: Path) -> bytes:
    """Read a file that is nobody else's; a link is none."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no file")
        _require_trust(path, status)
        return file.read()


def publish(folder: Path, name: str, drafts: Iterable[Path]) -> None:
    """Make files an entry, in place of the one of that name.

    A process that is killed here leaves no entry; nothing that is mapped by another one changes.

    Args:
        folder: Of `trusted_folder`.
        name: The entry's.
        drafts: The files, on the same file system, under the names that they shall have.

    Raises:
        OSError: They cannot be moved or written to the disk.
    """
    drafts, goal = list(drafts), folder / (name + _LIST)
    goal.unlink(missing_ok=True)
    lines = []
    for draft in drafts:
        draft.chmod(0o600)
        lines.append(f"{hashlib.sha256(draft.read_bytes()).hexdigest()}  {draft.name}\n")
        _sync(draft)
        os.replace(draft, folder / draft.name)
    sums = drafts[0].with_name(goal.name)
    sums.touch(0o600)
    sums.write_text("".join(lines), "ascii")
    _sync(sums)
    os.replace(sums, goal)
    # Some file systems cannot do this for a folder.
    with contextlib.suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    at = os.open(path, os.O_RDONLY)
    try:
        os.fsync(at)
    finally:
        os.close(at)


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes of this machine from making the same entry while the block runs.

    The system drops the lock of a process that dies. A folder that takes no locks, and a holder
    that does not end, let two processes do the same work, which is right and slow.
    """
    try:
        path = folder / f"{name}.lock"
        at = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        _wait_for_lock(at)
        yield
    finally:
        # Said, and not left to closing: a child that was forked meanwhile shares the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(at, fcntl.LOCK_UN)
        os.close(at)


def _wait_for_lock(at: int) -> None:
    end = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < end:
        try:
            fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        except OSError:
            return
