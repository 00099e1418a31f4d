# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What is refused and why, for every frontend; who computes which sum in a fixed order."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from te_grouped_mlp.cli.frontend_releases import RELEASES
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.cudnn import capability
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import NVFP4, DType
from te_grouped_mlp.op.layout import Kernel, Launch, Output, RowExtent
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind
from tests.op.backends.cudnn.facts import NEWEST, NO_BIAS, call, environment, problem

WORKING = RELEASES[RELEASES.index("1.27.0") :]
EITHER = {RowExtent.PACKED, RowExtent.BUFFER}


def launches(problem: Problem, call: Call, env: Environment) -> dict[Kernel, Launch]:
    found = capability.plan_launches(problem, call, env)
    assert not isinstance(found, Reject), found
    return {launch.kernel: launch for launch in found}


# What a frontend has ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("release", RELEASES)
def test_which_frontend_takes_which_activation(release: str, kind: Activation) -> None:
    refusal = capability.refusal(problem(kind), environment(release))
    needed = {Activation.SITU_GLU: "1.28.0", Activation.TANH_SRELU: "1.29.0"}.get(kind, "1.27.0")
    if release not in WORKING:
        assert refusal is not None
        assert refusal.reason is Reason.PACKAGE
        assert "too old" in refusal.detail
    elif RELEASES.index(release) < RELEASES.index(needed):
        assert refusal is not None
        assert refusal.reason is Reason.WRAPPER
    else:
        assert refusal is None


@pytest.mark.parametrize("release", WORKING)
def test_only_wrappers_that_can_compute_every_row_do(release: str) -> None:
    found = launches(problem(), call(), environment(release))
    assert all(launch.extents == EITHER for launch in found.values())
    found = launches(problem(Activation.SRELU), call(), environment(release))
    packed = {kernel for kernel, launch in found.items() if launch.extents != EITHER}
    assert packed == {Kernel.FC1_ACT, Kernel.DACT_DGRAD}
    assert found[Kernel.FC1_ACT].extents == {RowExtent.PACKED}


DGLU_KEEPS_ORDER = {"1.29.1", "1.31.0", "1.32.0"}
DSRELU_KEEPS_ORDER = set(RELEASES[RELEASES.index("1.28.0") :])


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("kind", [Activation.SWIGLU, Activation.SRELU])
@pytest.mark.parametrize("release", WORKING)
def test_who_keeps_the_order_of_its_sums(release: str, kind: Activation, bias: bool) -> None:
    """Not by version: 1.30.0 lost what 1.29.1 had. The gated kernel cannot with FC1's bias."""
    without = () if bias else NO_BIAS
    found = launches(
        problem(kind, bias=bias), call(*without, deterministic=True), environment(release)
    )
    keeps = release in (DGLU_KEEPS_ORDER if kind.is_gated else DSRELU_KEEPS_ORDER)
    keeps = keeps and not (bias and kind.is_gated)
    dact = found.pop(Kernel.DACT_DGRAD)
    assert dact.outputs == ({Output.DPROB, Output.DB1} if bias else {Output.DPROB})
    assert dact.deterministic == (dact.outputs if keeps else frozenset())
    assert bool(dact.cause) is not keeps
    # Everything else is fixed: among it FC2's bias gradient and the scale's, which are ours.
    assert all(launch.deterministic == launch.outputs for launch in found.values())
    if bias:
        assert found[Kernel.FC2_BIAS_GRAD].outputs == {Output.DB2, Output.DPROB}


def test_the_cause_says_what_to_change() -> None:
    def cause(release: str, bias: bool, deterministic: bool) -> str:
        wanted = call(*(() if bias else NO_BIAS), deterministic=deterministic)
        return launches(problem(bias=bias), wanted, environment(release))[Kernel.DACT_DGRAD].cause

    assert "install nvidia-cudnn-frontend 1.31" in cause("1.30.0", False, True)
    assert "take the bias off FC1" in cause(NEWEST, True, True)
    assert "ask before the forward" in cause(NEWEST, False, False)
    assert cause(NEWEST, False, True) == ""


@pytest.mark.parametrize("kind", [Activation.SWIGLU, Activation.SRELU])
def test_sums_that_nobody_wants_vary_for_nobody(kind: Activation) -> None:
    env = environment("1.27.0")
    for wanted in (call(*NO_BIAS, Output.DPROB), call(*NO_BIAS, Output.DPROB, unit_scale=True)):
        dact = launches(problem(kind), wanted, env)[Kernel.DACT_DGRAD]
        assert dact.outputs == frozenset()
        assert dact.cause == ""
    frozen = call(Output.DX, Output.DW1, Output.DB1, Output.DPROB)
    assert Kernel.DACT_DGRAD not in launches(problem(kind, bias=True), frozen, env)


def test_a_frozen_fc1_frees_the_gated_kernel_from_the_bias() -> None:
    wanted = call(Output.DB1, Output.DW1, deterministic=True)
    dact = launches(problem(bias=True), wanted, environment())[Kernel.DACT_DGRAD]
    assert dact.deterministic == {Output.DPROB}
    assert capability.runs_deterministic(problem(bias=True), wanted, environment())
    assert not capability.runs_deterministic(problem(bias=True), call(), environment())


