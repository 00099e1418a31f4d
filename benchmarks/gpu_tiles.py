# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The tiles among which the native backend's were chosen, and a key for each."""

from __future__ import annotations

import dataclasses
from typing import Any

from te_grouped_mlp.measure.bench.layer import step_keys
from te_grouped_mlp.measure.bench.shapes import Shape
from te_grouped_mlp.op.backends.cutedsl.config import Op, Tile
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey
from te_grouped_mlp.op.formats import DType

TILES = {
    Op.FC1_ACT: (
        Tile(128, 256, 2, 1), Tile(128, 256, 1, 2), Tile(128, 192, 1, 2, True),
        Tile(128, 192, 1, 1, True), Tile(64, 256, 2, 1, True), Tile(128, 128, 1, 2, True),
    ),
    Op.FC2_FORWARD: (
        Tile(128, 256, 2, 1), Tile(128, 256, 1, 2), Tile(128, 192, 2, 1, True),
        Tile(128, 192, 1, 2, True), Tile(128, 128, 1, 2, True), Tile(64, 256, 2, 1, True),
    ),
    Op.DACT_DGRAD: (
        Tile(128, 128, 1, 2, True), Tile(128, 128, 2, 1, True), Tile(128, 192, 1, 2, True),
        Tile(64, 256, 2, 1, True), Tile(64, 256, 1, 2, True),
    ),
    Op.FC1_WGRAD: (
        Tile(128, 192, 2, 1, True), Tile(128, 192, 1, 2, True), Tile(128, 128, 1, 2, True),
        Tile(128, 256, 2, 1), Tile(64, 256, 2, 1, True),
    ),
}  # fmt: skip
TILES[Op.FC1_DGRAD] = TILES[Op.FC2_FORWARD]
TILES[Op.FC2_WGRAD] = TILES[Op.FC1_WGRAD]


def part_keys() -> dict[tuple[Op, Tile, str], KernelKey]:
    """One key for each kernel, tile and variant of the parts' table."""
    found = {}
    for base in step_keys(Shape(1, 64, 64, 64), DType.FLOAT32, accumulate=True):
        for tile in TILES.get(base.op, ()):
            for variant, changes in _VARIANTS.get(base.op, {"": {}}).items():
                found[base.op, tile, variant] = dataclasses.replace(base, tile=tile, **changes)
    return found


_WGRADS = {"fp32+=": {}, "bf16=": {"out": DType.BFLOAT16, "accumulate": False}}
_VARIANTS: dict[Op, dict[str, dict[str, Any]]] = {
    Op.DACT_DGRAD: {
        "bare": {"scale": None, "dprob": False}, "scale": {"dprob": False}, "dprob": {},
    },
    Op.FC1_WGRAD: _WGRADS,
    Op.FC2_WGRAD: _WGRADS,
}  # fmt: skip
