# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the cuDNN frontend's kernels compute, launch by launch. Imports neither torch, TE nor cudnn.

What a frontend can do is read off the arguments of its wrappers, never off its version: 1.29.1 has
dGLU's `deterministic`, 1.30.0 has not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from te_grouped_mlp.op.activations import wrappers
from te_grouped_mlp.op.environment import WGRAD_SWITCH, Environment
from te_grouped_mlp.op.formats import MAX_QUANTIZED_GROUPS, MXFP8, DType
from te_grouped_mlp.op.layout import Kernel, Launch, Output, RowExtent
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Plan, Reason, Reject, planned
from te_grouped_mlp.op.problem import Call, Problem, RecipeKind
from te_grouped_mlp.op.shape_constraints import INTERLEAVE, activation_refusals, feature_refusals

NAME = "cudnn"

ROWS_MULTIPLE = 256
"""Of the buffer and of every split: a tile of 256 rows runs past an expert that ends elsewhere."""
DETERMINISTIC = "deterministic"

_DTYPES = (DType.BFLOAT16, DType.FLOAT16)
_PROB_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_PACKED = frozenset({RowExtent.PACKED})
_EITHER = frozenset({RowExtent.PACKED, RowExtent.BUFFER})

# `RUNTIME_OFFSETS` also marks the release since which a probability may be absent.
_NEEDED = {
    "glu": (RUNTIME_OFFSETS, "geglu_alpha"),
    "dglu": (RUNTIME_OFFSETS, "geglu_alpha"),
    "srelu": ("prob_tensor",),
    "dsrelu": ("dprob_tensor",),
    "quant": (RUNTIME_OFFSETS, "d_tensor"),
    "wgrad": ("wgrad_ptrs",),
}
ASKED = frozenset({DETERMINISTIC, *itertools.chain.from_iterable(_NEEDED.values())})
"""Arguments of wrappers that decide, besides those of an activation's parameters."""


@dataclass(frozen=True)
class Placement:
    """Where the kernels are: on a GPU behind TE's extension; or emulated, or simulated by tests, on
    a CPU.
    """

    device: str = "cuda"
    standalone: bool = False


GPU = Placement()
EMULATED = Placement(device="cpu", standalone=True)


def placement_of(env: Environment) -> Placement:
    """Return where the kernels are on this machine."""
    return EMULATED if env.emulated else GPU


def refusal(
    problem: Problem, env: Environment, placement: Placement | None = None
) -> Reject | None:
    """Return the first cause for which no call of `problem` could run here, or None."""
    return next(_problem_refusals(problem, env, placement or placement_of(env)), None)


def plan_launches(
    problem: Problem, call: Call, env: Environment, placement: Placement | None = None
) -> tuple[Launch, ...] | Reject:
    """Return the launches that the call needs, in order, or the first cause that rules it out.

    Args:
        problem: The facts of the fused op.
        call: The facts of the call.
        env: The machine; its wrappers decide row extents and determinism.
        placement: Where the kernels are; None for what `env` says.

    Returns:
        Every launch of the forward and of the backward. Those that add with float atomics under
        this call do not name the sums as deterministic, and say why.
    """
    reject = refusal(problem, env, placement) or next(_call_refusals(call), None)
    return reject if reject is not None else tuple(_launches(problem, call, env))


def plan(
    problem: Problem, call: Call, env: Environment, placement: Placement | None = None
) -> Plan | Reject:
    """Plan a call, or say why it is refused; arguments as of `plan_launches`."""
    launches = plan_launches(problem, call, env, placement)
    return planned(NAME, problem, call, launches, split_multiple=ROWS_MULTIPLE)


def runs_deterministic(problem: Problem, call: Call, env: Environment) -> bool:
    """Whether the launch through the activation is asked to keep the order of its sums.

    Asked only on demand: it costs a buffer of partial sums and two small kernels.
    """
    return call.deterministic and _determinism_gap(problem, call, env) is None


