# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Check, apply, diff and revert on small trees: what is written, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from te_grouped_mlp.patches import engine, manifest
from te_grouped_mlp.patches.base import BadTreeError, Edit, Patch, PatchError, State, Target
from te_grouped_mlp.patches.structure import assigns, is_definition
from tests.patches import trees

NEW_TE = ("te_full_rows", "te_deterministic_dglu", "te_no_dprob", "te_use_fork")
MEGATRON = ("megatron_deterministic", "megatron_skip_when_active")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """TE 2.20.2 and Megatron-Core side by side, as in a site-packages folder."""
    return trees.write_tree(
        tmp_path / "site", trees.te_source("2.20.2"), megatron=trees.megatron_source()
    )


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder with its bytes and mode, folders with their mode."""
    return {
        str(path.relative_to(root)): (
            path.read_bytes() if path.is_file() else b"",
            path.lstat().st_mode,
        )
        for path in sorted(root.rglob("*"))
    }


def states(findings: list) -> dict[str, State]:
    return {finding.patch: finding.state for finding in findings}


def test_check_apply_revert(tree: Path) -> None:
    before = snapshot(tree)
    expected = dict.fromkeys(NEW_TE + MEGATRON, State.APPLICABLE) | {
        "te_one_decision": State.ABSENT
    }
    expected["megatron_skip_when_active"] = State.APPLICABLE
    assert states(engine.check(tree)) == expected
    assert snapshot(tree) == before
    applied = {n: State.APPLIED if s is not State.ABSENT else s for n, s in expected.items()}
    assert states(engine.apply(tree)) == applied
    patched = snapshot(tree)
    assert patched != before
    assert states(engine.apply(tree)) == applied
    assert snapshot(tree) == patched
    assert states(engine.revert(tree)) == expected
    assert snapshot(tree) == before
    engine.revert(tree)
    assert snapshot(tree) == before


def test_findings_name_the_place(tree: Path) -> None:
    lines = trees.te_file(tree).read_text().splitlines()
    for finding in engine.check(tree):
        if finding.state is State.APPLICABLE and finding.file == trees.te_file(tree):
            assert finding.line is not None
            line = lines[finding.line - 1]
            assert line.lstrip().startswith(("def fuser_", "class GroupedMLP", "# Tell")), line


@pytest.mark.parametrize("names", list(itertools.permutations(NEW_TE, 3))[::6])
def test_order_does_not_matter(names: tuple[str, ...], tree: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tree, tmp_path / "other")
    engine.apply(tree, names)
    for name in names:
        engine.apply(other, [name])
    assert trees.te_file(tree).read_bytes() == trees.te_file(other).read_bytes()
    engine.revert(other, names[:1])
    engine.revert(tree)
    engine.apply(tree, names[1:])
    assert trees.te_file(tree).read_bytes() == trees.te_file(other).read_bytes()


@pytest.mark.parametrize("layout", ["site", "package", "parent"])
def test_ways_to_name_a_tree(layout: str, tree: Path) -> None:
    root = {
        "site": tree,
        "package": tree / "megatron" / "core",
        "parent": tree / "megatron",
    }[layout]
    found = engine.apply(root, ["megatron_deterministic"])
    assert states(found) == {"megatron_deterministic": State.APPLIED}
    assert states(engine.check(tree, MEGATRON[:1])) == states(found)
    engine.revert(tree)
    assert not (tree / "megatron/core" / manifest.FOLDER).exists()


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_bytes_and_mode_survive(ending: str, mode: int, tmp_path: Path) -> None:
    text = trees.te_source("2.19.0").replace("\n", ending).removesuffix(ending)
    tree = trees.write_tree(tmp_path / "site", te_version="2.19.0", te="")
    file = trees.te_file(tree)
    file.write_bytes(text.encode())
    file.chmod(mode)
    before = snapshot(tree)
    engine.apply(tree, ["te_one_decision", "te_full_rows"])
    patched = file.read_bytes()
    assert patched.count(b"\r\n") == (patched.count(b"\n") if ending == "\r\n" else 0)
    assert file.stat().st_mode & 0o777 == mode
    engine.revert(tree)
    assert snapshot(tree) == before


def test_a_hard_link_keeps_the_old_file(tree: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cache.py"
    os.link(trees.te_file(tree), cached)
    before = cached.read_bytes()
    engine.apply(tree)
    assert cached.read_bytes() == before
    assert trees.te_file(tree).read_bytes() != before


@pytest.mark.parametrize("applied", [False, True])
def test_diff_makes_the_same_files(applied: bool, tree: Path, tmp_path: Path) -> None:
    git = shutil.which("git")
    assert git is not None
    clean = shutil.copytree(tree, tmp_path / "clean")
    if applied:
        engine.apply(tree)
    text = engine.diff(tree)
    engine.apply(tree)
    subprocess.run([git, "apply", "-p1", "-"], input=text, text=True, cwd=clean, check=True)
    for file in (trees.te_file, trees.megatron_file):
        assert file(clean).read_bytes() == file(tree).read_bytes()
    assert engine.diff(tree) == text


# ------------------------------------------------------------------------------------ refusals


def refused(tree: Path, match: str, only: tuple[str, ...] = ()) -> None:
    """Apply must raise with a text that matches, and leave every byte as it was."""
    before = snapshot(tree)
    with pytest.raises(PatchError, match=match):
        engine.apply(tree, only)
    assert snapshot(tree) == before


def test_no_such_tree(tmp_path: Path) -> None:
    with pytest.raises(BadTreeError, match="nowhere does not exist"):
        engine.check(tmp_path / "nowhere")
    with pytest.raises(BadTreeError, match="holds neither transformer_engine/pytorch nor"):
        engine.check(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadTreeError, match="file is not a folder"):
        engine.check(tmp_path / "file")


def test_unknown_name(tree: Path) -> None:
    with pytest.raises(BadTreeError, match="no patch 'te_magic'; the patches are te_one_decision"):
        engine.apply(tree, ["te_full_rows", "te_magic"])


def test_a_patch_for_another_tree(tree: Path) -> None:
    refused(
        tree, r"te_one_decision \(absent\): the file already decides once", ("te_one_decision",)
    )
    shutil.rmtree(tree / "transformer_engine")
    refused(tree, r"te_full_rows \(absent\): the tree has no transformer_engine", ("te_full_rows",))


def test_te_without_the_file(tree: Path) -> None:
    trees.te_file(tree).unlink()
    found = {f.patch: f for f in engine.check(tree)}
    assert found["te_full_rows"].state is State.ABSENT
    assert "has no pytorch/ops/fused/grouped_mlp.py" in found["te_full_rows"].reason


_ONLY_NVFP4 = """
def quantize(quantizer, num_groups):
    if num_groups != 1 or not isinstance(quantizer, NVFP4Quantizer):
        return "packed"
    return "dense"


