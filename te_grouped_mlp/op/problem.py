# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What is known of a grouped MLP when it is fused (Problem) and when it is called (Call)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum

from te_grouped_mlp.op.activations import ActivationSpec
from te_grouped_mlp.op.formats import MXFP8, NVFP4, UNQUANTIZED, DType, Format
from te_grouped_mlp.op.layout import Output


@dataclass(frozen=True)
class LinearSpec:
    """The facts of one GroupedLinear.

    Attributes:
        in_features, out_features: Of every expert.
        has_bias: Whether there is a bias.
        scale_bias: Whether the bias is multiplied by a per-row scale.
        single_grouped_weight, single_grouped_bias: One parameter for all experts.
        quantized_weight: The parameter itself is stored quantized.
        main_grad: Weight gradients go to ``weight.main_grad``.
        delay_wgrad: Weight gradients wait for ``backward_dw()``.
        distributed: The weight is sharded and materialised by its owner.
    """

    in_features: int
    out_features: int
    has_bias: bool = False
    scale_bias: bool = False
    single_grouped_weight: bool = False
    single_grouped_bias: bool = False
    quantized_weight: bool = False
    main_grad: bool = False
    delay_wgrad: bool = False
    distributed: bool = False


class RecipeKind(Enum):
    """The precision recipe in force."""

    __hash__ = object.__hash__  # as for layout.Output

    NONE = "none"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    OTHER = "other"


_FORMATS = {RecipeKind.NONE: UNQUANTIZED, RecipeKind.MXFP8: MXFP8, RecipeKind.NVFP4: NVFP4}


@dataclass(frozen=True)
class Problem:
    """Facts that hold for every call of a fused op; fusion is decided on these alone.

    Attributes:
        num_groups: Number of experts.
        fc1, fc2: The two linears.
        activation: The op between them.
        recipe: Kind of the recipe.
        recipe_detail: The content of the recipe that fusion depends on, for messages ("hybrid",
            "rht disabled"), empty when there is nothing to say.
        device: "cpu" or "cuda".
        dtype: Of the parameters.
    """

    num_groups: int
    fc1: LinearSpec
    fc2: LinearSpec
    activation: ActivationSpec
    recipe: RecipeKind
    recipe_detail: str
    device: str
    dtype: DType

    @functools.cached_property
    def format(self) -> Format:
        """The operand format of the recipe.

        Raises:
            ValueError: No fused op computes the recipe. TE fuses once for all recipes of one class.
        """
        fmt = _FORMATS.get(self.recipe)
        if fmt is None:
            detail = self.recipe_detail or self.recipe.value
            raise ValueError(
                f"recipe is {detail}, and the op was fused under another content of it; allowed: a "
                "recipe of another class, or another module, for what the unfused ops compute"
            )
        return fmt

    @functools.cached_property
    def token_widths(self) -> tuple[int, ...]:
        """The different feature widths of the token tensors of a step."""
        fc1, fc2 = self.fc1, self.fc2
        widths = fc1.in_features, fc1.out_features, fc2.in_features, fc2.out_features
        return tuple(dict.fromkeys(widths))

    @property
    def text(self) -> str:
        """The problem in a few words: experts, hidden and ffn features, activation, recipe."""
        recipe = "no recipe" if self.recipe is RecipeKind.NONE else self.recipe.value
        sizes = f"{self.num_groups} x {self.fc1.in_features} x {self.fc2.in_features}"
        return (
            f"{sizes} {self.activation.kind.value}, {recipe}, {self.dtype.value} on {self.device}"
        )


class TensorKind(Enum):
    """How a token tensor arrives."""

    PLAIN = "plain"
    PREQUANTIZED = "prequantized"
    """A GroupedTensor that holds quantized data."""


@dataclass(frozen=True)
class Call:
    """Facts of one forward call and of the backward that belongs to it.

    Attributes:
        rows: ``shape[0]`` of the token buffer.
        dtype: Compute dtype (autocast's, or the parameters').
        prob_dtype: Of the probabilities.
        rows_are_full: ``sum(split_sizes) == rows`` is known on the host, or promised.
        wanted: Which outputs are asked for; Y always, none of the others without gradients.
        input_kind: How the input arrives. (The output gradient's form is not known yet.)
        unit_scale: The activation scale is one and its tensor is not used.
        deterministic: Bit-identical results are demanded.
        format: Of the operands of the matrix products.
        split_multiple: The largest power of two up to 256 that divides every split that the host
            can read; None where it cannot.
    """

    rows: int
    dtype: DType
    prob_dtype: DType
    rows_are_full: bool
    wanted: frozenset[Output]
    input_kind: TensorKind
    unit_scale: bool
    deterministic: bool
    format: Format
    split_multiple: int | None = None

    def wants(self, *outputs: Output) -> bool:
        """Whether any of `outputs` is asked for."""
        return not self.wanted.isdisjoint(outputs)

    @functools.cached_property
    def needs_backward(self) -> bool:
        """Whether a backward may follow."""
        return self.wanted != frozenset({Output.Y})

    @functools.cached_property
    def needs_dact(self) -> bool:
        """Whether the backward goes through the activation."""
        return self.wants(Output.DX, Output.DW1, Output.DB1, Output.DPROB)
