# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the reference backend computes, launch by launch. Imports neither torch nor TE.

The row extents are those of the GPU kernels that each launch stands for, so that a call is laid out
here as it would be on a GPU with the same frontend.
"""

from __future__ import annotations

from collections.abc import Iterator

from te_grouped_mlp.op.activations import wrappers
from te_grouped_mlp.op.environment import Environment
from te_grouped_mlp.op.formats import MAX_QUANTIZED_GROUPS, DType
from te_grouped_mlp.op.layout import Kernel, Launch, Output, RowExtent
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Plan, Reason, Reject, planned
from te_grouped_mlp.op.problem import Call, Problem, RecipeKind, TensorKind
from te_grouped_mlp.op.shape_constraints import INTERLEAVE, feature_refusals

NAME = "reference"

_RECIPES = (RecipeKind.MXFP8, RecipeKind.NONE)
_DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)

_PACKED = frozenset({RowExtent.PACKED})
_EITHER = frozenset({RowExtent.PACKED, RowExtent.BUFFER})
# What the newest frontend's wrappers can be told; used where no frontend is installed.
_NEWEST_TAKE_OFFSETS = frozenset({"glu", "dglu", "quant"})


def refusal(problem: Problem, env: Environment) -> Reject | None:
    """Return the first cause for which no call of `problem` could run here, or None."""
    return next(_problem_refusals(problem, env), None)


def plan_launches(problem: Problem, call: Call, env: Environment) -> tuple[Launch, ...] | Reject:
    """Return the launches that the call needs, in order, or the first cause that rules it out.

    Args:
        problem: The facts of the fused op.
        call: The facts of the call.
        env: The machine; its wrappers decide the row extents, its switches whether CUDA tensors
            may be copied to the host.

    Returns:
        Every launch of the forward and of the backward; all are deterministic in all outputs.
    """
    reject = refusal(problem, env) or next(_call_refusals(problem, call), None)
    return reject if reject is not None else tuple(_launches(problem, call, env))


def plan(problem: Problem, call: Call, env: Environment) -> Plan | Reject:
    """Plan a call, or say why it is refused; arguments as of `plan_launches`.

    Alone among the backends this one honours the forced faulty layout.
    """
    launches = plan_launches(problem, call, env)
    dense = env.single_group_is_always_dense
    return planned(NAME, problem, call, launches, single_group_is_always_dense=dense)


def _problem_refusals(problem: Problem, env: Environment) -> Iterator[Reject]:
    yield from _device_refusals(problem, env)
    if problem.recipe not in _RECIPES:
        allowed = ", ".join(recipe.value for recipe in _RECIPES)
        detail = problem.recipe_detail or problem.recipe.value
        yield Reject(Reason.RECIPE, f"recipe is {detail}; allowed: {allowed}")
        return
    fmt = problem.format
    if fmt.is_block_scaled and problem.recipe_detail:
        yield Reject(Reason.GRADIENT_FORMAT, f"{problem.recipe_detail}; allowed: E4M3 throughout")
    if problem.dtype not in _DTYPES:
        yield Reject(Reason.DTYPE, _dtype_detail("dtype of the weights", problem.dtype))
    if problem.fc1.scale_bias:
        yield Reject(Reason.OPTION, "scale_bias is set on FC1; allowed: on FC2 only")
    interleaves = (INTERLEAVE,) if fmt.is_block_scaled else (INTERLEAVE, None)
    yield from feature_refusals(problem, fmt.features_multiple, interleaves)
    if fmt.is_block_scaled and problem.num_groups > MAX_QUANTIZED_GROUPS and not _is_2_19(env):
        detail = f"num_groups is {problem.num_groups}; allowed: 1 to {MAX_QUANTIZED_GROUPS}"
        yield Reject(Reason.OPTION, detail)


def _is_2_19(env: Environment) -> bool:
    """Whether Transformer Engine's grouped quantization takes any number of groups."""
    return str(env.versions.get("transformer_engine")).startswith("2.19.")


