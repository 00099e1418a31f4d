# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls of standalone's tex functions, one of whose tensors was spoiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from te_grouped_mlp.op.tensors import capacity
from tests.integration.standalone.test_quantize import make_quantizer

REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError, AttributeError)
BF16, E4M3 = 6, 7
"""TE's numbers of two types."""


class Good:
    """The arguments of a good call of one function, drawn anew each time."""

    def __init__(self, tex: Any, draw: random.Random) -> None:
        self.tex = tex
        self.draw = draw
        self.rows = 128 * draw.randint(1, 3)
        self.cols = 32 * draw.randint(1, 6)
        row = draw.random() < 0.7
        self.quantizer = self.make_quantizer(row, not row or draw.random() < 0.5)
        self.quantizer.internal = draw.random() < 0.5
        self.counts = torch.tensor([self.rows, 0, 128], dtype=torch.int64)

    def make_quantizer(self, rowwise: bool = True, columnwise: bool = True) -> Any:
        return make_quantizer(self.tex, rowwise=rowwise, columnwise=columnwise)

    def plain(self, rows: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.draw.randrange(1000))
        shape = (self.rows if rows is None else rows, self.cols)
        return torch.randn(shape, generator=generator).bfloat16()

    def dense(self) -> Any:
        return self.tex.quantize(self.plain(), self.quantizer)

    def matrix(self) -> torch.Tensor:
        """The rows of all groups, and some past them."""
        return self.plain(int(self.counts.sum()) + 128 * self.draw.randrange(2))

    def grouped(self) -> Any:
        return self.tex.group_quantize(self.matrix(), self.quantizer, 3, self.counts)

    def both(self) -> Any:
        return self.make_quantizer(True, self.draw.random() < 0.5)

    def equal(self) -> Any:
        return self.tex.group_quantize(self.plain(384), self.quantizer, 3, None)

    def rowwise(self) -> Any:
        self.cols = 128
        return self.tex.group_quantize(
            self.matrix(), self.make_quantizer(True, False), 3, self.counts
        )

    def ones(self) -> torch.Tensor:
        return torch.ones(self.rows)


def _weights(good: Good) -> tuple[Any, ...]:
    one = [good.tex.quantize(good.plain(), good.make_quantizer()) for _ in range(3)]
    data = [each._rowwise_data for each in one]
    scales = [each._rowwise_scale_inv for each in one]
    return data, scales, "mxfp8_rowwise", torch.device("cpu")


def _gemm(good: Good) -> tuple[Any, ...]:
    a, b = (good.tex.quantize(good.plain(), good.make_quantizer()) for _ in range(2))
    none = torch.empty(0)
    out = torch.zeros(good.rows, good.rows, dtype=torch.bfloat16)
    tail = (None, BF16, None, BF16, False, None, False, none, 0, False, False)
    return a, True, b, False, out, *tail


def _grouped_gemm(good: Good) -> tuple[Any, ...]:
    weights = [good.plain(128) for _ in range(3)]
    plain = good.matrix()
    tokens = good.tex.group_quantize(plain, good.make_quantizer(), 3, good.counts)
    outputs = [torch.zeros(128, good.cols).bfloat16() for _ in weights]
    dy = good.tex.group_quantize(
        torch.ones(plain.shape[0], 128).bfloat16(), good.make_quantizer(), 3, good.counts
    )
    ones, none = torch.ones(3), torch.empty(0)
    tail = (None, None, ones, torch.zeros(3), none, none, False, 0)
    return tokens, False, dy, True, outputs, *tail


