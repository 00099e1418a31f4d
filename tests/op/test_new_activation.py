# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a new activation must be told to: a made-up row, and everyone who reads the table.

Each reader works from the row alone or refuses the activation by name.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.ops import basic

import te_grouped_mlp
from te_grouped_mlp.cli import arguments as cli_arguments
from te_grouped_mlp.cli import determinism, paths
from te_grouped_mlp.integration.standalone.tex import activations as tex_activations
from te_grouped_mlp.integration.standalone.tex import contract
from te_grouped_mlp.measure.selftest import cases, checks
from te_grouped_mlp.op import activations, fusion, selection
from te_grouped_mlp.op.activations import Activation, ActivationSpec, Evaluated, Parameter, Row
from te_grouped_mlp.op.backends.cudnn import arguments as cudnn_arguments
from te_grouped_mlp.op.backends.cudnn import capability as cudnn
from te_grouped_mlp.op.backends.cutedsl import capability as cutedsl
from te_grouped_mlp.op.backends.cutedsl import keys
from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.plan import Reason
from te_grouped_mlp.op.problem import RecipeKind
from te_grouped_mlp.op.te import adapter, probes
from tests.op.backends.cutedsl.problems import environment, problem_of

FILES = (
    "te_grouped_mlp/op/activations.py",
    "te_grouped_mlp/op/backends/cutedsl/kernels/activations.py",
    "tests/op/backends/reference/naive.py",
    "tests/support/step.py",
    "tests/integration/standalone/tex_calls.py",
)
"""What one opens to add an activation; the first is all that it takes to compute one on a CPU."""

ALPHA = Parameter("alpha", "alpha", {"made_up_alpha": 1}, 1.3)


def _gated(xp: Any, p: ActivationSpec, gate: Any, linear: Any) -> Evaluated:
    return Evaluated(p.alpha * gate * linear, lambda _: (p.alpha * linear, p.alpha * gate))


def _unary(xp: Any, p: ActivationSpec, x: Any) -> Evaluated:
    return Evaluated(p.alpha * xp.sin(x), lambda _: (p.alpha * xp.cos(x),))


@pytest.fixture(params=[True, False], ids=["gated", "unary"])
def made_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Activation:
    """A further member of the table, and a class of that name among TE's."""
    gated = request.param
    kind = object.__new__(Activation)
    kind._name_, kind._value_ = "MADE_UP", "ScaledMadeUp"
    kind.row = Row("ScaledMadeUp", _gated if gated else _unary, gated, (ALPHA,))
    monkeypatch.setitem(Activation._member_map_, "MADE_UP", kind)
    monkeypatch.setattr(Activation, "_member_names_", [*Activation._member_names_, "MADE_UP"])
    monkeypatch.setitem(Activation._value2member_map_, "ScaledMadeUp", kind)

    def init(self: Any, alpha: float = 1.702, **options: Any) -> None:
        base.__init__(self, **options)
        self.alpha = alpha

    base = te.ops.ScaledSwiGLU if gated else te.ops.ScaledSReLU
    cls = type("ScaledMadeUp", (base,), {"__init__": init})
    for module in (basic, te.ops):
        monkeypatch.setattr(module, "ScaledMadeUp", cls, raising=False)
    assert list(Activation)[-1] is kind
    return kind


