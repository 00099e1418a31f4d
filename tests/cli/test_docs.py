# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/doctor.md is run, and its tables name what there is."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_grouped_mlp.cli import machine
from te_grouped_mlp.cli.remedies import REMEDIES
from te_grouped_mlp.op import environment
from tests.cli.conftest import ROOT, Shell

PAGE = ROOT / "docs" / "doctor.md"
# A copy of the tests beside an installed wheel has no docs.
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
COMMANDS = re.findall(r"^```sh\n(te-grouped-mlp .*)\n```$", TEXT, flags=re.MULTILINE)


def test_page_is_there_in_the_repository() -> None:
    assert bool(TEXT) == (ROOT / "pyproject.toml").is_file()
    assert not TEXT or len(COMMANDS) == len(re.findall(r"^```sh$", TEXT, flags=re.MULTILINE))


@pytest.fixture(scope="module", autouse=True)
def _one_look_at_the_machine() -> Iterator[None]:
    """The process that looks at torch and the frontend answers each `doctor` of the page alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_ask_child", functools.cache(machine._ask_child))
        yield


@pytest.mark.parametrize("line", COMMANDS)
def test_command_of_the_page_runs(
    shell: Shell, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(environment.FUSED_SWITCH, "1")
    command, _, comment = line.partition("  # ")
    expected = int(comment.removeprefix("exit code ") or 0)
    assert shell(*shlex.split(command)[1:]) == expected
    # The kinds of columns on the page are those of the program.
    for heading in re.findall(r"^\S.* {2,}(?:why|bitwise|hash \(runs\))$", shell.out, re.MULTILINE):
        assert re.sub(r" +", " ", heading) in re.sub(r" +", " ", TEXT)


def test_page_lists_every_reason() -> None:
    rows = [f"| `{each.name}` | {each.value} | {remedy} |" for each, remedy in REMEDIES.items()]
    assert all(row in TEXT for row in rows) or not TEXT
