# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults that upstream's op has when nobody looks, and traps of the kernels' contract.

First what reading upstream's module showed, one test each; then what a caller of the frontend's
kernels has to know, as far as it concerns an op on a CPU.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_grouped_mlp
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.layout import Kernel, Output, RowExtent
from te_grouped_mlp.op.plan import Plan, Reason
from tests.op import fixtures
from tests.support import step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SINGLE = StepCase(splits=(256,), hidden=128, ffn=64)
SEVERAL = StepCase(splits=(128, 0, 256), buffer_rows=512, hidden=128, ffn=64, fill=math.nan)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Plan, tuple[Any, ...]]]:
    """Record every device operation: its name, the plan and the other arguments."""
    calls: list[tuple[str, Plan, tuple[Any, ...]]] = []

    def spy(name: str) -> None:
        original = getattr(ReferenceBackend, name)

        def run(self: Any, plan: Plan, *args: Any) -> Any:
            calls.append((name, plan, args))
            return original(self, plan, *args)

        monkeypatch.setattr(ReferenceBackend, name, run)

    for name in ("fc1_act", "gemm", "dact_dgrad", "wgrad"):
        spy(name)
    return calls


def recipe(name: str = "MXFP8BlockScaling", **options: Any) -> Any:
    from transformer_engine.common import recipe as recipes

    if "fp8_format" in options:
        options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
    return getattr(recipes, name)(**options)


def declined(ops: list[Any], *, under: Any) -> Reason:
    """Return why our backend does not fuse the ops."""
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    assert grouped_mlp.fuse_glu_ops(ops, recipe=under) == ops
    found = [
        decision.refusals
        for decision in te_grouped_mlp.explain()
        if decision.problem is not None and decision.problem.num_groups == ops[0].num_groups
    ]
    return dict(found[-1])["reference"].reason


# Upstream's latent issues -----------------------------------------------------------------------


