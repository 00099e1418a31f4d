# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The step in float64 on the unquantized values, and how far from it a result may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from te_grouped_mlp.op.activations import Activation, ActivationSpec, evaluate
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED, Format

if TYPE_CHECKING:
    from te_grouped_mlp.measure.step import Batch, Model

    Outputs = dict[str, torch.Tensor]

AGREEMENT = 0.02
"""Against the reference backend, which rounds where the kernels round: another order of the sums,
and now and then a code one apart."""

# Of one product's tolerance: at most three follow each other, and their errors add like the sides
# of right angles, so what is usual is less than twice.
_PRODUCTS = 2.0
# Beside a clamp, whose derivative jumps, a rounded value gets the other side's: share of the values
# that are so near, in the square.
_CLAMPED = {MXFP8: 0.25, UNQUANTIZED: 0.12}
# Sums over rows cancel, so they are smaller than what went into them.
_SUM_FACTOR = 2.0
_STRIPE = 16

_TOKENS = ("y", "dx", "dprob")
_WEIGHTS = ("dW1", "dW2")
_SUMS = ("db1", "db2")


def bounds(fmt: Format, kind: Activation) -> dict[str, float | None]:
    """Return the largest relative error of each output that the format explains.

    Args:
        fmt: Of the operands.
        kind: The activation.

    Returns:
        Output -> bound for `error`; None where the error could be anything: the jumps of a clamp's
        derivative add up over the rows of db1 while the sum itself cancels.
    """
    kinks = kind.row.has_kinks
    limit = _CLAMPED[fmt] if kinks else _PRODUCTS * fmt.tolerance
    found: dict[str, float | None] = dict.fromkeys((*_TOKENS, *_WEIGHTS), limit)
    found |= dict.fromkeys(_SUMS, limit * _SUM_FACTOR)
    return {**found, "db1": None} if kinks else found


def error(name: str, found: torch.Tensor, wanted: torch.Tensor, splits: Sequence[int]) -> float:
    """Return the largest relative error of any expert's stripe of 16 columns.

    A fault of layout spoils a few columns or one expert, which a norm over all would hide.

    Args:
        name: The output: says whether the first dimension counts experts or rows.
        found, wanted: On the CPU, equal shapes, live rows alone.
        splits: Rows of every expert.

    Returns:
        Frobenius norm of the difference over that of `wanted`; NaN for values that are not finite.
    """
    difference, exact = found.double() - wanted.double(), wanted.double()
    if not difference.isfinite().all():
        return float("nan")
    worst = 0.0
    pairs = zip(_stripes(name, difference, splits), _stripes(name, exact, splits), strict=True)
    for off, size in pairs:
        norm, scale = float(off.norm()), float(size.norm())
        worst = max(worst, norm / scale if scale else float(norm > 0))
    return worst


def agreement(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error over all values; NaN for values that are not finite."""
    difference, exact = found.double() - wanted.double(), wanted.double()
    return float(difference.norm() / exact.norm().clamp_min(1e-30))


def _stripes(name: str, values: torch.Tensor, splits: Sequence[int]) -> Iterator[torch.Tensor]:
    parts = values.unbind(0) if name in (*_WEIGHTS, *_SUMS) else values.split(list(splits))
    for part in parts:
        # Probabilities have rows alone: one stripe for each expert.
        yield from (part,) if name == "dprob" else part.split(_STRIPE, dim=-1)


def step(model: Model, given: Batch, spec: ActivationSpec, splits: Sequence[int]) -> Outputs:
    """Compute outputs and gradients, one expert after another, by autograd.

    Args:
        model: Its parameters are read.
        given: The call; its live rows are read.
        spec: The activation that the model is built with.
        splits: Rows of every expert.

    Returns:
        New float64 tensors on the CPU, with the names and shapes of `Model.run`.
    """
    live = sum(splits)
    x, prob = _leaf(given.x[:live]), _leaf(given.prob[:live])
    leaves = {
        f"{gradient}{suffix}": [
            _leaf(getattr(op, f"{parameter}{index}")) for index in range(op.num_groups)
        ]
        for suffix, op in (("1", model.fc1), ("2", model.fc2))
        for parameter, gradient in (("weight", "dW"), ("bias", "db"))
        if parameter == "weight" or op.has_bias
    }
    parts = []
    for index, rows in enumerate(torch.arange(live).split(list(splits))):
        pre = x[rows] @ leaves["dW1"][index].t()
        scale = prob[rows, None]
        if "db1" in leaves:
            pre = pre + leaves["db1"][index]
        out = (evaluate(torch, spec, pre).value * scale) @ leaves["dW2"][index].t()
        if "db2" in leaves:
            out = out + leaves["db2"][index] * scale
        parts.append(out)
    y = torch.cat(parts)
    y.backward(given.dy[:live].detach().cpu().double())
    grads = {name: torch.stack([_grad(each) for each in all_]) for name, all_ in leaves.items()}
    return {"y": y.detach(), "dx": _grad(x), "dprob": _grad(prob), **grads}


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().double().requires_grad_()


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
