# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What `transformer_engine.pytorch.triton` holds in standalone.

Transformer Engine imports its own triton subpackage unconditionally. Standing in for it, and for
nothing called `triton`, keeps a gigabyte out of a CPU machine.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from te_grouped_mlp.integration.standalone import on_gpu
from te_grouped_mlp.integration.standalone.tex.contract import on_any_device
from te_grouped_mlp.integration.standalone.tex.placeholder import make_placeholder
from te_grouped_mlp.op.kernels import group_reductions

MODULES = ("cross_entropy", "grouped_dbias_dscales", "mhc", "pad", "permutation")


def _check_offsets(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return int64 row counts per group after checking the row offsets against `dy`.

    Offsets on a GPU are not looked at: that would wait for it.
    """
    if dy.dim() != 2:
        raise ValueError(f"dy has {dy.dim()} dimensions; allowed: 2 (tokens, hidden)")
    if on_gpu.serves(offsets):
        return torch.diff(offsets.to(torch.int64))
    edges = offsets.to(torch.int64).tolist()
    if edges[0] != 0 or edges != sorted(edges) or edges[-1] > dy.shape[0]:
        raise ValueError(
            f"offsets is {edges}; allowed: 0 first, then ascending up to dy's {dy.shape[0]} rows"
        )
    return torch.diff(offsets.to(torch.int64)).contiguous()


def _result(
    given: torch.Tensor | None, shape: tuple[int, ...], name: str, device: torch.device
) -> torch.Tensor:
    """Return the fp32 tensor to add to: the caller's, or zeros."""
    if given is None:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    if given.dtype != torch.float32 or tuple(given.shape) != shape:
        raise ValueError(
            f"{name} is {given.dtype} of shape {tuple(given.shape)}; allowed: float32 of {shape}"
        )
    return given


@on_any_device
def compute_grouped_dbias(
    dy: torch.Tensor,
    offsets: torch.Tensor,
    num_groups: int,
    dbias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum `dy` over each group's rows.

    Args:
        dy: (tokens, hidden). Rows past the last offset are not read.
        offsets: (num_groups + 1,) row offsets with a leading 0.
        num_groups: Number of groups.
        dbias: fp32 (num_groups, hidden) to add to, or None for zeros.

    Returns:
        fp32 (num_groups, hidden); `dbias` itself where it was given.
    """
    splits = _check_offsets(dy, offsets)
    if splits.numel() != num_groups:
        raise ValueError(f"offsets holds {splits.numel()} groups, num_groups is {num_groups}")
    dbias = _result(dbias, (num_groups, dy.shape[1]), "dbias", dy.device)
    return dbias.add_(group_reductions.column_sums(dy, splits))


@on_any_device
def compute_grouped_dbias_dscales(
    dy: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    offsets: torch.Tensor,
    dbias: torch.Tensor | None = None,
    dscales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiate a bias that each row scales by its own factor.

    Args:
        dy: (tokens, hidden). Rows past the last offset are not read.
        scales: (tokens,) fp32 row factors.
        bias: (groups, hidden).
        offsets: (groups + 1,) row offsets with a leading 0.
        dbias: fp32 (groups, hidden) to add to, or None for zeros.
        dscales: fp32 (tokens,) to add to, or None for zeros.

    Returns:
        `dbias[g, j] += sum_i dy[i, j] * scales[i]` and `dscales[i] += sum_j dy[i, j] * bias[g, j]`,
        both summed in one fixed order: two calls give the same bytes.
    """
    splits = _check_offsets(dy, offsets)
    tokens, hidden = dy.shape
    if bias.shape != (splits.numel(), hidden):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; allowed: {(splits.numel(), hidden)}")
    if scales.numel() != tokens:
        raise ValueError(f"scales has {scales.numel()} elements; allowed: {tokens}, one per row")
    dbias = _result(dbias, (splits.numel(), hidden), "dbias", dy.device)
    dscales = _result(dscales, (tokens,), "dscales", dy.device)
    dbias.add_(group_reductions.column_sums(dy, splits, weights=scales))
    return dbias, dscales.add_(group_reductions.row_dots(dy, bias, splits))


_FUNCTIONS: dict[str, dict[str, Any]] = {
    "grouped_dbias_dscales": {
        "compute_grouped_dbias": compute_grouped_dbias,
        "compute_grouped_dbias_dscales": compute_grouped_dbias_dscales,
    }
}


def fill(module: ModuleType) -> None:
    """Give a stand-in module its functions; other names raise NotImplementedError when called."""
    name = module.__name__.rpartition(".")[2]
    if name not in MODULES:
        return
    vars(module).update(_FUNCTIONS.get(name, {}))

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {module.__name__} has no attribute {attribute}")
        return make_placeholder(f"{module.__name__}.{attribute}")

    vars(module)["__getattr__"] = missing
