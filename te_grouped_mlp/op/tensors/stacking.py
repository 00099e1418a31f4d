# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How the tensors of all experts lie: at a uniform stride in one storage, or scattered.

A step asks hundreds of tensors the same questions, and each question to one of them takes the host
a tenth of a microsecond. One call looks at them all, anew in every pass: a user may move or replace
a parameter or its ``main_grad`` at any time, so nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from te_grouped_mlp.op.extension import _C
from te_grouped_mlp.op.tensors import capacity
from te_grouped_mlp.op.tensors.tensor_dataclass import tensor_dataclass


@tensor_dataclass
class Stacked:
    """One tensor over all experts, and a sequence of theirs in the experts' order.

    Attributes:
        values: (G, ...), the tensor at the lowest address first.
        reversed_experts: That is the last expert's: a buffer filled from its end, as Megatron fills
            those of parameters and gradients. PyTorch knows no negative strides.
    """

    values: torch.Tensor
    reversed_experts: bool = False

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.values[-1 - expert if self.reversed_experts else expert]

    def __iter__(self) -> Iterator[torch.Tensor]:
        experts = self.values.unbind(0)
        return iter(experts[::-1] if self.reversed_experts else experts)


Scattered: TypeAlias = tuple[torch.Tensor, ...]
"""One tensor per expert, wherever it lies: copied to a stack, or passed as a table of addresses."""

Experts: TypeAlias = "Stacked | Scattered"


def _usable(table: Any) -> Any:
    """Return PyTorch's functions that describe a tensor to C, or None if they cannot be used.

    There are none before PyTorch 2.10, and later ones may be of a version that is not known here.
    """
    if not _C or table is None:
        return None
    trial = [torch.empty(1, device="cpu")]
    stride = _C.uniform_stride(table, trial, torch.Tensor, torch.nn.Parameter)
    return None if stride is None else table


_TABLE = _usable(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


def uniform_stride(tensors: Sequence[torch.Tensor | None]) -> int | None:
    """Look at tensors that may be alike, as the weights of all experts are.

    Args:
        tensors: A list or a tuple.

    Returns:
        None unless all have the first one's shape, strides, dtype and device and a storage that was
        not freed, and also where one of them is no plain Tensor or Parameter with memory of its
        own: then each must be asked. Else the bytes from each tensor to the next; 0 for a single
        tensor and where these differ. Never synchronises, reads no element.
    """
    if _TABLE is None:
        return _ask_each(tensors)
    stride: int | None = _C.uniform_stride(_TABLE, tensors, torch.Tensor, torch.nn.Parameter)
    return stride


def _ask_each(tensors: Sequence[Any]) -> int | None:
    if not tensors or not set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}:
        return None
    first, count = tensors[0], len(tensors)
    if first.is_meta or first.layout is not torch.strided:
        return None
    # Whole lists instead of a loop over hundreds of tensors.
    if (
        [tensor.layout for tensor in tensors].count(first.layout) != count
        or [tensor.dtype for tensor in tensors].count(first.dtype) != count
        or [tensor.device for tensor in tensors].count(first.device) != count
        or list(map(torch.Tensor.size, tensors)).count(first.shape) != count
        or list(map(torch.Tensor.stride, tensors)).count(first.stride()) != count
    ):
        return None
    storages = map(torch.Tensor.untyped_storage, tensors)
    if first.numel() and 0 in map(torch.UntypedStorage.nbytes, storages):
        return None
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    steps = {later - earlier for earlier, later in zip(addresses, addresses[1:], strict=False)}
    return steps.pop() if len(steps) == 1 else 0


def require(
    name: str,
    tensors: Sequence[torch.Tensor],
    check: Callable[[str, torch.Tensor], None],
    *,
    cut: bool = False,
) -> int | None:
    """Check every tensor, and ask only one of them where all are alike.

    Args:
        name: Of each, with a place for its number: "fc1.weight{}".
        tensors: At least one.
        check: Raises for a tensor that does not fit or lacks memory, given its name.
        cut: Also ask each one in a storage of its own whether that was made shorter, which takes
            longer than all else. A storage that was freed is always found.

    Returns:
        What `uniform_stride` says.
    """
    step = uniform_stride(tensors)
    if step is None or (cut and not _have_memory(tensors, step)):
        for index, tensor in enumerate(tensors):
            check(name.format(index), tensor)
    else:
        check(name.format(0), tensors[0])
    return step


def _have_memory(tensors: Sequence[torch.Tensor], step: int) -> bool:
    """Whether tensors that are alike have the memory that their shape takes."""
    needed = capacity.extent(tensors[0])
    lowest = tensors[-1] if step < 0 else tensors[0]
    if step and (len(tensors) - 1) * abs(step) + needed <= capacity.held(lowest):
        # All of them lie in the storage of one.
        return True
    storages = map(torch.Tensor.untyped_storage, tensors)
    if min(map(torch.UntypedStorage.nbytes, storages)) < needed:
        return False
    if not any(map(torch.Tensor.storage_offset, tensors)):
        return True
    return all(capacity.held(tensor) >= needed for tensor in tensors)


def as_stacked_view(experts: Experts | Sequence[torch.Tensor]) -> Stacked | None:
    """Return experts as one tensor, without a copy.

    Returns:
        None unless they are alike (`uniform_stride`), row-major, and lie at a uniform stride in one
        storage without overlap, in ascending or in descending order. A single one is ascending.
    """
    if isinstance(experts, Stacked):
        return experts
    stride = uniform_stride(experts)
    if stride is None:
        return None
    lowest = experts[-1] if stride < 0 else experts[0]
    shape, strides, size, extent = lowest.shape, lowest.stride(), lowest.element_size(), 1
    if strides and strides[-1] != 1:
        return None
    for length, step in zip(reversed(shape), reversed(strides), strict=True):
        if step < extent:
            return None
        extent = length * step
    count, bytes_each = len(experts), extent * size
    bytes_apart = bytes_each if count == 1 else abs(stride)
    if bytes_apart < bytes_each or bytes_apart % size:
        return None
    # A storage that covers the last one covers them all, so nothing else can lie there.
    end = lowest.storage_offset() * size + (count - 1) * bytes_apart + bytes_each
    if end > lowest.untyped_storage().nbytes():
        return None
    view = lowest.as_strided((count, *shape), (bytes_apart // size, *strides))
    return Stacked(view, stride < 0)


def stacked(experts: Experts | Sequence[torch.Tensor]) -> Stacked:
    """Return experts as one tensor: the view of `as_stacked_view` where there is one, else a copy.

    All must have one shape and dtype.
    """
    return as_stacked_view(experts) or copied(experts)


def copied(experts: Experts | Sequence[torch.Tensor]) -> Stacked:
    """Return experts of one shape and dtype in a new tensor, ascending."""
    # One kernel, and half the host time of stack, which makes a view of each first.
    return Stacked(torch.cat(tuple(experts)).view(len(experts), *experts[0].shape))


def packed_bytes(experts: Experts) -> torch.Tensor | None:
    """Return experts that follow each other in ascending order without gaps as uint8 (G, bytes).

    Returns:
        A view; None where they lie otherwise.
    """
    view = as_stacked_view(experts)
    if view is None or view.reversed_experts or not view.values.is_contiguous():
        return None
    return view.values.view(torch.uint8).view(len(view), -1)