def quantize_with_amax(quantizer, num_groups):
    if not isinstance(quantizer, NVFP4Quantizer):
        return quantize(quantizer, num_groups)
    return "packed" if num_groups != 1 else "dense"


class _GroupedMLP_CuTeGEMMBase:
    def fuser_forward(self, use_nvfp4, num_groups, split_sizes):
        if int(split_sizes.numel()) != num_groups:
            raise ValueError
        if use_nvfp4:
            if num_groups == 1:
                return "dense"
        else:
            return "packed"

    def fuser_backward(self, grouped_x, num_groups):
        if num_groups == 1 and isinstance(grouped_x.quantizer, NVFP4Quantizer):
            return "dense"


class GroupedMLP_CuTeGEMMGLU: ...
class GroupedMLP_CuTeGEMMUnary: ...
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("or not isinstance", "or isinstance"),
        ("    if not isinstance(q", "    if isinstance(q"),
        ("        if use_nvfp4:", "        if not use_nvfp4:"),
        (
            '            return "packed"\n\n',
            '            return "dense" if num_groups < 2 else ""\n\n',
        ),
        ("num_groups == 1 and isinstance", "num_groups == 1 or isinstance"),
    ],
)
def test_before_one_mxfp8_group_was_dense(old: str, new: str, tmp_path: Path) -> None:
    """The structure of TE 2.17 and 2.18 is left alone; with a shortcut under MXFP8 it is not."""
    assert old in _ONLY_NVFP4
    source = _ONLY_NVFP4.replace(old, new, 1) if old else _ONLY_NVFP4
    tree = trees.write_tree(tmp_path / "site", source, "2.18.0")
    found = {f.patch: f for f in engine.check(tree)}
    for name in ("te_one_decision", "te_full_rows"):
        assert found[name].state is (State.UNKNOWN if old else State.ABSENT), name
        assert old or "MXFP8 group" in found[name].reason
    assert old or "older than 2.19" in found["te_use_fork"].reason


