# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The native kernels on a Hopper GPU, beside what else computes the layer there.

    python -m benchmarks.bench_cutedsl --out FOLDER [--shape E,H,I,T ...] [--sections NAMES]

Checks come first: no number of ours is reported on a red check. Results go to FOLDER/cutedsl.json
after every section, and a table to standard output. An error in one section does not end the rest.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_ours, gpu_peers
from benchmarks.gpu_shapes import SHAPES, Inputs, Shape, inputs
from benchmarks.gpu_timing import Clock, ceilings
from te_grouped_mlp.op.backends.cutedsl.compile import compile_ahead
from te_grouped_mlp.op.backends.cutedsl.config import Op, Tile
from te_grouped_mlp.op.formats import DType

Report = dict[str, Any]
BOUNDS = {"y": 6e-3, "dx": 8e-3, "dprob": 3e-3, "dw1": 8e-3, "dw2": 6e-3}


def oracle(given: Inputs) -> dict[str, torch.Tensor]:
    """The layer in fp32 without tf32, expert by expert, with autograd; nothing is rounded."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in BOUNDS}
    start = 0
    for expert, size in enumerate(given.sizes):
        rows = slice(start, start + size)
        start += size
        x, prob = given.x[rows].float(), given.prob[rows].clone()
        w1, w2 = given.w1[expert].float(), given.w2[expert].float()
        leaves = (x, w1, w2, prob)
        for leaf in leaves:
            leaf.requires_grad_()
        gate, linear = (x @ w1.t()).view(size, -1, 2, 32).unbind(2)
        activated = torch.nn.functional.silu(gate) * linear
        y = (activated.reshape(size, -1) * prob[:, None]) @ w2.t()
        grads = torch.autograd.grad(y, leaves, given.dy[rows].float())
        for name, value in zip(("dx", "dw1", "dw2", "dprob"), grads, strict=True):
            found[name].append(value)
        found["y"].append(y.detach())
    join = {"dw1": torch.stack, "dw2": torch.stack}
    return {name: join.get(name, torch.cat)(parts) for name, parts in found.items()}


def errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of the outputs that are there."""
    return {
        name: float((got[name].float() - want[name]).norm() / want[name].norm())
        for name in want
        if got.get(name) is not None and got[name].shape == want[name].shape
    }


def check(shape: Shape) -> Report:
    """Compare a step with the oracle, and twelve runs of it with each other, bit for bit."""
    given = inputs(shape)
    layer = gpu_ours.layer_of(given, accumulate=False, grad=torch.float32)
    first = {name: value.clone() for name, value in layer.step().items()}
    found = errors(first, oracle(given))
    same = True
    for _ in range(11):
        same &= all(torch.equal(value, first[name]) for name, value in layer.step().items())
    green = same and all(value <= BOUNDS[name] for name, value in found.items())
    return {"green": green, "bitwise": same, "errors": found}


def parts(shape: Shape, clock: Clock) -> list[Report]:
    """Time every kernel in every tile, and a dense product of that size by cuBLAS."""
    given, buffers = inputs(shape), {}
    rows: list[Report] = []
    keys = gpu_ours.part_keys()
    for op in dict.fromkeys(op for op, _, _ in keys):
        works: dict[str, Callable[[], object]] = {}
        for (owner, tile, variant), key in keys.items():
            if owner is op:
                works[f"{short(tile)} {variant}"] = gpu_ours.part(given, key, buffers)
        works["cublas dense"] = dense(shape, op)
        try:
            for name, taken in clock.compare(works, runs=9, warm=2).items():
                rate = gpu_ours.part_flops(shape, op) / taken.median / 1e9
                rows.append({"op": op.value, "tile": name, **taken.as_dict(), "tflops": rate})
        except Exception as error:
            rows.append({"op": op.value, "error": repr(error)})
    return rows


def short(tile: Tile) -> str:
    """A tile in a few characters."""
    kind = "p" if tile.pingpong else "c"
    return f"{kind}{tile.m}x{tile.n} {tile.cluster_m}x{tile.cluster_n}"


