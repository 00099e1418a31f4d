# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The native kernels on a Hopper GPU, beside what else computes the layer there.

Checks come first: where one is red, nothing else of that shape is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.measure.bench import layer, mxfp8, peers
from te_grouped_mlp.measure.bench.interleaved import OURS, Report, Step, errors, race
from te_grouped_mlp.measure.bench.shapes import Inputs, Shape, inputs
from te_grouped_mlp.measure.bench.timing import Clock, ceilings
from te_grouped_mlp.op.backends.cutedsl.compile import compile_ahead
from te_grouped_mlp.op.backends.cutedsl.config import Op, Tile
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey
from te_grouped_mlp.op.formats import DType

BOUNDS = {"y": 6e-3, "dx": 8e-3, "dprob": 3e-3, "dw1": 8e-3, "dw2": 6e-3}
"""Relative errors that bf16 intermediates explain."""


@dataclass(frozen=True)
class Effort:
    """How often everything runs.

    Attributes:
        steps: Turns of whole steps.
        modes: Turns of deterministic mode against the default, whose ratio is near one.
        parts: Turns of passes and single kernels.
        replays: Steps that must give the same bits.
    """

    steps: int
    modes: int
    parts: int
    replays: int


FULL = Effort(steps=24, modes=60, parts=11, replays=12)
QUICK = Effort(steps=8, modes=12, parts=5, replays=4)
_GRADS = ((DType.BFLOAT16, False), (DType.FLOAT32, False), (DType.FLOAT32, True))


def oracle(given: Inputs) -> dict[str, torch.Tensor]:
    """The layer in fp32 without tf32, expert by expert, with autograd; nothing is rounded."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in BOUNDS}
    start = 0
    assert given.prob is not None
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


def check(shape: Shape, replays: int = FULL.replays) -> Report:
    """Compare a step with the oracle, and several runs of it with each other, bit for bit."""
    given = inputs(shape)
    ours = layer.layer_of(given, accumulate=False, grad=torch.float32)
    first = {name: value.clone() for name, value in ours.step().items()}
    found = errors(first, oracle(given))
    same = True
    for _ in range(replays - 1):
        same &= all(torch.equal(value, first[name]) for name, value in ours.step().items())
    green = same and set(found) == set(BOUNDS)
    green = green and all(value <= BOUNDS[name] for name, value in found.items())
    return {"green": green, "bitwise": same, "errors": found}


def candidates(given: Inputs, with_peers: bool = True) -> dict[str, Callable[[], Step]]:
    """What computes the layer of the inputs: ours first, and what builds each."""

    def ours(grad: torch.dtype, accumulate: bool) -> layer.Layer:
        return layer.layer_of(given, accumulate=accumulate, grad=grad)

    makers: dict[str, Callable[[], Step]] = {
        OURS: lambda: ours(torch.bfloat16, False).step,
        "ours, fp32 main_grad +=": lambda: ours(torch.float32, True).step,
    }
    if with_peers:
        makers |= {
            "unit probabilities": lambda: layer.UnitProbability(ours(torch.bfloat16, False)).step,
            "quack": lambda: peers.quack_step(given),
            "torch eager": lambda: peers.torch_step(given, compiled=False),
            "torch compile": lambda: peers.torch_step(given, compiled=True),
            "te.ops": lambda: peers.te_ops_step(given),
        }
    return makers


def modes(shape: Shape, clock: Clock, runs: int) -> Report:
    """Time deterministic mode against the default: these two alone, so that each follows the other.

    Returns:
        A `race` of both.
    """
    given = inputs(shape)

    def step(deterministic: bool) -> Step:
        return layer.layer_of(
            given, accumulate=False, grad=torch.bfloat16, deterministic=deterministic
        ).step

    return race({OURS: lambda: step(False), "ours, deterministic": lambda: step(True)}, clock, runs)


def passes(shape: Shape, clock: Clock, runs: int) -> Report:
    """Time forward and backward apart, host times, and the memory held between them."""
    ours = layer.layer_of(inputs(shape), accumulate=True, grad=torch.float32)
    before = clock.memory()
    y, activated, pre = ours.forward()
    held = clock.memory() - before - y.numel() * y.element_size()
    works: dict[str, Callable[[], object]] = {
        "forward": ours.forward,
        "backward": lambda: ours.backward(activated, pre),
        "backward_without_dprob": lambda: ours.backward(activated, pre, dprob=False),
    }
    found: Report = {name: taken.as_dict() for name, taken in clock.compare(works, runs).items()}
    for name in ("forward", "backward"):
        found[f"host_{name}"] = clock.host(works[name]).as_dict()
    # The rewrite keeps the output before its product with the probabilities as well.
    found["held_gb"] = held / 1e9
    found["held_by_unit_probabilities_gb"] = (held + y.numel() * y.element_size()) / 1e9
    return found


def kernels(shape: Shape, clock: Clock, limits: Report, runs: int) -> list[Report]:
    """Time every kernel as it is launched, with its two floors; a dense product by cuBLAS beside.

    Args:
        shape: Of the layer.
        clock: Times.
        limits: The result of `ceilings`.
        runs: Number of turns.
    """
    given = inputs(shape)
    buffers: dict[str, torch.Tensor] = {}
    rows: list[Report] = []
    keys = _launched(shape)
    for op in dict.fromkeys(key.op for _, key in keys):
        chosen = [(name, key) for name, key in keys if key.op is op]
        works: dict[str, Callable[[], object]] = {
            name: layer.part(given, key, buffers) for name, key in chosen
        }
        works["cublas dense"] = dense(shape, op)
        for name, taken in clock.compare(works, runs, warm=2).items():
            row: Report = {"kernel": op.value, "variant": name, **taken.as_dict()}
            row["tflops"] = layer.part_flops(shape, op) / taken.median / 1e9
            key = dict(chosen).get(name)
            if key is not None:
                row |= floors(shape, key, limits)
            rows.append(row)
    return rows


def _launched(shape: Shape) -> list[tuple[str, KernelKey]]:
    """Name and key of what a step launches, and of the same kernels with less to do."""
    found: dict[str, KernelKey] = {}
    for grad, accumulate in _GRADS:
        for key in layer.step_keys(shape, grad, accumulate=accumulate):
            if key.op in (Op.FC1_WGRAD, Op.FC2_WGRAD):
                found[f"{key.op.value} {grad.value}{' +=' * accumulate}"] = key
            elif key.op is Op.DACT_DGRAD:
                found["dprob"] = key
                found["no dprob"] = dataclasses.replace(key, dprob=False)
            elif key.tile is not None:
                found[key.op.value] = key
    return list(found.items())


def floors(shape: Shape, key: KernelKey, limits: Report) -> Report:
    """Return the least milliseconds that a kernel's operations and its bytes need."""
    operations = layer.part_flops(shape, key.op) / limits["bf16_tflops"] / 1e9
    moved = layer.part_bytes(shape, key) / limits["copy_tbs"] / 1e9
    return {"tile": short(key.tile), "operations_ms": operations, "bytes_ms": moved}


