# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's activations with one scale for each row: `y = act(x) * scale`, made from the table's rows.

Computed in float64 and rounded once at the store. fp32 would do for accuracy, but torch's
vectorised fp32 functions give an element other last bits in the tail of a buffer than in its body,
and a row's result must not depend on how many rows follow it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex.activation_rules import (
    backward_refusals,
    forward_refusals,
)
from te_grouped_mlp.integration.standalone.tex.contract import Refusal, tex_function
from te_grouped_mlp.op import activations
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.tensors import memory

# Rows are worked off in pieces of about this many elements, to stay in the cache.
_PIECE = 1 << 18


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a matrix; leading dimensions count as rows."""
    return x.detach().reshape(-1, x.shape[-1]) if x.numel() else x.detach().view(0, x.shape[-1])


def _pieces(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _PIECE // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _cut(derivative: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, derivative, 0.0)


def _forward(spec: ActivationSpec, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `act(input) * act_scales`, rounded to the input's dtype."""
    matrix, width = _rows(x), x.shape[-1] // spec.expansion
    out = memory.empty((matrix.shape[0], width), x.dtype, x.device)
    column = scales.detach().reshape(-1, 1).double()
    for piece in _pieces(*matrix.shape):
        value = activations.evaluate(torch, spec, matrix[piece].double()).value
        out[piece] = value * column[piece]
    return out.view(*x.shape[:-1], width)


def _backward(
    spec: ActivationSpec,
    grad: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    compute_scale_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the input, in its layout, and of the scales (or None)."""
    matrix, dy = _rows(x), _rows(grad)
    dx = memory.empty(matrix.shape, x.dtype, x.device)
    d_scales = memory.empty((matrix.shape[0],), scales.dtype, x.device)
    column = scales.detach().reshape(-1, 1).double()
    for piece in _pieces(*matrix.shape):
        value, derivatives = activations.evaluate(torch, spec, matrix[piece].double())
        upstream = dy[piece].double()
        scaled = upstream * column[piece]
        parts = tuple(scaled * part for part in derivatives(_cut))
        dx[piece] = activations.join(torch, spec, parts)
        if compute_scale_grad:
            d_scales[piece] = (upstream * value).sum(dim=1).to(scales.dtype)
    return dx.view(x.shape), d_scales.view(scales.shape) if compute_scale_grad else None


def _declare(
    name: str,
    compute: Callable[..., Any],
    kind: Activation,
    refusals: tuple[Refusal, ...],
    arguments: dict[str, str],
) -> Callable[..., Any]:
    """Return a tex function: `compute` of the activation, its tensors and its flag.

    Args:
        name: Of the function.
        compute: Called with the activation and the values of `arguments`.
        kind: Which activation; its parameters are arguments behind the quantizer.
        refusals: What it refuses.
        arguments: Names of the tensors, and of what stands last with its default, with their types.
    """
    parameters = kind.row.parameters
    types = {
        **{key: value for key, value in arguments.items() if value != "bool"},
        "quantizer": "Any",
        **{each.keyword: "float" for each in parameters},
        **({"glu_interleave_size": "int"} if kind.is_gated else {}),
        **arguments,
    }
    defaults = {each.keyword: each.default for each in parameters}
    defaults |= {"glu_interleave_size": 0, "compute_scale_grad": True}
    empty, either = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [
            inspect.Parameter(key, either, default=defaults.get(key, empty), annotation=value)
            for key, value in types.items()
        ]
    )

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        values = {each.name: given[each.keyword] for each in parameters}
        spec = ActivationSpec(kind, given.get("glu_interleave_size") or None, **values)
        return compute(spec, *(given[key] for key in arguments))

    function.__name__, function.__doc__ = name, compute.__doc__
    function.__signature__ = signature  # type: ignore[attr-defined]
    return tex_function(*refusals, gpu=False)(function)


def functions(kind: Activation) -> dict[str, Callable[..., Any]]:
    """Return the tex functions of an activation by name: forward and backward, or none."""
    if not kind.row.tex:
        return {}
    (forward, backward), divisor = kind.row.tex, ActivationSpec(kind).expansion
    tensors = {"act_scales": "torch.Tensor"}
    inputs = {"input": "torch.Tensor", **tensors}
    grads = {"grad": "torch.Tensor", "fwd_input": "torch.Tensor", **tensors}
    grads["compute_scale_grad"] = "bool"
    return {
        forward: _declare(forward, _forward, kind, forward_refusals(divisor), inputs),
        backward: _declare(backward, _backward, kind, backward_refusals(divisor), grads),
    }


FUNCTIONS = {name: function for kind in Activation for name, function in functions(kind).items()}
# Attributes of the module, as those of the other modules of tex's functions are.
globals().update(FUNCTIONS)