def dense(shape: Shape, op: Op) -> Callable[[], object]:
    """Return a dense product of as many operations as `op` has, on random values."""
    wide = 2 * shape.ffn if op in (Op.FC1_ACT, Op.FC1_DGRAD, Op.FC1_WGRAD) else shape.ffn
    a = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
    b = torch.randn(shape.hidden, wide, device="cuda").bfloat16()
    out = torch.empty(shape.tokens, wide, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.matmul(a, b, out=out)


def steps(shape: Shape, clock: Clock) -> Report:
    """Time forward and backward, ours and the peers', in turns."""
    given = inputs(shape)

    def ours(grad: torch.dtype, accumulate: bool) -> gpu_ours.Layer:
        return gpu_ours.layer_of(given, accumulate=accumulate, grad=grad)

    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "ours": lambda: ours(torch.bfloat16, False).step,
        "ours, fp32 main_grad +=": lambda: ours(torch.float32, True).step,
        "unit probabilities": lambda: gpu_ours.UnitProbability(ours(torch.bfloat16, False)).step,
        "quack": lambda: gpu_peers.quack_step(given),
        "torch eager": lambda: gpu_peers.torch_step(given, compiled=False),
        "torch compile": lambda: gpu_peers.torch_step(given, compiled=True),
    }
    works: dict[str, Callable[[], Any]] = {}
    found: Report = {}
    want: dict[str, torch.Tensor] | None = None
    for name, make in makers.items():
        try:
            works[name] = make()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            got = works[name]()
            torch.cuda.synchronize()
            if want is None:
                want = {key: value.float() for key, value in got.items() if key != "dw1"}
            peak = torch.cuda.max_memory_allocated() - before
            found[name] = {"peak_gb": peak / 1e9, "against_ours": errors(got, want)}
            del got
        except Exception as error:
            works.pop(name, None)
            found[name] = {"error": repr(error)[:300]}
    for name, taken in clock.compare(works, runs=13).items():
        found[name].update(taken.as_dict())
        found[name]["ours_is_faster_by"] = 0.0
    for row in found.values():
        if "median" in row:
            row["ours_is_faster_by"] = row["median"] / found["ours"]["median"]
    return found


def backward_parts(shape: Shape, clock: Clock) -> Report:
    """Forward and backward apart, and host times."""
    layer = gpu_ours.layer_of(inputs(shape), accumulate=True, grad=torch.float32)
    y, activated, pre = layer.forward()
    del y
    works: dict[str, Callable[[], object]] = {
        "forward": layer.forward,
        "backward": lambda: layer.backward(activated, pre),
        "backward_without_dprob": lambda: layer.backward(activated, pre, dprob=False),
    }
    found = {name: taken.as_dict() for name, taken in clock.compare(works).items()}
    for name in ("forward", "backward"):
        found[f"host_{name}"] = clock.host(works[name]).as_dict()
    return found


def compiling(shapes: tuple[Shape, ...]) -> Report:
    """Compile everything: first one step's kernels, then the rest."""
    begin = time.perf_counter()
    first = compile_ahead(gpu_ours.step_keys(shapes[0], DType.BFLOAT16, accumulate=False))
    middle = time.perf_counter()
    rest = [*gpu_ours.part_keys().values()]
    for shape in shapes:
        rest += gpu_ours.step_keys(shape, DType.BFLOAT16, accumulate=False)
        rest += gpu_ours.step_keys(shape, DType.FLOAT32, accumulate=False)
        rest += gpu_ours.step_keys(shape, DType.FLOAT32, accumulate=True)
    count = compile_ahead(rest)
    end = time.perf_counter()
    return {
        "first_kernels": first, "first_seconds": middle - begin,
        "other_kernels": count, "other_seconds": end - middle,
    }  # fmt: skip


def main() -> None:
    """Run the sections and write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for cutedsl.json")
    parser.add_argument("--shape", action="append", default=[], help="E,H,I,T; may be repeated")
    parser.add_argument("--sections", default="compile,ceilings,check,steps,apart,parts")
    given = parser.parse_args()
    shapes = tuple(Shape(*map(int, text.split(","))) for text in given.shape) or SHAPES
    given.out.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    report: Report = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "shapes": [shape.label for shape in shapes],
    }  # fmt: skip
    sections: dict[str, Callable[[], Any]] = {
        "compile": lambda: compiling(shapes),
        "ceilings": lambda: ceilings(clock),
    }
    for name, work in (("check", check),):
        for shape in shapes:
            sections[f"{name} {shape.label}"] = lambda work=work, shape=shape: work(shape)
    for name, timed in (("steps", steps), ("apart", backward_parts), ("parts", parts)):
        for shape in shapes:
            sections[f"{name} {shape.label}"] = lambda timed=timed, shape=shape: timed(shape, clock)
    for name, section in sections.items():
        if name.split()[0] not in given.sections.split(","):
            continue
        begin = time.perf_counter()
        try:
            report[name] = section()
        except Exception:
            report[name] = {"error": traceback.format_exc()[-2000:]}
        torch.cuda.empty_cache()
        show(name, report[name], time.perf_counter() - begin)
        (given.out / "cutedsl.json").write_text(json.dumps(report, indent=1))


def show(name: str, result: Any, seconds: float) -> None:
    """Print one section in a few lines."""
    print(f"== {name} ({seconds:.1f} s)", flush=True)
    rows = result if isinstance(result, list) else [{key: value} for key, value in result.items()]
    for row in rows:
        print("  " + " ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}={_short(each)}" for key, each in value.items()) + "}"
    return str(value)


if __name__ == "__main__":
    main()
