# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The ops' quantizers, not the recipe, say what a step quantizes to; what is no E4M3 runs unfused.

TE makes quantizers when the type of the recipe changes, so a layer keeps those of E4M3 under HYBRID
and the other way round.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_grouped_mlp
from te_grouped_mlp.op import decisions, environment
from te_grouped_mlp.op.plan import Reason
from tests.support import prequantized, step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

CASE = StepCase(splits=(128, 0, 256), hidden=128, ffn=64, bias=True, scale_bias=True)
CASES = {
    "grad": CASE,
    "main_grad": CASE.but(grad="fused", activation="srelu", scale_bias=False),
    "delayed": CASE.but(grad="main_grad", delay=True, activation="qgeglu"),
    "quantized": CASE.but(weight="quantized", activation="situ", bias=False, scale_bias=False),
    "fc1 frozen": CASE.but(frozen=frozenset({"fc1", "x"})),
    "only fc2": CASE.but(frozen=frozenset({"fc1", "x", "prob"}), bias=False, scale_bias=False),
}
SLOTS = [
    (index, mode, slot)
    for index in (0, 2)
    for mode, slot in (("forward", 0), ("forward", 1), ("backward", 0))
]


@pytest.fixture(autouse=True)
def fresh_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_decisions", type(decisions._decisions)(maxlen=256))


def recipe(hybrid: bool = False) -> Any:
    from transformer_engine.common.recipe import Format, MXFP8BlockScaling

    return MXFP8BlockScaling(fp8_format=Format.HYBRID if hybrid else Format.E4M3)


def run(model: Any, case: StepCase, under: Any) -> dict[str, Any]:
    """One step of a live model under a recipe, with new gradients."""
    import transformer_engine.pytorch as te

    inputs = step.make_inputs(case)
    for parameter in model.parameters():
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.fill_(0.5)
    extra = [inputs.split_sizes, inputs.prob, inputs.split_sizes]
    with te.autocast(enabled=under is not None, recipe=under):
        y = model(inputs.x, *extra, *([inputs.prob] if case.bias and case.scale_bias else []))
    y.backward(inputs.dy)
    for op in (model[0], model[2]) if case.delay else ():
        op.backward_dw()
    return step.collect(case, model, inputs, y)


def renew(model: Any, under: Any) -> None:
    """What steps without recipe and then with one do to the quantizers."""
    for op in model:
        op.reset_recipe_state(recipe=None)
        op.reset_recipe_state(recipe=under)


def unfused(case: StepCase, change: Any = None) -> dict[str, Any]:
    """The step of TE's unfused ops: under HYBRID, or under E4M3 with changed quantizers."""
    with step.switches(NVTE_CUTEDSL_FUSED_GROUPED_MLP="0"):
        model = step.make_model(case)
        if change is None:
            renew(model, recipe(hybrid=True))
        else:
            run(model, case, recipe())
            change(model)
        found = run(model, case, recipe(hybrid=change is None))
        assert type(step.fused_op(model)).__name__ == "GroupedLinear"
    return found


def last_refusal() -> Any:
    decision = te_grouped_mlp.explain()[-1]
    assert decision.path == "unfused"
    assert dict(decision.refusals)["upstream"].detail.endswith("does not fuse anew")
    return dict(decision.refusals)["reference"]


@pytest.mark.filterwarnings("ignore:Quantizer is being updated:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_live_layer_under_hybrid(name: str) -> None:
    """With the quantizers of E4M3 it goes on; with those of HYBRID the unfused ops take it."""
    case = CASES[name]
    expected = unfused(case)
    model = step.make_model(case)
    first = run(model, case, recipe())
    step.assert_same(run(model, case, recipe(hybrid=True)), first)
    renew(model, recipe(hybrid=True))
    for under in (recipe(hybrid=True), recipe()):
        step.assert_same(run(model, case, under), expected)
    assert last_refusal().reason is Reason.GRADIENT_FORMAT
    renew(model, recipe())
    step.assert_same(run(model, case, recipe()), first)
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")


def set_e5m2(model: Any, index: int, mode: str, slot: int) -> None:
    quantizers = model[index]._quantizers[mode]
    for quantizer in quantizers[slot :: 2 if mode == "forward" else 1]:
        quantizer.dtype = type(quantizer.dtype).kFloat8E5M2


@pytest.mark.parametrize(("index", "mode", "slot"), SLOTS)
def test_an_e5m2_quantizer_under_an_e4m3_recipe(index: int, mode: str, slot: int) -> None:
    expected = unfused(CASE, lambda model: set_e5m2(model, index, mode, slot))
    model = step.make_model(CASE)
    first = run(model, CASE, recipe())
    set_e5m2(model, index, mode, slot)
    found = run(model, CASE, recipe())
    step.assert_same(found, expected)
    assert not step.same_bits(found["dx"], first["dx"])
    refusal = last_refusal()
    assert refusal.reason is (Reason.RECIPE if mode == "forward" else Reason.GRADIENT_FORMAT)
    assert f"FC{1 + index // 2} quantizes its" in refusal.detail
    assert "by MXFP8Quantizer to kFloat8E5M2" in refusal.detail


def test_a_quantizer_of_another_class() -> None:
    """Also of a subclass: what it changes is not known."""
    model = step.make_model(CASE)
    run(model, CASE, recipe())
    for mode, slot in (("forward", 0), ("backward", 0)):
        quantizer = model[2]._quantizers[mode][slot]
        made, quantizer.__class__ = type(quantizer), type("Other", (type(quantizer),), {})
        # What TE's extension says to it, once the unfused ops have the call.
        with pytest.raises(RuntimeError, match="quantizer is a Other; allowed: MXFP8Quantizer"):
            run(model, CASE, recipe())
        assert last_refusal().reason is Reason.RECIPE
        assert "by Other to kFloat8E4M3" in last_refusal().detail
        quantizer.__class__ = made


def test_a_named_backend_runs_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.BACKEND_SWITCH, "reference")
    model = step.make_model(CASE)
    run(model, CASE, recipe())
    run(model, CASE, recipe(hybrid=True))
    set_e5m2(model, 2, "backward", 0)
    with pytest.raises(ValueError, match="backend 'reference': the recipe quantizes gradients to"):
        run(model, CASE, recipe())


