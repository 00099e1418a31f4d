# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The enumerations of tex that Transformer Engine (TE) mirrors in Python.

TE asserts at import that `DType` and `NVTE_Fused_Attn_Backend` equal its own, name by name and
value by value; `tests/integration/standalone/test_enums.py` asserts all of them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

_MODULE = "transformer_engine_torch"


def _enum(name: str, members: dict[str, int]) -> Any:
    """Make an enum that pickles as a name of tex, as the compiled one does."""
    return IntEnum(name, members, module=_MODULE)


DType = _enum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
FP8FwdTensors = _enum(
    "FP8FwdTensors",
    {
        f"GEMM{gemm}_{part}": 3 * (gemm - 1) + slot
        for gemm in (1, 2, 3)
        for slot, part in enumerate(("INPUT", "WEIGHT", "OUTPUT"))
    },
)
FP8BwdTensors = _enum(
    "FP8BwdTensors",
    {
        f"GRAD_{part}{gemm}": 2 * (gemm - 1) + slot
        for gemm in (1, 2, 3)
        for slot, part in enumerate(("OUTPUT", "INPUT"))
    },
)
NVTE_Fused_Attn_Backend = _enum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)
# Transformer Engine takes the integers of these while it is imported; nothing here uses them.
NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    {
        "NVTE_SBHD": 0,
        "NVTE_BSHD": 1,
        "NVTE_THD": 2,
        "NVTE_BSHD_2SBHD": 3,
        "NVTE_SBHD_2BSHD": 4,
        "NVTE_THD_2BSHD": 5,
        "NVTE_THD_2SBHD": 6,
        "NVTE_BHSD": 7,
        "NVTE_QKV_Format_NOT_SET": 8,
    },
)
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", {"BYTEMAP": 0, "BITMAP_U8": 1})
NVTEQBHistogramMode = _enum("NVTEQBHistogramMode", {"TWO_KERNEL": 0, "FUSED_ATOMIC": 1})
