# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the native kernels compute, launch by launch. Imports no torch, no TE, no kernel package."""

from __future__ import annotations

from collections.abc import Iterator

from te_grouped_mlp.op.environment import Absent, Environment
from te_grouped_mlp.op.fit import INTERLEAVE, feature_refusals
from te_grouped_mlp.op.formats import UNQUANTIZED, DType
from te_grouped_mlp.op.layout import Kernel, Launch, Output, RowExtent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import Call, Problem, RecipeKind, TensorKind

NAME = "cutedsl"

MAX_ROWS = 1 << 30
"""The ragged tensor maps of the main loops shift rows by this much."""

_HOPPER, _BLACKWELL = (9, 0), 10
_PROB_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_QUACK = "0.6.5"
_CUTLASS_DSL = (4, 8)
_PACKED = frozenset({RowExtent.PACKED})


def refusal(problem: Problem, env: Environment) -> Reject | None:
    """Return the first cause for which no call of `problem` could run here, or None."""
    return next(_problem_refusals(problem, env), None)


def plan_launches(problem: Problem, call: Call, env: Environment) -> tuple[Launch, ...] | Reject:
    """Return the launches that the call needs, in order, or the first cause that rules it out.

    Every launch touches the packed rows only, whose number it reads on the device, and is
    deterministic in all its outputs.
    """
    found = refusal(problem, env) or next(_call_refusals(call), None)
    return found if found is not None else tuple(_launches(problem, call))


def _problem_refusals(problem: Problem, env: Environment) -> Iterator[Reject]:
    named = env.switches.backend == NAME
    if problem.device != "cuda":
        yield Reject(Reason.DEVICE, f"device is {problem.device}; allowed: cuda")
    yield from _architecture_refusals(env, named)
    if problem.recipe is not RecipeKind.NONE:
        detail = problem.recipe_detail or problem.recipe.value
        yield Reject(Reason.RECIPE, f"recipe is {detail}; allowed: none")
    if problem.dtype is not DType.BFLOAT16:
        yield Reject(Reason.DTYPE, f"dtype is {problem.dtype.value}; allowed: bfloat16")
    if problem.fc1.scale_bias:
        yield Reject(Reason.OPTION, "scale_bias is set on FC1; allowed: on FC2 only")
    yield from feature_refusals(problem, UNQUANTIZED.features_multiple, (INTERLEAVE, None))
    yield from _package_refusals(env)


def _architecture_refusals(env: Environment, named: bool) -> Iterator[Reject]:
    if isinstance(env.sm, Absent):
        yield Reject(Reason.ARCHITECTURE, f"{env.sm.cause}; allowed: SM 9.0")
    elif env.sm[0] == _BLACKWELL:
        if not named:
            detail = f"SM {env.sm[0]}.{env.sm[1]}; {NAME} takes it only when named"
            yield Reject(Reason.NOT_NAMED, detail)
    elif env.sm != _HOPPER:
        allowed = "SM 9.0, or SM 10.x when named"
        yield Reject(Reason.ARCHITECTURE, f"SM is {env.sm[0]}.{env.sm[1]}; allowed: {allowed}")


def _package_refusals(env: Environment) -> Iterator[Reject]:
    for name in ("quack", "cutlass_dsl", "triton"):
        version = env.versions.get(name, Absent(f"{name} was not looked for"))
        if isinstance(version, Absent):
            yield Reject(Reason.PACKAGE, version.cause)
        elif name == "quack" and version != _QUACK:
            yield Reject(Reason.PACKAGE, f"quack-kernels is {version}; allowed: {_QUACK}")
        elif name == "cutlass_dsl" and _minor(version) != _CUTLASS_DSL:
            yield Reject(Reason.PACKAGE, f"nvidia-cutlass-dsl is {version}; allowed: 4.8.x")


def _minor(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def _call_refusals(call: Call) -> Iterator[Reject]:
    if call.format != UNQUANTIZED:
        yield Reject(Reason.RECIPE, f"format is {call.format.name}; allowed: {UNQUANTIZED.name}")
    if call.dtype is not DType.BFLOAT16:
        yield Reject(Reason.DTYPE, f"dtype is {call.dtype.value}; allowed: bfloat16")
    if call.prob_dtype not in _PROB_DTYPES:
        allowed = ", ".join(each.value for each in _PROB_DTYPES)
        yield Reject(
            Reason.DTYPE, f"probability dtype is {call.prob_dtype.value}; allowed: {allowed}"
        )
    if call.input_kind is not TensorKind.PLAIN:
        yield Reject(Reason.INPUT_KIND, f"input is {call.input_kind.value}; allowed: plain")
    if call.rows > MAX_ROWS:
        yield Reject(Reason.ALIGNMENT, f"rows is {call.rows}; allowed: at most {MAX_ROWS}")


def _launches(problem: Problem, call: Call) -> Iterator[Launch]:
    yield _launch(call, Kernel.FC1_ACT, Output.Y)
    yield _launch(call, Kernel.FC2_FORWARD, Output.Y)
    dprob = call.wants(Output.DPROB) and not call.unit_scale
    scaled_bias = problem.fc2.has_bias and problem.fc2.scale_bias
    if call.wants(Output.DB2) or (scaled_bias and call.wants(Output.DPROB)):
        scales = (Output.DPROB,) if scaled_bias else ()
        yield _launch(call, Kernel.FC2_BIAS_GRAD, Output.DB2, *scales)
    if dprob or call.wants(Output.DX, Output.DW1, Output.DB1):
        probs = (Output.DPROB,) if dprob else ()
        yield _launch(call, Kernel.DACT_DGRAD, Output.DB1, *probs)
    if call.wants(Output.DW2):
        yield _launch(call, Kernel.FC2_WGRAD, Output.DW2)
    if call.wants(Output.DX):
        yield _launch(call, Kernel.FC1_DGRAD, Output.DX)
    if call.wants(Output.DW1):
        yield _launch(call, Kernel.FC1_WGRAD, Output.DW1)


def _launch(call: Call, kernel: Kernel, *outputs: Output) -> Launch:
    wanted = call.wanted.intersection(outputs)
    return Launch(kernel, _PACKED, outputs=wanted, deterministic=wanted)