def short(tile: Tile | None) -> str:
    """A tile in a few characters."""
    if tile is None:
        return ""
    kind = "p" if tile.pingpong else "c"
    return f"{kind}{tile.m}x{tile.n} {tile.cluster_m}x{tile.cluster_n}"


def dense(shape: Shape, op: Op) -> Callable[[], object]:
    """Return a dense product of as many operations as `op` has, on random values."""
    wide = 2 * shape.ffn if op in (Op.FC1_ACT, Op.FC1_DGRAD, Op.FC1_WGRAD) else shape.ffn
    a = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
    b = torch.randn(shape.hidden, wide, device="cuda").bfloat16()
    out = torch.empty(shape.tokens, wide, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.matmul(a, b, out=out)


def compile_all(shapes: Sequence[Shape]) -> None:
    """Compile what `check`, `steps`, `passes` and `kernels` launch, several kernels at a time."""
    wanted = [key for shape in shapes for _, key in _launched(shape)]
    for shape in shapes:
        for grad, accumulate in _GRADS:
            wanted += layer.step_keys(shape, grad, accumulate=accumulate)
    # The rewrite with unit probabilities has kernels without them.
    scaled = (Op.FC1_ACT, Op.DACT_DGRAD)
    wanted += [
        dataclasses.replace(key, scale=None, dprob=False) for key in wanted if key.op in scaled
    ]
    compile_ahead(wanted)


def measure(
    shapes: Sequence[Shape],
    *,
    with_peers: bool = True,
    parts: bool = True,
    with_mxfp8: bool = True,
    effort: Effort = FULL,
) -> Iterator[tuple[str, Any]]:
    """Yield (section, result) pairs; a section is a name, and the shape's label where it has one.

    Args:
        shapes: The layers.
        with_peers: Time the peers too.
        parts: Time the passes and the single kernels too.
        with_mxfp8: Time the layer in MXFP8 too.
        effort: How often everything runs.
    """
    clock = Clock()
    compile_all(shapes)
    limits = ceilings(clock)
    yield "ceilings", limits
    green = []
    for shape in shapes:
        found = check(shape, effort.replays)
        if found["green"]:
            green.append(shape)
        yield f"check {shape.label}", found
        torch.cuda.empty_cache()
    for shape in green:
        yield (
            f"steps {shape.label}",
            race(candidates(inputs(shape), with_peers), clock, effort.steps),
        )
        torch.cuda.empty_cache()
        yield f"modes {shape.label}", modes(shape, clock, effort.modes)
        torch.cuda.empty_cache()
        if parts:
            yield f"passes {shape.label}", passes(shape, clock, effort.parts)
            yield f"kernels {shape.label}", kernels(shape, clock, limits, effort.parts)
            torch.cuda.empty_cache()
    if with_mxfp8:
        counts = {"runs": effort.steps, "replays": effort.replays}
        for section in mxfp8.sections(green, clock, limits["copy_tbs"], **counts):
            yield section
            torch.cuda.empty_cache()
