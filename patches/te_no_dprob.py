# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""No probability gradient where the probabilities need none, and then no refusal because of it.

The file computes dprob unless one unit-scale group is marked. Whether the probabilities need a
gradient is known in the forward for any group count: a frozen router, or a caller that applies
the probabilities elsewhere. The other outputs keep the promise of determinism: a bias gradient
that the kernels would add atomically still raises.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Module, Patch, Statement, Target
from te_grouped_mlp.patches.expressions import change_value, expression
from te_grouped_mlp.patches.structure import assigns, contains, target_of, value_of
from te_grouped_mlp.patches.te_sites import (
    BACKWARD,
    FORWARD,
    assigned,
    helper,
    no_fused_mlp,
)

_NEED = "tegm_scales_need_grad"

_HELPER = '''
def _tegm_trains_bias(linear_op):
    """Whether a grouped linear has a bias whose gradient somebody will use."""
    return linear_op.has_bias and any(
        parameter.requires_grad
        for name, parameter in linear_op.named_parameters()
        if name.startswith("bias")
    )


def _tegm_determinism_without_dprob(fused_op, scale_bias):
    """Keyword arguments that make the bias gradients bit-exact, if that was asked for.

    Raises:
        RuntimeError: a bias gradient is needed that the kernels can only add atomically.
    """
    if not _deterministic_algorithms_required():
        return {}
    fc1_op, activation_op, fc2_op = fused_op.basic_ops
    if scale_bias and _tegm_trains_bias(fc2_op):
        output, remedy = "FC2", "an FC2 without scale_bias"
    elif not _tegm_trains_bias(fc1_op):
        return {}
    elif (
        not is_glu_activation(activation_op)
        and fused_op.grouped_gemm_dactivation_is_deterministic()
    ):
        return {"deterministic": True}
    else:
        output, remedy = "FC1", "an FC1 without bias"
    raise RuntimeError(
        "Deterministic execution was requested (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 or "
        f"torch.use_deterministic_algorithms), but the {output} bias gradient is added "
        f"atomically. To run, use {remedy}, or take the request back."
    )
'''

_BACKWARD_READS = f"""
{_NEED} = fc1_ctx.{_NEED}
# A frontend before 1.27 wants the buffer; what it writes there is dropped.
tegm_dprob_buffer = {_NEED} or not _cudnn_frontend_version_at_least("1.27.0")
"""

_KERNEL_ARGUMENTS = f"""
if not ({_NEED} or unit_activation_scale):
    fc2_dactivation_kwargs.update(_tegm_determinism_without_dprob(self, scale_bias))
"""


def _put(text: str):  # noqa: ANN202 - a rewrite of Edit
    def rewrite(statement: Statement) -> Statement:
        return change_value(statement, lambda value: expression(text, KNOWN=value))

    return rewrite


def _reads_unit_scale(statement: Statement) -> bool:
    return target_of(statement) == "unit_activation_scale" and contains(
        statement, m.Name("fc1_ctx")
    )


def _allocates(statement: Statement) -> bool:
    return target_of(statement) == "dscales_tensor" and isinstance(value_of(statement), cst.Call)


def _chooses_extra_grad(statement: Statement) -> bool:
    return (
        isinstance(statement, cst.If)
        and m.matches(statement.test, m.Name("unit_activation_scale"))
        and [target_of(s) for s in statement.body.body] == ["activation_grad_extra"]
    )


def _or_frozen(statement: Statement) -> Statement:
    test = expression(f"KNOWN or not {_NEED}", KNOWN=statement.test)
    return statement.with_changes(test=test)


def _not_needed(module: Module) -> str | None:
    reason = no_fused_mlp(module)
    if reason is None and not assigned(module, BACKWARD, "deterministic_dactivation"):
        return "the backward does not ask for determinism, so nothing raises"
    return reason


PATCH = Patch(
    name="te_no_dprob",
    title="no dprob",
    target=Target.TE,
    versions=("2.20.2",),
    looks_for="the probability gradient and its determinism check in the backward",
    changes="both are left out where the probabilities need no gradient, for any group count",
    proof="tests/patches/test_published_te_runs.py",
    edits=(
        helper(_HELPER),
        Edit(
            "forward: who needs it",
            FORWARD,
            find=assigns("scales"),
            after=f"fc1_ctx.{_NEED} = bool(scales.requires_grad)",
        ),
        Edit(
            "backward: who needs it",
            BACKWARD,
            find=_reads_unit_scale,
            after=_BACKWARD_READS,
            wanted="an assignment to unit_activation_scale from fc1_ctx",
        ),
        Edit(
            "backward: request",
            BACKWARD,
            find=assigns("deterministic_dactivation"),
            rewrite=_put(f"KNOWN and {_NEED}"),
        ),
        Edit(
            "backward: buffer",
            BACKWARD,
            find=_allocates,
            rewrite=_put("KNOWN if tegm_dprob_buffer else None"),
            wanted="an assignment of a call to dscales_tensor",
        ),
        Edit(
            "backward: bias gradients",
            BACKWARD,
            find=assigns("dactivation_kernel"),
            after=_KERNEL_ARGUMENTS,
        ),
        Edit(
            "backward: extra grad",
            BACKWARD,
            find=_chooses_extra_grad,
            rewrite=_or_frozen,
            wanted="`if unit_activation_scale` over an assignment to activation_grad_extra",
        ),
    ),
    not_needed=_not_needed,
)
