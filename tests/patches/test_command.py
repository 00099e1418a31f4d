# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, texts, JSON, and the commands of docs/patches.md."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from te_grouped_mlp.cli import patch
from te_grouped_mlp.patches import NAMES
from tests.patches import trees

DOCS = Path(__file__).resolve().parents[2] / "docs" / "patches.md"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return trees.write_tree(
        tmp_path / "site-packages", trees.te_source("2.20.2"), megatron=trees.megatron_source()
    )


def run(*arguments: object) -> int:
    try:
        return patch.main([str(argument) for argument in arguments])
    except SystemExit as error:
        return int(error.code or 0)


def test_exit_codes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    assert run("check", "--tree", tree) == 1
    assert run("diff", "--tree", tree) == 0
    assert run("apply", "--tree", tree) == 0
    assert run("check", "--tree", tree) == 0
    assert run("apply", "--tree", tree) == 0
    assert run("revert", "--tree", tree) == 0
    assert run("check", "--tree", tree) == 1
    assert run("apply", "--tree", tree, "--only", "te_one_decision") == 1
    assert "refused, nothing was written" in capsys.readouterr().err


def test_a_reader_who_leaves_is_no_refusal(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are patched by then, so nobody may read that nothing was written."""

    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with contextlib.redirect_stdout(Closed()), pytest.raises(BrokenPipeError):
        run("apply", "--tree", tree, "--only", "megatron_deterministic")
    assert capsys.readouterr().err == ""
    assert "[guards]" in trees.megatron_file(tree).read_text()


@pytest.mark.skipif(not DOCS.is_file(), reason="the tests alone, without the repository's docs")
def test_exit_codes_of_the_docs_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    told = re.findall(r"^  ((?:\d+)(?:, \d+)*)  ", capsys.readouterr().out, re.M)
    assert told == ["0", "1", "2", "129, 130, 143"]
    rows = re.findall(r"^\| ([\d, ]+) \| ", DOCS.read_text(encoding="utf-8"), re.M)
    assert list(dict.fromkeys(rows)) == told


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["mend"],
        ["apply"],
        ["apply", "--tree", "nowhere"],
        ["check", "--tree", "."],
        ["apply", "--tree", "site-packages", "--only", "te_magic"],
        ["apply", "--tree", "site-packages", "--only"],
    ],
)
def test_bad_arguments(
    arguments: list[str], tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err.strip()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], *([name, "--help"] for name in ("list", "check", "apply"))):
        assert run(*arguments) == 0
        assert "usage: te-grouped-mlp patch" in capsys.readouterr().out


def test_below_another_parser() -> None:
    parser = argparse.ArgumentParser()
    patch.add_parser(parser.add_subparsers())
    assert patch.run(parser.parse_args(["patch", "list"])) == 0


@pytest.mark.parametrize("to_file", [True, False])
def test_json(to_file: bool, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["out.json"] if to_file else []
    run("check", "--tree", tree, "--json", *where)
    out = capsys.readouterr().out
    report = json.loads(Path("out.json").read_text() if to_file else out)
    assert ("te_full_rows  " in out) == to_file
    assert report["ok"] is False
    assert [row["patch"] for row in report["patches"]] == list(NAMES)
    row = report["patches"][NAMES.index("te_full_rows")]
    assert row["state"] == "applicable"
    assert row["file"] == str(trees.te_file(tree))
    assert isinstance(row["line"], int)
    run("list", "--json")
    assert len(json.loads(capsys.readouterr().out)["patches"]) == len(NAMES)


def test_structure_without_a_claim_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = trees.write_tree(tmp_path / "site", trees.te_source("2.20.2"), "2.21.0")
    run("check", "--tree", tree, "--only", "te_full_rows")
    assert "fits by structure; proven for 2.19.0, 2.20.2, not for 2.21.0" in capsys.readouterr().out


def test_list_names_a_proof_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    run("list", "--json")
    root = Path(__file__).resolve().parents[2]
    for row in json.loads(capsys.readouterr().out)["patches"]:
        proof = root / row["proof"]
        assert proof.is_file() or not (root / "patches").is_dir()


@pytest.mark.skipif(not DOCS.is_file(), reason="the tests alone, without the repository's docs")
def test_commands_of_the_docs(tree: Path) -> None:
    """Every command of the page runs, in order, with the exit code that the page gives."""
    text = DOCS.read_text(encoding="utf-8")
    commands = re.findall(r"^te-grouped-mlp patch (.*?)(?:  # exit code (\d))?$", text, re.M)
    assert len(commands) == len(re.findall("^```sh$", text, re.M)) >= 6
    for command, code in commands:
        arguments = shlex.split(command.split(" > ")[0])
        assert run(*arguments) == int(code or 0), command


@pytest.mark.skipif(not DOCS.is_file(), reason="the tests alone, without the repository's docs")
def test_docs_name_every_patch() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in NAMES if f"| `{name}` |" not in text] == []