def _problem_refusals(problem: Problem, env: Environment, placement: Placement) -> Iterator[Reject]:
    if problem.device != placement.device:
        yield Reject(Reason.DEVICE, f"device is {problem.device}; allowed: {placement.device}")
    yield from _architecture_refusals(env)
    if env.standalone and not placement.standalone:
        yield Reject(Reason.PACKAGE, "Transformer Engine's extension is not installed")
    yield from _frontend_refusals(problem, env)
    if problem.recipe is not RecipeKind.MXFP8:
        detail = problem.recipe_detail or problem.recipe.value
        yield Reject(Reason.RECIPE, f"recipe is {detail}; allowed: mxfp8")
    elif problem.recipe_detail:
        yield Reject(Reason.GRADIENT_FORMAT, f"{problem.recipe_detail}; allowed: E4M3 throughout")
    if problem.fc1.scale_bias:
        yield Reject(Reason.OPTION, "scale_bias is set on FC1; allowed: on FC2 only")
    if env.switches.no_frontend_wgrad:
        yield Reject(Reason.WGRAD_SWITCH, f"{WGRAD_SWITCH} is set; allowed: unset, or 0")
    # The frontend itself takes 1024.
    if not 1 <= problem.num_groups <= MAX_QUANTIZED_GROUPS:
        detail = f"num_groups is {problem.num_groups}; allowed: 1 to {MAX_QUANTIZED_GROUPS}"
        yield Reject(Reason.OPTION, detail)
    yield from feature_refusals(problem, MXFP8.features_multiple, (INTERLEAVE,))
    yield from activation_refusals(problem, lambda row: row.act_func is not None)
    yield from _parameter_refusals(problem)


def _architecture_refusals(env: Environment) -> Iterator[Reject]:
    allowed = "SM 10.0 to 10.6"
    if isinstance(env.sm, Absent):
        yield Reject(Reason.ARCHITECTURE, f"{env.sm.cause}; allowed: {allowed}")
        return
    major, minor = env.sm
    if major == 10 and minor >= 7:
        detail = f"SM is {major}.{minor} (Rubin), for which the frontend has other kernels"
        yield Reject(Reason.ARCHITECTURE, f"{detail}; allowed: {allowed}")
    elif major != 10:
        yield Reject(Reason.ARCHITECTURE, f"SM is {major}.{minor}; allowed: {allowed}")


def _frontend_refusals(problem: Problem, env: Environment) -> Iterator[Reject]:
    if isinstance(env.wrappers, Absent):
        yield Reject(Reason.PACKAGE, env.wrappers.cause)
        return
    kind = problem.activation.kind
    through_activation = wrappers(kind.is_gated)
    for wrapper in (*through_activation, "quant", "wgrad"):
        if wrapper not in env.wrappers:
            yield Reject(Reason.PACKAGE, f"the installed frontend has no wrapper {wrapper}")
            continue
        for argument in _NEEDED[wrapper]:
            if not env.wrapper_takes(wrapper, argument):
                detail = f"the installed frontend is too old: {wrapper} has no argument {argument}"
                yield Reject(Reason.PACKAGE, detail)
    for parameter, wrapper in itertools.product(kind.row.parameters, through_activation):
        for argument in parameter.frontend:
            if not env.wrapper_takes(wrapper, argument):
                detail = f"{wrapper} has no argument {argument}, which {kind.value} needs"
                yield Reject(Reason.WRAPPER, detail)


def _parameter_refusals(problem: Problem) -> Iterator[Reject]:
    """Refuse parameters that a kernel divides by and its wrapper does not look at."""
    for parameter in problem.activation.kind.row.parameters:
        value: float = getattr(problem.activation, parameter.name)
        if parameter.is_divisor and not value > 0:
            yield Reject(Reason.OPTION, f"{parameter.name} is {value}; allowed: positive values")


