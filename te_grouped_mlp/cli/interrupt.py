# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a command with 130, whatever it is doing.

Libraries that are being imported turn a KeyboardInterrupt into an ImportError, or swallow it. So it
is noted when it comes, and a process that has not ended soon after is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

CODE = 130

_SECONDS = 2.0
"""What is left for cleaning up."""


class Noted:
    """Whether Ctrl-C came.

    Attributes:
        came: It did.
    """

    came = False


@contextlib.contextmanager
def noted() -> Iterator[Noted]:
    """Raise KeyboardInterrupt on Ctrl-C, and end the process if that does not.

    Outside the main thread, and where Ctrl-C is ignored (a background job), nothing is changed.
    """
    note = Noted()
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield note
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        note.came = True
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    alarm = signal.getsignal(signal.SIGALRM)
    try:
        yield note
    finally:
        signal.signal(signal.SIGINT, before)
        if note.came:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(CODE)
