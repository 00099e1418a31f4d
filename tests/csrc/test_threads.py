# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The extension's threads: as many as torch and the system allow; equal bits, after a fork too."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors.capacity import span
from tests.csrc import calls

MUCH, LITTLE = 1 << 30, 1 << 10
ROWS, COLS = 4096, 512
CPUS = len(os.sched_getaffinity(0))

needs_two_cpus = pytest.mark.skipif(CPUS < 2, reason="one CPU is all that this process may use")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cpus)


@pytest.mark.parametrize("wanted", [1, 2, 3, 64])
def test_torchs_number_is_the_most(wanted: int) -> None:
    torch.set_num_threads(wanted)
    assert _C.threads_for(MUCH) == min(wanted, CPUS, 16)
    assert _C.threads_for(LITTLE) == 1


@needs_two_cpus
def test_so_are_the_cpus_that_the_process_may_use_now() -> None:
    torch.set_num_threads(8)
    assert _C.threads_for(MUCH) > 1
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    assert _C.threads_for(MUCH) == 1


@pytest.mark.slow
@needs_two_cpus
@pytest.mark.parametrize(
    ("prefix", "variables", "wanted"),
    [
        ((), {"OMP_NUM_THREADS": "1"}, 1),
        ((), {"OMP_NUM_THREADS": "2"}, 2),
        (("taskset", "-c", str(min(os.sched_getaffinity(0)))), {"OMP_NUM_THREADS": "2"}, 1),
    ],
)
def test_what_a_process_is_started_with(
    prefix: tuple[str, ...], variables: dict[str, str], wanted: int
) -> None:
    code = f"import torch\nfrom te_grouped_mlp import _C\nprint(_C.threads_for({MUCH}))"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) == wanted


def test_without_torch_the_extension_works() -> None:
    code = f"from te_grouped_mlp import _C\nprint(_C.threads_for({MUCH}), _C.threads_for(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(min(CPUS, 16)), "1"]


Entry = Callable[[int], torch.Tensor]


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    """Every function with threads, on more than a megabyte; its argument is their number."""
    x = calls.sample(ROWS, COLS, torch.float32, "normal", 0)
    weights, table = torch.rand(ROWS), torch.rand(2, COLS)
    data, scale = calls.quantize(x, cols_wanted=False)
    splits, where, groups = calls.host_splits([ROWS // 4, ROWS // 2])
    geometry = (span(x), calls.SOURCE_TYPES[x.dtype], ROWS, COLS, x.stride(0))

    def sums(threads: int) -> torch.Tensor:
        out = calls.poisoned((groups, COLS), torch.float32)
        _C.column_sums(*geometry, where, groups, span(out), threads)
        return out

    def weighted(threads: int) -> torch.Tensor:
        out = calls.poisoned((groups, COLS), torch.float32)
        _C.weighted_column_sums(*geometry, span(weights), where, groups, span(out), threads)
        return out

    def dots(threads: int) -> torch.Tensor:
        assert splits is not None
        out = calls.poisoned((ROWS,), torch.float32)
        _C.row_dots(*geometry, span(table), where, groups, span(out), threads)
        return out

    return {
        "quantize": lambda threads: torch.cat(
            [each.flatten() for each in calls.quantize(x, threads=threads)]
        ),
        "dequantize": lambda threads: calls.dequantize(
            data, scale, 0, 0, False, torch.float32, threads=threads
        ),
        "column_sums": sums,
        "weighted_column_sums": weighted,
        "row_dots": dots,
    }


NAMES = ("quantize", "dequantize", "column_sums", "weighted_column_sums", "row_dots")


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_threads_gives_the_same_bits(entries: dict[str, Entry], name: str) -> None:
    expected = entries[name](1)
    for threads in (2, 3, 7, 64):
        assert calls.same_bytes(entries[name](threads), expected), threads
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert calls.same_bytes(entries[name](0), expected), threads


@pytest.mark.parametrize("name", NAMES)
def test_one_thread_does_all_the_work_where_torch_has_one(
    entries: dict[str, Entry], name: str
) -> None:
    torch.set_num_threads(1)
    process, thread = time.process_time(), time.thread_time()
    entries[name](0)
    process, thread = time.process_time() - process, time.thread_time() - thread
    assert process - thread <= process / 4 + 2e-4


def test_a_forked_child_computes(entries: dict[str, Entry]) -> None:
    """As a worker of a DataLoader does, after its parent has used threads."""
    expected = entries["quantize"](2)

    def child() -> None:
        torch.set_num_threads(1)  # as in every worker: torch's own threads are not there
        same = [calls.same_bytes(entries["quantize"](threads), expected) for threads in (0, 1, 3)]
        os._exit(0 if all(same) else 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
        process.start()
    process.join(30)
    process.kill()
    assert process.exitcode == 0
