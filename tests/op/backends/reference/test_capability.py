# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the reference backend plans: launches, extents, refusals."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from te_grouped_mlp.op.backends.reference import capability
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.backends.reference.capability import plan_launches, refusal
from te_grouped_mlp.op.environment import Switches
from te_grouped_mlp.op.formats import MXFP8, NVFP4, UNQUANTIZED, DType
from te_grouped_mlp.op.layout import Kernel, Output, RowExtent
from te_grouped_mlp.op.plan import Plan, Reason, Reject
from te_grouped_mlp.op.problem import RecipeKind, TensorKind
from tests.op.backends.reference.cases import (
    ACTIVATIONS,
    EVERY_WRAPPER,
    Case,
    environment,
)

BACKEND = ReferenceBackend()
AUTO = environment(switches=Switches())
EITHER = frozenset(RowExtent)
PACKED = frozenset({RowExtent.PACKED})


def facts(activation="swiglu", **changes):
    plan = Case(ACTIVATIONS[activation], (256,), 256, **changes).plan()
    return plan.problem, plan.call


def launches(problem, call, env=None):
    found = plan_launches(problem, call, env or environment())
    assert not isinstance(found, Reject), found
    return {launch.kernel: launch for launch in found}


def test_a_training_step_has_every_launch_in_order():
    problem, call = facts(fc2_bias=True)
    assert list(launches(problem, call)) == list(Kernel)


@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        ({}, {}),
        ({Output.DX}, {Kernel.QUANTIZE_GRAD, Kernel.DACT_DGRAD, Kernel.FC1_DGRAD}),
        ({Output.DW1}, {Kernel.QUANTIZE_GRAD, Kernel.DACT_DGRAD, Kernel.FC1_WGRAD}),
        ({Output.DW2}, {Kernel.QUANTIZE_GRAD, Kernel.FC2_WGRAD}),
        ({Output.DB1}, {Kernel.QUANTIZE_GRAD, Kernel.DACT_DGRAD}),
        ({Output.DPROB}, {Kernel.QUANTIZE_GRAD, Kernel.DACT_DGRAD}),
        ({Output.DB2}, {Kernel.FC2_BIAS_GRAD}),
    ],
    ids=lambda value: "+".join(sorted(each.value for each in value)) or "none",
)
def test_only_what_is_wanted_is_launched(wanted, kernels):
    problem, call = facts()
    call = dataclasses.replace(call, wanted=frozenset({Output.Y, *wanted}))
    forward = {Kernel.QUANTIZE_INPUT, Kernel.FC1_ACT, Kernel.FC2_FORWARD}
    found = launches(problem, call)
    assert set(found) == forward | set(kernels)
    assert set().union(*(launch.outputs for launch in found.values())) == call.wanted


def test_the_scale_of_a_bias_is_a_probability():
    problem, call = facts(fc2_bias=True, scale_bias=True)
    call = dataclasses.replace(call, wanted=frozenset({Output.Y, Output.DPROB}))
    assert launches(problem, call)[Kernel.FC2_BIAS_GRAD].outputs == {Output.DPROB}
    # A unit activation scale has no gradient of its own; the bias scale still has.
    alone = launches(problem, dataclasses.replace(call, unit_scale=True))
    assert Kernel.FC2_BIAS_GRAD in alone
    assert Kernel.DACT_DGRAD not in alone


def test_plain_operands_need_no_quantization():
    problem, call = facts(fmt=UNQUANTIZED)
    found = launches(problem, call)
    assert Kernel.QUANTIZE_INPUT not in found
    assert Kernel.QUANTIZE_GRAD not in found


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_launch_is_deterministic(activation):
    problem, call = facts(activation, fc1_bias=True, fc2_bias=True, scale_bias=True)
    for launch in launches(problem, call).values():
        assert launch.deterministic == launch.outputs


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "known",
    [None, frozenset(), EVERY_WRAPPER, {"glu", "quant"}],
    ids=["no frontend", "none", "every", "glu and quant"],
)
def test_extents_follow_the_wrappers(activation, known):
    problem, call = facts(activation)
    gated = problem.activation.is_gated
    found = launches(problem, call, environment(known))
    takes = {"glu", "dglu", "quant"} if known is None else known
    for kernel, wrapper in (
        (Kernel.FC1_ACT, "glu" if gated else "srelu"),
        (Kernel.DACT_DGRAD, "dglu" if gated else "dsrelu"),
        (Kernel.FC2_FORWARD, "quant"),
        (Kernel.FC1_DGRAD, "quant"),
    ):
        assert found[kernel].extents == (EITHER if wrapper in takes else PACKED), kernel
    for kernel in (
        Kernel.QUANTIZE_INPUT,
        Kernel.QUANTIZE_GRAD,
        Kernel.FC2_BIAS_GRAD,
        Kernel.FC1_WGRAD,
        Kernel.FC2_WGRAD,
    ):
        assert found[kernel].extents == EITHER, kernel


