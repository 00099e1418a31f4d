# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Write docs/commands.md from the parsers: `make reference`. A test compares the two."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from te_grouped_mlp import cli

PAGE = Path(__file__).parent / "commands.md"

_HEAD = """# The commands

Written by `make reference` from the parsers; `--help` says the same. Exit codes: 0 good, 1 found
something or failed, 2 bad arguments, 130 stopped by Ctrl-C. Every command takes `--traceback`,
which shows where an error came from.
"""
_EVERYWHERE = ("--help", "--traceback")


def page() -> str:
    """Return the whole page."""
    parser = cli._parser()
    (commands,) = _subcommands(parser)
    return _HEAD + "".join(_command(f"te-grouped-mlp {name}", commands[name]) for name in commands)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    parts = [f"\n## `{name}`\n"]
    if parser.description:
        parts.append(f"\n{parser.description}\n")
    rows = [row for action in parser._actions if (row := _row(action)) is not None]
    if rows:
        parts.append("\n| argument | what it says |\n|---|---|\n" + "".join(rows))
    for commands in _subcommands(parser):
        parts += [_command(f"{name} {each}", inner) for each, inner in commands.items()]
    return "".join(parts)


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[dict[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield dict(action.choices)


def _row(action: argparse.Action) -> str | None:
    if isinstance(action, argparse._SubParsersAction):
        return None
    if set(action.option_strings) & set(_EVERYWHERE):
        return None
    text = (action.help or "") % {**vars(action), "prog": "te-grouped-mlp"}
    return f"| `{_form(action)}` | {text}{_allowed(action)} |\n".replace("\n|", "|")


def _form(action: argparse.Action) -> str:
    value = str(action.metavar or ("VALUE" if action.choices else action.dest.upper()))
    if not action.option_strings:
        return value
    if action.nargs == 0:
        return ", ".join(action.option_strings)
    optional = action.nargs in ("?", "*")
    return f"{', '.join(action.option_strings)} {f'[{value}]' if optional else value}"


def _allowed(action: argparse.Action) -> str:
    if not action.choices:
        return ""
    return f" ({', '.join(f'`{each}`' for each in action.choices)})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
