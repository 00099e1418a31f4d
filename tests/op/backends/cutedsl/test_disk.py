# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernel cache runs only what this user wrote and what is whole; one process compiles for all.

The compiler is replaced by one that counts, and the loader by one that reads: what they are given
is what matters. `test_compile` does the same with the real ones.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import multiprocessing
import os
import pwd
import stat
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from te_grouped_mlp.op.backends.cutedsl import compile as kernels
from te_grouped_mlp.op.backends.cutedsl import disk, library
from te_grouped_mlp.op.backends.cutedsl.config import Op
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey

KEY, OTHER = KernelKey(Op.ZERO_TAIL, 9), KernelKey(Op.REDUCE_ROW_PARTIALS, 9)
STRANGER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
needs_limits = pytest.mark.skipif(os.geteuid() == 0, reason="root writes where modes forbid it")


class Compiled:
    """What CuTe DSL returns, as far as the cache uses it."""

    def __init__(self, key: KernelKey) -> None:
        self.key = key

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_bytes(f"{function_name} {self.key}".encode() * 99)


class Machine:
    """The cache of one user, over a compiler that counts and a loader that reads.

    `compiled` has a line for each compilation, of forked processes too.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.log, self.seconds = root / "cache", root / "log", 0.0
        self.loaded: list[bytes] = []
        self.log.touch()
        monkeypatch.setenv(kernels.CACHE_SWITCH, str(self.root))
        monkeypatch.setattr(kernels, "_fingerprint", lambda: "v1")
        monkeypatch.setattr(kernels, "_builder", lambda: self.build)
        monkeypatch.setattr(kernels, "_said", set())
        monkeypatch.setattr(library, "link", self.link)
        monkeypatch.setattr(library, "load", self.load)
        self._monkeypatch = monkeypatch
        self.restart()

    def restart(self) -> None:
        """Forget what is in memory, as a new process has."""
        self._monkeypatch.setattr(kernels, "_loaded", {})

    def build(self, key: KernelKey) -> Compiled:
        time.sleep(self.seconds)
        with self.log.open("a") as file:
            file.write(f"{key.op.value}\n")
        return Compiled(key)

    @staticmethod
    def link(draft: Path) -> Path:
        linked = draft.with_suffix(".so")
        linked.write_bytes(b"linked " + draft.read_bytes())
        return linked

    def load(self, path: Path, symbol: str) -> bytes:
        self.loaded.append(path.read_bytes())
        assert symbol.encode() in self.loaded[-1]
        return self.loaded[-1]

    @property
    def compiled(self) -> list[str]:
        return self.log.read_text().split()

    @property
    def folder(self) -> Path:
        return self.root / "v1"

    def file(self, suffix: str) -> Path:
        (found,) = self.folder.glob(f"*{suffix}")
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    # pytest's own folders are 0700, but what they lie in may be anybody's.
    monkeypatch.setenv("HOME", str(tmp_path))
    return Machine(monkeypatch, tmp_path)


def used_again(machine: Machine) -> bool:
    """Whether a new process takes the kernel from disk."""
    machine.restart()
    before = len(machine.compiled)
    kernels.kernel(KEY)
    return len(machine.compiled) == before


# Whose ------------------------------------------------------------------------------------------


def test_what_the_cache_makes_is_its_users_alone(machine: Machine) -> None:
    before = os.umask(0)
    try:
        kernels.kernel(KEY)
    finally:
        os.umask(before)
    made = {path: stat.S_IMODE(path.stat().st_mode) for path in machine.root.rglob("*")}
    assert {path.suffix for path in made} == {"", ".o", ".so", ".sha256", ".lock"}
    assert {mode for path, mode in made.items() if path.is_file()} == {0o600}
    folders = {mode for path, mode in made.items() if path.is_dir()}
    assert folders == {stat.S_IMODE(machine.root.stat().st_mode)} == {0o700}
    assert used_again(machine)


@pytest.mark.parametrize("mode", [0o702, 0o777, 0o1777])
@pytest.mark.parametrize("which", ["folder", "root"])
def test_a_folder_that_others_may_write_to_is_not_used(
    machine: Machine, which: str, mode: int
) -> None:
    kernels.kernel(KEY)
    machine.restart()
    bad: Path = getattr(machine, which)
    bad.chmod(mode)
    if which == "root" and mode & stat.S_ISVTX:
        assert used_again(machine)  # as in /tmp: nobody can replace what is not theirs
        return
    with pytest.warns(UserWarning, match=rf"{bad} has mode {mode:04o}.*CACHE names another folder"):
        assert isinstance(kernels.kernel(KEY), Compiled)
    assert machine.loaded == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        kernels.kernel(OTHER)
    assert not list(machine.folder.glob(f"{kernels._name(OTHER)}*"))


@pytest.mark.parametrize("suffix", [".so", ".o", ".sha256"])
def test_a_file_that_others_may_write_to_is_replaced(machine: Machine, suffix: str) -> None:
    kernels.kernel(KEY)
    machine.file(suffix).chmod(0o666)
    with pytest.warns(UserWarning, match=r"not used, but replaced: .* has mode 0666"):
        assert not used_again(machine)
    assert stat.S_IMODE(machine.file(suffix).stat().st_mode) == 0o600
    assert used_again(machine)


@pytest.mark.parametrize("suffix", ["", ".so", ".o", ".sha256"])
def test_what_belongs_to_another_user(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Told by the owner that is seen, so that it needs no second user."""
    kernels.kernel(KEY)
    theirs = machine.folder if not suffix else machine.file(suffix)
    inode = theirs.stat().st_ino

    def seen(original):
        def call(*args, **options):
            found = original(*args, **options)
            fields = list(found)
            if found.st_ino == inode:
                fields[4] = STRANGER
            return os.stat_result(fields)

        return call

    for name in ("lstat", "fstat"):
        monkeypatch.setattr(disk.os, name, seen(getattr(os, name)))
    with pytest.warns(UserWarning, match=rf"{theirs} belongs to user {STRANGER}; allowed: user"):
        assert not used_again(machine)
    assert machine.loaded == []


