# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How long the fused op keeps the host busy, apart from kernels and from Transformer Engine.

A step runs with every device call replaced: what the call gave in one real step is given again, at
once. The same step with a fused op that does nothing is subtracted; the two take turns, so that a
machine that gets slower does so for both. What remains is the op's own Python: processor time, not
time on the wall, since nothing waits. Medians and quartiles; the aims, on one idle core and for 64
experts with a weight each, are 0.2 ms forward and 0.3 ms backward. "hot" is the forward called
again and again with nothing between: in a step the caches are cold after autograd's work. A second
part makes 500 calls with random splits and compares the first with the last, in time and memory.

    python benchmarks/bench_host_time.py --json host.json
    python benchmarks/bench_host_time.py --profile
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import te_grouped_mlp  # noqa: E402

# Before the first import of TE.
te_grouped_mlp.activate()

import torch  # noqa: E402
import transformer_engine.pytorch  # noqa: E402, F401
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.ops.fuser import OperationFuser  # noqa: E402
from transformer_engine.pytorch.ops.op import FusedOperation  # noqa: E402

from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend  # noqa: E402
from te_grouped_mlp.op.step import weight_gradient  # noqa: E402
from te_grouped_mlp.op.te import adapter  # noqa: E402
from tests.support import step  # noqa: E402
from tests.support.step import StepCase  # noqa: E402

PASSES = ("forward", "backward")
AIM_MS = {"forward": 0.2, "backward": 0.3}
GROWTH_CALLS = 500
# The part of the calls that is compared at each end, and what two such medians may differ by.
END_CALLS = 100
SLOWER = 1.2
GATE = "tests/op/test_selection.py"
KEPT_BYTES = 64 * 1024

_DEVICE_CALLS = {
    tex: ("quantize", "group_quantize", "splits_to_offsets_multi"),
    ReferenceBackend: ("fc1_act", "gemm", "dact_dgrad", "wgrad"),
}


def model_of(case: StepCase, *, packed: bool = False, descending: bool = False) -> Any:
    """The case's model; its main_grads lie beside it, `packed` for those of a linear in a row.

    Frameworks keep main_grads in one buffer; so may weights lie, whose storage is moved there.
    Megatron fills its buffers from the end: `descending`.
    """
    model = step.make_model(case)
    for op in (model[0], model[2]):
        found = [value for name, value in op.named_parameters() if name.startswith("weight")]
        first, shape = found[0], (len(found), *found[0].shape)
        grads = torch.zeros(shape, dtype=torch.float32, device=first.device).unbind(0)
        values = torch.empty(shape, dtype=first.dtype, device=first.device).unbind(0)
        if descending:
            grads, values = grads[::-1], values[::-1]
        for index, parameter in enumerate(found):
            parameter.main_grad = grads[index] if packed else grads[index].clone()
            if packed and len(found) > 1:
                values[index].copy_(parameter.data)
                parameter.data = values[index]
    return model


