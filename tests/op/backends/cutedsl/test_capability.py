# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the native backend takes, and the cause of every refusal. No kernel package is needed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.cutedsl import capability
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED, DType
from te_grouped_mlp.op.layout import Kernel, Output, RowExtent
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import RecipeKind, TensorKind
from tests.op.backends.cutedsl.problems import ACTIVATIONS, call_of, environment, problem_of

SWIGLU = ACTIVATIONS["swiglu"]
UNDER_MXFP8 = {"recipe": RecipeKind.MXFP8}
MXFP8_CALL = {"format": MXFP8, "rows": 1024}


def linear(problem, which, **changes):
    return dataclasses.replace(
        problem, **{which: dataclasses.replace(getattr(problem, which), **changes)}
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("interleave", [32, None])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_taken(name, interleave, bias):
    spec = ACTIVATIONS[name]
    if spec.is_gated:
        spec = dataclasses.replace(spec, interleave=interleave)
    problem = problem_of(spec, bias)
    assert capability.refusal(problem, environment()) is None
    wanted = frozenset(Output) - (set() if bias else {Output.DB1, Output.DB2})
    launches = capability.plan_launches(problem, call_of(wanted=wanted), environment())
    assert not isinstance(launches, Reject)
    for launch in launches:
        assert launch.extents == {RowExtent.PACKED}
        assert launch.deterministic == launch.outputs
    kernels = [launch.kernel for launch in launches]
    assert (Kernel.FC2_BIAS_GRAD in kernels) == bias
    covered = frozenset().union(*(launch.outputs for launch in launches))
    assert covered == wanted


@pytest.mark.parametrize("sm", [(9, 0), (10, 0)], ids=["sm90", "sm100"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_taken_under_mxfp8(name, bias, sm):
    problem = problem_of(ACTIVATIONS[name], bias, **UNDER_MXFP8)
    env = environment(sm, named=True, standalone=True)
    assert capability.refusal(problem, env) is None
    wanted = frozenset(Output) - (set() if bias else {Output.DB1, Output.DB2})
    call = call_of(wanted=wanted, **MXFP8_CALL)
    launches = capability.plan_launches(problem, call, env)
    assert not isinstance(launches, Reject)
    for launch in launches:
        assert launch.extents == {RowExtent.PACKED}
        assert launch.deterministic == launch.outputs
    kernels = [launch.kernel for launch in launches]
    assert kernels == [each for each in Kernel if bias or each is not Kernel.FC2_BIAS_GRAD]
    assert frozenset().union(*(launch.outputs for launch in launches)) == wanted


REFUSED = {
    "cpu": ({"device": "cpu"}, Reason.DEVICE, "device is cpu; allowed: cuda"),
    "recipe": ({"recipe": RecipeKind.NVFP4}, Reason.RECIPE, "recipe is nvfp4; allowed: mxfp8, n"),
    "hybrid": (
        {"recipe": RecipeKind.MXFP8, "recipe_detail": "gradients are E5M2"},
        Reason.GRADIENT_FORMAT,
        "gradients are E5M2; allowed: E4M3 throughout",
    ),
    "halves under mxfp8": (
        {"recipe": RecipeKind.MXFP8, "activation": ActivationSpec(Activation.SWIGLU, None)},
        Reason.INTERLEAVE,
        "interleave is None; allowed: 32",
    ),
    "dtype": ({"dtype": DType.FLOAT16}, Reason.DTYPE, "dtype is float16; allowed: bfloat16"),
    "interleave": (
        {"activation": ActivationSpec(Activation.SWIGLU, 16)},
        Reason.INTERLEAVE,
        "interleave is 16; allowed: 32 or None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_problems_that_are_refused(name):
    changes, reason, text = REFUSED[name]
    refusal = capability.refusal(problem_of(SWIGLU, **changes), environment(standalone=True))
    assert refusal is not None
    assert refusal.reason is reason
    assert text in refusal.detail


@pytest.mark.parametrize(
    ("which", "changes", "reason", "text"),
    [
        ("fc1", {"in_features": 96}, Reason.FEATURES, "fc1.in_features is 96"),
        ("fc1", {"in_features": 0}, Reason.FEATURES, "fc1.in_features is 0"),
        ("fc1", {"out_features": 256}, Reason.FEATURES, "needs 2 times fc2.in_features, 256"),
        ("fc2", {"out_features": 100}, Reason.FEATURES, "fc2.out_features is 100"),
        ("fc1", {"scale_bias": True}, Reason.OPTION, "scale_bias is set on FC1"),
    ],
)
def test_linears_that_are_refused(which, changes, reason, text):
    refusal = capability.refusal(linear(problem_of(SWIGLU), which, **changes), environment())
    assert refusal is not None
    assert refusal.reason is reason
    assert text in refusal.detail


@pytest.mark.parametrize(
    ("sm", "named", "reason"),
    [
        ((9, 0), False, None),
        ((9, 0), True, None),
        ((10, 0), False, Reason.NOT_NAMED),
        ((10, 3), False, Reason.NOT_NAMED),
        ((10, 0), True, None),
        ((10, 3), True, None),
        ((8, 0), True, Reason.ARCHITECTURE),
        ((12, 0), True, Reason.ARCHITECTURE),
        (Absent("torch sees no CUDA device"), True, Reason.ARCHITECTURE),
    ],
)
def test_architectures(sm, named, reason):
    for changes in ({}, UNDER_MXFP8):
        env = environment(sm, named, standalone=True)
        refusal = capability.refusal(problem_of(SWIGLU, **changes), env)
        assert (refusal.reason if refusal else None) is reason


@pytest.mark.parametrize("sm", [(10, 0), (10, 3)], ids=["sm100", "sm103"])
@pytest.mark.parametrize(
    ("recipe", "deterministic", "taken"),
    [
        (RecipeKind.MXFP8, True, True),
        (RecipeKind.MXFP8, False, False),
        (RecipeKind.NONE, True, False),
        (RecipeKind.NONE, False, False),
    ],
)
def test_unnamed_on_blackwell_only_determinism_under_mxfp8_is_taken(
    recipe, deterministic, taken, sm
):
    fmt = MXFP8 if recipe is RecipeKind.MXFP8 else UNQUANTIZED
    call = call_of(format=fmt, rows=1024, deterministic=deterministic)
    problem, env = problem_of(SWIGLU, recipe=recipe), environment(sm)
    assert capability.refusal(problem, env).reason is Reason.NOT_NAMED
    found = capability.plan_launches(problem, call, env)
    assert isinstance(found, tuple) is taken
    if not taken:
        assert found.reason is Reason.NOT_NAMED


@pytest.mark.parametrize("named", [False, True])
def test_transformer_engines_extension_has_no_mxfp8_on_hopper(named):
    problem = problem_of(SWIGLU, **UNDER_MXFP8)
    refusal = capability.refusal(problem, environment((9, 0), named))
    assert refusal.reason is Reason.ARCHITECTURE
    assert "SM is 9.0" in refusal.detail
    assert refusal.detail.endswith("without extension and NVTE_GROUPED_MLP_STANDALONE=1")
    assert capability.refusal(problem_of(SWIGLU), environment((9, 0), named)) is None


@pytest.mark.parametrize("sm", [(8, 0), (12, 0)])
def test_a_demand_for_determinism_opens_no_other_gpu(sm):
    problem, call = problem_of(SWIGLU, **UNDER_MXFP8), call_of(**MXFP8_CALL)
    assert capability.plan_launches(problem, call, environment(sm)).reason is Reason.ARCHITECTURE


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"quack": Absent("quack-kernels is not installed")}, "quack-kernels is not installed"),
        ({"quack": "0.6.4"}, "quack-kernels is 0.6.4; allowed: 0.6.5"),
        ({"cutlass_dsl": "4.7.2"}, "nvidia-cutlass-dsl is 4.7.2; allowed: 4.8.x"),
        ({"cutlass_dsl": "4.10.0"}, "nvidia-cutlass-dsl is 4.10.0"),
        ({"triton": Absent("triton is not installed")}, "triton is not installed"),
    ],
)
def test_packages(versions, text):
    refusal = capability.refusal(problem_of(SWIGLU), environment(**versions))
    assert refusal is not None
    assert refusal.reason is Reason.PACKAGE
    assert text in refusal.detail


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"format": MXFP8}, Reason.RECIPE, "format is mxfp8"),
        ({"dtype": DType.FLOAT32}, Reason.DTYPE, "dtype is float32"),
        ({"prob_dtype": DType.FLOAT64}, Reason.DTYPE, "probability dtype is float64"),
        ({"input_kind": TensorKind.PREQUANTIZED}, Reason.INPUT_KIND, "prequantized"),
        ({"rows": (1 << 30) + 1}, Reason.ALIGNMENT, f"at most {1 << 30}"),
    ],
)
def test_calls_that_are_refused(changes, reason, text):
    found = capability.plan_launches(problem_of(SWIGLU), call_of(**changes), environment())
    assert isinstance(found, Reject)
    assert found.reason is reason
    assert text in found.detail


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"format": UNQUANTIZED}, Reason.RECIPE, "format is unquantized; recipe mxfp8 has mxfp8"),
        ({"dtype": DType.FLOAT16}, Reason.DTYPE, "dtype is float16"),
        ({"prob_dtype": DType.FLOAT64}, Reason.DTYPE, "probability dtype is float64"),
        ({"rows": 1000}, Reason.ALIGNMENT, "rows is 1000; allowed: multiples of 128"),
        ({"split_multiple": 64}, Reason.ALIGNMENT, "splits is 64; allowed: multiples of 128"),
        ({"rows": (1 << 30) + 128}, Reason.ALIGNMENT, f"at most {1 << 30}"),
        ({"input_kind": TensorKind.PREQUANTIZED}, None, ""),
        ({"split_multiple": 128}, None, ""),
        ({"prob_dtype": DType.BFLOAT16}, None, ""),
        ({"rows": 0, "split_multiple": 0}, None, ""),
    ],
)
def test_calls_under_mxfp8(changes, reason, text):
    problem, call = problem_of(SWIGLU, **UNDER_MXFP8), call_of(**MXFP8_CALL | changes)
    found = capability.plan_launches(problem, call, environment(standalone=True))
    if reason is None:
        assert isinstance(found, tuple)
    else:
        assert found.reason is reason
        assert text in found.detail