CALLS: dict[str, Callable[[Good], tuple[Any, ...]]] = {
    "quantize": lambda good: (good.plain(), good.quantizer, good.dense()),
    "bgrad_quantize": lambda good: (good.plain(), good.quantizer),
    "dequantize": lambda good: (good.dense(), BF16),
    "split_quantize": lambda good: (
        good.plain(),
        [good.rows - 64, 64],
        [good.quantizer, good.quantizer],
    ),
    "group_quantize": lambda good: (
        *(good.plain(384), good.quantizer, 3, None, None, None, None, good.equal()),
    ),
    "bgrad_group_quantize": lambda good: (good.matrix(), good.quantizer, 3, good.counts),
    "group_dequantize": lambda good: (good.grouped(), BF16),
    "group_requantize_inplace": lambda good: (
        *(good.rowwise(), good.both(), 3, good.counts, BF16),
    ),
    "swizzle_scales_for_gemm_": lambda good: (good.dense(),),
    "grouped_swizzle_for_gemm": lambda good: (good.grouped(), True, True),
    "swizzle_scales_and_pack_ptrs_for_discrete_weights": _weights,
    "generic_gemm": _gemm,
    "te_general_grouped_gemm_for_discrete_out": _grouped_gemm,
    "scaled_swiglu": lambda good: (good.plain(), good.ones(), None, 0),
    "scaled_dsrelu": lambda good: (good.plain(), good.plain(), good.ones(), None),
    "splits_to_offsets": lambda good: (good.counts, good.cols),
}


def _cut(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    found = tensor.clone()
    storage = found.untyped_storage()
    storage.resize_(draw.randrange(storage.nbytes()))
    return found


def _in_freed(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    flat = torch.cat((tensor.flatten(), tensor.flatten()))
    found = flat[draw.choice([0, tensor.numel()]) :][: tensor.numel()].view(tensor.shape)
    flat.untyped_storage().resize_(0)
    return found


SPOILS: dict[str, Callable[[torch.Tensor, random.Random], torch.Tensor]] = {
    "cut": _cut,
    "freed": _in_freed,
    "shorter": lambda tensor, draw: tensor.flatten()[: draw.randrange(tensor.numel())].clone(),
    "fewer rows": lambda tensor, draw: tensor[: draw.randrange(len(tensor))],
    "transposed": lambda tensor, draw: tensor.t() if tensor.dim() == 2 else tensor[None],
    "other type": lambda tensor, draw: tensor.to(draw.choice([torch.int32, torch.float64])),
    "empty": lambda tensor, draw: tensor.new_empty(0),
}
LOST = ("cut", "freed")
"""What is refused whatever the tensor is for."""


def run_spoiled(tex: Any, draw: random.Random) -> tuple[str, str, Exception | None]:
    """Make a call with one tensor spoiled; return its name, what was done, what it said."""
    name = draw.choice(list(CALLS))
    arguments = list(CALLS[name](Good(tex, draw)))
    holders = [(index, part) for index, value in enumerate(arguments) for part in _parts(value)]
    index, part = draw.choice(holders)
    how = draw.choice(list(SPOILS))
    spoiled = SPOILS[how](_get(arguments[index], part), draw)
    if part is None:
        arguments[index] = spoiled
    elif isinstance(part, int):
        arguments[index][part] = spoiled
    else:
        setattr(arguments[index], part, spoiled)
    try:
        function_of(tex, name)(*arguments)
    except REFUSALS as error:
        return name, f"{how} {index}.{part}", error
    return name, f"{how} {index}.{part}", None


def function_of(tex: Any, name: str) -> Callable[..., Any]:
    return getattr(tex if name in vars(tex) else tex.grouped_mlp_experimental, name)


def _parts(value: Any) -> list[Any]:
    """Name the tensors of an argument: itself (None), by place, or by attribute."""
    if isinstance(value, list):
        return [i for i, each in enumerate(value) if _is_full(each)]
    if capacity.tensors_in(value) == [value]:
        return [None] if _is_full(value) else []
    if hasattr(value, "get_data_tensors"):
        return [name for name, part in vars(value).items() if _is_full(part)]
    return []


def _get(value: Any, part: Any) -> torch.Tensor:
    if part is None:
        return value
    return value[part] if isinstance(part, int) else getattr(value, part)


def _is_full(value: Any) -> bool:
    return type(value) is torch.Tensor and value.numel() > 0
