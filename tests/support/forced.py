# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Run any script, as it is, over the fused grouped MLP with the old row-layout decision.

    python -m tests.support.forced script.py [ARGUMENT ...]
    python -m tests.support.forced --decision own --backend cutedsl script.py

The old decision asks for the group count alone, as Transformer Engine 2.19 does. The reference
backend, which computes exactly, is the only one that can be made to decide so: what goes wrong then
is the decision's doing. With `--decision own` the script runs as any user's would.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import te_grouped_mlp
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.tensors import memory
from tests.support import step

OLD, OWN = "old", "own"
_POISON = 0xFF


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; its output is the script's own.

    Returns:
        0; what the script raises is not caught.
    """
    args = _parser().parse_args(argv)
    if not args.script.is_file():
        _parser().error(f"script is {str(args.script)!r}; allowed: a file")
    if args.decision == OLD and args.backend != "reference":
        _parser().error(
            f"--backend is {args.backend!r} with --decision old; allowed: reference, the only one "
            "that can be made to decide wrongly"
        )
    # Only without Transformer Engine's extension; where that is installed it has no effect.
    os.environ.setdefault(environment.STANDALONE_SWITCH, "1")
    te_grouped_mlp.activate()
    with _forced(args.decision, args.backend, args.poisoned), _argv(args.script, args.arguments):
        runpy.run_path(str(args.script), run_name="__main__")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.support.forced", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--decision", choices=(OLD, OWN), default=OLD, help="default: %(default)s")
    parser.add_argument("--backend", default="reference", help="default: %(default)s")
    parser.add_argument(
        "--poisoned", action="store_true", help="fill every fresh buffer of the op with 0xFF first"
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


@contextlib.contextmanager
def _forced(decision: str, backend: str, poisoned: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(step.switches(NVTE_GROUPED_MLP_BACKEND=backend))
        stack.enter_context(memory.poisoned(_POISON) if poisoned else contextlib.nullcontext())
        if decision == OLD:
            stack.enter_context(environment.override(single_group_is_always_dense=True))
        yield


@contextlib.contextmanager
def _argv(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Let the script find its arguments and the modules beside it as without a wrapper."""
    before, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, path


if __name__ == "__main__":
    sys.exit(main())
