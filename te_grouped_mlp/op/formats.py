# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Number formats of operands, as data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """Element types; the value is the name of the torch dtype."""

    __hash__ = object.__hash__  # as for layout.Output

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    E4M3 = "float8_e4m3fn"
    E5M2 = "float8_e5m2"
    E8M0 = "float8_e8m0fnu"
    E2M1_X2 = "float4_e2m1fn_x2"

    @staticmethod
    @functools.cache
    def of(dtype: object) -> DType:
        """Return the member for a torch dtype (or its name), without importing torch.

        Raises:
            TypeError: Naming the dtype and the allowed ones.
        """
        name = str(dtype).removeprefix("torch.")
        try:
            return DType(name)
        except ValueError:
            allowed = ", ".join(member.value for member in DType)
            raise TypeError(f"dtype is {name}; allowed: {allowed}") from None


@dataclass(frozen=True)
class Format:
    """How an operand's values are stored.

    Attributes:
        name: For messages.
        element: Element type; None for "the tensor's own dtype, no scales".
        scale: Type of the block scales, or None.
        block: Elements that share one scale along the quantized axis; 0 without scales.
        elements_per_byte: 2 for four-bit formats.
        rows_multiple: What each split, and the buffer, must be a multiple of.
        features_multiple: What in and out features must be a multiple of.
        tolerance: Relative error (Frobenius norm) that one product of two operands quantized to
            this format may show against the unquantized operands.
    """

    name: str
    element: DType | None
    scale: DType | None
    block: int
    elements_per_byte: int
    rows_multiple: int
    features_multiple: int
    tolerance: float

    @functools.cached_property
    def is_block_scaled(self) -> bool:
        """Whether operands carry block scales."""
        return self.block > 0


MXFP8 = Format("mxfp8", DType.E4M3, DType.E8M0, 32, 1, 128, 64, 0.06)
NVFP4 = Format("nvfp4", DType.E2M1_X2, DType.E4M3, 16, 2, 128, 64, 0.25)
UNQUANTIZED = Format("unquantized", None, None, 0, 1, 1, 64, 0.01)

SCALE_TILE_OUTER = 128
"""Rows (or columns, for column scales) that one tile of the swizzled scale layout spans."""
SCALE_TILE_INNER = 4
"""Block scales along the quantized axis that one tile spans."""
MAX_QUANTIZED_GROUPS = 64
"""Groups that one call of Transformer Engine 2.20's grouped quantization takes."""
