# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Facts that follow from a problem or a call."""

from __future__ import annotations

import pytest

from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.problem import LinearSpec, RecipeKind
from tests.op.backends.cutedsl.problems import ACTIVATIONS, call_of, problem_of

SWIGLU = ACTIVATIONS["swiglu"]


def test_the_recipe_gives_the_format() -> None:
    assert problem_of(SWIGLU).format is UNQUANTIZED
    assert problem_of(SWIGLU, recipe=RecipeKind.MXFP8).format is MXFP8
    other = problem_of(SWIGLU, recipe=RecipeKind.OTHER, recipe_detail="hybrid")
    with pytest.raises(ValueError, match="recipe is hybrid, and the op was fused under another"):
        _ = other.format


def test_widths_are_those_of_the_tokens_once_each() -> None:
    problem = problem_of(SWIGLU, fc1=LinearSpec(512, 1024), fc2=LinearSpec(512, 256))
    assert problem.token_widths == (512, 1024, 256)


@pytest.mark.parametrize("output", Output)
def test_what_an_output_needs(output: Output) -> None:
    call = call_of(wanted=frozenset({Output.Y, output}))
    assert call.wants(output, Output.Y)
    assert call.needs_backward is (output is not Output.Y)
    through = {Output.DX, Output.DW1, Output.DB1, Output.DPROB}
    assert call.needs_dact is (output in through)
