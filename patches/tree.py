# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Finding the upstream files in a folder, and what must hold before one may be written."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from te_grouped_mlp.patches.base import BadTreeError, PatchError, Target


@dataclass(frozen=True)
class TreeFile:
    """One upstream file of a tree.

    Attributes:
        target: Which file.
        root: The folder that the user named.
        package: The package folder that holds the file.
        version: The version that the tree says it is, or None.
    """

    target: Target
    root: Path
    package: Path
    version: str | None

    @property
    def path(self) -> Path:
        """The file."""
        return self.package / self.target.value

    @property
    def title(self) -> str:
        """The project and version for a report."""
        return f"{self.target.distribution} {self.version or '(version unknown)'}"


def digest(data: bytes) -> str:
    """The hexadecimal SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def locate(root: Path) -> list[TreeFile]:
    """Find the upstream packages in a folder.

    Args:
        root: A site-packages folder, a checkout, or a package folder itself.

    Returns:
        TE's package first, then Megatron-Core's; at least one.

    Raises:
        BadTreeError: the folder does not exist, is a link, or holds neither package.
    """
    if not os.path.lexists(root):
        raise BadTreeError(f"{root} does not exist")
    if root.is_symlink():
        raise BadTreeError(f"{root} is a symbolic link; name the real folder, {root.resolve()}")
    if not root.is_dir():
        raise BadTreeError(f"{root} is not a folder")
    found = []
    for target in Target:
        package = _package(root, target)
        if package is not None:
            found.append(TreeFile(target, root, package, _version(package, target)))
    if not found:
        raise BadTreeError(
            f"{root} holds neither transformer_engine/pytorch nor megatron/core; name a "
            "site-packages folder, a source checkout, or the package folder"
        )
    return found


def _package(root: Path, target: Target) -> Path | None:
    inner = Path(target.value).parts[0]
    parts = Path(target.package).parts
    for skipped in range(len(parts) + 1):
        # The root may be any folder on the way to the package: then its name must fit.
        if parts[:skipped] and root.absolute().parts[-skipped:] != parts[:skipped]:
            continue
        package = root.joinpath(*parts[skipped:])
        if (package / inner).is_dir():
            return package
    return None


def _distribution_root(package: Path, target: Target) -> Path:
    return package.parents[len(Path(target.package).parts) - 1]


def _dist_info(package: Path, target: Target) -> Path | None:
    name = target.distribution.replace("-", "_")
    found = sorted(_distribution_root(package, target).glob(f"{name}-*.dist-info"))
    return found[0] if found else None


def _version(package: Path, target: Target) -> str | None:
    info = _dist_info(package, target)
    if info is not None:
        return info.name.removesuffix(".dist-info").rpartition("-")[2]
    if target is Target.TE:
        file = _distribution_root(package, target) / "build_tools" / "VERSION.txt"
        return file.read_text(encoding="utf-8").strip() if file.is_file() else None
    file = package / "package_info.py"
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) for part in parts if part) or None


def check_writable(file: TreeFile) -> None:
    """Refuse a file that cannot be replaced safely.

    Raises:
        PatchError: a link on the way, no plain file, or no permission to write.
    """
    path = file.path
    for part in _ways(file):
        if part.is_symlink():
            raise PatchError(
                f"{part} is a symbolic link; patching it would change {part.resolve()}, which "
                "another tree may use"
            )
    if not path.is_file():
        raise PatchError(f"{path} is not a plain file")
    for part in (path, path.parent, file.package):
        mode = stat.S_IMODE(part.stat().st_mode)
        if not mode & 0o222 or not os.access(part, os.W_OK):
            raise PatchError(f"{part} is read-only (mode {mode:04o})")


def _ways(file: TreeFile) -> list[Path]:
    below = file.path.relative_to(file.root).parts
    return [file.root.joinpath(*below[: count + 1]) for count in range(len(below))]


def check_clean(file: TreeFile, data: bytes) -> None:
    """Refuse a file that somebody has changed, as far as the tree itself can tell.

    An installed package lists its files' hashes, a checkout knows its commit. The structure of a
    changed file may still fit, but its owner would not get back what they think they have.

    Raises:
        PatchError: the file differs from what was installed or committed.
    """
    expected = _recorded_hash(file)
    actual = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    if expected is not None and expected != actual:
        raise PatchError(
            f"{file.path}:1: the file is not the one that {file.title} installed (its hash "
            "differs from RECORD); reinstall the package, then patch"
        )
    if expected is None and _uncommitted(file.path):
        raise PatchError(
            f"{file.path}:1: the file has changes that are not committed; commit or undo them, "
            "then patch"
        )


def _recorded_hash(file: TreeFile) -> str | None:
    info = _dist_info(file.package, file.target)
    record = info / "RECORD" if info is not None else None
    if record is None or not record.is_file():
        return None
    name = file.path.relative_to(_distribution_root(file.package, file.target)).as_posix()
    with record.open(encoding="utf-8", newline="") as lines:
        for row in csv.reader(lines):
            if len(row) > 1 and row[0] == name and row[1].startswith("sha256="):
                return row[1].removeprefix("sha256=")
    return None


def _uncommitted(path: Path) -> bool:
    git = shutil.which("git")
    if git is None or not any((parent / ".git").exists() for parent in path.absolute().parents):
        return False
    status = subprocess.run(
        [git, "-C", str(path.parent), "status", "--porcelain", "--", path.name],
        capture_output=True,
        text=True,
        check=False,
    )
    # An untracked file (`??`) belongs to no commit: an environment inside somebody's checkout.
    return any(not line.startswith("??") for line in status.stdout.splitlines())