@pytest.mark.parametrize(
    ("old", "new", "where", "text"),
    [
        (
            "            use_single_group_dense_fc2 = num_groups == 1\n",
            "            dense_fc2 = num_groups == 1\n",
            "def fuser_forward",
            r"\[forward: FC2 MXFP8\] \(an assignment to use_single_group_dense_fc2\): "
            "expected exactly one place, found 0",
        ),
        (
            "        use_single_group_dense_dgrad = num_groups == 1\n",
            "        use_single_group_dense_dgrad = num_groups == 1\n"
            "        more = num_groups == 1\n",
            "more = ",
            "further place, in a way that is not known: line LINE: more = num_groups == 1",
        ),
        (
            "        use_single_group_dense_dgrad = num_groups == 1\n",
            "        use_single_group_dense_dgrad = num_groups == 1\n" * 2,
            "use_single_group_dense_dgrad = ",
            r"\[backward: FC1 dgrad\] .*: expected exactly one place, found 2: line LINE: use",
        ),
        (
            "        use_single_group_dense_dgrad = num_groups == 1\n",
            "        use_single_group_dense_dgrad = num_groups == 1\n"
            "        _compute_grad_params(fc1_op, num_groups, label='again')\n",
            "def fuser_backward",
            "_compute_grad_params is called at a further place",
        ),
        (
            "def _cudnn_frontend_supports_single_group_runtime_offsets(",
            "def _another_name(",
            '"""A model',
            "the definition of _cudnn_frontend_supports_single_group_runtime_offsets",
        ),
    ],
)
def test_another_structure(old: str, new: str, where: str, text: str, tmp_path: Path) -> None:
    source = trees.te_source("2.19.0")
    assert old in source
    source = source.replace(old, new, 1)
    tree = trees.write_tree(tmp_path / "site", source, "2.19.1", trees.megatron_source())
    line = next(i for i, t in enumerate(source.splitlines(), 1) if t.strip().startswith(where))
    text = text.replace("LINE", str(line))
    refused(tree, rf"grouped_mlp.py:{line}: te_one_decision \(unknown\): .*{text}")


def test_decision_used_too_early(tmp_path: Path) -> None:
    source = trees.te_source("2.20.2").replace(
        "        split_sizes = basic_op_extra_inputs[0][0]\n",
        "        early = use_dense_single_group\n"
        "        split_sizes = basic_op_extra_inputs[0][0]\n",
    )
    tree = trees.write_tree(tmp_path / "site", source)
    refused(tree, "is read before the split sizes are known", ("te_full_rows",))


def test_no_python(tree: Path) -> None:
    trees.te_file(tree).write_text("def broken(:\n")
    refused(tree, r"grouped_mlp.py:1: te_full_rows \(unknown\): is not valid Python")