@needs_root
def test_a_strangers_library_does_not_run(machine: Machine) -> None:
    kernels.kernel(KEY)
    os.chown(machine.file(".so"), STRANGER, STRANGER)
    with pytest.warns(UserWarning, match=f"belongs to user {STRANGER}"):
        assert not used_again(machine)
    assert machine.file(".so").stat().st_uid == os.geteuid()


@needs_root
def test_root_may_fill_a_cache_for_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.kernel(KEY)
    monkeypatch.setattr(disk.os, "geteuid", lambda: STRANGER)
    assert used_again(machine)


def test_a_link_is_not_followed(machine: Machine, tmp_path: Path) -> None:
    kernels.kernel(KEY)
    file = machine.file(".so")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert not used_again(machine)
    assert not machine.file(".so").is_symlink()


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_of_ones_own_is_nobody_else(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Many systems give each user a group, and write permission to the group with it."""
    kernels.kernel(KEY)
    gid = machine.folder.stat().st_gid
    machine.folder.chmod(0o770)
    me = SimpleNamespace(pw_name="me", pw_gid=gid)
    group = SimpleNamespace(gr_name="me", gr_mem=[] if alone else ["me", "other"])
    monkeypatch.setattr(pwd, "getpwuid", lambda _: me)
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    if alone:
        assert used_again(machine)
    else:
        with pytest.warns(UserWarning, match="has mode 0770"):
            assert not used_again(machine)


def test_a_folder_above_that_others_may_write_to(machine: Machine, tmp_path: Path) -> None:
    """They could put another folder in its place. Above one's home nothing is looked at."""
    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match=f"{tmp_path} has mode 0777"):
        kernels.kernel(KEY)
    assert not machine.root.exists()


# Whole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 64, 100, -1])
@pytest.mark.parametrize("suffix", [".so", ".o", ".sha256"])
def test_what_is_not_whole_is_replaced_and_never_loaded(
    machine: Machine, suffix: str, left: int
) -> None:
    kernels.kernel(KEY)
    file = machine.file(suffix)
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    assert kernels.not_stored([KEY, KEY]) == [KEY]
    assert not used_again(machine)
    assert machine.loaded == []
    assert file.read_bytes() == whole
    assert used_again(machine)


@pytest.mark.parametrize("suffix", [".so", ".o"])
def test_a_changed_byte_is_noticed(machine: Machine, suffix: str) -> None:
    kernels.kernel(KEY)
    changed = bytearray(machine.file(suffix).read_bytes())
    changed[100] ^= 1
    machine.file(suffix).write_bytes(changed)
    assert not used_again(machine)
    assert machine.loaded == []


@pytest.mark.parametrize("suffix", [".so", ".o", ".sha256"])
def test_a_file_that_is_gone_is_made_again(machine: Machine, suffix: str) -> None:
    kernels.kernel(KEY)
    machine.file(suffix).unlink()
    assert not used_again(machine)
    assert used_again(machine)


