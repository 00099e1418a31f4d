# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Draw what `te-grouped-mlp repro` prints, as docs/repro.svg: `make pictures`."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100
COMMANDS = (("repro",), ("repro", "--old-decision"))
STYLES = {r"\bequal\b": "green", r"\bDIFFERS\b": "bold red", r"^\$ .*$": "bold cyan"}


def printed(arguments: tuple[str, ...]) -> str:
    """Return what a command prints; the second one finds the fault, so its exit code is 1."""
    done = subprocess.run(
        [sys.executable, "-m", "te_grouped_mlp.cli", *arguments],
        env={**os.environ, "COLUMNS": str(WIDTH)},
        capture_output=True,
        text=True,
    )
    if done.returncode != int("--old-decision" in arguments):
        raise SystemExit(done.stderr or done.stdout)
    return done.stdout


def drawing(texts: list[tuple[tuple[str, ...], str]]) -> str:
    """Return an SVG of commands and what they printed, the same for the same texts."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for arguments, text in texts:
        shown = Text(f"$ te-grouped-mlp {' '.join(arguments)}\n{text}")
        for pattern, style in STYLES.items():
            shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
        console.print(shown)
    svg = console.export_svg(title="te-grouped-mlp", unique_id="repro")
    # The font of whoever looks: an image in a README loads nothing from elsewhere.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    picture = drawing([(arguments, printed(arguments)) for arguments in COMMANDS])
    lines = (line.rstrip() for line in picture.splitlines())
    (Path(__file__).parent / "repro.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")
