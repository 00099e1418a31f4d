# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a command with 130: at its first line, among imports that swallow it, in a step."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from te_grouped_mlp.cli import interrupt

# A command whose work takes the exception as the first argument says; it prints when it has begun.
PROGRAM = """
import sys, time
from te_grouped_mlp import _command
from te_grouped_mlp.cli import doctor, interrupt

(_, word), sys.argv = sys.argv, ["te-grouped-mlp", "doctor"]
interrupt._SECONDS = 0.3

def work(args):
    try:
        print("begun", flush=True)
        time.sleep(20)
    except BaseException as error:
        if word == "wrap":
            raise ImportError("as torch does") from error
        if word == "hold":
            time.sleep(20)
        if word == "raise":
            raise
    return 0

doctor.run = work
sys.exit(_command.main())
"""


@pytest.mark.parametrize("word", ["raise", "wrap", "swallow", "hold"])
def test_whatever_becomes_of_the_exception(word: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, word],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    # Into the sleep.
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=15)
    assert child.returncode == interrupt.CODE, err
    assert "Traceback" not in err


def test_before_anything_is_loaded() -> None:
    code = """
import os, signal, sys
from te_grouped_mlp import _command

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "te_grouped_mlp.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
_command.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (interrupt.CODE, "")


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals belong to the main thread, and pytest-xdist runs tests in another",
)
def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    with interrupt.noted() as note:
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before
    assert not note.came
