# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Token tensors that only claim to be bf16: their storage holds E4M3 data and scales.

An op announces one by an attribute. Who reads it as bf16 computes finite nonsense.
"""

from __future__ import annotations

import importlib
from typing import Any

from te_grouped_mlp.op.te import adapter

INPUT = "ep_mxfp8_carrier_input"
GRAD = "ep_mxfp8_carrier_grad"

_DECODER = "mxfp8_carrier_to_grouped"
"""Its name in ``transformer_engine.pytorch.ep``, as proposed and not merged."""


def te_decodes() -> bool:
    """Whether TE has the proposed function that decodes a carrier; no released version has."""
    return hasattr(importlib.import_module("transformer_engine.pytorch.ep"), _DECODER)


def refuse(op: Any, attribute: str) -> None:
    """Refuse an op that announces a token tensor which only claims to be bf16.

    Args:
        op: FC1 for the input, FC2 for the output gradient.
        attribute: The announcement.

    Raises:
        RuntimeError: The op announces one.
    """
    if adapter.flag(op, attribute):
        raise RuntimeError(
            f"{attribute} is set on {type(op).__name__}, but no released Transformer Engine has a "
            "function that decodes such a tensor (proposed, and not merged: "
            f"transformer_engine.pytorch.ep.{_DECODER}); allowed: a plain tensor "
            "or a GroupedTensor, without the announcement"
        )
