# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What `emulate` and `repro --emulate` refuse, and where they take upstream's file from."""

from __future__ import annotations

import importlib.util
import tarfile
import zipfile
from pathlib import Path

import pytest

from te_grouped_mlp.cli import emulate, repro_emulated
from te_grouped_mlp.cli.output import BadArgument
from tests.cli.conftest import Shell
from tests.emulator.packages import require_packages

TEXT = b"fused = True\n"
KNOWN = ["cudnn/fc1_act", "cudnn/fc1_act-bias", "cutedsl/fc1_act"]


def test_launches_are_named_by_patterns() -> None:
    assert emulate._named(["cudnn/*", "cudnn/fc1_act"], KNOWN) == KNOWN[:2]


@pytest.mark.parametrize("patterns", [[], ["cutlass/*"]])
def test_a_pattern_without_a_launch_is_refused(patterns: list[str]) -> None:
    with pytest.raises(BadArgument, match="LAUNCH"):
        emulate._named(patterns, KNOWN)


def test_the_list_has_every_launch(shell: Shell) -> None:
    require_packages()
    assert shell("emulate", "--list", "--json") == 0
    names = shell.json()["launches"]
    assert sum(name.startswith("cudnn/") for name in names) == 88


@pytest.mark.parametrize("kind", ["wheel", "sdist", "tree", "file"])
def test_upstreams_file_is_found(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "te-2" / repro_emulated.MODULE
    source.parent.mkdir(parents=True)
    source.write_bytes(TEXT)
    path = {"tree": tmp_path / "te-2", "file": source}.get(kind, tmp_path / f"te.{kind}")
    if kind == "wheel":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(source, repro_emulated.MODULE)
    elif kind == "sdist":
        with tarfile.open(path, "w:gz") as archive:
            archive.add(source, f"te-2/{repro_emulated.MODULE}")
    assert repro_emulated._module_of(path) == TEXT


@pytest.mark.parametrize("name", ["absent.whl", "empty", "text.txt"])
def test_a_path_without_it_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("no archive")
    with pytest.raises(BadArgument, match=name):
        repro_emulated._module_of(tmp_path / name)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("repro", "--te", "te.whl"), "--emulate"),
        (("repro", "--emulate", "--live", "384"), "multiples of 256"),
        (("emulate",), "LAUNCH"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    shell: Shell, argv: tuple[str, ...], words: str
) -> None:
    if argv[0] == "emulate" and importlib.util.find_spec("cutlass") is None:
        pytest.skip("the packages are looked for first")
    assert shell(*argv) == 2
    assert words in shell.err
