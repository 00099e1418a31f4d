# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What every command prints with: tables for people, JSON for programs, progress on the side."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

STANDARD_OUTPUT = "-"

EXTRA_REMEDY = "pip install 'te-grouped-mlp[cli]'"
"""Brings rich, for tables, and LibCST, for patches."""

# Wide enough for any table: a log file must not lose or fold what a terminal would.
_FILE_WIDTH = 1000
_LINES_OF_PROGRESS = 10


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


@dataclass
class Table:
    """Headings, and rows of as many texts."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Add one row."""
        self.rows.append(cells)


def table(*columns: str) -> Table:
    """Return an empty table."""
    return Table(columns)


def need(package: str) -> None:
    """Raise CommandError, which names the extra, unless a package of it can be imported."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise CommandError(f"{package} cannot be imported ({error}); {EXTRA_REMEDY}") from error


def show(found: Table) -> None:
    """Print a table: cells fold on a narrow terminal, and a file gets each row as one line.

    Without rich the rows are one line each everywhere, and standard error names the extra.
    """
    try:
        printer = _console(sys.stdout)
    except ImportError:
        print(_plain(found))
        _say_once(f"tables do not fit the terminal without rich: {EXTRA_REMEDY}")
        return
    if printer.is_terminal:
        printer.print(as_rich(found))
        return
    with printer.capture() as capture:
        printer.print(as_rich(found))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n"))


def as_rich(found: Table) -> Any:
    """Return a table of rich whose cells fold where they do not fit instead of being cut."""
    from rich import box
    from rich.table import Table as RichTable

    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in found.columns:
        made.add_column(name, overflow="fold")
    for row in found.rows:
        made.add_row(*row)
    return made


def _plain(found: Table) -> str:
    lines = [found.columns, *found.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _console(stream: TextIO) -> Any:
    """Return a rich console: colours and the terminal's width on a terminal, else plain text."""
    from rich.console import Console

    width = None if stream.isatty() else _FILE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Show how far long work has come, on standard error.

    Args:
        total: Number of steps.
        what: The kind of work.

    Yields:
        A function to call before each step with the step's name. On a terminal it moves a bar that
        vanishes at the end; elsewhere, and without rich, it writes a line for each tenth.
    """
    try:
        printer = _console(sys.stderr)
    except ImportError:
        printer = None
    if printer is not None and printer.is_terminal:
        with _bar(printer, total, what) as advance:
            yield advance
        return
    done, every = 0, max(1, -(-total // _LINES_OF_PROGRESS))

    def write(step: str) -> None:
        nonlocal done
        if done % every == 0:
            print(f"{what}: {done + 1} of {total}, {step}", file=sys.stderr, flush=True)
        done += 1

    yield write


@contextlib.contextmanager
def _bar(printer: Any, total: int, what: str) -> Iterator[Callable[[str], None]]:
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