def _device_refusals(problem: Problem, env: Environment) -> Iterator[Reject]:
    if isinstance(env.extension, Absent):
        yield Reject(Reason.EXTENSION, env.extension.cause)
    named = env.switches.backend == NAME
    if problem.device == "cuda" and not named:
        yield Reject(Reason.NOT_NAMED, f"device is cuda; {NAME} takes cpu tensors unless named")
    elif problem.device not in ("cpu", "cuda"):
        yield Reject(Reason.DEVICE, f"device is {problem.device}; allowed: cpu, or cuda when named")
    if problem.recipe is RecipeKind.NONE and not named:
        yield Reject(Reason.NOT_NAMED, f"there is no recipe; {NAME} computes that only when named")


def _call_refusals(problem: Problem, call: Call) -> Iterator[Reject]:
    fmt = problem.format
    if call.format != fmt:
        yield Reject(
            Reason.RECIPE,
            f"format is {call.format.name}; recipe {problem.recipe.value} has {fmt.name}",
        )
    for name, dtype in (("dtype", call.dtype), ("probability dtype", call.prob_dtype)):
        if dtype not in _DTYPES:
            yield Reject(Reason.DTYPE, _dtype_detail(name, dtype))
    if call.input_kind is not TensorKind.PLAIN and not fmt.is_block_scaled:
        yield Reject(Reason.INPUT_KIND, f"input is {call.input_kind.value}; allowed: plain")
    if call.rows % fmt.rows_multiple:
        yield Reject(
            Reason.ALIGNMENT, f"rows is {call.rows}; allowed: multiples of {fmt.rows_multiple}"
        )


def _dtype_detail(name: str, dtype: DType) -> str:
    return f"{name} is {dtype.value}; allowed: {', '.join(known.value for known in _DTYPES)}"


def _launches(problem: Problem, call: Call, env: Environment) -> Iterator[Launch]:
    quantized = call.format.is_block_scaled
    forward_act, backward_act = wrappers(problem.activation.is_gated)
    products = _extents(env, "quant")
    if quantized:
        yield _launch(call, Kernel.QUANTIZE_INPUT, _EITHER)
    yield _launch(call, Kernel.FC1_ACT, _extents(env, forward_act), Output.Y)
    yield _launch(call, Kernel.FC2_FORWARD, products, Output.Y)

    dprob = call.wants(Output.DPROB) and not call.unit_scale
    needs_dact = dprob or call.wants(Output.DX, Output.DW1, Output.DB1)
    scaled_bias = problem.fc2.has_bias and problem.fc2.scale_bias
    if quantized and (needs_dact or call.wants(Output.DW2)):
        yield _launch(call, Kernel.QUANTIZE_GRAD, _EITHER)
    if call.wants(Output.DB2) or (scaled_bias and call.wants(Output.DPROB)):
        scales = (Output.DPROB,) if scaled_bias else ()
        yield _launch(call, Kernel.FC2_BIAS_GRAD, _EITHER, Output.DB2, *scales)
    if needs_dact:
        probs = (Output.DPROB,) if dprob else ()
        extents = _extents(env, backward_act)
        yield _launch(call, Kernel.DACT_DGRAD, extents, Output.DB1, *probs)
    if call.wants(Output.DW2):
        yield _launch(call, Kernel.FC2_WGRAD, _EITHER, Output.DW2)
    if call.wants(Output.DX):
        yield _launch(call, Kernel.FC1_DGRAD, products, Output.DX)
    if call.wants(Output.DW1):
        yield _launch(call, Kernel.FC1_WGRAD, _EITHER, Output.DW1)


def _launch(call: Call, kernel: Kernel, extents: frozenset[RowExtent], *outputs: Output) -> Launch:
    wanted = call.wanted.intersection(outputs)
    return Launch(kernel, extents, outputs=wanted, deterministic=wanted)


def _extents(env: Environment, wrapper: str) -> frozenset[RowExtent]:
    if isinstance(env.wrappers, Absent):
        return _EITHER if wrapper in _NEWEST_TAKE_OFFSETS else _PACKED
    return _EITHER if env.wrapper_takes(wrapper, RUNTIME_OFFSETS) else _PACKED
