# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts' rows on the multiples that the kernels want, for whoever calls the op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op import environment
from te_grouped_mlp.op.backends import CLASSES
from te_grouped_mlp.op.backends.cudnn.capability import NAME as CUDNN
from te_grouped_mlp.op.backends.cudnn.capability import ROWS_MULTIPLE as CUDNN_ROWS
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED
from te_grouped_mlp.op.problem import RecipeKind

_BLACKWELL = 10


def row_multiple(recipe: Any = None, *, backend: str | None = None) -> int:
    """Return what every split size, and the buffer, must be a multiple of.

    Args:
        recipe: Transformer Engine's recipe; None for a step outside ``autocast``.
        backend: "reference", "cutedsl" or "cudnn". None for what fits every backend that may run
            on the current device: the 256-row tiles of "cudnn" where it runs.

    Returns:
        1 without a recipe; 128 under MXFP8, and 256 for "cudnn". Not what Transformer Engine's
        ``get_align_size_for_quantization`` says, which knows its unfused ops alone.

    Raises:
        ValueError: There is no such backend, or the op is never fused under that recipe.
    """
    if backend is not None and backend not in CLASSES:
        raise ValueError(f"backend is {backend!r}; allowed: None, {', '.join(CLASSES)}")
    if recipe is None:
        return UNQUANTIZED.rows_multiple
    from te_grouped_mlp.op.te import quantizers

    kind, detail = quantizers.read_recipe(recipe)
    if kind is not RecipeKind.MXFP8:
        raise ValueError(
            f"recipe is {detail or type(recipe).__name__}; allowed: None, MXFP8BlockScaling"
        )
    if backend is None:
        sm = environment.current().sm
        backend = CUDNN if isinstance(sm, tuple) and sm[0] == _BLACKWELL else None
    return CUDNN_ROWS if backend == CUDNN else MXFP8.rows_multiple


@dataclass(frozen=True)
class RowPadding:
    """Where rows go in a buffer whose groups begin on multiples; made by `row_padding`.

    Attributes:
        split_sizes: Rows of each group with its padding, (num_groups,), of the given dtype and
            device: the op's ``split_sizes``.
        rows: Rows of the buffer. It follows from shapes alone, so it is the same in every step.
        position: The buffer's row of each row, (unpadded rows,) int64.
    """

    split_sizes: torch.Tensor
    rows: int
    position: torch.Tensor

    def pad(self, tensor: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Return a new tensor, (self.rows, ...), with the rows in place and `fill` elsewhere.

        Autograd goes through it. Inside a group the kernels compute with `fill`: 0 for tokens and
        probabilities leaves every result and gradient as it is.
        """
        if tensor.shape[:1] != self.position.shape:
            raise ValueError(
                f"tensor has shape {tuple(tensor.shape)}; allowed: {len(self.position)} rows"
            )
        out = tensor.new_full((self.rows, *tensor.shape[1:]), fill)
        return out.index_copy(0, self.position, tensor)

    def unpad(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows that `pad` put in place, as a new tensor. Autograd goes through it."""
        if tensor.shape[:1] != (self.rows,):
            raise ValueError(f"tensor has shape {tuple(tensor.shape)}; allowed: {self.rows} rows")
        return tensor.index_select(0, self.position)


def row_padding(split_sizes: torch.Tensor, rows: int, multiple: int) -> RowPadding:
    """Return how to pad each group to a multiple of rows.

    Never waits for a device. The buffer has room for the worst routing, and its tail, which
    depends on the routing, is left to the op, which does not read it.

    Args:
        split_sizes: Rows of each group, (num_groups,), int32 or int64. Rows past their sum stay
            past the padded sum.
        rows: Rows of the tensors that will be padded.
        multiple: What `row_multiple` returns.

    Raises:
        ValueError: `multiple` is not positive; or sizes on the host are negative or more than
            `rows` together. Sizes on a device are the op's to check.
    """
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}; allowed: at least 1")
    sizes = split_sizes.detach()
    if sizes.dim() != 1 or sizes.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"split_sizes is {sizes.dtype} of shape {tuple(sizes.shape)}; allowed: int32 or int64, "
            "(num_groups,)"
        )
    if sizes.device.type == "cpu" and (bool((sizes < 0).any()) or int(sizes.sum()) > rows):
        raise ValueError(
            f"split_sizes is {sizes.tolist()}; allowed: not negative, at most {rows} rows in all"
        )
    padded = (sizes + (multiple - 1)) // multiple * multiple
    shift = torch.nn.functional.pad((padded - sizes).cumsum(0), (1, 0))
    row = torch.arange(rows, device=sizes.device)
    group = torch.searchsorted(sizes.cumsum(0), row, right=True)
    worst = rows + sizes.shape[0] * (multiple - 1)
    return RowPadding(padded, -(-worst // multiple) * multiple, row + shift[group])
