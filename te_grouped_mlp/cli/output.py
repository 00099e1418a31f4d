# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What every command prints with: tables for people, JSON for programs, progress on the side."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STANDARD_OUTPUT = "-"

EXTRA_REMEDY = "pip install 'te-grouped-mlp[cli]'"
"""Brings rich, for progress bars, and LibCST, for patches."""

_FILE_WIDTH = 100
"""Columns of a table that goes to a file or a pipe; programs read the JSON."""

_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_GAPS = ("  ", " ")
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
    """Print a table as wide as the terminal; elsewhere as COLUMNS says, or 100 columns wide."""
    print(render(found, _width()))


def show_text(text: str) -> None:
    """Print a paragraph, broken between words where a table would be."""
    print(textwrap.fill(text, _width(), subsequent_indent="    ", **_WORDS))


def _width() -> int:
    return shutil.get_terminal_size((_FILE_WIDTH, 24)).columns


def render(found: Table, width: int) -> str:
    """Return a table as text whose lines are at most `width` long, broken between words alone.

    Where not even the longest words fit next to each other, each row is a block of lines, one for
    each cell. A word that is longer than `width` by itself is not broken.
    """
    lines = [found.columns, *found.rows]
    cells = list(zip(*lines, strict=True))
    words = [max(len(word) for text in column for word in text.split() or [""]) for column in cells]
    widths = [max(map(len, column)) for column in cells]
    gap = next((gap for gap in _GAPS if sum(words) + len(gap) * (len(cells) - 1) <= width), None)
    if gap is None:
        return "\n\n".join(_block(found.columns, row, width) for row in found.rows)
    room = width - len(gap) * (len(cells) - 1)
    while sum(widths) > room:
        # The widest gives way first, as long as it has a place to break.
        index = max(range(len(widths)), key=lambda i: (widths[i] > words[i], widths[i]))
        widths[index] -= 1
    out = [_wrapped(line, widths, gap) for line in lines]
    out.insert(1, gap.join("-" * each for each in widths))
    return "\n".join(out)


def _wrapped(line: Sequence[str], widths: Sequence[int], gap: str) -> str:
    parts = [
        textwrap.wrap(text, width, **_WORDS) or [""]
        for text, width in zip(line, widths, strict=True)
    ]
    rows = itertools.zip_longest(*parts, fillvalue="")
    padded = (
        gap.join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows
    )
    return "\n".join(row.rstrip() for row in padded)


def _block(names: Sequence[str], row: Sequence[str], width: int) -> str:
    texts = (f"{name}: {text}" for name, text in zip(names, row, strict=True) if text)
    return "\n".join(
        textwrap.fill(text, width, subsequent_indent="    ", **_WORDS) for text in texts
    )


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
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar(total, what) as advance:
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
def _bar(total: int, what: str) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        started = False

        def advance(step: str) -> None:
            nonlocal started
            bar.update(task, description=f"{what}: {step}", advance=1 if started else 0)
            started = True

        yield advance