@pytest.mark.parametrize("fill", [3.0, math.nan])
def test_1_bias_and_weight_gradients_of_one_padded_expert_agree_on_its_rows(fill: float) -> None:
    """Upstream sums the bias gradient over the split and multiplies all rows of the buffer."""
    case = SINGLE.but(buffer_rows=512, fill=fill, bias=True)
    fixtures.assert_padding_invisible(case)
    found = step.run_step(case)
    ones = step.make_inputs(case).dy[: case.live].double().sum(0)
    assert torch.allclose(found["db2"][0].double(), ones, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(
    ("number", "changes"),
    [(11, {"weight": "grouped"}), (12, {"bias": True}), (13, {"bias": True, "scale_bias": True})],
    ids=["2 single grouped weight", "3 FC2 bias", "scaled FC2 bias"],
)
def test_2_and_3_nvfp4_is_declined(number: int, changes: dict[str, Any]) -> None:
    """Upstream passes unswizzled scales of a grouped weight; a plain FC2 bias raises inside."""
    ops = list(step.make_model(SINGLE.but(splits=(128,) * number, **changes)))
    assert declined(ops, under=recipe("NVFP4BlockScaling")) is Reason.RECIPE


def test_4_a_bias_scale_gets_its_whole_gradient() -> None:
    """Both uses of the one probability tensor count, in its one gradient."""
    case = SEVERAL.but(bias=True, scale_bias=True, buffer_rows=None)
    found = step.run_step(case)
    fixtures.assert_right(case, found)
    without = step.run_step(case.but(scale_bias=False))
    assert not torch.allclose(found["dprob"], without["dprob"], rtol=0.05)


def test_4_a_bias_scale_of_fc1_is_not_ignored() -> None:
    """Upstream's fused op takes such an FC1 and then fails in the count of gradients."""
    import transformer_engine.pytorch as te

    case = SINGLE.but(splits=(128,) * 14)
    fc1 = te.ops.GroupedLinear(14, 128, 128, bias=True, scale_bias=True)
    ops = [fc1, *list(step.make_model(case))[1:]]
    assert declined(ops, under=recipe()) is Reason.OPTION


FROZEN = {
    "fc1": (Output.DW1, Kernel.FC1_WGRAD),
    "fc2": (Output.DW2, Kernel.FC2_WGRAD),
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_5_a_frozen_linear_has_no_weight_gradient(frozen: str, bias: bool, launched: Any) -> None:
    """Upstream has one flag for both linears and their biases."""
    output, kernel = FROZEN[frozen]
    step.run_step(SEVERAL.but(frozen=frozenset({frozen}), bias=bias))
    kernels = [args[0] for name, _, args in launched if name == "wgrad"]
    assert kernels == [other for _, other in FROZEN.values() if other is not kernel]
    plan = launched[0][1]
    assert not plan.call.wants(output, Output.DB1 if frozen == "fc1" else Output.DB2)


@pytest.mark.parametrize("frozen", [frozenset(), frozenset({"prob"})], ids=["dprob", "no dprob"])
@pytest.mark.parametrize("scale_bias", [False, True])
def test_6_every_extra_input_has_an_entry(
    frozen: frozenset[str], scale_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fuser counts them: one for FC1, one for the activation, one or two for FC2."""
    case = SEVERAL.but(bias=True, scale_bias=scale_bias, frozen=frozen)
    model, inputs = step.make_model(case), step.make_inputs(case)
    y = step.forward(model, case, inputs)
    fused, returned = step.fused_op(model), []
    original = type(fused).fuser_backward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned.append(original(self, *args, **kwargs))
        return returned[-1]

    monkeypatch.setattr(type(fused), "fuser_backward", spy)
    y.backward(inputs.dy)
    extra = returned[0][2]
    assert [len(each) for each in extra] == [op.num_extra_inputs for op in model]
    assert (extra[1][0] is None) is bool(frozen)
    assert extra[0] == (None,)


def usages(model: Any) -> list[tuple[Any, ...]]:
    names = ("rowwise_usage", "columnwise_usage", "optimize_for_gemm", "internal")
    return [
        tuple(getattr(quantizer, name) for name in names)
        for op in (model[0], model[2])
        for quantizers in op._quantizers.values()
        for quantizer in quantizers
    ]


@pytest.mark.parametrize("arrives", ["plain", "prequantized"])
@pytest.mark.parametrize(
    "base",
    [SINGLE, SEVERAL, SEVERAL.but(frozen=frozenset({"fc1", "prob", "x"}))],
    ids=["1g", "3g-pad", "fc2 alone"],
)
def test_7_and_8_quantizers_stay_as_they_were(base: StepCase, arrives: str) -> None:
    """Upstream leaves row-wise usage off after a requantize, and GEMM-ready output on."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    model, inputs = step.make_model(base), step.make_inputs(base)
    step.forward(model, base, inputs)
    fused, before = step.fused_op(model), []
    original = fused.fuser_forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        # TE's fuser has set what it wants for this call by now.
        before.append(usages(model))
        return original(*args, **kwargs)

    fused.fuser_forward = spy
    dy = inputs.dy
    if arrives == "prequantized":
        dy = tex.group_quantize(
            tensor=dy,
            quantizer=MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False),
            num_tensors=len(base.splits),
            first_dims=inputs.split_sizes,
        )
    for _ in range(2):
        step.run_model(model, base, inputs, dy=dy)
        assert usages(model) == before[-1]


def test_8_an_unfused_call_of_the_same_ops_is_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.pytorch as te

    case = SEVERAL.but(buffer_rows=None)
    fused = step.make_model(case)
    step.run_model(fused, case, step.make_inputs(case))
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0")
    expected = step.run_step(case, fused=None)
    again, inputs = te.ops.Sequential(*fused), step.make_inputs(case)
    for parameter in fused.parameters():
        parameter.grad = None
    y = step.run_model(again, case, inputs)
    assert type(step.fused_op(again)).__name__ == "GroupedLinear"
    step.assert_same(step.collect(case, again, inputs, y), expected)


def run_under(model: Any, inputs: Any, under: Any) -> torch.Tensor:
    import transformer_engine.pytorch as te

    with te.autocast(enabled=True, recipe=under):
        return model(inputs.x, inputs.split_sizes, inputs.prob, inputs.split_sizes)


def test_9_what_a_recipe_came_to_is_looked_at_in_each_call(launched: Any) -> None:
    """TE's cache of fused ops knows the type only, so the op that E4M3 made meets HYBRID."""
    model, inputs = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
    y = run_under(model, inputs, recipe())
    # TE keeps the quantizers of E4M3, and its unfused ops go on with them.
    assert step.same_bits(run_under(model, inputs, recipe(fp8_format="HYBRID")), y)
    for op in model[0], model[2]:
        op.reset_recipe_state(recipe=None)
        op.reset_recipe_state(recipe=recipe(fp8_format="HYBRID"))
    launched.clear()
    for again in recipe(fp8_format="HYBRID"), recipe():
        run_under(model, inputs, again)
    assert launched == []


# Traps of the kernels' contract -----------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_rows_past_the_live_ones_are_not_written_inside(activation: str, launched: Any) -> None:
    """The kernels leave them as the allocator gave them; what leaves the op is zero there."""
    case = SEVERAL.but(activation=activation)
    found = step.run_step(case)
    dact = next(args for name, _, args in launched if name == "dact_dgrad")
    pre_activation = dact[2]
    assert pre_activation[case.live :].isnan().all()
    assert pre_activation[: case.live].isfinite().all()
    for name in ("y", "dx", "dprob"):
        assert not found[name][case.live :].any(), name


@pytest.mark.parametrize("splits", [(256,), (128, 128), (256, 0)], ids=str)
@pytest.mark.parametrize("wrappers", ["none", "all"])
def test_only_one_group_may_use_runtime_offsets(
    splits: tuple[int, ...], wrappers: str, launched: Any
) -> None:
    """The frontend refuses that argument for several groups, whatever the rows."""
    with environment.override(wrappers=fixtures.FRONTENDS[wrappers]):
        step.run_step(SINGLE.but(splits=splits))
    extents = {plan.layout.extent for _, plan, _ in launched}
    assert extents == {RowExtent.BUFFER if len(splits) == 1 else RowExtent.PACKED}


def test_a_legal_call_does_not_open_the_door_for_an_illegal_one() -> None:
    """The frontend's check is skipped when a kernel is cached, so features are checked here."""
    for number, hidden in ((21, 128), (22, 96), (23, 128), (24, 96)):
        case = SINGLE.but(splits=(128,) * number, hidden=hidden)
        if hidden == 128:
            step.run_step(case)
        else:
            assert declined(list(step.make_model(case)), under=recipe()) is Reason.FEATURES


def test_the_order_of_scales_travels_with_them(launched: Any) -> None:
    """A compact scale buffer has as many bytes as one in tile order: only the flag tells."""
    from te_grouped_mlp.op.backends.reference.arguments import Segment, read
    from te_grouped_mlp.op.tensors.operands import Axis

    step.run_step(SINGLE.but(hidden=256))
    x = next(args for name, _, args in launched if name == "fc1_act")[0]
    assert x.row.swizzled
    segment = Segment(0, 0, 256)
    values = read(x, Axis.ROW, segment, "x")
    wrong = dataclasses.replace(x, row=dataclasses.replace(x.row, swizzled=False))
    assert values.isfinite().all()
    assert not torch.equal(read(wrong, Axis.ROW, segment, "x"), values)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
@pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "3g-pad"])
def test_calls_in_flight_share_nothing(base: StepCase, order: tuple[int, int]) -> None:
    """Two forwards of one op before their backwards: the frontend has one workspace for both."""
    cases = (base, base.but(seed=7))
    alone = []
    for case in cases:
        model = step.make_model(base)
        inputs = step.make_inputs(case)
        y = step.run_model(model, case, inputs)
        alone.append(step.collect(case, model, inputs, y))
    model = step.make_model(base)
    given = [step.make_inputs(case) for case in cases]
    outputs = [step.forward(model, case, inputs) for case, inputs in zip(cases, given, strict=True)]
    for index in order:
        for parameter in model.parameters():
            parameter.grad = None
        outputs[index].backward(given[index].dy)
        found = step.collect(base, model, given[index], outputs[index])
        step.assert_same(found, alone[index])