def test_quantizers_of_another_recipe_say_nothing_about_one_that_is_asked_about() -> None:
    """TE makes new ones when the type of the recipe changes, and keeps them when not."""
    from transformer_engine.common.recipe import Float8CurrentScaling

    model = step.make_model(CASE)
    for op in model[0], model[2]:
        op.reset_recipe_state(recipe=Float8CurrentScaling())
    (decision,) = te_grouped_mlp.explain(model, recipe=recipe())
    assert decision.path == "reference"
    (decision,) = te_grouped_mlp.explain(model, recipe=recipe(hybrid=True))
    assert dict(decision.refusals)["reference"].reason is Reason.GRADIENT_FORMAT
    for op in model[0], model[2]:
        op.reset_recipe_state(recipe=recipe())
    (decision,) = te_grouped_mlp.explain(model, recipe=recipe(hybrid=True))
    assert decision.path == "reference"


def in_e5m2(tensor: torch.Tensor, *, ready: bool) -> Any:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    quantizer = MXFP8Quantizer(tex.DType.kFloat8E5M2, rowwise=True, columnwise=ready)
    quantizer.optimize_for_gemm = ready
    sizes = torch.tensor(CASE.splits)
    return tex.group_quantize(tensor.detach(), quantizer, len(CASE.splits), sizes)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("name", ["x", "dy"])
def test_tokens_in_e5m2_are_refused(name: str, ready: bool) -> None:
    """Their bytes would be read as E4M3."""
    case = CASE.but(grad="main_grad")
    model, inputs = step.make_model(case), step.make_inputs(case)
    setattr(inputs, name, in_e5m2(getattr(inputs, name), ready=ready))
    label = "input" if name == "x" else "grad_output"
    grads = [w.main_grad for w in model.parameters() if hasattr(w, "main_grad")]
    before = [grad.clone() for grad in grads]
    with pytest.raises(
        ValueError, match=f"{label} is a GroupedTensor of MXFP8Quantizer to kFloat8E5M2"
    ):
        step.run_model(model, case, inputs)
    assert all(map(torch.equal, grads, before))


def test_a_quantized_gradient_of_a_step_without_recipe_is_refused() -> None:
    case = CASE.but(mxfp8=False)
    model, inputs = step.make_model(case), step.make_inputs(case)
    dy = prequantized.prequantize(inputs.dy, case, ready=False)
    with step.switches(NVTE_GROUPED_MLP_BACKEND="reference"):
        y = step.forward(model, case, inputs)
        with pytest.raises(ValueError, match="grad_output is a GroupedTensor; allowed without a"):
            y.backward(dy)


def test_class_attributes_of_an_activation_are_the_instances() -> None:
    """A subclass may say at its class what others say at each instance."""
    case = StepCase(splits=(128,), hidden=64, ffn=64, activation="srelu")
    for name, field in (
        ("_grouped_mlp_unit_activation_scale", "unit_scale"),
        ("activation_recompute_in_mlp", "recompute"),
    ):
        expected = step.run_step(case.but(**{field: True}))
        model, inputs = step.make_model(case), step.make_inputs(case.but(**{field: True}))
        activation = model[1]
        vars(activation).pop(name, None)
        activation.__class__ = type("Mine", (type(activation),), {name: True})
        found = step.collect(case, model, inputs, step.run_model(model, case, inputs))
        step.assert_same(found, expected)
        if field == "unit_scale":
            assert found["dprob"] is None
        setattr(activation, name, False)
        inputs = step.make_inputs(case)
        assert inputs.prob.grad is None
        step.run_model(model, case, inputs)
        assert inputs.prob.grad is not None
