# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems, calls and environments of the native backend's tests; no GPU, no kernel package."""

from __future__ import annotations

import dataclasses
from typing import Any

from te_grouped_mlp.op.activations import ActivationSpec
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import UNQUANTIZED, DType
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind
from tests.op.backends.reference.cases import ACTIVATIONS

__all__ = ["ACTIVATIONS", "call_of", "environment", "problem_of"]

VERSIONS = {"quack": "0.6.5", "cutlass_dsl": "4.8.1", "triton": "3.6.0"}


def problem_of(spec: ActivationSpec, bias: bool = False, **changes: Any) -> Problem:
    """A problem that the backend takes, unless `changes` say otherwise."""
    linears = (
        LinearSpec(512, 256 * spec.expansion, has_bias=bias),
        LinearSpec(256, 512, has_bias=bias, scale_bias=bias),
    )
    problem = Problem(8, *linears, spec, RecipeKind.NONE, "", "cuda", DType.BFLOAT16)
    return dataclasses.replace(problem, **changes)


def call_of(**changes: Any) -> Call:
    """A call that the backend takes, unless `changes` say otherwise."""
    call = Call(
        rows=1000,
        dtype=DType.BFLOAT16,
        prob_dtype=DType.FLOAT32,
        rows_are_full=False,
        wanted=frozenset(Output),
        input_kind=TensorKind.PLAIN,
        unit_scale=False,
        deterministic=True,
        format=UNQUANTIZED,
    )
    return dataclasses.replace(call, **changes)


def environment(
    sm: Any = (9, 0), named: bool = False, standalone: bool = False, **versions: Any
) -> Environment:
    """A machine with the kernel packages; `versions` replaces single ones."""
    switches = Switches(backend="cutedsl" if named else "auto")
    return Environment(sm, VERSIONS | versions, Absent("none"), switches, standalone)
