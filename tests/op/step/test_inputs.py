# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which outputs a call wants, of what autograd says."""

from __future__ import annotations

import itertools

import pytest
import transformer_engine.pytorch  # noqa: F401  (what `inputs` imports of it)

from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.step import inputs


@pytest.mark.parametrize(("dw1", "dw2"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_is_trained_with_its_weight(dw1: bool, dw2: bool, bias: bool) -> None:
    """A linear whose weight is frozen has no bias gradient, whatever else is wanted."""
    wanted = inputs._outputs(True, dw1, bias, dw2, bias, True)
    always = {Output.Y, Output.DX, Output.DPROB}
    of_fc1 = {Output.DW1, *((Output.DB1,) if bias else ())} if dw1 else set()
    of_fc2 = {Output.DW2, *((Output.DB2,) if bias else ())} if dw2 else set()
    assert wanted == always | of_fc1 | of_fc2
