# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a fault in a builder of arguments would give a wrapper. Imports no pytest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values and strides of a tensor, one element further in memory."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    raw = torch.empty((last + 2) * size, dtype=torch.uint8)[size:].view(tensor.dtype)
    return raw.as_strided(tensor.shape, tensor.stride(), raw.storage_offset()).copy_(tensor)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps between the rows."""
    wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], 1, dtype=torch.uint8)
    return wide[:, : tensor.shape[1]].view(tensor.dtype)


# Name -> the keywords that a fault in a builder would give instead.
FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "int64 offsets": lambda given: {"padded_offsets": given["padded_offsets"].long()},
    "rows with gaps": lambda given: {"a_tensor": _spread(given["a_tensor"])},
    "block of 16": lambda _: {"sf_vec_size": 16},
    "narrow tile": lambda _: {"mma_tiler_mn": (256, 64)},
    "bf16 prob": lambda given: {"prob_tensor": given["prob_tensor"].bfloat16()},
    "fewer probs": lambda given: {"prob_tensor": given["prob_tensor"][:-256]},
    "fewer pre-activations": lambda given: {"c_tensor": given["c_tensor"][:-256]},
    "no norm": lambda _: {"norm_const_tensor": None},
    "wrong activation": lambda _: {"act_func": "swiglu"},
    "no beta": lambda _: {"beta_tensor": None},
    "any order": lambda _: {"deterministic": False},
    "tall weights": lambda given: {"b_tensor": given["b_tensor"].transpose(0, 1)},
    "column-major output": lambda given: {"d_tensor": given["d_tensor"].transpose(0, 1)},
    "misaligned descriptors": lambda given: {
        "descriptor_workspace": given["descriptor_workspace"][8:]
    },
    "misaligned prob": lambda given: {"prob_tensor": _shifted(given["prob_tensor"])},
    "misaligned pre-activations": lambda given: {"c_tensor": _shifted(given["c_tensor"])},
    "misaligned scales": lambda given: {"sfa_tensor": _shifted(given["sfa_tensor"])},
    "misaligned offsets": lambda given: {"padded_offsets": _shifted(given["padded_offsets"])},
    "misaligned bias": lambda given: {"bias_tensor": _shifted(given["bias_tensor"])},
    "int64 ends": lambda given: {"offsets_tensor": given["offsets_tensor"].long()},
}