def _with(kind: Activation, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Activation:
    monkeypatch.setattr(kind, "row", dataclasses.replace(kind.row, **changes))
    return kind


def spec_of(kind: Activation) -> ActivationSpec:
    return ActivationSpec(kind, 32 if kind.is_gated else None, alpha=0.3)


def test_the_op_is_read_and_a_whole_step_is_computed(made_up: Activation) -> None:
    """By the reference backend, against the self-test's float64, with its parameter."""
    assert adapter.activation_spec(te.ops.ScaledMadeUp(0.3)) == dataclasses.replace(
        spec_of(made_up), interleave=None
    )
    (case, *_), _ = cases.find("reference", ["cpu"], [made_up], quick=True)
    assert case.spec.alpha == ALPHA.trial
    result = checks.run(dataclasses.replace(case, hidden=128, ffn=64), 1)
    assert (result.failures, result.error) == ([], None)
    assert fusion.is_glu_activation(te.ops.ScaledMadeUp()) is made_up.is_gated


def test_tex_has_its_functions(made_up: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tex_activations.functions(made_up) == {}
    monkeypatch.setattr(contract, "CONTRACTS", {})
    kind = _with(made_up, monkeypatch, tex=("scaled_made_up", "scaled_dmade_up"))
    forward, backward = tex_activations.functions(kind).values()
    assert list(contract.CONTRACTS) == ["scaled_made_up", "scaled_dmade_up"]
    x, scales = torch.randn(3, 64), torch.rand(3)
    x.requires_grad_()
    spec = dataclasses.replace(spec_of(kind), interleave=None)
    wanted = activations.evaluate(torch, spec, x).value * scales[:, None]
    torch.testing.assert_close(forward(x.detach(), scales, None, 0.3), wanted.detach())
    grad = torch.ones_like(wanted)
    dx, d_scales = backward(grad, x.detach(), scales, None, alpha=0.3)
    (by_autograd,) = torch.autograd.grad(wanted.sum(), x)
    torch.testing.assert_close(dx, by_autograd)
    torch.testing.assert_close(d_scales, (wanted.detach() / scales[:, None]).sum(1))


def test_the_native_kernels_refuse_it(made_up: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(spec_of(made_up))
    refusal = cutedsl.refusal(problem, environment())
    assert refusal is not None
    assert refusal.reason is Reason.OPTION
    assert "activation is ScaledMadeUp; allowed: ScaledSwiGLU, " in refusal.detail
    _with(made_up, monkeypatch, is_native=True)
    assert cutedsl.refusal(problem, environment()) is None
    used = keys.of_problem(problem, 9)
    other = keys.of_problem(problem_of(dataclasses.replace(spec_of(made_up), alpha=0.4)), 9)
    assert [one.op.value for one, two in zip(used, other, strict=True) if one != two] == [
        "fc1_act", "dact_dgrad",
    ]  # fmt: skip


def test_device_code_without_its_formula_raises(made_up: Activation) -> None:
    """While it is traced; before, it computed another activation."""
    pytest.importorskip("cutlass")
    from te_grouped_mlp.op.backends.cutedsl import library

    with library.deprecations_ignored():
        from te_grouped_mlp.op.backends.cutedsl.kernels import activations as device
    for function, parts in (
        (device.value_gated, 2),
        (device.gated_derivative, 2),
        (device.value_unary, 1),
        (device.unary_derivative, 1),
    ):
        with pytest.raises(NotImplementedError, match="ScaledMadeUp has no formula in "):
            function.__wrapped__(spec_of(made_up), *[1.0] * parts)


def test_the_frontend_refuses_it(made_up: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(spec_of(made_up), recipe=RecipeKind.MXFP8)
    env = determinism.environment(True)
    assert str(made_up.value) in str(list(cudnn._problem_refusals(problem, env, cudnn.GPU)))
    _with(made_up, monkeypatch, act_func="made_up")
    refusal = cudnn.refusal(problem, env)
    assert refusal is not None
    wrapper = activations.wrappers(made_up.is_gated)[0]
    assert f"{wrapper} has no argument made_up_alpha, which ScaledMadeUp needs" in refusal.detail
    wrappers = {name: taken | {"made_up_alpha"} for name, taken in env.wrappers.items()}  # type: ignore[union-attr]
    assert cudnn.refusal(problem, dataclasses.replace(env, wrappers=wrappers)) is None
    if made_up.is_gated:
        wanted = {"act_func": "dmade_up", "made_up_alpha": 0.3}
        assert cudnn_arguments._gated(spec_of(made_up), "d") == wanted
    else:
        assert cudnn_arguments._unary(spec_of(made_up)) == {"made_up_alpha": (0.3, None)}


def test_commands_and_upstreams_probes_know_it(
    made_up: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli_arguments.activation("madeup") is made_up
    assert cli_arguments.activations("all")[-1] is made_up
    question = paths.Question(made_up, RecipeKind.MXFP8, paths.Bias.NONE, 8, False)
    answer = paths.answer(question, determinism.environment(True))
    assert answer.path == selection.UPSTREAM
    assert probes.refusal(made_up) is None
    _with(made_up, monkeypatch, probes=("_cudnn_frontend_supports_grouped_gemm_srelu",))
    monkeypatch.setattr(probes, "replaced", lambda _: lambda: False)
    assert probes.refusal(made_up) is not None
    assert made_up.row.has_kinks is (checks.exact.bounds(MXFP8, made_up)["db1"] is None)


def test_nobody_else_names_an_activation() -> None:
    """But SwiGLU and SReLU, which stand for the gated and the unary ones."""
    root = Path(te_grouped_mlp.__file__).parent
    special = "|".join({kind.name for kind in Activation} - {"SWIGLU", "SRELU"})
    named = {
        f"te_grouped_mlp/{file.relative_to(root).as_posix()}"
        for file in root.rglob("*.py")
        if re.search(rf"Activation\.({special})\b", file.read_text())
    }
    assert named == {FILES[1]}


def test_the_native_flag_is_that_of_the_device_code() -> None:
    source = (Path(te_grouped_mlp.__file__).parents[1] / FILES[1]).read_text()
    known = set(re.findall(r"Activation\.(\w+)", source))
    assert known == {kind.name for kind in Activation if kind.row.is_native}


def test_the_document_lists_the_files() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
    if not page.exists():
        pytest.skip("a copy of the tests without the repository")
    text = page.read_text(encoding="utf-8")
    (section,) = re.findall(r"## Add an activation\n(.*?)(?:\n## |\Z)", text, re.S)
    assert tuple(re.findall(r"^\d\. `([^`]+)`", section, re.M)) == FILES
