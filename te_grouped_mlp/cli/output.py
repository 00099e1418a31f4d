# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What every command prints with: tables for people, JSON for programs, progress on the side."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STANDARD_OUTPUT = "-"

# Wide enough for any table: a log file must not lose or fold what a terminal would.
_FILE_WIDTH = 1000


class CommandError(Exception):
    """A failure that the user can act on; its text is the whole message."""


class BadArgument(CommandError):
    """Arguments that do not go together, or that only a late look can judge: exit code 2."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json [FILE]``: ``args.json`` is None, a path, or STANDARD_OUTPUT without a path."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="write the result as JSON to FILE, or to standard output instead of the text",
    )


def write_json(destination: str | None, value: object) -> None:
    """Write a value as JSON where ``--json`` says; None writes nothing.

    Raises:
        CommandError: The file cannot be written.
        ValueError: The value holds NaN or an infinity, which JSON has not.
    """
    if destination is None:
        return
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if destination == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        Path(destination).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {destination}: {error.strerror or error}") from error


def shows_text(destination: str | None) -> bool:
    """Whether the text for people is wanted: not when standard output carries the JSON."""
    return destination != STANDARD_OUTPUT


def console(*, stderr: bool = False) -> Any:
    """Return a rich console: colours and the terminal's width on a terminal, else plain text."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _FILE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def table(*columns: str) -> Any:
    """Return an empty rich table whose cells fold on a narrow terminal instead of being cut."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, overflow="fold")
    return made


def show(found: Any) -> None:
    """Print a table; away from a terminal without trailing blanks."""
    printer = console()
    if printer.is_terminal:
        printer.print(found)
        return
    with printer.capture() as capture:
        printer.print(found)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n"))


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Show how far long work has come, on standard error.

    Args:
        total: Number of steps.
        what: The kind of work.

    Yields:
        A function to call before each step with the step's name. On a terminal it moves a bar that
        vanishes at the end; elsewhere one line is written at the start.
    """
    printer = console(stderr=True)
    if not printer.is_terminal:
        print(f"{what}: {total} steps", file=sys.stderr, flush=True)
        yield lambda _step: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=printer, transient=True) as bar:
        task = bar.add_task(what, total=total)
        started = False

        def advance(step: str) -> None:
            nonlocal started
            bar.update(task, description=f"{what}: {step}", advance=1 if started else 0)
            started = True

        yield advance