def test_the_sums_are_those_that_the_usual_tool_reads(machine: Machine) -> None:
    kernels.kernel(KEY)
    for line in machine.file(".sha256").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((machine.folder / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("step", range(4))
def test_a_process_that_dies_while_it_writes_leaves_nothing_half(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Killed before the first, second or third file is in place, or never; over an old entry."""
    kernels.kernel(KEY)
    machine.file(".so").write_bytes(b"damaged")
    machine.restart()
    left = [step]

    def replace(*args):
        if not left[0]:
            raise KeyboardInterrupt  # no handler of the cache's own comes between
        left[0] -= 1
        os.rename(*args)

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "replace", replace)
        if step < 3:
            with pytest.raises(KeyboardInterrupt):
                kernels.kernel(KEY)
            assert kernels.not_stored([KEY]) == [KEY]
        else:
            kernels.kernel(KEY)
    assert used_again(machine) == (step == 3)
    assert used_again(machine)
    assert not [path for path in machine.folder.iterdir() if path.is_dir()]


def test_files_and_folder_reach_the_disk_before_and_after_they_are_moved(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    def logged(name, original, what):
        def call(first, *args):
            events.append((name, what(first)))
            return original(first, *args)

        monkeypatch.setattr(disk.os, name, call)

    def of_file(at):
        return Path(os.readlink(f"/proc/self/fd/{at}")).name

    logged("fsync", os.fsync, of_file)
    logged("replace", os.replace, lambda path: Path(path).name)
    kernels.kernel(KEY)
    name = kernels._name(KEY)
    moved = [f"{name}{end}" for end in (".o", ".so", ".sha256")]
    each = [(what, file) for file in moved for what in ("fsync", "replace")]
    assert events == [*each, ("fsync", "v1")]


# Where ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({kernels.CACHE_SWITCH: "~/kernels"}, "kernels/v1"),
        ({kernels.CACHE_SWITCH: "", "XDG_CACHE_HOME": "{home}/xdg"}, "xdg/te-grouped-mlp/v1"),
        ({kernels.CACHE_SWITCH: "", "XDG_CACHE_HOME": "rel"}, ".cache/te-grouped-mlp/v1"),
        ({kernels.CACHE_SWITCH: "here"}, "here/v1"),
    ],
)
def test_where_the_cache_lies(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    kernels.kernel(KEY)
    assert list((tmp_path / place).glob("*.so"))
    assert used_again(machine)


def test_a_user_without_a_home(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for value in ("", "~/kernels"):
        monkeypatch.setenv(kernels.CACHE_SWITCH, value)
        machine.restart()
        with pytest.warns(UserWarning, match="compiles its kernels: .*home dir"):
            kernels.kernel(KEY)
        kernels._said.clear()
    assert len(machine.compiled) == 2


def test_a_folder_that_is_a_file(machine: Machine) -> None:
    machine.root.write_text("")
    with pytest.warns(UserWarning, match=rf"{machine.root} is no folder"):
        kernels.kernel(KEY)
    assert kernels.compile_ahead([KEY, OTHER], 2) == 1
    assert machine.compiled == ["zero_tail", "reduce_row_partials"]


@needs_limits
def test_a_folder_that_cannot_be_made(machine: Machine, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(UserWarning, match=r"Permission denied: .*cache"):
        kernels.kernel(KEY)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("where", ["draft", "goal"])
def test_a_folder_that_takes_no_more(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: int, where: str
) -> None:
    def full(*args, **kwargs):
        raise OSError(error, os.strerror(error), "a name that differs every time")

    if where == "draft":
        monkeypatch.setattr(kernels.tempfile, "TemporaryDirectory", full)
    else:
        monkeypatch.setattr(disk.os, "replace", full)
    with pytest.warns(UserWarning, match=f"cannot be written to.*{os.strerror(error)}") as said:
        [kernels.kernel(key) for key in (KEY, OTHER)]
    assert len(said) == 1
    assert kernels.not_stored([KEY]) == [KEY]


# Who --------------------------------------------------------------------------------------------


def together(function, count: int) -> None:
    """Run a function in forked processes at once."""
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(count)

    def run() -> None:
        ready.wait()
        function()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        processes = [context.Process(target=run, daemon=True) for _ in range(count)]
        for process in processes:
            process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


def test_ranks_that_start_at_once_compile_each_kernel_once(machine: Machine) -> None:
    machine.seconds = 0.05
    together(lambda: (kernels.kernel(KEY), kernels.kernel(OTHER)), 3)
    assert sorted(machine.compiled) == ["reduce_row_partials", "zero_tail"]
    assert used_again(machine)


def test_ranks_that_compile_ahead_share_the_work(machine: Machine) -> None:
    machine.seconds = 0.05
    together(lambda: kernels._work([KEY, OTHER], kernels.usable_folder()), 3)
    assert sorted(machine.compiled) == ["reduce_row_partials", "zero_tail"]


def test_a_file_system_without_locks_costs_time_only(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", none)
    machine.seconds = 0.05
    together(lambda: kernels.kernel(KEY), 2)
    assert machine.compiled == ["zero_tail"] * 2
    assert used_again(machine)


def test_a_holder_that_died_does_not_block(machine: Machine) -> None:
    folder = kernels.usable_folder()

    def die() -> None:
        with disk.locked(folder, kernels._name(KEY)):
            os._exit(0)

    together(die, 1)
    begin = time.monotonic()
    kernels.kernel(KEY)
    assert time.monotonic() - begin < disk._LOCK_SECONDS / 10


def test_a_holder_that_does_not_end_is_not_waited_for_for_ever(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_LOCK_SECONDS", 0.05)
    with disk.locked(kernels.usable_folder(), kernels._name(KEY)):
        kernels.kernel(KEY)
    assert machine.compiled == ["zero_tail"]
