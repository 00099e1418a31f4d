# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A usual problem, call and machine, to be changed by a test. Imports no pytest."""

from __future__ import annotations

import dataclasses
from typing import Any

from te_grouped_mlp.cli.frontend_releases import RELEASES, wrappers
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import MXFP8, DType
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind

NEWEST = RELEASES[-1]


def environment(release: str = NEWEST, **changes: Any) -> Environment:
    fields: dict[str, Any] = {
        "sm": (10, 0),
        "versions": {},
        "wrappers": wrappers(release),
        "switches": Switches(),
        "standalone": False,
        **changes,
    }
    return Environment(**fields)


def problem(kind: Activation = Activation.SWIGLU, *, bias: bool = False, **changes: Any) -> Problem:
    spec = ActivationSpec(kind, interleave=32 if kind.is_gated else None)
    found = Problem(
        num_groups=4,
        fc1=LinearSpec(512, 256 * spec.expansion, has_bias=bias),
        fc2=LinearSpec(256, 512, has_bias=bias, scale_bias=bias),
        activation=spec,
        recipe=RecipeKind.MXFP8,
        recipe_detail="",
        device="cuda",
        dtype=DType.BFLOAT16,
    )
    return dataclasses.replace(found, **changes)


def call(*without: Output, **changes: Any) -> Call:
    found = Call(
        rows=1024,
        dtype=DType.BFLOAT16,
        prob_dtype=DType.FLOAT32,
        rows_are_full=False,
        wanted=frozenset(Output) - set(without),
        input_kind=TensorKind.PLAIN,
        unit_scale=False,
        deterministic=False,
        format=MXFP8,
    )
    return dataclasses.replace(found, **changes)


NO_BIAS = (Output.DB1, Output.DB2)
