# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What users of upstream's module ask ours, and activations that are theirs or upstream's own."""

from __future__ import annotations

import threading

import pytest
import transformer_engine.pytorch as te

import te_grouped_mlp
from te_grouped_mlp.op import decisions, environment, selection, te_adapter
from te_grouped_mlp.op.environment import RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Reason, Reject
from tests.support import step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "hostile_memory")

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
        te_adapter.problem_of(*step.make_model(CASE.but(splits=(128,) * n)), None)
        for n in range(2, 10)
    ]
    failures = []

    def work(number: int) -> None:
        try:
            for turn in range(300):
                problem = problems[(number + turn) % len(problems)]
                decisions.record(decisions.Decision(problem, f"path {turn}", ()))
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
