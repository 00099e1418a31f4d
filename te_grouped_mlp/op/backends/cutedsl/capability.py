# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the native kernels compute, launch by launch. Imports no torch, no TE, no kernel package.

Where they run without being named: on SM 9.0 always, under MXFP8 where Transformer Engine runs
without its extension, which has no MXFP8 there; on SM 10.x for a call under MXFP8 that asks for
determinism, of an op that was fused for another backend, since these kernels have not run on that
chip and the frontend's have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from te_grouped_mlp.op.environment import STANDALONE_SWITCH, Environment
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.layout import Kernel, Launch, Output, RowExtent
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Plan, Reason, Reject, planned
from te_grouped_mlp.op.problem import Call, Problem, RecipeKind, TensorKind
from te_grouped_mlp.op.shape_constraints import INTERLEAVE, activation_refusals, feature_refusals

NAME = "cutedsl"

MAX_ROWS = 1 << 30
"""The ragged tensor maps of the main loops shift rows by this much."""

_HOPPER, _BLACKWELL = (9, 0), 10
_RECIPES = (RecipeKind.MXFP8, RecipeKind.NONE)
_PROB_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_QUACK = "0.6.5"
_CUTLASS_DSL = (4, 8)
_PACKED = frozenset({RowExtent.PACKED})


def refusal(problem: Problem, env: Environment) -> Reject | None:
    """Return the first cause for which no op of `problem` is fused for this backend, or None."""
    return next(_problem_refusals(problem, env, steps_in=False), None)


def plan_launches(problem: Problem, call: Call, env: Environment) -> tuple[Launch, ...] | Reject:
    """Return the launches that the call needs, in order, or the first cause that rules it out.

    Takes one kind of call whose op `refusal` declines: on SM 10.x, a call under MXFP8 that asks
    for determinism. Asked after the backend that fused the op, it takes the calls that would vary
    there.

    Args:
        problem: The facts of the fused op.
        call: The facts of the call.
        env: The machine.

    Returns:
        Every launch of the forward and of the backward. Each touches the packed rows only, whose
        number it reads on the device, and is deterministic in all its outputs.
    """
    reject = next(_problem_refusals(problem, env, steps_in=call.deterministic), None)
    reject = reject or next(_call_refusals(problem, call), None)
    if reject is not None:
        return reject
    bias = problem.fc2.has_bias and problem.fc2.scale_bias
    return _launches(call.format.is_block_scaled, call.wanted, call.unit_scale, bias)


def plan(problem: Problem, call: Call, env: Environment) -> Plan | Reject:
    """Plan a call, always packed, or say why it is refused; arguments as of `plan_launches`."""
    return planned(
        NAME,
        problem,
        call,
        plan_launches(problem, call, env),
        reads_values=call.format.is_block_scaled,
        reuses_weights=env.switches.reuse_weights,
    )


def _problem_refusals(problem: Problem, env: Environment, *, steps_in: bool) -> Iterator[Reject]:
    device = "cpu" if env.emulated else "cuda"
    if problem.device != device:
        yield Reject(Reason.DEVICE, f"device is {problem.device}; allowed: {device}")
    steps_in = steps_in and problem.recipe is RecipeKind.MXFP8
    yield from _architecture_refusals(env, steps_in or env.switches.backend == NAME)
    if problem.recipe is RecipeKind.MXFP8 and env.sm == _HOPPER and not env.standalone:
        detail = "SM is 9.0, where Transformer Engine's extension has no MXFP8; allowed: SM 10.x"
        allowed = f"or a Transformer Engine without extension and {STANDALONE_SWITCH}=1"
        yield Reject(Reason.ARCHITECTURE, f"{detail}, {allowed}")
    if problem.recipe not in _RECIPES:
        allowed = ", ".join(recipe.value for recipe in _RECIPES)
        detail = problem.recipe_detail or problem.recipe.value
        yield Reject(Reason.RECIPE, f"recipe is {detail}; allowed: {allowed}")
        return
    fmt = problem.format
    if fmt.is_block_scaled and problem.recipe_detail:
        yield Reject(Reason.GRADIENT_FORMAT, f"{problem.recipe_detail}; allowed: E4M3 throughout")
    if problem.dtype is not DType.BFLOAT16:
        yield Reject(Reason.DTYPE, f"dtype is {problem.dtype.value}; allowed: bfloat16")
    if problem.fc1.scale_bias:
        yield Reject(Reason.OPTION, "scale_bias is set on FC1; allowed: on FC2 only")
    interleaves = (INTERLEAVE,) if fmt.is_block_scaled else (INTERLEAVE, None)
    yield from feature_refusals(problem, fmt.features_multiple, interleaves)
    yield from activation_refusals(problem, lambda row: row.is_native)
    yield from _package_refusals(env)


