# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A bit-exact probability gradient for GLU activations, where the frontend can make one.

The file raises for every GLU activation when determinism is asked for. Some releases of the cuDNN
frontend take `deterministic` in the dGLU wrapper; the question goes to the wrapper's signature,
because the argument came, went and came again between releases. It does not cover the bias
gradient of FC1, so an FC1 with bias keeps raising.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Module, Patch, Statement, Target
from te_grouped_mlp.patches.expressions import change_value, expression
from te_grouped_mlp.patches.structure import assigns, defines, has_definition, value_of
from te_grouped_mlp.patches.te_sites import (
    BACKWARD,
    GLU_CLASS,
    assigned,
    helper,
    no_fused_mlp,
)

_QUESTION = "grouped_gemm_dactivation_is_deterministic"
_ANSWER = "dprob_is_deterministic"

_HELPER = '''
def _tegm_kernel_takes_deterministic(get_kernel):
    """Whether a wrapper of the cuDNN frontend has the argument `deterministic` and honours it."""
    try:
        parameters = inspect.signature(get_kernel()).parameters
    except (ImportError, TypeError, ValueError):
        return False
    # The dGLU wrapper of SM 10.7 has the argument and refuses it.
    return "deterministic" in parameters and tuple(get_device_compute_capability()) != (10, 7)


def _tegm_nondeterministic(activation_op, fc1_op, scale_bias):
    """Say which output cannot be made bit-exact, why, and what to change."""
    if scale_bias:
        output, cause = "dprob and the FC2 bias gradient", "an FC2 with scale_bias adds atomically"
        remedy = "use an FC2 without scale_bias"
    elif is_glu_activation(activation_op) and fc1_op.has_bias:
        output, cause = "the FC1 bias gradient", "the dGLU kernel adds it atomically"
        remedy = "use an FC1 without bias"
    else:
        output, cause = "dprob", "the installed activation-backward kernel adds it atomically"
        remedy = "install an nvidia-cudnn-frontend whose wrapper takes `deterministic`"
    return (
        "Deterministic execution was requested (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 or "
        f"torch.use_deterministic_algorithms), but {output} of {type(activation_op).__name__} is "
        f"not bit-exact: {cause}. To run, {remedy}, or detach the probabilities if they need no "
        "gradient, or take the request back."
    )
'''

_METHOD = f'''
@classmethod
@functools.cache
def {_QUESTION}(cls) -> bool:
    """Whether the dGLU wrapper of the installed frontend can produce a bit-exact ``dprob``."""
    return _tegm_kernel_takes_deterministic(cls.grouped_gemm_dactivation_kernel)
'''


def _without_bias(statement: Statement) -> Statement:
    return change_value(
        statement,
        lambda value: expression(
            "KNOWN and not (is_glu_activation(activation_op) and fc1_op.has_bias)", KNOWN=value
        ),
    )


def _raises_on_answer(statement: Statement) -> bool:
    return (
        isinstance(statement, cst.If)
        and m.matches(statement.test, m.UnaryOperation(m.Not(), m.Name(_ANSWER)))
        and m.matches(statement.body, m.IndentedBlock([m.SimpleStatementLine([m.Raise()])]))
    )


def _our_text(statement: Statement) -> Statement:
    raised = cst.parse_statement(
        "raise RuntimeError(_tegm_nondeterministic(activation_op, fc1_op, scale_bias))"
    )
    return statement.with_changes(body=statement.body.with_changes(body=[raised]))


def _not_needed(module: Module) -> str | None:
    reason = no_fused_mlp(module)
    if reason is None and not assigned(module, BACKWARD, _ANSWER):
        return "the backward does not ask for determinism, so nothing raises"
    if reason is None and has_definition(module, GLU_CLASS, _QUESTION):
        return f"{GLU_CLASS} already asks the dGLU wrapper"
    return reason


PATCH = Patch(
    name="te_deterministic_dglu",
    title="deterministic dGLU",
    target=Target.TE,
    versions=("2.20.2",),
    looks_for="the determinism check of the backward, which refuses every GLU activation",
    changes="it passes where the dGLU wrapper has `deterministic` and FC1 has no bias",
    proof="tests/patches/test_published_te_runs.py",
    edits=(
        helper(_HELPER),
        Edit(
            "backward: FC1 bias",
            BACKWARD,
            find=lambda s: assigns(_ANSWER)(s) and isinstance(value_of(s), cst.BooleanOperation),
            rewrite=_without_bias,
            wanted=f"an assignment of an `and` or `or` to {_ANSWER}",
        ),
        Edit(
            "backward: reason",
            BACKWARD,
            find=_raises_on_answer,
            rewrite=_our_text,
            wanted=f"`if not {_ANSWER}` over one raise",
        ),
        Edit(
            "GLU class: question",
            (GLU_CLASS,),
            find=defines("grouped_gemm_dactivation_kernel"),
            after=_METHOD,
            blank_lines=1,
        ),
    ),
    not_needed=_not_needed,
)
