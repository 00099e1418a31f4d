# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the `.pth` file costs every start of Python in an environment that has this package.

Two numbers: the line itself, timed inside new interpreters that have loaded nothing but `site`,
and the whole start with and without the line. Median and spread over the runs; the aim is under
1 ms for the line.

    python benchmarks/bench_startup.py --runs 200 --json startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import te_grouped_mlp

LINE = "import te_grouped_mlp._bootstrap; te_grouped_mlp._bootstrap.install()"
# The clock is read inside, so that the start of the process does not count.
TIMED = f"""
import os, sys, time
sys.path.insert(0, {{root!r}})
start = time.perf_counter_ns()
{LINE}
print(time.perf_counter_ns() - start)
assert "te_grouped_mlp._bootstrap" in sys.modules
assert "typing" not in sys.modules and "torch" not in sys.modules
"""


def line_ms(root: Path, runs: int) -> list[float]:
    """Time the line in new interpreters; milliseconds, one per run."""
    code = TIMED.format(root=str(root))
    command = [sys.executable, "-I", "-S", "-c", code]
    subprocess.run(command, check=True, capture_output=True)
    outputs = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for _ in range(runs)
    ]
    return [int(output) / 1e6 for output in outputs]


def start_ms(lines: list[str], root: Path, runs: int) -> list[list[float]]:
    """Time whole starts of Python whose site folder has one `.pth` file with the given line.

    The lines take turns, so that a machine that gets slower does so for all of them.
    """
    times: list[list[float]] = [[] for _ in lines]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as folder:
        code = f"import site; site.addsitedir({folder!r})"
        command = [sys.executable, "-S", "-c", code]
        for run in range(-2, runs):
            for line, row in zip(lines, times, strict=True):
                Path(folder, "bench.pth").write_text(f"{line}\n")
                start = time.perf_counter()
                subprocess.run(command, check=True, env=environment)
                # The first two fill the caches of the file system.
                if run >= 0:
                    row.append((time.perf_counter() - start) * 1e3)
    return times


def summary(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median_ms": median, "q1_ms": low, "q3_ms": high, "runs": len(values)}


def main() -> int:
    """Print the table; exit 1 if the line's median is not under a millisecond."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=100, help="interpreters per row (default 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    if arguments.runs < 2:
        parser.error(f"--runs is {arguments.runs}; allowed: 2 or more")
    root = Path(te_grouped_mlp.__file__).resolve().parent.parent
    without, with_it = start_ms(["# nothing", LINE], root, arguments.runs)
    rows = {
        "the line": summary(line_ms(root, arguments.runs)),
        "start without it": summary(without),
        "start with it": summary(with_it),
    }
    print(f"{'':18}{'median':>10}{'quartiles':>20}   ms, {arguments.runs} runs")
    for name, row in rows.items():
        quartiles = f"{row['q1_ms']:.3f} .. {row['q3_ms']:.3f}"
        print(f"{name:18}{row['median_ms']:10.3f}{quartiles:>20}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if rows["the line"]["median_ms"] < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
