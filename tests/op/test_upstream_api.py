# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What users of upstream's module ask ours, and activations that are theirs or upstream's own."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import transformer_engine.pytorch as te

import te_grouped_mlp
from te_grouped_mlp.op import decisions, environment, execution, packages, selection
from te_grouped_mlp.op.layout import RowExtent
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.te import adapter
from tests.support import step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

CASE = StepCase(splits=(128, 128), hidden=128, ffn=64)


def module():
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    return grouped_mlp


@pytest.mark.parametrize(
    "name",
    [
        "is_supported",
        "grouped_gemm_activation_kernel",
        "grouped_gemm_dactivation_kernel",
        "grouped_gemm_quant_kernel",
        "grouped_gemm_wgrad_kernel",
        "grouped_gemm_act_hadamard_kernel",
        "grouped_gemm_dactivation_is_deterministic",
    ],
)
def test_capability_methods_have_a_cache_to_clear(name: str) -> None:
    for cls in (module().GroupedMLP_CuTeGEMMGLU, module().GroupedMLP_CuTeGEMMUnary):
        assert getattr(cls, name).cache_clear() is None


def test_is_supported_follows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module().GroupedMLP_CuTeGEMMGLU.is_supported()
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0")
    assert not module().GroupedMLP_CuTeGEMMGLU.is_supported()


def test_is_supported_where_only_upstream_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_grouped_mlp.op import fusion

    asked = []
    monkeypatch.setattr(fusion.upstream, "is_supported", lambda *, gated: asked.append(gated) or 7)
    with environment.override(sm=(10, 7)):
        assert module().GroupedMLP_CuTeGEMMUnary.is_supported()
    assert asked == [False]


def test_frontend_questions_follow_the_wrappers() -> None:
    names = ("_cudnn_frontend_version_supported", "_cudnn_frontend_supports_grouped_gemm_srelu")
    offsets = module()._cudnn_frontend_supports_single_group_runtime_offsets
    situ = module()._cudnn_frontend_supports_grouped_gemm_situglu
    gated, unary = (type(step.make_activation(CASE.but(activation=a))) for a in ("swiglu", "srelu"))
    with environment.override(wrappers=Absent("none")):
        assert not any(getattr(module(), name)() for name in names)
        assert not offsets(gated)
    full = {
        "glu": frozenset({RUNTIME_OFFSETS, "situ_beta1", "situ_beta2"}),
        "dglu": frozenset({RUNTIME_OFFSETS, "situ_beta1", "situ_beta2"}),
        "srelu": frozenset(),
        "dsrelu": frozenset(),
    }
    with environment.override(wrappers=full):
        assert all(getattr(module(), name)() for name in names)
        assert offsets(gated)
        assert not offsets(unary)
        assert situ()
    with environment.override(wrappers={**full, "dglu": frozenset()}):
        assert not situ()


def test_the_switch_off_asks_nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0")
    monkeypatch.setattr(environment, "current", lambda: pytest.fail("the machine was probed"))
    step.run_step(CASE, fused=None)


def test_a_subclass_of_an_activation_is_fused() -> None:
    class Mine(te.ops.ScaledSwiGLU):
        """A user's own."""

    model, inputs = step.make_model(CASE), step.make_inputs(CASE)
    mine = te.ops.Sequential(model[0], Mine(glu_interleave_size=32), model[2])
    y = step.run_model(mine, CASE, inputs)
    assert type(step.fused_op(mine)).__name__ == "GroupedMLP_CuTeGEMMGLU"
    assert step.same_bits(y, step.run_step(CASE)["y"])


def test_an_unknown_activation_reaches_upstream_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformer_engine.common.recipe import MXFP8BlockScaling

    from te_grouped_mlp.op import fusion

    asked = []

    def refuse(triple, _recipe, _switches):
        asked.append(type(triple[1]).__name__)
        return Reject(Reason.OPTION, "not this one")

    monkeypatch.setattr(fusion.upstream, "fuse", refuse)
    fc1 = te.ops.GroupedLinear(2, 64, 64, bias=False)
    fc2 = te.ops.GroupedLinear(2, 64, 64, bias=False)
    model = te.ops.Sequential(fc1, te.ops.GELU(), fc2)
    (decision,) = te_grouped_mlp.explain(model, recipe=MXFP8BlockScaling())
    assert asked == ["GELU"]
    assert decision.path == "unfused"
    assert [reject.reason for _, reject in decision.refusals] == [Reason.PATTERN, Reason.OPTION]


