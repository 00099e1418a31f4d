# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp repro --emulate`: TE's own fused op and ours, on emulated Blackwell kernels.

NVIDIA's kernels of the cuDNN frontend are compiled for sm_100a and executed on the CPU. The padded
call of each op is compared with its own exact-size call, over memory of two contents.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_grouped_mlp.cli import output
from te_grouped_mlp.cli.output import BadArgument, CommandError

if TYPE_CHECKING:
    from te_grouped_mlp.emulator.padded_step import Job

MODULE = "transformer_engine/pytorch/ops/fused/grouped_mlp.py"
FILLS = ("nan", "3.0")
BYTES = (0xFF, 0x00)
HIDDEN = FFN = 256
ROWS = 256
"""What the frontend's kernels take: multiples of this many rows."""

_OURS = "this project"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only make sense with an emulated GPU."""
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="run Transformer Engine's own fused op and ours on the cuDNN frontend's kernels for "
        "Blackwell, executed by the emulator: minutes; default sizes 256, 256",
    )
    parser.add_argument(
        "--te",
        type=Path,
        metavar="PATH",
        help="with --emulate: take Transformer Engine's grouped_mlp.py from this wheel, sdist, "
        "source tree or file",
    )


def run(args: argparse.Namespace, compare: Callable[..., Any]) -> int:
    """Run both ops and print one table.

    Args:
        args: Of `repro`.
        compare: ``(activation, op, fill, found, exact)`` to a case of `repro`.

    Raises:
        BadArgument: Rows that the kernels do not take, or a path without the file.
        CommandError: A package is missing, or a process failed.
    """
    for name in ("live", "padding"):
        if getattr(args, name) % ROWS:
            raise BadArgument(f"--{name} {getattr(args, name)}; allowed: multiples of {ROWS}")
    for package in ("cutlass", "cudnn", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise CommandError(f"{package} is missing: pip install 'te-grouped-mlp[emulate]'")
    with tempfile.TemporaryDirectory(prefix="repro-") as name:
        folder = Path(name)
        tree, title = _upstream(args.te, folder)
        cases = _cases(args, folder, _Child(title, tree, fork=False), compare)
    good = all(case.bitwise_equal for case in cases)
    if output.shows_text(args.json):
        _print(cases, args)
    keys = ("activation", "extent", "fill", "rel_err", "non_finite", "bitwise_equal")
    rows = [
        {"op" if key == "extent" else key: getattr(case, key) for key in keys} for case in cases
    ]
    output.write_json(args.json, {"cases": rows, "ok": good})
    return 0 if good else 1


@dataclass
class _Child:
    """One op in a process of its own; `tree` holds the TE to import, if not the installed one."""

    title: str
    tree: Path | None
    fork: bool


def _cases(
    args: argparse.Namespace, folder: Path, upstream: _Child, compare: Callable[..., Any]
) -> list[Any]:
    from te_grouped_mlp.emulator.padded_step import EXACT, Job, name_of

    job = Job(
        [kind.value for kind in args.activation],
        args.hidden, args.ffn or args.hidden, args.live, args.padding, args.seed,
        list(FILLS), list(BYTES),
    )  # fmt: skip
    children = [upstream, _Child(_OURS, None, fork=True)]
    steps = len(list(job.runs()))
    with (
        output.progress(steps * len(children), "repro --emulate") as advance,
        ThreadPoolExecutor(len(children)) as pool,
    ):
        found = list(pool.map(lambda child: _outputs(child, job, folder, advance), children))
    cases = []
    kinds = {kind.value: kind for kind in args.activation}
    for child, outputs in zip(children, found, strict=True):
        for activation, fill, byte in job.runs():
            if fill == EXACT:
                exact = outputs[name_of(activation, fill, byte)]
                continue
            text = f"{fill} over 0x{byte:02X}"
            values = outputs[name_of(activation, fill, byte)]
            case = compare(kinds[activation], child.title, text, values, exact)
            # Only we promise zeros in the rows past the live ones.
            live = not any(case.rel_err.values()) and not any(case.non_finite.values())
            right = case.bitwise_equal if child.fork else live
            cases.append(dataclasses.replace(case, bitwise_equal=right))
    return cases


def _outputs(
    child: _Child, job: Job, folder: Path, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Run one process; returns its outputs by the names of its runs."""
    import torch

    from te_grouped_mlp.emulator import padded_step
    from te_grouped_mlp.op.environment import child_environment

    label = "ours" if child.fork else "upstream"
    source, results, errors = (folder / f"{label}.{end}" for end in ("json", "pt", "log"))
    padded_step.write(job, source)
    switches = {
        "NVTE_GROUPED_MLP_EMULATE": "sm100",
        "NVTE_GROUPED_MLP_FORK": "1" if child.fork else "0",
        "NVTE_GROUPED_MLP_BACKEND": "cudnn",
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", padded_step.__name__, str(source), str(results)]
    with errors.open("w") as log:
        process = subprocess.Popen(
            command,
            env=child_environment(switches, child.tree),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if ", memory 0x" in line:
                    advance(f"{child.title}: {line.strip()}")
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
    if code:
        lines = errors.read_text(errors="replace").splitlines() or ["no message"]
        raise CommandError(f"{child.title}: the process ended with {code}: {lines[-1]}")
    found: dict[str, Any] = torch.load(results)
    return found


def _upstream(path: Path | None, folder: Path) -> tuple[Path | None, str]:
    """Return a folder with the TE to import (None for the installed one), and what to call it."""
    from te_grouped_mlp.integration import installed_te

    if path is None:
        return None, f"TE {installed_te.te_version()}"
    text = _module_of(path)
    root = installed_te.te_root()
    assert root is not None
    tree = folder / "te"
    shutil.copytree(root, tree / "transformer_engine", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / MODULE).write_bytes(text)
    return tree, path.name.removesuffix(".whl").removesuffix("-py3-none-any")


def _module_of(path: Path) -> bytes:
    if path.is_dir():
        return _one(path, [str(each) for each in path.glob(f"**/{MODULE}")], _read)
    if not path.is_file():
        raise BadArgument(f"--te {path}; allowed: a wheel, an sdist, a source tree or a file")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return _one(path, archive.namelist(), archive.read)
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            return _one(path, archive.getnames(), lambda name: archive.extractfile(name).read())  # type: ignore[union-attr]
    if path.suffix == ".py":
        return path.read_bytes()
    raise BadArgument(f"--te {path}; allowed: a wheel, an sdist, a source tree or a file")


def _read(name: str) -> bytes:
    return Path(name).read_bytes()


def _one(path: Path, names: Iterable[str], read: Callable[[str], bytes]) -> bytes:
    found = [name for name in names if name.endswith(MODULE)]
    if not found:
        raise BadArgument(f"--te {path}: it has no {MODULE}; allowed: one that has")
    return read(min(found, key=len))


def _print(cases: list[Any], args: argparse.Namespace) -> None:
    from te_grouped_mlp.cli.repro import cell

    names = list(cases[0].rel_err)
    print(
        f"One expert, hidden {args.hidden}, ffn {args.ffn or args.hidden}, {args.live} live rows, "
        f"{args.padding} padding rows, MXFP8, on NVIDIA's kernels for sm_100a in the emulator;\n"
        "each op against its own exact-size call."
    )
    table = output.table("op", "activation", "padding over memory", *names, "live rows")
    for case in cases:
        cells = [cell(case.rel_err[name], case.non_finite[name]) for name in names]
        verdict = "equal" if case.bitwise_equal else "DIFFERS"
        table.add_row(case.extent, case.activation, case.fill, *cells, verdict)
    output.show(table)
    wrong = [case for case in cases if not case.bitwise_equal]
    if wrong:
        print("A cell holds rel_err of the finite values, and the share of non-finite ones.")
    ops = dict.fromkeys(case.extent for case in cases)
    for op in ops:
        count = sum(case.extent == op for case in wrong)
        total = sum(case.extent == op for case in cases)
        print(f"{op}: {total - count} of {total} padded calls equal the exact-size call.")