def test_a_forward_alone_has_no_backward() -> None:
    only = call(*(set(Output) - {Output.Y}))
    expected = {Kernel.QUANTIZE_INPUT, Kernel.FC1_ACT, Kernel.FC2_FORWARD}
    assert launches(problem(), only, environment()).keys() == expected


# What is refused ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Reason, dict[str, Any], dict[str, Any]]] = {
    "cpu": (Reason.DEVICE, {"device": "cpu"}, {}),
    "no gpu": (Reason.ARCHITECTURE, {}, {"sm": Absent("no CUDA device")}),
    "hopper": (Reason.ARCHITECTURE, {}, {"sm": (9, 0)}),
    "rubin": (Reason.ARCHITECTURE, {}, {"sm": (10, 7)}),
    "consumer": (Reason.ARCHITECTURE, {}, {"sm": (12, 0)}),
    "standalone": (Reason.PACKAGE, {}, {"standalone": True}),
    "no frontend": (Reason.PACKAGE, {}, {"wrappers": Absent("not installed")}),
    "no wrappers": (Reason.PACKAGE, {}, {"wrappers": {}}),
    "no wgrad kernel": (Reason.WGRAD_SWITCH, {}, {"switches": Switches(no_frontend_wgrad=True)}),
    "no recipe": (Reason.RECIPE, {"recipe": RecipeKind.NONE}, {}),
    "nvfp4": (Reason.RECIPE, {"recipe": RecipeKind.NVFP4}, {}),
    "hybrid": (Reason.GRADIENT_FORMAT, {"recipe_detail": "gradients in E5M2"}, {}),
    "scaled bias on fc1": (Reason.OPTION, {"fc1": LinearSpec(512, 512, True, True)}, {}),
    "many experts": (Reason.OPTION, {"num_groups": 65}, {}),
    "odd width": (Reason.FEATURES, {"fc1": LinearSpec(528, 512)}, {}),
    "other expansion": (Reason.FEATURES, {"fc1": LinearSpec(512, 256)}, {}),
    "halves": (Reason.INTERLEAVE, {"activation": ActivationSpec(Activation.SWIGLU)}, {}),
    "beta": (
        Reason.OPTION,
        {"activation": ActivationSpec(Activation.SITU_GLU, interleave=32, beta2=0.0)},
        {},
    ),
    "clamp": (
        Reason.OPTION,
        {
            "activation": ActivationSpec(Activation.TANH_SRELU, clamp_scale=float("nan")),
            "fc1": LinearSpec(512, 256),
        },
        {},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_problems(name: str) -> None:
    reason, changes, facts = REFUSED[name]
    refusal = capability.refusal(problem(**changes), environment(**facts))
    assert refusal is not None
    assert refusal.reason is reason
    assert capability.plan_launches(problem(**changes), call(), environment(**facts)) == refusal


def test_rubin_is_refused_by_name() -> None:
    refusal = capability.refusal(problem(), environment(sm=(10, 7)))
    assert refusal is not None
    assert "Rubin" in refusal.detail


@pytest.mark.parametrize("sm", [(10, 0), (10, 3)])
def test_blackwell_is_taken(sm: tuple[int, int]) -> None:
    assert capability.refusal(problem(), environment(sm=sm)) is None


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (Reason.ALIGNMENT, {"rows": 1152}),
        (Reason.DTYPE, {"dtype": DType.FLOAT32}),
        (Reason.DTYPE, {"prob_dtype": DType.E4M3}),
        (Reason.RECIPE, {"format": NVFP4}),
    ],
)
def test_refused_calls(reason: Reason, changes: dict[str, Any]) -> None:
    found = capability.plan_launches(problem(), call(**changes), environment())
    assert isinstance(found, Reject)
    assert found.reason is reason
    (value,) = changes.values()
    assert str(getattr(value, "value", getattr(value, "name", value))) in found.detail


@pytest.mark.parametrize("kind", TensorKind)
def test_taken_calls(kind: TensorKind) -> None:
    for changes in ({}, {"rows": 0}, {"dtype": DType.FLOAT16}, {"prob_dtype": DType.BFLOAT16}):
        assert launches(problem(), call(input_kind=kind, **changes), environment())


def test_only_the_test_host_allows_a_cpu() -> None:
    assert capability.Placement() == capability.GPU
    on_cpu = problem(device="cpu")
    assert capability.refusal(on_cpu, environment()) is not None
    placement = capability.Placement(device="cpu", standalone=True)
    assert capability.refusal(on_cpu, environment(standalone=True), placement) is None


def test_it_is_imported_without_torch_te_and_the_frontend() -> None:
    code = """
import sys
for name in ("torch", "transformer_engine", "transformer_engine_torch", "cudnn"):
    sys.modules[name] = None
import te_grouped_mlp.op.backends.cudnn.capability
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