@pytest.mark.parametrize(
    ("activation", "full", "known", "dense"),
    [
        ("swiglu", True, None, True),
        ("swiglu", False, None, False),
        ("swiglu", True, frozenset(), False),
        ("srelu", True, None, False),
        ("srelu", True, EVERY_WRAPPER, True),
    ],
)
def test_layout_of_one_group(activation, full, known, dense):
    case = Case(ACTIVATIONS[activation], (256,), 256, full=full, env=environment(known))
    plan = case.plan()
    assert plan.layout.use_dense_single_group == dense
    assert plan.backend == "reference"


def test_several_groups_are_packed():
    case = Case(ACTIVATIONS["swiglu"], (128, 128), 256, full=True)
    assert not case.plan().layout.use_dense_single_group


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"device": "cuda"}, Reason.NOT_NAMED, "device is cuda"),
        ({"device": "xpu"}, Reason.DEVICE, "device is xpu"),
        ({"recipe": RecipeKind.NVFP4}, Reason.RECIPE, "recipe is nvfp4"),
        ({"recipe": RecipeKind.OTHER}, Reason.RECIPE, "recipe is other"),
        ({"recipe": RecipeKind.NONE}, Reason.NOT_NAMED, "no recipe"),
        ({"fc1.scale_bias": True}, Reason.OPTION, "scale_bias is set on FC1"),
        ({"recipe_detail": "hybrid"}, Reason.GRADIENT_FORMAT, "hybrid"),
        ({"fc1.in_features": 96}, Reason.FEATURES, "fc1.in_features is 96"),
        ({"fc2.out_features": 0}, Reason.FEATURES, "fc2.out_features is 0"),
        ({"fc2.in_features": 192}, Reason.FEATURES, "fc1.out_features is 256"),
        ({"activation.interleave": None}, Reason.INTERLEAVE, "interleave is None; allowed: 32"),
        ({"activation.interleave": 64}, Reason.INTERLEAVE, "interleave is 64; allowed: 32"),
    ],
    ids=str,
)
def test_problem_refusals(changes, reason, detail):
    problem, call = facts()
    for path, value in changes.items():
        part, _, name = path.rpartition(".")
        if part:
            value = dataclasses.replace(getattr(problem, part), **{name: value})
        problem = dataclasses.replace(problem, **{part or name: value})
    refused = refusal(problem, AUTO)
    assert refused is not None
    assert refused.reason is reason
    assert detail in refused.detail
    assert capability.plan(problem, call, AUTO) == refused


@pytest.mark.parametrize(
    ("fmt", "changes", "reason", "detail"),
    [
        (MXFP8, {"rows": 192}, Reason.ALIGNMENT, "rows is 192; allowed: multiples of 128"),
        (MXFP8, {"format": NVFP4}, Reason.RECIPE, "format is nvfp4"),
        (MXFP8, {"dtype": DType.E4M3}, Reason.DTYPE, "dtype is float8_e4m3fn"),
        (MXFP8, {"prob_dtype": DType.E5M2}, Reason.DTYPE, "probability dtype is float8_e5m2"),
        (
            UNQUANTIZED,
            {"input_kind": TensorKind.PREQUANTIZED},
            Reason.INPUT_KIND,
            "input is prequantized",
        ),
    ],
    ids=str,
)
def test_call_refusals(fmt, changes, reason, detail):
    problem, call = facts(fmt=fmt)
    assert refusal(problem, environment()) is None
    refused = capability.plan(problem, dataclasses.replace(call, **changes), environment())
    assert isinstance(refused, Reject)
    assert refused.reason is reason
    assert detail in refused.detail


def test_any_number_of_plain_rows():
    problem, call = facts(fmt=UNQUANTIZED)
    plan = capability.plan(problem, dataclasses.replace(call, rows=7), environment())
    assert isinstance(plan, Plan)


def test_cuda_tensors_only_when_named():
    problem, call = facts()
    problem = dataclasses.replace(problem, device="cuda")
    assert isinstance(capability.plan(problem, call, environment()), Plan)
    for name in ("auto", "cutedsl"):
        refused = capability.plan(problem, call, environment(switches=Switches(backend=name)))
        assert isinstance(refused, Reject)
        assert refused.reason is Reason.NOT_NAMED


def test_planning_is_pure():
    problem, call = facts()
    assert plan_launches(problem, call, environment()) == plan_launches(
        problem, call, environment()
    )


def test_imports_neither_torch_nor_te():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformer_engine', 'transformer_engine_torch'):\n"
        "    sys.modules[name] = None\n"
        "import te_grouped_mlp.op.backends.reference.capability\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