def test_builds_on(tmp_path: Path) -> None:
    tree = trees.write_tree(tmp_path / "site", trees.te_source("2.19.0"), "2.19.0")
    refused(tree, "te_one_decision must be applied first, or with it", ("te_full_rows",))
    engine.apply(tree, ["te_one_decision"])
    engine.apply(tree, ["te_full_rows"])
    before = snapshot(tree)
    with pytest.raises(PatchError, match="te_full_rows builds on te_one_decision; revert both"):
        engine.revert(tree, ["te_one_decision"])
    assert snapshot(tree) == before
    engine.revert(tree, ["te_one_decision", "te_full_rows"])


def test_skip_builds_on_the_rewrite(tree: Path) -> None:
    text = "megatron_deterministic must be applied first, or with it"
    refused(tree, text, ("megatron_skip_when_active",))


def test_changed_after_patching(tree: Path) -> None:
    engine.apply(tree)
    file = trees.te_file(tree)
    lines = file.read_text().splitlines(keepends=True)
    lines[40] = "# somebody was here\n" + lines[40]
    file.write_text("".join(lines))
    before = snapshot(tree)
    text = r"grouped_mlp.py:41: te_.*has been changed since te-grouped-mlp patched it"
    for action in (engine.apply, engine.revert, engine.diff):
        with pytest.raises(PatchError, match=text):
            action(tree)
    assert snapshot(tree) == before


def test_partly_patched(tree: Path) -> None:
    engine.apply(tree, NEW_TE)
    file = trees.te_file(tree)
    kept = [x for x in file.read_text().splitlines(keepends=True) if "[forward: known" not in x]
    shutil.rmtree(tree / "transformer_engine" / manifest.FOLDER)
    file.write_text("".join(kept))
    finding = engine.check(tree, ["te_full_rows"])[0]
    assert finding.state is State.PARTIAL
    assert kept[(finding.line or 0) - 1].startswith("# te-grouped-mlp: full rows [helper]")
    refused(tree, r"2 of 3 places are marked; not \[forward: known rows\]")
    with pytest.raises(PatchError, match="2 of 3 places"):
        engine.revert(tree)


def test_patched_without_a_record(tree: Path) -> None:
    engine.apply(tree, ["te_full_rows"])
    shutil.rmtree(tree / "transformer_engine" / manifest.FOLDER)
    assert states(engine.check(tree, ["te_full_rows"])) == {"te_full_rows": State.APPLIED}
    engine.apply(tree, ["te_full_rows"])
    refused(tree, "no record of them; restore the original file", ("te_no_dprob",))
    with pytest.raises(PatchError, match="without a record"):
        engine.revert(tree)


def test_reinstalled_over_a_patched_file(tree: Path) -> None:
    original = trees.te_file(tree).read_bytes()
    engine.apply(tree)
    trees.te_file(tree).write_bytes(original + b"# a newer release\n")
    engine.apply(tree)
    engine.revert(tree)
    assert trees.te_file(tree).read_bytes() == original + b"# a newer release\n"


def test_damaged_record(tree: Path) -> None:
    engine.apply(tree)
    hidden = tree / "transformer_engine" / manifest.FOLDER
    (hidden / "original").write_bytes(b"other bytes")
    with pytest.raises(PatchError, match="not the file's original bytes any more"):
        engine.revert(tree)
    (hidden / "record.json").write_text("{")
    with pytest.raises(PatchError, match="the record of the patches is damaged"):
        engine.check(tree)


@pytest.mark.parametrize("which", ["file", "folder"])
def test_read_only(which: str, tree: Path) -> None:
    path = trees.megatron_file(tree)
    path = path if which == "file" else path.parent
    mode = path.stat().st_mode
    path.chmod(mode & ~0o222)
    try:
        refused(tree, rf"{path.name} is read-only")
    finally:
        path.chmod(mode)


