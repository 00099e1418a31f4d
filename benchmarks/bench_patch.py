# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How long `te-grouped-mlp patch check` and `apply` of all patches take on a TE tree.

The published wheel is downloaded and unpacked first; the two commands then run as a user runs
them, in new processes on one core. The aim is under 10 s of processor time for both together; the
elapsed time is shown beside it, and is longer where the core is shared.

    python benchmarks/bench_patch.py --version 2.20.2 --runs 5 --json patch.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

AIM_SECONDS = 10.0


def unpack(project: str, version: str, folder: Path) -> Path:
    """Download and unpack a wheel; returns the folder that serves as site-packages."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, f"{project}=={version}"], check=True)
    tree = folder / "tree"
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(tree)
    return tree


def seconds(action: str, tree: Path, expected: int) -> tuple[float, float]:
    """Run one command, its start included; returns processor seconds and elapsed seconds."""
    command = [sys.executable, "-m", "te_grouped_mlp.cli.patch", action, "--tree", str(tree)]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == expected, done.stderr.decode()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed


def main() -> int:
    """Measure, print, and say by the exit code whether the aim is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", default="2.20.2", help="the TE release")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with contextlib.suppress(AttributeError):  # where a process cannot be bound to a core
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    times: dict[str, list[tuple[float, float]]] = {
        "check": [],
        "apply": [],
        "diff": [],
        "revert": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        tree = unpack("transformer-engine", args.version, Path(folder))
        for _ in range(args.runs):
            for action, values in times.items():
                values.append(seconds(action, tree, expected=int(action == "check")))
    for action, values in times.items():
        spent, elapsed = zip(*values, strict=True)
        print(
            f"{action:7} median {statistics.median(spent):5.2f} s of one core, from "
            f"{min(spent):5.2f} to {max(spent):5.2f}; elapsed {statistics.median(elapsed):5.2f} s"
        )
    pairs = zip(times["check"], times["apply"], strict=True)
    both = statistics.median(check[0] + apply[0] for check, apply in pairs)
    print(f"check + apply of all patches: {both:.2f} s (aim: under {AIM_SECONDS:.0f} s)")
    if args.json is not None:
        args.json.write_text(json.dumps({"seconds": times, "check_and_apply": both}, indent=2))
    return 0 if both < AIM_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
