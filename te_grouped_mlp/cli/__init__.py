# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: one module per command, imported without torch or Transformer Engine.

A command module has ``add_parser(subparsers)``, which adds its arguments, and ``run(args)``, which
returns the exit code: 0 good, 1 found something, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

import te_grouped_mlp
from te_grouped_mlp.cli import interrupt
from te_grouped_mlp.cli.output import BadArgument, CommandError

__all__ = ["COMMANDS", "main"]

COMMANDS = (
    "repro", "replay", "doctor", "selftest", "emulate", "bench", "compile", "convert", "patch",
)  # fmt: skip
"""The commands in the order of the help text; each is a module of this package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0 good, 1 found something or failed, 2 bad arguments. A failure is one line
        on standard error, unless ``--traceback`` asks for more.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    with interrupt.noted() as note:
        code = _run(args)
    return interrupt.CODE if note.came else code


def _run(args: argparse.Namespace) -> int:
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return interrupt.CODE
    except BrokenPipeError:
        # The reader has left (`| head`); Python's own flush at exit must not complain again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.traceback:
            raise
        kind = "" if isinstance(error, CommandError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())
        print(f"te-grouped-mlp {args.command}: {kind}{text}", file=sys.stderr)
        return 2 if isinstance(error, BadArgument) else 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="te-grouped-mlp",
        description="Tools around the fused grouped MLP for Transformer Engine.",
        epilog="Exit codes: 0 good, 1 found something or failed, 2 bad arguments.",
    )
    parser.add_argument(
        "--version", action="version", version=f"te-grouped-mlp {te_grouped_mlp.__version__}"
    )
    _add_traceback(parser, default=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"te_grouped_mlp.cli.{name}")
        module.add_parser(subparsers)
        command = subparsers.choices[name]
        command.set_defaults(run=module.run)
        # After the command too; SUPPRESS, or its default would undo the one given before it.
        _add_traceback(command, default=argparse.SUPPRESS)
    return parser


def _add_traceback(parser: argparse.ArgumentParser, *, default: object) -> None:
    parser.add_argument(
        "--traceback", action="store_true", default=default, help="show where an error came from"
    )