def test_launches_follow_what_is_wanted():
    def kernels(*wanted, **changes):
        call = call_of(wanted=frozenset({Output.Y, *wanted}), **changes)
        found = capability.plan_launches(problem_of(SWIGLU), call, environment())
        assert not isinstance(found, Reject)
        return [launch.kernel for launch in found][2:]

    assert kernels() == []
    assert kernels(Output.DW2) == [Kernel.FC2_WGRAD]
    assert kernels(Output.DPROB) == [Kernel.DACT_DGRAD]
    assert kernels(Output.DPROB, unit_scale=True) == []
    assert kernels(Output.DX) == [Kernel.DACT_DGRAD, Kernel.FC1_DGRAD]


def test_launches_under_mxfp8_follow_what_is_wanted():
    def kernels(*wanted, **changes):
        call = call_of(wanted=frozenset({Output.Y, *wanted}), **MXFP8_CALL, **changes)
        problem = problem_of(SWIGLU, **UNDER_MXFP8)
        found = capability.plan_launches(problem, call, environment(standalone=True))
        return [launch.kernel for launch in found][3:]

    assert kernels() == []
    assert kernels(Output.DW2) == [Kernel.QUANTIZE_GRAD, Kernel.FC2_WGRAD]
    assert kernels(Output.DB2) == [Kernel.FC2_BIAS_GRAD]
    assert kernels(Output.DPROB) == [Kernel.QUANTIZE_GRAD, Kernel.DACT_DGRAD]
    assert kernels(Output.DPROB, unit_scale=True) == []


def test_capability_imports_no_heavy_package():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformer_engine', 'quack', 'cutlass', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import te_grouped_mlp.op.backends.cutedsl.capability\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