def test_decisions_and_plans_survive_threads() -> None:
    problems = [
        adapter.problem_of(*step.make_model(CASE.but(splits=(128,) * n)), None)
        for n in range(2, 10)
    ]
    failures = []

    def work(number: int) -> None:
        try:
            for turn in range(300):
                problem = problems[(number + turn) % len(problems)]
                decisions.add(decisions.Decision(problem, f"path {turn}", ()))
                te_grouped_mlp.explain()
                selection.choose(problem, environment.current())
        except Exception as error:  # the test reports whatever a thread raised
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# What a caller puts in the place of ours --------------------------------------------------------


def with_betas(*, situ_beta1: float = 4.0, situ_beta2: float = 25.0) -> None:
    """Stand for a wrapper that takes SiTU's parameters."""


def without_betas() -> None:
    """Stand for a wrapper that does not."""


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a stub in the place of the frontend, as TE's own tests do."""
    stub = types.ModuleType("cudnn")
    for name in (*packages.WRAPPERS.values(), "grouped_gemm_glu_hadamard_wrapper_sm100"):
        setattr(stub, name, with_betas)
    monkeypatch.setitem(sys.modules, "cudnn", stub)
    yield stub
    packages.forget()


@pytest.mark.parametrize("wrapper", ["glu", "dglu", "glu_hadamard"])
def test_the_situ_probe_looks_at_the_frontend_that_is_imported(
    wrapper: str, frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = module()._cudnn_frontend_supports_grouped_gemm_situglu
    assert probe()
    monkeypatch.setattr(frontend, f"grouped_gemm_{wrapper}_wrapper_sm100", without_betas)
    probe.cache_clear()
    assert not probe()
    monkeypatch.undo()
    probe.cache_clear()


def test_clearing_a_kernels_cache_brings_the_wrapper_that_is_there_now(
    frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the backend, and in upstream's own copy of the module."""
    from te_grouped_mlp.integration import overlay
    from te_grouped_mlp.op.backends.cudnn import signatures

    cls, cleared = module().GroupedMLP_CuTeGEMMGLU, []
    copy = types.SimpleNamespace(
        GroupedMLP_CuTeGEMMGLU=types.SimpleNamespace(
            grouped_gemm_activation_kernel=types.SimpleNamespace(
                cache_clear=lambda: cleared.append(1)
            )
        )
    )
    monkeypatch.setitem(sys.modules, overlay.UPSTREAM_NAME, copy)
    assert cls.grouped_gemm_activation_kernel() is with_betas
    assert signatures.wrapper("glu") is with_betas
    monkeypatch.setattr(frontend, packages.WRAPPERS["glu"], without_betas)
    cls.grouped_gemm_activation_kernel.cache_clear()
    assert cleared == [1]
    assert cls.grouped_gemm_activation_kernel() is without_betas
    assert signatures.wrapper("glu") is without_betas
    assert signatures.takes("glu") == frozenset()


def test_the_hadamard_kernel_is_the_frontends(frontend: Any) -> None:
    assert module().GroupedMLP_CuTeGEMMGLU.grouped_gemm_act_hadamard_kernel() is with_betas
    del frontend.grouped_gemm_glu_hadamard_wrapper_sm100
    assert module().GroupedMLP_CuTeGEMMGLU.grouped_gemm_act_hadamard_kernel() is None


def test_the_wgrad_kernel_follows_its_switch(
    frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls in (module().GroupedMLP_CuTeGEMMGLU, module().GroupedMLP_CuTeGEMMUnary):
        monkeypatch.setenv(environment.WGRAD_SWITCH, "0")
        assert cls.grouped_gemm_wgrad_kernel() is with_betas
        monkeypatch.setenv(environment.WGRAD_SWITCH, "1")
        assert cls.grouped_gemm_wgrad_kernel() is None


VERSIONS = [
    ("1.23.0", "1.23.0", True),
    ("1.9.0", "1.23.0", False),
    ("1.24", "1.23.5", True),
    ("1.27.0rc1", "1.27.0", True),
    (Absent("not installed"), "1.23.0", False),
]


@pytest.mark.parametrize(("installed", "wanted", "answer"), VERSIONS, ids=str)
def test_versions_are_compared_as_numbers(installed: Any, wanted: str, answer: bool) -> None:
    with environment.override(versions={"cudnn_frontend": installed}):
        assert module()._cudnn_frontend_version_at_least(wanted) is answer


def test_newer_probes_follow_the_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = module()
    tanh = frozenset({"tanh_clamp_scale"})
    found = {"srelu": tanh, "dsrelu": tanh, "wgrad": frozenset(), "glu": frozenset()}
    with environment.override(wrappers=found, sm=(10, 0)):
        assert ours._cudnn_frontend_supports_grouped_gemm_srelu_tanh()
        assert ours._nvidia_cudnn_frontend_supports_wgrad()
        assert ours._grouped_gemm_dsrelu_backward_supported()
        assert not ours._cudnn_frontend_geglu_runtime_params()
        monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0")
        assert not ours._grouped_gemm_dsrelu_backward_supported()
        monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    with environment.override(wrappers={**found, "dsrelu": frozenset()}, sm=(9, 0)):
        assert not ours._cudnn_frontend_supports_grouped_gemm_srelu_tanh()
        assert not ours._grouped_gemm_dsrelu_backward_supported()
    with environment.override(wrappers=Absent("none")):
        assert not ours._nvidia_cudnn_frontend_supports_wgrad()


FORBIDDING = {
    "_cudnn_frontend_version_supported": step.ACTIVATIONS,
    "_cudnn_frontend_supports_grouped_gemm_situglu": ("situ",),
    "_cudnn_frontend_supports_grouped_gemm_srelu": ("srelu", "tanh_srelu"),
    "_cudnn_frontend_supports_grouped_gemm_srelu_tanh": ("tanh_srelu",),
}


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("name", FORBIDDING)
def test_a_replaced_probe_that_says_no_is_obeyed(
    name: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native activation runs then, as where the frontend lacks the kernels."""
    from transformer_engine.common.recipe import MXFP8BlockScaling

    model = step.make_model(CASE.but(activation=activation))
    for answer in (True, False):
        monkeypatch.setattr(module(), name, lambda answer=answer: answer)
        (decision,) = te_grouped_mlp.explain(model, recipe=MXFP8BlockScaling())
        fused = answer or activation not in FORBIDDING[name]
        assert decision.path == ("reference" if fused else "unfused")
    if not fused:
        assert dict(decision.refusals)["fused"] == Reject(Reason.PROBE, f"{name}() is False")


@pytest.mark.parametrize("owner", ["GroupedMLP_CuTeGEMMGLU", "GroupedMLP_CuTeGEMMUnary"])
def test_a_class_that_says_it_is_not_supported_is_not_built(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = getattr(module(), owner)
    monkeypatch.setattr(cls, "is_supported", classmethod(lambda _cls: False))
    for activation, gated in (("swiglu", True), ("srelu", False)):
        case = CASE.but(activation=activation)
        model = step.make_model(case)
        step.forward(model, case, step.make_inputs(case))
        expected = "GroupedLinear"
        if gated is not cls.is_gated:
            expected = "GroupedMLP_CuTeGEMMGLU" if gated else "GroupedMLP_CuTeGEMMUnary"
        assert type(step.fused_op(model)).__name__ == expected


@pytest.mark.parametrize("answer", [True, False])
def test_a_replaced_probe_decides_about_all_rows(
    answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may forbid the dense layout of one expert; it cannot give it to padded rows."""
    asked: list[type] = []
    name = "_cudnn_frontend_supports_single_group_runtime_offsets"
    monkeypatch.setattr(module(), name, lambda kind: asked.append(kind) or answer)
    extents: list[RowExtent] = []
    original = execution.operations
    monkeypatch.setattr(
        execution, "operations", lambda plan: extents.append(plan.layout.extent) or original(plan)
    )
    for rows in (None, 256):
        case = CASE.but(splits=(128,), buffer_rows=rows)
        step.forward(step.make_model(case), case, step.make_inputs(case))
    assert extents == [RowExtent.BUFFER if answer else RowExtent.PACKED, RowExtent.PACKED]
    assert set(asked) == {te.ops.ScaledSwiGLU}


@pytest.mark.parametrize("answer", [True, False])
def test_a_replaced_demand_for_determinism_is_obeyed(
    answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module(), "_deterministic_algorithms_required", lambda: answer)
    monkeypatch.setenv(environment.DETERMINISM_SWITCH, "1" if answer else "0")
    calls: list[bool] = []
    original = selection.make_plan

    def spy(problem: Any, call: Any, env: Any) -> Any:
        calls.append(call.deterministic)
        return original(problem, call, env)

    monkeypatch.setattr(selection, "make_plan", spy)
    step.forward(step.make_model(CASE), CASE, step.make_inputs(CASE))
    assert calls == [answer]
