# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The steps that are compared with upstream, and in which layout of ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.oracle.jobs import Job
from tests.support.step import StepCase

NAN = float("nan")
ONE = {"splits": (256,)}
FOUR = {"splits": (512, 0, 256, 256), "buffer_rows": 1280, "fill": NAN}
GROUPS = {"1g": ONE, "4g": FOUR}
GATED = ("swiglu", "qgeglu", "situ")
UNARY = ("srelu", "tanh_srelu")
SINCE_2_20 = ("situ", "tanh_srelu")
"""Activations that older modules do not fuse."""


def job(**choices: Any) -> Job:
    """Return a job from fields of Job and of StepCase; probabilities are bfloat16."""
    own = {field.name for field in dataclasses.fields(Job)}
    mine = {key: value for key, value in choices.items() if key in own}
    rest = {key: value for key, value in choices.items() if key not in own}
    return Job(StepCase(**{"prob_dtype": torch.bfloat16, **rest}), **mine)


_PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale_bias": {"bias": True, "scale_bias": True},
    "grouped": {"weight": "grouped", "bias": True},
    "quantized": {"weight": "quantized"},
}
_CALLS: dict[str, dict[str, Any]] = {
    "main_grad": {"grad": "main_grad"},
    "fused_grad": {"grad": "fused"},
    "overwrite": {"grad": "overwrite"},
    "odd_features": {"hidden": 320, "ffn": 192, "bias": True},
    "wide": {"hidden": 512, "ffn": 256},
    "mixed_fc1": {
        "bias": (True, False),
        "weight": ("grouped", "discrete"),
        "grad": ("main_grad", "grad"),
        "delay": (False, True),
    },
    "mixed_fc2": {
        "bias": (False, True),
        "weight": ("quantized", "grouped"),
        "grad": ("grad", "fused"),
        "delay": (True, False),
    },
    "fp32_prob": {"prob_dtype": torch.float32, "round_prob": True, "split_dtype": torch.int32},
    "delayed": {"delay": True},
    "fp16": {"dtype": torch.float16, "prob_dtype": torch.float16},
    "mxfp8_x": {"prequantized": "x", "frozen": frozenset({"x"})},
    "mxfp8_dy": {"prequantized": "dy"},
    "frozen_fc1": {"frozen": frozenset({"fc1"})},
    "frozen_fc2": {"frozen": frozenset({"fc2"})},
    "frozen_weights": {"frozen": frozenset({"fc1", "fc2"})},
    "frozen_prob": {"frozen": frozenset({"prob"})},
    "frozen_x": {"frozen": frozenset({"x"})},
}


def right() -> dict[str, Job]:
    """Return the steps, by name, in which TE 2.20.2 is right."""
    found = {}
    for groups, rows in GROUPS.items():
        for activation in GATED + UNARY:
            for label, choices in _PARAMETERS.items():
                found[f"{groups}-{activation}-{label}"] = job(
                    activation=activation, **rows, **choices
                )
        for activation in ("swiglu", "srelu"):
            for label, choices in _CALLS.items():
                found[f"{groups}-{activation}-{label}"] = job(
                    activation=activation, **rows, **choices
                )
        for label in ("plain", "scale_bias"):
            found[f"{groups}-srelu-recompute-{label}"] = job(
                activation="srelu", recompute=True, **rows, **_PARAMETERS[label]
            )
    found["1g-swiglu-unit_scale"] = job(activation="swiglu", unit_scale=True, **ONE)
    # A padded single group is packed upstream too where the kernels know no other extent.
    for label in ("plain", "bias", "mxfp8_dy"):
        choices = {**_PARAMETERS, **_CALLS}[label]
        found[f"1g-padded-srelu-{label}"] = job(
            activation="srelu", splits=(256,), buffer_rows=512, fill=NAN, **choices
        )
    return found


def right_of(module: str) -> dict[str, Job]:
    """Return the steps in which a release's module is right, each in that release's layout."""
    found = right()
    if module == "2.20.2":
        return found
    found = {
        name: each
        for name, each in found.items()
        if each.case.activation not in SINCE_2_20 and "padded" not in name
    }
    if module == "2.19.0":
        # One group is always dense.
        return {
            name: each.but(layout="dense") if name.startswith("1g-srelu") else each
            for name, each in found.items()
        }
    # One group is packed like any other. The module misses what it calls for `scale_bias`, which
    # TE 2.20.2 has no more; prequantized tensors and unit scales came later.
    unknown = ("scale_bias", "mxfp8", "unit_scale")
    return {
        name: each.but(layout="packed") if name.startswith("1g") else each
        for name, each in found.items()
        if not any(word in name for word in unknown)
    }


NO_OFFSETS = "RuntimeError: grouped_swizzle_for_gemm: tensor has first_dims and no tensor_offsets"


def lacks_offsets(job: Job, *, dense: bool) -> bool:
    """Whether the own op of TE 2.19 and 2.20 ends in NO_OFFSETS.

    It wraps the quantized weight of one dense group with its row count, and swizzles FC2's without
    the offsets that the extension wants beside that (common/transformer_engine.cpp:304).
    """
    case = job.case
    return dense and len(case.splits) == 1 and case.linears[1].weight == "grouped"


def allowed_difference(name: str, output: str) -> float:
    """Return by how much an output may differ from upstream's, by design; 0 is not at all.

    Upstream rounds fp32 probabilities' gradient to bfloat16, and keeps the pre-activation of an
    fp16 model in bfloat16. The dense product that runs here rounds its sum with a main_grad once,
    where ours (and a GPU's) rounds the product to fp32 before it.
    """
    adds = any(word in name for word in ("main_grad", "fused_grad", "mixed"))
    if adds and name.startswith("1g") and output in ("dW1", "dW2"):
        return 2**-22
    if name.endswith("fp32_prob"):
        return 2**-8 if output == "dprob" else 0.0
    if name.endswith("fp16"):
        return 0.02 if output in ("dx", "dprob", "dW1") else 0.0
    return 0.0


_FAULTY_ROWS = {"splits": (512,), "buffer_rows": 768, "hidden": 512, "ffn": 256}


def tails(x: float, dy: float, prob: float) -> Job:
    """Return a padded single group with SwiGLU whose tails hold these values."""
    fills = (("x", x), ("dy", dy), ("prob", prob))
    return job(activation="swiglu", fills=fills, **_FAULTY_ROWS)


def packed_path(path: str, memory: int, **changes: Any) -> Job:
    """Return a padded single group, tails zero, through a path that upstream 2.20.2 packs."""
    choices = {
        "bias": {"bias": True},
        "x": {"prequantized": "x", "frozen": frozenset({"x"})},
        "dy": {"prequantized": "dy"},
    }[path]
    return job(**{"activation": "swiglu", **_FAULTY_ROWS, **choices, "memory": memory, **changes})


def odd_splits(activation: str, spill: str | None, **changes: Any) -> Job:
    """Return experts that end on odd multiples of 128."""
    choices = {"splits": (128, 384, 256, 256), "hidden": 512, "ffn": 256, "bias": True, **changes}
    return job(activation=activation, spill=spill, **choices)
