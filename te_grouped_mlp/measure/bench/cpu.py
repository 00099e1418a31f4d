# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference backend on a CPU, through Transformer Engine, beside its unfused ops."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from te_grouped_mlp.measure import step
from te_grouped_mlp.measure.bench.interleaved import OURS
from te_grouped_mlp.measure.bench.shapes import Shape
from te_grouped_mlp.measure.bench.timing import summary
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.activations import Activation

SHAPES = (Shape(4, 256, 256, 1024), Shape(1, 256, 256, 1024))
RUNS, QUICK_RUNS = 7, 3
BOUND = 0.1
"""Relative error that MXFP8 operands explain: 5 to 7 % of a result of three products in a row."""

_SEED = 0


def measure(shapes: Sequence[Shape], runs: int = RUNS) -> Iterator[tuple[str, Any]]:
    """Yield (section, result) pairs as `bench.gpu.measure` does; TE must be imported already."""
    for shape in shapes:
        rows = step.Shape(shape.experts, shape.hidden, shape.ffn, shape.tokens)
        given = step.batch(rows, _SEED + 1, "cpu")
        ours = step.Model.build(Activation.SWIGLU, rows, seed=_SEED, device="cpu")
        with step.switches("reference"):
            found = _check(ours, given)
            yield f"check {shape.label}", found
            if not found["green"]:
                continue
            result = {OURS: _time(functools.partial(ours.run, given), runs)}
        unfused = step.Model.build(Activation.SWIGLU, rows, seed=_SEED, device="cpu")
        off = dataclasses.replace(environment.read_switches(), fused=False)
        with environment.override(switches=off):
            result["te unfused"] = _time(functools.partial(unfused.run, given), runs)
        for row in result.values():
            row["ratio"] = row["median"] / result[OURS]["median"]
        yield f"steps {shape.label}", result


def _check(model: step.Model, given: step.Batch) -> dict[str, Any]:
    first = model.run(given)
    model.require_fused()
    again = model.run(given)
    same = all(torch.equal(again[name], value) for name, value in first.items())
    want = oracle(model, given)
    errors = {
        name: float((first[name].double() - value).norm() / value.norm())
        for name, value in want.items()
    }
    green = same and all(value <= BOUND for value in errors.values())
    return {"green": green, "bitwise": same, "errors": errors}


def oracle(model: step.Model, given: step.Batch) -> dict[str, torch.Tensor]:
    """Compute a step with SwiGLU in float64, expert by expert, from unquantized values."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ("y", "dx", "dprob", "dW1", "dW2")}
    parts = (values.detach().split(given.splits.tolist()) for values in (given.x, given.dy))
    probs = given.prob.detach().split(given.splits.tolist())
    for expert, (x, dy, prob) in enumerate(zip(*parts, probs, strict=True)):
        leaves = [
            value.detach().double().requires_grad_()
            for value in (
                x,
                prob,
                getattr(model.fc1, f"weight{expert}"),
                getattr(model.fc2, f"weight{expert}"),
            )
        ]
        x, prob, w1, w2 = leaves
        gate, linear = (x @ w1.t()).view(len(x), -1, 2, 32).unbind(2)
        activated = (torch.nn.functional.silu(gate) * linear).reshape(len(x), -1)
        y = (activated * prob[:, None]) @ w2.t()
        grads = torch.autograd.grad(y, leaves, dy.double())
        for name, value in zip(found, (y.detach(), *grads), strict=True):
            found[name].append(value)
    stacked = ("dW1", "dW2")
    return {
        name: torch.stack(parts) if name in stacked else torch.cat(parts)
        for name, parts in found.items()
    }


def _time(work: Callable[[], object], runs: int) -> dict[str, float]:
    work()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return summary(times).as_dict()
