# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The tensors of all experts looked at together.

A step asks hundreds of tensors the same questions, and each question to one of them takes the host
a tenth of a microsecond. They are asked anew in every pass, and never remembered: a user may move
or replace a parameter or its ``main_grad`` at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors import capacity


class Matrices(NamedTuple):
    """The experts' matrices in one tensor.

    Attributes:
        values: (G, rows, cols), the matrix at the lowest address first.
        descending: That is the last expert's.
    """

    values: torch.Tensor
    descending: bool = False


def _usable(table: Any) -> Any:
    """Return PyTorch's functions that describe a tensor to C, or None if they cannot be used.

    There are none before PyTorch 2.10, and later ones may be of a version that is not known here.
    """
    known = table is not None and _look(table, [torch.empty(1, device="cpu")]) is not None
    return table if known else None


def _look(table: Any, tensors: Sequence[torch.Tensor | None]) -> int | None:
    return _C.spacing(table, tensors, torch.Tensor, torch.nn.Parameter)


_TABLE = _usable(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


def distance(tensors: Sequence[torch.Tensor | None]) -> int | None:
    """Look at tensors that may be alike, as the weights of all experts are.

    Args:
        tensors: A list or a tuple.

    Returns:
        None unless all have the first one's shape, strides, dtype and device and a storage that was
        not freed, and also where one of them is no plain Tensor or Parameter with memory of its
        own: then each must be asked. Else
        the bytes from each tensor to the next; 0 for a single tensor and where they lie at
        different distances. Never synchronises, reads no element.
    """
    if _TABLE is None:
        return _ask_each(tensors)
    return _look(_TABLE, tensors)


def _ask_each(tensors: Sequence[Any]) -> int | None:
    if not tensors or not set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}:
        return None
    first, count = tensors[0], len(tensors)
    if first.is_meta or first.layout is not torch.strided:
        return None
    # Whole lists instead of a loop over hundreds of tensors.
    if (
        [each.layout for each in tensors].count(first.layout) != count
        or [each.dtype for each in tensors].count(first.dtype) != count
        or [each.device for each in tensors].count(first.device) != count
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
        What `distance` says.
    """
    step = distance(tensors)
    if step is None or (cut and not _have_memory(tensors, step)):
        for index, each in enumerate(tensors):
            check(name.format(index), each)
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
    return all(capacity.held(each) >= needed for each in tensors)


def joined(matrices: Sequence[torch.Tensor], step: int | None) -> torch.Tensor | None:
    """Return matrices as one (G, rows, cols) view, without a copy.

    Args:
        matrices: At least one.
        step: What `distance` says of them.

    Returns:
        None unless they are row-major and lie evenly in one storage, in ascending order and without
        overlap.
    """
    first, count = matrices[0], len(matrices)
    if step is None or first.dim() != 2:
        return None
    (rows, cols), stride, size = first.shape, first.stride(), first.element_size()
    extent = rows * stride[0] * size
    if count == 1:
        step = extent
    if stride[1] != 1 or stride[0] < cols or step < extent or step % size:
        return None
    # A storage that covers the last one covers them all, so nothing else can lie there.
    end = first.storage_offset() * size + (count - 1) * step + extent
    if end > first.untyped_storage().nbytes():
        return None
    return first.as_strided((count, rows, cols), (step // size, *stride))


def in_a_row(matrices: Sequence[torch.Tensor]) -> Matrices | None:
    """Return matrices as one view in either order of the experts, without a copy.

    In descending order (a buffer filled from its end, as Megatron fills those of parameters and
    gradients) the view begins at the last one, since PyTorch knows no negative strides. A single
    one is ascending.

    Returns:
        None unless they are alike (`distance`) and, in one of the two orders, as `joined` asks.
    """
    step = distance(matrices)
    if step is None:
        return None
    descending = step < 0
    view = joined(matrices[::-1] if descending else matrices, abs(step))
    return None if view is None else Matrices(view, descending)
