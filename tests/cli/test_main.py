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


def test_table_loses_nothing_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    made = output.table("a", "b")
    made.add_row("x" * 70, "y" * 70)
    Console(width=40).print(output.as_rich(made))
    text = capsys.readouterr().out
    assert text.count("x") == 70
    assert text.count("y") == 70
    assert max(map(len, text.splitlines())) <= 40
    output.show(made)
    assert "x" * 70 in capsys.readouterr().out
