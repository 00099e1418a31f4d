# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A hash of tensors, to compare steps bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

_BYTES = 8


def digest(
    tensors: torch.Tensor | Mapping[str, torch.Tensor | None] | Iterable[torch.Tensor | None],
) -> str:
    """Return a hash of the bytes of tensors, as 16 hexadecimal digits.

    Two results are equal bit for bit exactly if their hashes are equal: NaN equals itself, and -0
    differs from 0. Waits for the device; the host holds one tensor at a time.

    Args:
        tensors: One tensor, of which the bytes count alone, in row-major order (what
            ``te-grouped-mlp replay`` prints); tensors by name, in any order; or tensors in an
            order that counts. None, for a gradient that there is not, is a value of its own.
    """
    if isinstance(tensors, torch.Tensor):
        return _of_one(tensors)
    if isinstance(tensors, Mapping):
        named = sorted(tensors.items())
    else:
        named = [(str(index), tensor) for index, tensor in enumerate(tensors)]
    whole = hashlib.blake2b(digest_size=_BYTES)
    for name, tensor in named:
        one = "none" if tensor is None else _of_one(tensor)
        whole.update(f"{name} {one}\n".encode())
    return whole.hexdigest()


def _of_one(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    # Through a bytearray: numpy, the usual way to a tensor's bytes, need not be installed.
    data = bytearray(flat.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(flat)
    return hashlib.blake2b(data, digest_size=_BYTES).hexdigest()