def test_symlinks(tree: Path, tmp_path: Path) -> None:
    file = trees.megatron_file(tree)
    shutil.move(file, tmp_path / "real.py")
    file.symlink_to(tmp_path / "real.py")
    refused(tree, r"experts.py is a symbolic link; patching it would change .*real.py")
    file.unlink()
    shutil.move(tmp_path / "real.py", file)
    folder = tree / "transformer_engine" / "pytorch"
    shutil.move(folder, tmp_path / "pytorch")
    folder.symlink_to(tmp_path / "pytorch")
    refused(tree, "transformer_engine/pytorch is a symbolic link")
    (tmp_path / "link").symlink_to(tree)
    with pytest.raises(BadTreeError, match="is a symbolic link; name the real folder"):
        engine.check(tmp_path / "link")


def test_installed_file_was_changed(tree: Path) -> None:
    file = trees.te_file(tree)
    name = file.relative_to(tree).as_posix()
    record = tree / "transformer_engine-2.20.2.dist-info" / "RECORD"
    right = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=")
    record.write_text(f"{name},sha256={right.decode()},1\n")
    engine.apply(tree)
    engine.revert(tree)
    file.write_bytes(file.read_bytes() + b"# a local change\n")
    refused(tree, r"grouped_mlp.py:1: the file is not the one that transformer-engine 2.20.2")


def test_checkout_with_uncommitted_changes(tree: Path) -> None:
    git = shutil.which("git")
    assert git is not None
    shutil.rmtree(tree / "transformer_engine-2.20.2.dist-info")
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*settings, "commit", "-q", "-m", "all"]):
        subprocess.run([git, *command], cwd=tree, check=True)
    engine.apply(tree)
    engine.revert(tree)
    file = trees.te_file(tree)
    file.write_bytes(file.read_bytes() + b"# a local change\n")
    refused(tree, "grouped_mlp.py:1: the file has changes that are not committed")


def model_patch(name: str, **edit: object) -> Patch:
    place = Edit("place", ("Experts",), **edit)  # type: ignore[arg-type]
    return Patch(name, name, Target.MEGATRON, (), "", "", "", (place,))


def test_two_patches_in_conflict(tmp_path: Path) -> None:
    source = "class Experts:\n    first = 1\n    second = 2\n"
    tree = trees.write_tree(tmp_path / "site", megatron=source)
    one = model_patch("one", find=assigns("first"), after="second = 3")
    two = model_patch("two", find=assigns("second"), after="third = 3")
    before = snapshot(tree)
    for only in ((), ("two",)):
        with pytest.raises(PatchError, match=r"py:\d: two \(unknown\): conflicts with one"):
            engine.apply(tree, only, patches=[one, two])
        if not only:
            assert snapshot(tree) == before
            engine.apply(tree, ["one"], patches=[one, two])
    engine.revert(tree, patches=[one, two])
    assert snapshot(tree) == before


def test_a_patch_that_would_break_the_file(tmp_path: Path) -> None:
    tree = trees.write_tree(tmp_path / "site", megatron="class Experts:\n    first = 1\n")
    bad = model_patch("bad", find=assigns("first"), after="return 1")
    before = snapshot(tree)
    with pytest.raises(PatchError, match="the patched file would not compile"):
        engine.apply(tree, patches=[bad])
    assert snapshot(tree) == before


def test_elif_and_nested_places(tmp_path: Path) -> None:
    source = textwrap.dedent("""\
        def f(a):
            if a:
                pass
            elif a > 1:
                try:
                    b = 1
                except ValueError:
                    b = 2
                finally:
                    c = 3
            else:
                d = 4
            return a
        """)
    tree = trees.write_tree(tmp_path / "site", megatron=source)
    edits = tuple(
        Edit(name, ("f",), find=assigns(name), after=f"{name} = 0", count=None) for name in "bcd"
    )
    patch = Patch("deep", "deep", Target.MEGATRON, (), "", "", "", edits)
    engine.apply(tree, patches=[patch])
    text = trees.megatron_file(tree).read_text()
    assert [text.count(f"{name} = 0") for name in "bcd"] == [2, 1, 1]
    assert text.replace("\n", " ").count("elif a > 1:") == 1
    bad = model_patch("bad", find=lambda s: False)
    assert not is_definition(bad, "f")


