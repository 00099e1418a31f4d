# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The console script. Ctrl-C ends it with 130 from its first line on, before anything is loaded."""

import os
import signal


def main() -> int:
    """Run the command line; see `te_grouped_mlp.cli.main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from te_grouped_mlp.cli import main as run

    return run()
