# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.op.backends.cudnn.launch_child LEVEL JOBS RESULTS`: launches on a fake GPU."""

from __future__ import annotations

import pickle
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import te_grouped_mlp
from tests.op.backends.cudnn.fake_cuda import Launch, Report, Result


def main(level: str, source: str, target: str) -> None:
    """Make every launch of a file and write what came of it."""
    te_grouped_mlp.activate()
    import transformer_engine.pytorch  # noqa: F401

    from tests.op.backends.cudnn import fake_cuda

    jobs = pickle.loads(Path(source).read_bytes())
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        fake_cuda.install(level, Path(folder))
        maker, wrappers = _maker(fake_cuda)
        results = [_run(maker, *job, fake_cuda.launches) for job in jobs]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(target).write_bytes(pickle.dumps(Report(results, peak, wrappers)))


def _maker(fake_cuda: Any) -> tuple[Any, dict[str, frozenset[str]]]:
    from te_grouped_mlp.emulator.launches import Maker
    from te_grouped_mlp.op import environment, packages
    from te_grouped_mlp.op.backends.cudnn import signatures, streams

    # As on a GPU, the wrappers are told the stream.
    streams.lane = lambda _: streams.Lane(fake_cuda.STREAM)
    wrappers = {name: signatures.takes(name) for name in packages.WRAPPERS}
    with environment.override(sm=(10, 0), wrappers=wrappers, emulated=True):
        return Maker(environment.current()), wrappers


def _run(maker: Any, case: Any, fault: str, launches: list[Launch]) -> Result:
    from te_grouped_mlp.op.backends.cudnn import streams
    from tests.op.backends.cudnn.faults import FAULTS

    inner = streams.launch

    def launch(name: str, device: Any, at: Any, keywords: dict[str, Any]) -> Any:
        return inner(name, device, at, {**keywords, **FAULTS[fault](keywords)})

    streams.launch = launch if fault else inner
    result, start = Result(), time.perf_counter()
    launches.clear()
    try:
        maker.run(case)
    except Exception as error:
        # Whatever stands in the way of a launch is a result here.
        result.error = f"{type(error).__name__}: {error}"
    finally:
        streams.launch = inner
    result.launches, result.seconds = list(launches), time.perf_counter() - start
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