class Recording:
    """The results of every device call of one step, given again in the same order."""

    def __init__(self) -> None:
        self._results: dict[str, list[Any]] = {}
        self._next: dict[str, Iterator[Any]] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep what the device calls return while the block runs."""
        with _replaced(self._recorder):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Return what was kept, without any work; call `rewind` before each step."""
        with _replaced(self._player):
            yield

    def rewind(self) -> None:
        """Begin with the first result of each call again."""
        self._next.update((name, iter(results)) for name, results in self._results.items())

    def _recorder(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        kept = self._results.setdefault(name, [])

        def run(*args: Any, **kwargs: Any) -> Any:
            kept.append(original(*args, **kwargs))
            return kept[-1]

        return run

    def _player(self, name: str, _original: Callable[..., Any]) -> Callable[..., Any]:
        upcoming = self._next

        def give(*_args: Any, **_kwargs: Any) -> Any:
            return next(upcoming[name])

        return give


@contextmanager
def _replaced(make: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace every device call; and nothing frees what one of them gave, which is given again."""
    before = [
        (owner, name, vars(owner)[name]) for owner, names in _DEVICE_CALLS.items() for name in names
    ]
    freeing = (weight_gradient, "clear_tensor_data", weight_gradient.clear_tensor_data)
    for owner, name, original in before:
        setattr(owner, name, make(name, original))
    before.append(freeing)
    weight_gradient.clear_tensor_data = lambda *_tensors: None
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


class EmptyOp(FusedOperation):
    """A fused op that does nothing: what remains is the fuser and autograd."""

    results: dict[str, Any]

    def fuser_forward(self, *_args: Any, **_unused: Any) -> Any:
        """Return a ready-made output; keep nothing."""
        return self.results["y"], [(), (), ()]

    def fuser_backward(self, *_args: Any, **_unused: Any) -> Any:
        """Return ready-made gradients; TE's placeholders for main_grad are due at each call."""
        for linear in self.basic_ops[0], self.basic_ops[2]:
            adapter.placeholder_grads(adapter.parameters(linear))
        return self.results["gradients"]


def empty_model(case: StepCase, gradients: Any, y: torch.Tensor) -> Any:
    """Build the same model over an `EmptyOp` that returns what the real op returned."""
    model = step.make_model(case)

    def fuse(ops: list[Any], **_unused: Any) -> list[Any]:
        op = EmptyOp(tuple(ops))
        op.results = {"y": y.detach(), "gradients": gradients}
        return [op]

    registered = OperationFuser.forward_backward_fusion_functions
    before = list(registered)
    registered[:] = [fuse]
    try:
        step.run_model(model, case, step.make_inputs(case))
    finally:
        registered[:] = before
    assert isinstance(step.fused_op(model), EmptyOp)
    return model


class Timer:
    """Counts the processor time of one method of one object, in milliseconds.

    Nothing waits here, so that this is the time for which the host is busy; unlike time on the
    wall it does not count other processes.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.ms = 0.0
        inner = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            result = inner(*args, **kwargs)
            self.ms = (time.thread_time_ns() - start) / 1e6
            return result

        setattr(owner, name, run)


class Bench:
    """One step, ready to be run with our op and with the empty one."""

    def __init__(self, case: StepCase) -> None:
        self.case = case
        self.recording = Recording()
        self.model, self.inputs = step.make_model(case), step.make_inputs(case)
        step.run_model(self.model, case, self.inputs)
        fused = step.fused_op(self.model)
        assert type(fused).__name__.startswith("GroupedMLP_CuTeGEMM"), "the op is not fused"
        returned: list[Any] = []

        def spy(*args: Any, **kwargs: Any) -> Any:
            returned.append(type(fused).fuser_backward(fused, *args, **kwargs))
            return returned[-1]

        fused.fuser_backward = spy
        with self.recording.record():
            y = step.run_model(self.model, case, self.inputs)
        del fused.fuser_backward
        self.empty = empty_model(case, returned[0], y)
        self.timers = {
            model: [Timer(step.fused_op(model), f"fuser_{name}") for name in PASSES]
            for model in (self.model, self.empty)
        }

    def step(self, model: Any) -> list[float]:
        """Run one step; milliseconds of whole forward and backward, and of the op in each."""
        self.recording.rewind()
        start = time.thread_time_ns()
        y = step.forward(model, self.case, self.inputs)
        middle = time.thread_time_ns()
        y.backward(self.inputs.dy)
        whole = [(middle - start) / 1e6, (time.thread_time_ns() - middle) / 1e6]
        return [*whole, *(timer.ms for timer in self.timers[model])]

    def own_ms(self, runs: int) -> dict[str, dict[str, float]]:
        """Return the op's own time in each pass, and the empty op's."""
        rows: dict[Any, list[list[float]]] = {self.model: [], self.empty: []}
        with self.recording.replay():
            for run in range(-20, runs):
                for model, row in rows.items():
                    times = self.step(model)
                    # The first warm caches and the allocator.
                    if run >= 0:
                        row.append(times)
        found = {}
        pairs = list(zip(rows[self.model], rows[self.empty], strict=True))
        for index, name in enumerate(PASSES):
            own = [ours[2 + index] - empty[2 + index] for ours, empty in pairs]
            low, median, high = statistics.quantiles(own, n=4)
            found[name] = {
                "own_ms": median,
                "q1_ms": low,
                "q3_ms": high,
                "whole_ms": statistics.median(ours[index] for ours, _ in pairs),
                "whole_empty_ms": statistics.median(empty[index] for _, empty in pairs),
            }
        return found

    def hot_forward_ms(self, calls: int) -> dict[str, float]:
        """Return the time of the op's forward alone, called in a loop."""
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import MXFP8BlockScaling

        fused, given = step.fused_op(self.model), []
        forward = fused.fuser_forward
        fused.fuser_forward = lambda *args, **kwargs: (
            given.append((args, kwargs)) or forward(*args, **kwargs)
        )
        times = []
        with self.recording.replay():
            self.step(self.model)
            fused.fuser_forward = forward
            args, kwargs = given[0]
            with torch.no_grad(), te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
                for _ in range(calls):
                    self.recording.rewind()
                    forward(*args, **kwargs)
                    times.append(self.timers[self.model][0].ms)
        low, median, high = statistics.quantiles(times, n=4)
        return {"median_ms": median, "q1_ms": low, "q3_ms": high}

    def growth(self, calls: int) -> dict[str, float]:
        """Make calls with random splits; time at both ends, and the bytes kept in between."""
        draw = random.Random(0)
        tiles, times, kept = self.case.rows // 128, [], 0
        with self.recording.replay():
            for call in range(calls + END_CALLS):
                ends = sorted(draw.choices(range(tiles + 1), k=len(self.case.splits)))
                sizes = [128 * (b - a) for a, b in zip([0, *ends], ends, strict=False)]
                self.inputs.split_sizes.copy_(torch.tensor(sizes))
                times.append(sum(self.step(self.model)[:2]))
                # Tracing slows every allocation, so the calls that it counts are not timed.
                if call == calls - 1:
                    kept = self._traced(calls)
        first, last = times[:END_CALLS], times[calls - END_CALLS : calls]
        return {
            "first_ms": statistics.median(first),
            "last_ms": statistics.median(last),
            "kept_bytes": kept,
        }

    def _traced(self, calls: int) -> int:
        gc.collect()
        tracemalloc.start()
        self.step(self.model)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(calls):
            self.step(self.model)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return kept


def profile(bench: Bench, runs: int) -> None:
    """Print where the time of our op goes."""
    profiler = cProfile.Profile()
    with bench.recording.replay():
        bench.step(bench.model)
        profiler.enable()
        for _ in range(runs):
            bench.step(bench.model)
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--experts", type=int, default=64, help="default 64")
    parser.add_argument("--runs", type=int, default=500, help="steps per row (default 500)")
    parser.add_argument("--weight", choices=("discrete", "grouped", "quantized"))
    parser.add_argument("--profile", action="store_true", help="where the time goes, and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    if arguments.runs < 2 or arguments.experts < 1:
        parser.error("--runs needs 2 or more, --experts 1 or more")
    return arguments


def main() -> int:
    """Print the table and what is missed; exit 1 if an aim is, or if something grows."""
    arguments = parse()
    torch.set_num_threads(1)
    case = StepCase(splits=(128,) * arguments.experts, hidden=128, ffn=128, grad="main_grad")
    if arguments.profile:
        profile(Bench(case.but(weight=arguments.weight or "discrete")), arguments.runs)
        return 0
    subprocess.run([sys.executable, "-m", "pytest", "-q", GATE], check=True, cwd=ROOT)
    report: dict[str, Any] = {"experts": arguments.experts, "runs": arguments.runs}
    chosen = (arguments.weight,) if arguments.weight else ("discrete", "quantized", "grouped")
    missed: list[str] = []
    print(f"{'':20}{'own':>8}{'quartiles':>18}{'whole pass':>12}{'with an empty op':>18}   ms")
    for weight in chosen:
        bench = Bench(case.but(weight=weight))
        report[weight] = bench.own_ms(arguments.runs)
        for name, row in report[weight].items():
            quartiles = f"{row['q1_ms']:.3f} .. {row['q3_ms']:.3f}"
            label = f"{weight} {name}"
            whole = f"{row['whole_ms']:12.3f}{row['whole_empty_ms']:18.3f}"
            print(f"{label:20}{row['own_ms']:8.3f}{quartiles:>18}{whole}")
            if row["own_ms"] > AIM_MS[name]:
                missed.append(f"{label}: {row['own_ms']:.3f} ms, aim {AIM_MS[name]} ms")
        hot = report[weight]["hot forward"] = bench.hot_forward_ms(arguments.runs)
        quartiles = f"{hot['q1_ms']:.3f} .. {hot['q3_ms']:.3f}"
        print(f"{weight + ' hot':20}{hot['median_ms']:8.3f}{quartiles:>18}")
    grown = report["growth"] = Bench(case).growth(GROWTH_CALLS)
    print(
        f"{GROWTH_CALLS} calls with random splits: {grown['first_ms']:.3f} ms at first, "
        f"{grown['last_ms']:.3f} ms at last, {grown['kept_bytes']} bytes kept"
    )
    if grown["last_ms"] > SLOWER * grown["first_ms"]:
        missed.append(f"time grows: {grown['first_ms']:.3f} to {grown['last_ms']:.3f} ms")
    if grown["kept_bytes"] > KEPT_BYTES:
        missed.append(f"memory grows: {grown['kept_bytes']} bytes, allowed {KEPT_BYTES}")
    for each in missed:
        print(f"missed: {each}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