# ---------------------------------------------------------------------------------- interruption

_DIES = """
import os, sys
from pathlib import Path
from te_grouped_mlp.patches import engine
real, count = os.replace, 0
def fails(*args, **options):
    global count
    count += 1
    if count == {at}:
        {how}
    return real(*args, **options)
os.replace = fails
engine.apply(Path(sys.argv[1]))
"""


def run_dying(tree: Path, at: int, how: str) -> int:
    code = _DIES.format(at=at, how=how)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tree)]
    return subprocess.run(command, env=environment, check=False, capture_output=True).returncode


SMALL = [
    Patch(t.name, t.name, t, (), "", "", "", (Edit("place", (), assigns("first"), after="b = 2"),))
    for t in Target
]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Both files, of one line each, for tests of what is written rather than of what."""
    return trees.write_tree(tmp_path / "small", "first = 1\n", megatron="first = 1\n")


class DeadError(BaseException):
    """The process is gone: nothing that it would do afterwards happens."""


def die_at(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the `at`-th call that changes the disk, and all after it, not happen."""
    count = itertools.count(1)

    def mortal(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            if next(count) >= at:
                raise DeadError
            return real(*args, **options)

        return call

    for owner, name in (
        (os, "replace"),
        (os, "unlink"),
        (tempfile, "mkstemp"),
        (Path, "mkdir"),
        (Path, "rmdir"),
        (Path, "unlink"),
    ):
        monkeypatch.setattr(owner, name, mortal(getattr(owner, name)))


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_power_failure_at_any_step(
    action: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at each step in turn, an apply or revert has happened in all files or in none."""
    start = shutil.copytree(small, tmp_path / "start")
    end = shutil.copytree(small, tmp_path / "end")
    engine.apply(end if action == "apply" else start, patches=SMALL)
    expected = snapshot(start), snapshot(end)
    outcomes = set()
    for at in itertools.count(1):
        copy = shutil.copytree(start, tmp_path / "copy")
        with monkeypatch.context() as patched:
            die_at(patched, at)
            try:
                getattr(engine, action)(copy, patches=SMALL)
                finished = True
            except DeadError:
                finished = False
        engine.check(copy, patches=SMALL)
        found = snapshot(copy)
        assert found in expected, at
        outcomes.add(found == expected[1])
        shutil.rmtree(copy)
        if finished:
            break
    assert at > 20
    assert outcomes == {False, True}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", range(1, 11))
def test_error_is_undone_at_once(
    error: BaseException, at: int, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(small)
    count = itertools.count(1)
    real = os.replace

    def fails(*args: object) -> None:
        if next(count) == at:
            raise error
        real(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(type(error)):
            engine.apply(small, patches=SMALL)
    assert snapshot(small) == before


def test_termination_is_undone_at_once(tree: Path) -> None:
    before = snapshot(tree)
    how = "os.kill(os.getpid(), 15)"
    assert run_dying(tree, 7, how) == 128 + signal.SIGTERM
    assert snapshot(tree) == before


def test_moved_after_a_crash(tree: Path, tmp_path: Path) -> None:
    before = snapshot(tree)
    assert run_dying(tree, 7, "os._exit(9)") == 9
    moved = Path(shutil.move(tree, tmp_path / "moved"))
    assert snapshot(moved) != before
    engine.check(moved / "transformer_engine")
    assert snapshot(moved) == before


def test_crash_then_edited(tree: Path) -> None:
    assert run_dying(tree, 8, "os._exit(9)") == 9
    trees.te_file(tree).write_text("# somebody was here\n")
    with pytest.raises(PatchError, match=r"grouped_mlp.py: an interrupted change cannot be undone"):
        engine.check(tree)
    assert trees.te_file(tree).read_text() == "# somebody was here\n"


def test_two_processes(tree: Path) -> None:
    with (
        manifest.locked(engine.locate(tree)),
        pytest.raises(PatchError, match="another process is patching it"),
    ):
        engine.apply(tree)
