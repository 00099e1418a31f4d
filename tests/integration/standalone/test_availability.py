# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What is announced is there: recipes, the device's questions, and the dtype of autocast."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

# TE's ops ask these of CUDA; a CPU machine answers with an error, or with what never changes.
QUESTIONS = re.compile(r"torch\.cuda\.|(?:is_autocast_enabled|get_autocast_\w*dtype)\(|\"cuda\"")
# Modules that keep their torch, and why their question does no harm.
HARMLESS = {
    "basic.bias": "compares a device with CUDA, and makes the parameter anew where it is given",
    "basic.l2normalization": "compiles ahead only where CUDA is available",
    "fused.userbuffers_backward_linear": "refuses a device that is not CUDA",
}

RECIPES = {
    "MXFP8BlockScaling": "is_mxfp8_available",
    "Float8CurrentScaling": "is_fp8_available",
    "DelayedScaling": "is_fp8_available",
    "Float8BlockScaling": "is_fp8_block_scaling_available",
    "NVFP4BlockScaling": "is_nvfp4_available",
}


def linear(te, **options):
    options = {"device": "cpu", "dtype": torch.bfloat16, "bias": False, **options}
    return te.ops.Linear(64, 64, **options)


def tokens(dtype=torch.bfloat16, **options):
    return torch.ones(32, 64, dtype=dtype, **options)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_where_it_is_announced_and_says_why_where_not(te, name):
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    recipe, state = getattr(recipes, name)(), FP8GlobalStateManager.quantization_state
    available, reason = getattr(te, RECIPES[name])(return_reason=True)
    assert available is (name == "MXFP8BlockScaling")
    assert (reason == "") is available
    if available:
        with te.autocast(enabled=True, recipe=recipe):
            assert FP8GlobalStateManager.is_fp8_available() == (True, "")
            assert linear(te)(tokens()).isfinite().all()
    else:
        assert "not available in standalone" in reason
        with pytest.raises(RuntimeError, match=re.escape(reason)), te.autocast(recipe=recipe):
            pass
    # A refused region has not been entered: what follows is computed without a recipe.
    assert not state.fp8_enabled
    assert state.autocast_depth == 0
    assert not FP8GlobalStateManager.is_fp8_available()[0]


def test_the_default_recipe_is_one_that_is_there(te):
    assert type(te.get_default_recipe()).__name__ == "MXFP8BlockScaling"


def test_every_op_of_te_that_asks_cuda_is_answered(te):
    from te_grouped_mlp.integration.standalone import overrides

    folder = Path(te.__file__).parent / "ops"
    asking = set()
    for file in folder.rglob("*.py"):
        if any(QUESTIONS.search(line) for line in file.read_text().splitlines()):
            asking.add(".".join(file.relative_to(folder).with_suffix("").parts))
    prefix = "transformer_engine.pytorch.ops."
    answered = {row.module.removeprefix(prefix) for row in overrides.TABLE if row.name == "torch"}
    assert asking - answered == set(HARMLESS) & asking
    assert answered & set(HARMLESS) == set()
    assert {"basic.basic_linear", "op", "fused.forward_linear_bias_add"} <= asking & answered


@pytest.mark.skipif(torch.cuda.is_available(), reason="the modules run where CUDA is")
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_the_modules_of_te_say_that_they_need_cuda(te, name):
    sizes = (2, 64, 64) if name == "GroupedLinear" else (64, 64)
    with pytest.raises(RuntimeError, match="needs CUDA"):
        getattr(te, name)(*sizes, device="cpu")


def _op(te, kind):
    """Return an op, its extra inputs, and the class that runs its linear."""
    ops = te.ops
    if kind == "linear":
        return linear(te, dtype=torch.float32), (), "BasicLinear"
    if kind == "linear and bias":
        return linear(te, bias=True), (), "ForwardLinearBiasActivation"
    if kind == "linear, bias and addition":
        chain = ops.Sequential(linear(te, bias=True), ops.AddExtraInput(in_place=True))
        return chain, (torch.zeros(32, 64, dtype=torch.float16),), "ForwardLinearBiasAdd"
    if kind == "linear, scale and addition":
        chain = ops.Sequential(linear(te), ops.ConstantScale(2.0), ops.AddExtraInput(in_place=True))
        return chain, (torch.zeros(32, 64, dtype=torch.float16),), "ForwardLinearScaleAdd"
    options = {"device": "cpu", "dtype": torch.float32, "bias": False}
    return ops.GroupedLinear(1, 64, 64, **options), (torch.tensor([32]),), "GroupedLinear"


KINDS = [
    "linear",
    "linear and bias",
    "linear, bias and addition",
    "linear, scale and addition",
    "grouped linear",
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="autocast of the CPU governs without CUDA")
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_of_the_cpu_gives_the_dtype(te, kind):
    op, extra, expected = _op(te, kind)
    x = tokens(torch.float32, requires_grad=True)
    model = op if isinstance(op, te.ops.Sequential) else te.ops.Sequential(op)
    with torch.autocast("cpu", torch.float16):
        y = model(x, *extra)
    assert y.dtype is torch.float16
    classes = [type(one).__name__ for one, _ in model._module_groups[0]._forward_ops]
    assert expected in classes
    y.backward(torch.ones_like(y))
    assert x.grad.dtype is torch.float32
    assert all(p.grad.dtype is p.dtype for p in model.parameters())


def test_a_placeholder_gradient_lies_where_tensors_go(te):
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    first, second = (base.get_dummy_wgrad([2, 3], torch.bfloat16, zero=True) for _ in range(2))
    assert first.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert first is not second
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first.float().cpu(), torch.zeros(2, 3))
