# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Exit codes, messages, and what `--help` costs."""

from __future__ import annotations

import argparse

import pytest

from te_grouped_mlp import cli
from te_grouped_mlp.cli import output
from tests.cli.conftest import Shell, python


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(shell: Shell, name: str) -> None:
    assert shell(name, "--help") == 0
    assert "--traceback" in shell.out


def test_help_names_every_command(shell: Shell) -> None:
    assert shell("--help") == 0
    for name in cli.COMMANDS:
        assert f"\n    {name} " in shell.out


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["COMMAND"]),
        (["nothing"], ["nothing", "repro"]),
        (["repro", "--live", "100"], ["--live", "100", "multiple of 128"]),
        (["repro", "--padding", "0"], ["--padding", "0", "at least 128"]),
        (["repro", "--hidden", "x"], ["--hidden", "x", "multiple of 128"]),
        (["repro", "--seed", "-1"], ["--seed", "-1", "at least 0"]),
        (["repro", "--activation", "relu"], ["--activation", "relu", "ScaledTanhSReLU"]),
        (["repro", "--extent", "half"], ["--extent", "half", "packed-only"]),
        (
            ["repro", "--old-decision", "--backend", "auto"],
            ["--old-decision", "auto", "reference"],
        ),
        (["repro", "--backend", "magic"], ["--backend", "magic", "reference"]),
        (["replay", "--n", "1"], ["--n", "1", "at least 2"]),
        (["replay", "--shape", "128,128"], ["--shape", "128,128", "HIDDEN,FFN,ROWS"]),
        (["replay", "--shape", "128,100,128"], ["--shape", "100", "multiple of 128"]),
        (["replay", "--groups", "0"], ["--groups", "0", "at least 1"]),
        (["doctor", "--assume", "gpu=1"], ["--assume", "gpu=1", "frontend"]),
        (["doctor", "--assume", "sm=big"], ["--assume", "big", "100"]),
        (["doctor", "--assume", "frontend=9.9"], ["--assume", "9.9", "1.32.0"]),
        (["doctor", "--assume", ""], ["--assume", "''", "KEY=VALUE"]),
        (["doctor", "--assume", "sm=100,"], ["--assume", "''", "KEY=VALUE"]),
        (["doctor", "--assume", "sm=100,sm=90"], ["--assume", "sm", "twice"]),
        (["doctor", "--assume", "te=1.0"], ["--assume", "1.0", "2.19.0 or 2.20.x"]),
        (["doctor", "--assume", "torch=new"], ["--assume", "torch='new'", "a version, or none"]),
        (["doctor", "--assume", "sm=1000"], ["--assume", "1000", "103"]),
        (["repro", "--seed", str(2**63)], ["--seed", str(2**63), f"at most {2**62}"]),
        (["replay", "--backend", "foo"], ["--backend", "'foo'", "cutedsl"]),
        (["selftest", "--backend", "foo"], ["--backend", "'foo'", "cutedsl"]),
        (["repro", "--backend", "upstream"], ["--backend", "'upstream'", "reference"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_argument_is_named_with_value_and_what_is_allowed(
    shell: Shell, argv: list[str], parts: list[str]
) -> None:
    assert shell(*argv) == 2
    assert shell.out == ""
    for part in parts:
        assert part in shell.err


def _broken(_args: argparse.Namespace) -> int:
    raise LookupError("two\nlines")


def test_unexpected_error_is_one_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_grouped_mlp.cli.doctor.run", _broken)
    assert shell("doctor") == 1
    assert shell.err == "te-grouped-mlp doctor: LookupError: two lines\n"


@pytest.mark.parametrize("argv", [["--traceback", "doctor"], ["doctor", "--traceback"]])
def test_traceback_on_request(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setattr("te_grouped_mlp.cli.doctor.run", _broken)
    with pytest.raises(LookupError):
        shell(*argv)


def test_unwritable_json_file_is_named(shell: Shell, tmp_path) -> None:
    file = str(tmp_path / "no" / "file.json")
    assert shell("doctor", "--assume", "sm=none,frontend=none", "--json", file) == 1
    assert file in shell.err


def test_help_and_import_need_neither_torch_nor_te() -> None:
    code = """
import sys
from te_grouped_mlp.cli import main
assert main(["--help"]) == 0
heavy = {"torch", "transformer_engine", "numpy", "rich", "libcst"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


WORDS = ("every", "cell", "of", "a", "table", "keeps", "its", "words", "whole")


@pytest.mark.parametrize("width", [12, 24, 40, 80, 200])
def test_a_table_breaks_between_words_alone_and_loses_none(width: int) -> None:
    made = output.table("first", "second", "third")
    made.add_row(" ".join(WORDS), "short", " ".join(reversed(WORDS)))
    made.add_row("x", "", " ".join(WORDS))
    text = output.render(made, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\n\n" not in text or width == 12
    found = [word for word in text.split() if word in WORDS]
    assert sorted(found) == sorted(WORDS * 3)


def test_a_word_is_not_broken_even_where_it_is_too_long() -> None:
    made = output.table("a", "b")
    made.add_row("x" * 70, "y" * 70)
    text = output.render(made, 40)
    assert "x" * 70 in text
    assert "y" * 70 in text


def test_a_table_is_as_wide_as_columns_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = output.table("a")
    made.add_row("word " * 100)
    for columns, width in (("60", 60), ("0", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        output.show(made)
        assert width - 5 < max(map(len, capsys.readouterr().out.splitlines())) <= width


TABLES = {
    "doctor": ("doctor", "--assume", "sm=100,frontend=1.30.0,te=2.20.2"),
    "doctor here": ("doctor", "--assume", "sm=none"),
    "replay": ("replay", "--n", "2", "--groups", "2", "--shape", "128,128,256"),
    "repro": ("repro", "--hidden", "128", "--live", "128", "--padding", "128"),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_line_of_a_report_fits_80_columns(
    shell: Shell, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shell(*TABLES[name])
    # The first line is a sentence, which scripts read as one line.
    lines = shell.out.splitlines()[1:]
    assert len(lines) > 3, shell.err
    assert not [line for line in lines if len(line) > 80]
