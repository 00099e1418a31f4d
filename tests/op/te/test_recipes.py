# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A recipe is its class and every field of it, however it answers when asked for its kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

import te_grouped_mlp
from te_grouped_mlp.op.plan import Reason
from te_grouped_mlp.op.problem import RecipeKind
from te_grouped_mlp.op.te import quantizers
from tests.support import step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch")

CASE = StepCase(splits=(128, 128), hidden=128, ffn=64)
KINDS = {MXFP8BlockScaling: RecipeKind.MXFP8, NVFP4BlockScaling: RecipeKind.NVFP4}


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_the_known_fields_are_those_of_the_installed_version(cls: type) -> None:
    """A field that TE adds is unknown until somebody has looked at what it means here."""
    assert vars(cls()).keys() <= quantizers.KNOWN_FIELDS[cls]
    assert quantizers.read_recipe(cls()) == (KINDS[cls], "")


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_what_the_kernels_compute_needs_no_field_at_its_default(cls: type) -> None:
    options = {"fp8_dpa": True, "fp8_mha": True}
    assert quantizers.read_recipe(cls(**options)) == (KINDS[cls], "")
    assert quantizers.read_recipe(MXFP8BlockScaling(enable_2d_quantization=True)) == (
        RecipeKind.MXFP8,
        "",
    )


@pytest.mark.parametrize(
    ("recipe", "detail"),
    [
        (MXFP8BlockScaling(fp8_format=Format.HYBRID), quantizers.HYBRID),
        (NVFP4BlockScaling(disable_rht=True), "rht disabled"),
        (NVFP4BlockScaling(row_scaled_activation=True), "row_scaled_activation is True"),
        (NVFP4BlockScaling(nvfp4_4over6="weights"), "nvfp4_4over6 is 'weights'"),
    ],
    ids=["hybrid", "no rht", "row-scaled", "4 over 6"],
)
def test_content_that_fusion_depends_on(recipe: Any, detail: str) -> None:
    assert quantizers.read_recipe(recipe) == (KINDS[type(recipe)], detail)


def test_a_recipe_of_another_kind() -> None:
    assert quantizers.read_recipe(None) == (RecipeKind.NONE, "")
    assert quantizers.read_recipe(Float8BlockScaling()) == (RecipeKind.OTHER, "Float8BlockScaling")
    custom = CustomRecipe(qfactory=lambda role: role)
    assert quantizers.read_recipe(custom) == (RecipeKind.OTHER, "CustomRecipe")


def subclass(base: type) -> Any:
    """Return a recipe that rounds weights once more before they are quantized."""
    return type("Qat", (base,), {"rounds_weights": lambda self: True})()


def new_field(base: type) -> Any:
    """Return a recipe of a class of TE's that has a field which this version has not."""
    fields = [("rounds_weights", bool, dataclasses.field(default=False))]
    newer: Any = dataclasses.make_dataclass(base.__name__, fields, bases=(base,), repr=False)
    return newer(rounds_weights=True)


def new_attribute(base: type) -> Any:
    """Return a recipe on which a user set something."""
    recipe = base()
    recipe.rounds_weights = True
    return recipe


UNKNOWN = {"subclass": subclass, "field": new_field, "attribute": new_attribute}


@pytest.mark.parametrize("base", KINDS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_known_is_no_recipe_of_ours(what: str, base: type) -> None:
    kind, detail = quantizers.read_recipe(UNKNOWN[what](base))
    assert kind is RecipeKind.OTHER
    assert base.__name__ in detail
    assert ("rounds_weights is True" in detail) is (what == "attribute")


@pytest.mark.parametrize(
    ("default", "value", "off"),
    [
        (False, False, True),
        (None, None, True),
        ("none", "none", True),
        (0, 0, True),
        (False, True, False),
        (None, "dequantized", False),
        (True, True, False),
        (True, False, False),
        ("all", "all", False),
        (32, 32, False),
    ],
    ids=str,
)
def test_an_unknown_field_counts_unless_it_is_off(
    default: Any, value: Any, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at its default, where that is something: it may come from an environment variable."""
    fields = [("novelty", type(default), dataclasses.field(default=default))]
    cls: Any = dataclasses.make_dataclass("Newer", fields, bases=(MXFP8BlockScaling,), repr=False)
    known = quantizers.KNOWN_FIELDS[MXFP8BlockScaling]
    monkeypatch.setattr(quantizers, "KNOWN_FIELDS", {cls: known})
    kind, detail = quantizers.read_recipe(cls(novelty=value))
    assert (kind is not RecipeKind.OTHER) is off
    assert off or f"novelty is {value!r}" in detail


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_recipe_is_computed_by_the_unfused_ops(what: str) -> None:
    """They ask the recipe for its quantizers, so what it does to them is done."""
    recipe = UNKNOWN[what](MXFP8BlockScaling)
    model, inputs = step.make_model(CASE), step.make_inputs(CASE)
    with te.autocast(enabled=True, recipe=recipe):
        model(inputs.x, inputs.split_sizes, inputs.prob, inputs.split_sizes)
    assert type(step.fused_op(model)).__name__ == "GroupedLinear"
    (decision,) = te_grouped_mlp.explain(model, recipe=recipe)
    assert decision.path == "unfused"
    refused = dict(decision.refusals)["reference"]
    assert refused.reason is Reason.RECIPE
    assert "not known here" in refused.detail


def test_a_recipe_that_changes_under_a_fused_op_is_left_to_the_unfused_ops() -> None:
    """TE keeps fused ops by the type of the recipe."""
    model, inputs, recipe = step.make_model(CASE), step.make_inputs(CASE), MXFP8BlockScaling()

    def run() -> torch.Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            return model(inputs.x, inputs.split_sizes, inputs.prob, inputs.split_sizes)

    run()
    assert type(step.fused_op(model)).__name__ == "GroupedMLP_CuTeGEMMGLU"
    recipe.rounds_weights = True
    run()
    decision = te_grouped_mlp.explain()[-1]
    assert decision.path == "unfused"
    assert "rounds_weights is True, which is not known here" in str(decision)