def _call_refusals(call: Call) -> Iterator[Reject]:
    if call.format != MXFP8:
        yield Reject(Reason.RECIPE, f"format is {call.format.name}; allowed: {MXFP8.name}")
    if call.dtype not in _DTYPES:
        yield Reject(Reason.DTYPE, f"dtype is {call.dtype.value}; allowed: bfloat16, float16")
    if call.prob_dtype not in _PROB_DTYPES:
        allowed = ", ".join(dtype.value for dtype in _PROB_DTYPES)
        detail = f"probability dtype is {call.prob_dtype.value}; allowed: {allowed}"
        yield Reject(Reason.DTYPE, detail)
    if call.rows % ROWS_MULTIPLE:
        detail = f"rows is {call.rows}; allowed: multiples of {ROWS_MULTIPLE}"
        yield Reject(Reason.ALIGNMENT, detail)
    if call.split_multiple is not None and call.split_multiple % ROWS_MULTIPLE:
        detail = (
            f"what divides all splits is {call.split_multiple}; allowed: multiples of "
            f"{ROWS_MULTIPLE}"
        )
        yield Reject(Reason.ALIGNMENT, detail)


def _launches(problem: Problem, call: Call, env: Environment) -> Iterator[Launch]:
    forward_act, backward_act = wrappers(problem.activation.is_gated)
    yield _launch(call, Kernel.QUANTIZE_INPUT, _EITHER)
    yield _launch(call, Kernel.FC1_ACT, _extents(env, forward_act), Output.Y)
    # With BUFFER rows these two and the weight gradients are TE's dense matrix product.
    yield _launch(call, Kernel.FC2_FORWARD, _EITHER, Output.Y)

    scaled_bias = problem.fc2.has_bias and problem.fc2.scale_bias
    if call.needs_dact or call.wants(Output.DW2):
        yield _launch(call, Kernel.QUANTIZE_GRAD, _EITHER)
    if call.wants(Output.DB2) or (scaled_bias and call.wants(Output.DPROB)):
        # Not a kernel of the frontend's: sums of a fixed order, see op/kernels/group_reductions.py.
        scales = (Output.DPROB,) if scaled_bias else ()
        yield _launch(call, Kernel.FC2_BIAS_GRAD, _EITHER, Output.DB2, *scales)
    if call.needs_dact:
        yield _dact_launch(problem, call, env, _extents(env, backward_act))
    if call.wants(Output.DW2):
        yield _launch(call, Kernel.FC2_WGRAD, _EITHER, Output.DW2)
    if call.wants(Output.DX):
        yield _launch(call, Kernel.FC1_DGRAD, _EITHER, Output.DX)
    if call.wants(Output.DW1):
        yield _launch(call, Kernel.FC1_WGRAD, _EITHER, Output.DW1)


def _launch(call: Call, kernel: Kernel, extents: frozenset[RowExtent], *outputs: Output) -> Launch:
    wanted = call.wanted.intersection(outputs)
    return Launch(kernel, extents, outputs=wanted, deterministic=wanted)


def _dact_launch(
    problem: Problem, call: Call, env: Environment, extents: frozenset[RowExtent]
) -> Launch:
    sums = call.wanted.intersection((Output.DB1, Output.DPROB))
    cause = ""
    if sums and not runs_deterministic(problem, call, env):
        gap = _determinism_gap(problem, call, env)
        cause = gap or (
            "whose kernel adds with float atomics because no deterministic result was asked for; "
            "ask before the forward"
        )
    deterministic = frozenset() if cause else sums
    return Launch(
        Kernel.DACT_DGRAD, extents, outputs=sums, deterministic=deterministic, cause=cause
    )


def _determinism_gap(problem: Problem, call: Call, env: Environment) -> str | None:
    """Say why the kernel cannot keep the order of its sums even on demand, and what to change."""
    wrapper = wrappers(problem.activation.is_gated)[1]
    if not env.wrapper_takes(wrapper, DETERMINISTIC):
        return (
            f"whose wrapper {wrapper} has no argument {DETERMINISTIC} in the installed frontend "
            "and adds with float atomics; install nvidia-cudnn-frontend 1.31 or later"
        )
    if wrapper == "dglu" and call.wants(Output.DB1):
        return (
            "whose kernel adds FC1's bias gradient with bf16 atomics and refuses to be "
            "deterministic together with it; take the bias off FC1, or freeze FC1"
        )
    return None


def _extents(env: Environment, wrapper: str) -> frozenset[RowExtent]:
    return _EITHER if env.wrapper_takes(wrapper, RUNTIME_OFFSETS) else _PACKED