def _architecture_refusals(env: Environment, on_blackwell: bool) -> Iterator[Reject]:
    if isinstance(env.sm, Absent):
        yield Reject(Reason.ARCHITECTURE, f"{env.sm.cause}; allowed: SM 9.0")
    elif env.sm[0] == _BLACKWELL:
        if not on_blackwell:
            detail = "only when named, or for a call under mxfp8 that must be deterministic"
            yield Reject(Reason.NOT_NAMED, f"SM is {env.sm[0]}.{env.sm[1]}; taken {detail}")
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


def _call_refusals(problem: Problem, call: Call) -> Iterator[Reject]:
    fmt = problem.format
    if call.format != fmt:
        detail = f"format is {call.format.name}; recipe {problem.recipe.value} has {fmt.name}"
        yield Reject(Reason.RECIPE, detail)
    if call.dtype is not DType.BFLOAT16:
        yield Reject(Reason.DTYPE, f"dtype is {call.dtype.value}; allowed: bfloat16")
    if call.prob_dtype not in _PROB_DTYPES:
        allowed = ", ".join(dtype.value for dtype in _PROB_DTYPES)
        detail = f"probability dtype is {call.prob_dtype.value}; allowed: {allowed}"
        yield Reject(Reason.DTYPE, detail)
    if call.input_kind is not TensorKind.PLAIN and not fmt.is_block_scaled:
        yield Reject(Reason.INPUT_KIND, f"input is {call.input_kind.value}; allowed: plain")
    yield from _row_refusals(call)


def _row_refusals(call: Call) -> Iterator[Reject]:
    multiple, known = call.format.rows_multiple, call.split_multiple
    if call.rows > MAX_ROWS:
        yield Reject(Reason.ALIGNMENT, f"rows is {call.rows}; allowed: at most {MAX_ROWS}")
    if call.rows % multiple:
        yield Reject(Reason.ALIGNMENT, f"rows is {call.rows}; allowed: multiples of {multiple}")
    if known is not None and known % multiple:
        detail = f"what divides all splits is {known}; allowed: multiples of {multiple}"
        yield Reject(Reason.ALIGNMENT, detail)


# A step with another number of rows than the one before needs a new plan of the same launches.
@functools.lru_cache(maxsize=256)
def _launches(
    quantized: bool, wanted: frozenset[Output], unit_scale: bool, scaled_bias: bool
) -> tuple[Launch, ...]:
    def launch(kernel: Kernel, *outputs: Output) -> None:
        computed = wanted.intersection(outputs)
        launches.append(Launch(kernel, _PACKED, outputs=computed, deterministic=computed))

    launches: list[Launch] = []
    if quantized:
        launch(Kernel.QUANTIZE_INPUT)
    launch(Kernel.FC1_ACT, Output.Y)
    launch(Kernel.FC2_FORWARD, Output.Y)
    dprob = Output.DPROB in wanted and not unit_scale
    needs_dact = dprob or not wanted.isdisjoint((Output.DX, Output.DW1, Output.DB1))
    if quantized and (needs_dact or Output.DW2 in wanted):
        launch(Kernel.QUANTIZE_GRAD)
    if Output.DB2 in wanted or (scaled_bias and Output.DPROB in wanted):
        scales = (Output.DPROB,) if scaled_bias else ()
        launch(Kernel.FC2_BIAS_GRAD, Output.DB2, *scales)
    if needs_dact:
        probs = (Output.DPROB,) if dprob else ()
        launch(Kernel.DACT_DGRAD, Output.DB1, *probs)
    if Output.DW2 in wanted:
        launch(Kernel.FC2_WGRAD, Output.DW2)
    if Output.DX in wanted:
        launch(Kernel.FC1_DGRAD, Output.DX)
    if Output.DW1 in wanted:
        launch(Kernel.FC1_WGRAD, Output.DW1)
    return tuple(launches)
