# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Run mutations: each on a copy of the tree, with the test that must fail on it.

python -m tests.mutation [word ...]     those whose name, file or test has one of the words
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path

from tests.mutation.mutations import Mutation, every, unfit

ROOT = Path(__file__).resolve().parents[2]
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
_LIMIT = 600.0
"""Seconds for one test; a fault that makes a step hang is no kill."""

_PASSED, _FAILED = 0, 1
"""pytest's exit statuses that say something about a fault; any other is an error of this run."""

_PRELOADED = ("pytest", "torch", "numpy", "einops", "pydantic", "onnxscript")
"""What takes most of a test's time to import; every run is a fork of a process that has them."""


@dataclass(frozen=True)
class Answer:
    """What a test said of a mutation: "killed", "SURVIVED", or why it said nothing."""

    mutation: Mutation
    verdict: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per mutation and the rate; 0 if every one was killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations whose line has one of these")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes (2)")
    options = parser.parse_args(arguments)
    chosen = [m for m in every() if _is_named(m, options.words)]
    if wrong := unfit(chosen, ROOT):
        print("\n".join(wrong))
        return 1
    if not chosen:
        print("no mutation has any of these words")
        return 1
    _preload()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        first = Path(folder) / "0"
        _copy(ROOT, first)
        if broken := _tests_that_fail_anyway(first, chosen):
            print(f"a test fails without any mutation:\n{broken}")
            return 1
        others = [_copy(first, Path(folder) / str(index)) for index in range(1, options.jobs)]
        answers = _run([first, *others], chosen)
    killed = sum(answer.verdict == "killed" for answer in answers)
    print(f"killed {killed} of {len(chosen)} ({killed / len(chosen):.0%})")
    for answer in answers:
        if answer.verdict != "killed":
            print(f"{answer.verdict}: {answer.mutation.name}: {answer.mutation.test}")
    return int(killed < len(chosen))


def _is_named(mutation: Mutation, words: Sequence[str]) -> bool:
    line = f"{mutation.name} {mutation.file} {mutation.function} {mutation.test}"
    return not words or any(word in line for word in words)


def _copy(source: Path, target: Path) -> Path:
    """Copy the tree, with its compiled extension and without what tools left in the checkout."""
    left_out = _LEFT_OUT if source == ROOT else None
    shutil.copytree(source, target, ignore=left_out, symlinks=True)
    return target


def _preload() -> None:
    # One thread: a forked process cannot use those of its parent.
    os.environ.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _pytest(tree: Path, tests: Sequence[str], log: Path, *, fault: bool) -> ForkProcess:
    """Start tests of a copy in a process of their own; its exit status is pytest's."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_in_fork, args=(tree, tests, log, fault))
    process.start()
    return process


def _in_fork(tree: Path, tests: Sequence[str], log: Path, fault: bool) -> None:
    import pytest

    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # No compiled code of a fault is left: its file may have the size and second of another one.
    sys.dont_write_bytecode = fault
    # The copy's modules are imported; its `conftest.py` sees to the package and to children.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(tree)
    os.chdir(tree)
    stop = ["-x"] if fault else ["--tb=short"]
    status = pytest.main(["-q", *stop, "-p", "no:cacheprovider", "-m", "", *tests])
    sys.stdout.flush()
    os._exit(int(status))


def _tests_that_fail_anyway(tree: Path, mutations: Sequence[Mutation]) -> str:
    """Run all tests on the unchanged copy, in one process; a test that fails shows nothing.

    One that is skipped cannot kill, so that is seen later. What is compiled here serves all runs.
    """
    log = tree.with_suffix(".log")
    tests = sorted({mutation.test for mutation in mutations})
    process = _pytest(tree, tests, log, fault=False)
    process.join()
    return "" if process.exitcode == _PASSED else log.read_text()[-4000:]


@dataclass(frozen=True)
class _Running:
    mutation: Mutation
    tree: Path
    process: ForkProcess
    original: str
    begin: float


def _run(trees: Sequence[Path], mutations: Sequence[Mutation]) -> list[Answer]:
    """Try the mutations, as many at a time as there are copies, and print each answer."""
    waiting, free = list(reversed(mutations)), list(trees)
    running: list[_Running] = []
    answers: list[Answer] = []
    while waiting or running:
        while waiting and free:
            running.append(_start(free.pop(), waiting.pop()))
        connection.wait([each.process.sentinel for each in running], timeout=1.0)
        for each in list(running):
            late = time.monotonic() - each.begin > _LIMIT
            if not late and each.process.is_alive():
                continue
            answers.append(_finish(each))
            running.remove(each)
            free.append(each.tree)
            answer, mutation = answers[-1], each.mutation
            text = f"{answer.verdict:<9}{answer.seconds:5.1f} s  {mutation.name}"
            print(f"{text:<82} {mutation.file}:{mutation.function}", flush=True)
    return answers


def _start(tree: Path, mutation: Mutation) -> _Running:
    path, begin = tree / mutation.file, time.monotonic()
    original = path.read_text()
    path.write_text(mutation.apply(original))
    log = tree.with_suffix(".log")
    process = _pytest(tree, [mutation.test], log, fault=True)
    return _Running(mutation, tree, process, original, begin)


def _finish(running: _Running) -> Answer:
    """Take a mutation back, and say what its test said."""
    process = running.process
    if process.is_alive():
        process.kill()
    process.join()
    (running.tree / running.mutation.file).write_text(running.original)
    verdict = {_PASSED: "SURVIVED", _FAILED: "killed"}.get(process.exitcode or 0)
    if verdict is None:
        last = running.tree.with_suffix(".log").read_text().strip().splitlines()[-1:]
        verdict = f"ERROR {process.exitcode} {''.join(last)}"
    return Answer(running.mutation, verdict, time.monotonic() - running.begin)


if __name__ == "__main__":
    sys.exit(main())