def test_dprob_is_not_added_to_what_was_there() -> None:
    """The kernel accumulates into its buffer; a second step must not see the first one's."""
    model, inputs = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
    seen = []
    for _ in range(2):
        inputs.prob.grad = None
        step.run_model(model, SEVERAL, inputs)
        seen.append(inputs.prob.grad)
    assert step.same_bits(seen[0], seen[1])
    step.run_model(model, SEVERAL, inputs)
    assert torch.equal(inputs.prob.grad, 2 * seen[0]), "autograd's own accumulation"


CHANGED: dict[str, Callable[[Any], None]] = {
    "qgeglu": lambda op: setattr(op._clamped, "alpha", 9.0),
    "situ": lambda op: setattr(op, "beta1", 0.1),
    "tanh_srelu": lambda op: setattr(op, "tanh_clamp_scale", 0.1),
}


@pytest.mark.parametrize("activation", CHANGED)
def test_the_backward_has_the_parameters_of_its_forward(activation: str) -> None:
    """Nothing compares the two in the frontend; here they are part of the plan."""
    case = SEVERAL.but(activation=activation)
    expected = step.run_step(case)
    model, inputs = step.make_model(case), step.make_inputs(case)
    y = step.forward(model, case, inputs)
    CHANGED[activation](model[1])
    y.backward(inputs.dy)
    step.assert_same(step.collect(case, model, inputs, y), expected)
    changed = step.forward(model, case, inputs)
    assert not step.same_bits(changed.detach(), expected["y"])


def test_nothing_grows_with_random_splits() -> None:
    """The frontend remembers each row count for ever. 500 steps keep no more than 100 did."""
    case = StepCase(splits=(128, 128, 256), hidden=64, ffn=64)
    model, draw = step.make_model(case), random.Random(2)

    def run(count: int) -> None:
        for _ in range(count):
            splits = tuple(128 * draw.randrange(3) for _ in case.splits)
            rows = sum(splits) + 128 * draw.randrange(40)
            current = case.but(splits=splits, buffer_rows=rows)
            with torch.no_grad():
                step.forward(model, current, step.make_inputs(current))

    run(100)
    tracemalloc.start()
    # Until the plans kept are all of traced memory: the cache is bounded, not empty.
    run(200)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    run(500)
    # Garbage that waits, and tuples that Python keeps for the next one, are no growth.
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 150_000
