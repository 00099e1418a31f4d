# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp patch`: the repairs for TE and Megatron-Core source trees."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_grouped_mlp.cli import output

if TYPE_CHECKING:
    from te_grouped_mlp.patches.base import Finding

_ACTIONS = {
    "list": "name the patches, their versions, and what they do",
    "check": "say what each patch finds in a tree",
    "apply": "make the repairs, in all files or in none",
    "diff": "print the repairs as a unified diff against the original files",
    "revert": "take the repairs out again, byte for byte",
}
_EPILOG = """\
exit codes:
  0  check, apply: every patch is applied or absent; list, diff, revert: done
  1  check: a patch can be applied, is partly applied, or does not know the tree;
     apply, diff, revert: refused, nothing was written;
     all: the reader of the output has left (`| head`); what was asked for is done
  2  bad arguments: no such folder, no TE or Megatron-Core in it, an unknown patch, option or action
  129, 130, 143  stopped by SIGHUP, Ctrl-C or SIGTERM; what had begun is undone
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command to an argparse subparsers object and return its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "patch", help="repair a Transformer Engine or Megatron-Core tree"
    )
    _fill(parser)
    return parser


def _fill(parser: argparse.ArgumentParser) -> None:
    parser.description = "Repair a Transformer Engine or Megatron-Core tree."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        if name != "list":
            action.add_argument(
                "--tree",
                type=Path,
                required=True,
                metavar="DIR",
                help="a site-packages folder, a source checkout, or the package folder",
            )
            action.add_argument(
                "--only",
                action="append",
                default=[],
                metavar="NAME",
                help="this patch alone; may be given several times",
            )
        if name != "diff":
            output.add_json(action)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What `add_parser`'s parser made of the command line.

    Returns:
        0 good, 1 found something or refused, 2 bad arguments.

    Raises:
        OSError: the answer could not be written; what was asked for has been done.
        CommandError: LibCST cannot be imported.
    """
    output.need("libcst")
    if args.action == "list":
        return _list(args)
    from te_grouped_mlp.patches import engine
    from te_grouped_mlp.patches.base import BadTreeError, PatchError

    try:
        answer = getattr(engine, args.action)(args.tree, args.only)
    except BadTreeError as error:
        sys.stderr.write(f"te-grouped-mlp patch: {error}\n")
        return 2
    except (PatchError, OSError) as error:
        sys.stderr.write(f"te-grouped-mlp patch: refused, nothing was written\n{error}\n")
        return 1
    if args.action == "diff":
        sys.stdout.write(answer)
        return 0
    return _tell(args, answer)


def _tell(args: argparse.Namespace, findings: Sequence[Finding]) -> int:
    from te_grouped_mlp.patches.base import State

    bad = {State.PARTIAL, State.UNKNOWN}
    if args.action == "check":
        bad.add(State.APPLICABLE)
    good = args.action == "revert" or not any(f.state in bad for f in findings)
    if output.shows_text(args.json):
        _print(findings, args.tree)
    rows = [
        {
            "patch": f.patch,
            "state": f.state.value,
            "file": None if f.file is None else str(f.file),
            "line": f.line,
            "reason": f.reason,
        }
        for f in findings
    ]
    output.write_json(args.json, {"action": args.action, "patches": rows, "ok": good})
    return 0 if good else 1


def _list(args: argparse.Namespace) -> int:
    from te_grouped_mlp.patches import all_patches

    patches = all_patches()
    rows = [
        {
            "patch": p.name,
            "target": p.target.distribution,
            "versions": list(p.versions),
            "looks_for": p.looks_for,
            "changes": p.changes,
            "proof": p.proof,
        }
        for p in patches
    ]
    output.write_json(args.json, {"action": "list", "patches": rows, "ok": True})
    for p in patches if output.shows_text(args.json) else ():
        sys.stdout.write(
            f"{p.name}  ({p.target.distribution} {', '.join(p.versions)})\n"
            f"    looks for: {p.looks_for}\n"
            f"    changes:   {p.changes}\n"
            f"    proof:     {p.proof}\n"
        )
    return 0


def _print(findings: Sequence[Finding], tree: Path) -> None:
    width = max(len(f.patch) for f in findings)
    for f in findings:
        place = "" if f.file is None else os.path.relpath(f.file, tree)
        if place and f.line is not None:
            place += f":{f.line}"
        text = "; ".join(part for part in (place, f.reason) if part)
        sys.stdout.write(f"{f.patch:{width}}  {f.state.value:10}  {text}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command without the other commands of te-grouped-mlp."""
    parser = argparse.ArgumentParser(prog="te-grouped-mlp patch")
    _fill(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
