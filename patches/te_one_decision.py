# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One answer to "one dense group?" for every shortcut of the step.

The file asks for the group count at every shortcut, but a kernel of the same step may read its
rows from the split sizes. Where the two disagree, column scales are read with the wrong row
extent. Here the question is answered once, from what the kernels can do.
"""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Mismatch, Module, Patch, Statement, Target
from te_grouped_mlp.patches.expressions import replace, with_keyword, with_keyword_parameter
from te_grouped_mlp.patches.structure import (
    Finder,
    assigns,
    assigns_call,
    contains,
    defines,
    scope_body,
    walk,
)
from te_grouped_mlp.patches.te_sites import (
    BACKWARD,
    DENSE,
    FORWARD,
    ONE_GROUP,
    assigned,
    check_questions,
    helper,
    no_fused_mlp,
    only_nvfp4_is_dense,
)

_QUANTIZE = "_group_quantize_for_grouped_mlp"
_QUANTIZE_AMAX = "_group_quantize_with_amax_for_grouped_mlp"
_WGRAD = "_compute_grad_params"

_HELPER = '''
def _tegm_dense_single_group(num_groups, activation_op):
    """Whether the step may treat its only group as the whole buffer.

    Asked once per pass: the buffer's row count is right only where the activation kernels take
    their rows from the buffer too.
    """
    return num_groups == 1 and _cudnn_frontend_supports_single_group_runtime_offsets(
        type(activation_op)
    )
'''

_DECISION = f"{DENSE} = _tegm_dense_single_group(num_groups, activation_op)"


def _decide(statement: Statement) -> Statement:
    """Put the decision where the group count was compared with one."""

    def new(node: cst.CSTNode) -> cst.BaseExpression:
        assert isinstance(node, cst.Comparison)
        name = cst.Name(DENSE)
        if isinstance(node.comparisons[0].operator, cst.Equal):
            return name
        return cst.UnaryOperation(cst.Not(), name)

    return replace(statement, ONE_GROUP, new, "`num_groups == 1` or `num_groups != 1`")


def _pass_on(callee: str) -> Callable[[Statement], Statement]:
    def rewrite(statement: Statement) -> Statement:
        def new(node: cst.CSTNode) -> cst.Call:
            assert isinstance(node, cst.Call)
            return with_keyword(node, DENSE, DENSE)

        return replace(statement, m.Call(func=m.Name(callee)), new, f"a call of {callee}")

    return rewrite


_ASKS = Finder(
    "an `if` with `num_groups == 1` or `num_groups != 1`",
    lambda statement: isinstance(statement, cst.If) and contains(statement, ONE_GROUP),
)


def _asks_before_dense_fc2(statement: Statement) -> bool:
    return _ASKS(statement) and any(
        assigns_call("fc2_out_buf", "_single_group_fc2_gemm")(s) for s in statement.body.body
    )


def _returns_quantized(statement: Statement) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Return)
        and contains(statement, m.Call(func=m.Name(_QUANTIZE)))
    )


def _parameter(place: str, name: str) -> Edit:
    return Edit(
        place,
        (),
        find=defines(name),
        rewrite=lambda function: with_keyword_parameter(function, DENSE),
    )


def _question(place: str, scope: tuple[str, ...], find: Finder) -> Edit:
    return Edit(place, scope, find=find, rewrite=_decide)


def _call(place: str, scope: tuple[str, ...], target: str, callee: str) -> Edit:
    return Edit(place, scope, find=assigns_call(target, callee), rewrite=_pass_on(callee))


_RUNTIME_OFFSETS = "[use_single_group_runtime_offsets]"

_EDITS = (
    helper(_HELPER),
    _parameter("quantize: parameter", _QUANTIZE),
    _question("quantize: question", (_QUANTIZE,), _ASKS),
    _parameter("quantize with amax: parameter", _QUANTIZE_AMAX),
    _question("quantize with amax: question", (_QUANTIZE_AMAX,), _ASKS),
    Edit(
        "quantize with amax: call",
        (_QUANTIZE_AMAX,),
        find=Finder(f"a return that calls {_QUANTIZE}", _returns_quantized),
        rewrite=_pass_on(_QUANTIZE),
    ),
    _parameter("weight gradient: parameter", _WGRAD),
    _question("weight gradient: question", (_WGRAD,), _ASKS),
    Edit("forward: decision", FORWARD, find=assigns("num_groups"), after=_DECISION),
    _question("forward: offsets", FORWARD, assigns("use_offsetless_metadata")),
    _call("forward: FC1 weight", FORWARD, "grouped_fc1_weight", _QUANTIZE),
    _call("forward: FC2 weight", FORWARD, "grouped_fc2_weight", _QUANTIZE),
    _call("forward: FC1 input", FORWARD, "grouped_fc1_x", _QUANTIZE),
    _question("forward: FC1 kernel", FORWARD, assigns("fc1_activation_kwargs" + _RUNTIME_OFFSETS)),
    _question("forward: FC1 grouped scales", FORWARD, assigns("use_single_group_weight_swizzle")),
    _question("forward: FC1 discrete weight", FORWARD, assigns("use_single_discrete_weight")),
    _call("forward: FC2 input with amax", FORWARD, "grouped_fc2_x", _QUANTIZE_AMAX),
    _call("forward: FC2 input", FORWARD, "grouped_fc2_x", _QUANTIZE),
    _question(
        "forward: FC2 NVFP4",
        FORWARD,
        Finder(f"{_ASKS.wanted} over a call of _single_group_fc2_gemm", _asks_before_dense_fc2),
    ),
    _question("forward: FC2 MXFP8", FORWARD, assigns("use_single_group_dense_fc2")),
    _question("forward: FC2 kernel", FORWARD, assigns("fc2_quant_kwargs" + _RUNTIME_OFFSETS)),
    Edit("backward: decision", BACKWARD, find=assigns("num_groups"), after=_DECISION),
    _call("backward: grad output", BACKWARD, "grouped_fc2_dy", _QUANTIZE),
    _question(
        "backward: FC2 kernel", BACKWARD, assigns("fc2_dactivation_kwargs" + _RUNTIME_OFFSETS)
    ),
    _question("backward: FC2 discrete weight", BACKWARD, assigns("use_single_discrete_weight")),
    _call("backward: recomputed FC2 input", BACKWARD, "grouped_fc2_x", _QUANTIZE),
    _call("backward: FC1 grad", BACKWARD, "grouped_fc1_dy", _QUANTIZE),
    _call("backward: FC2 weight gradient", BACKWARD, "fc2_grad_params", _WGRAD),
    _question("backward: FC1 dgrad", BACKWARD, assigns("use_single_group_dense_dgrad")),
    _question("backward: FC1 kernel", BACKWARD, assigns("fc1_dgrad_kwargs" + _RUNTIME_OFFSETS)),
    _call("backward: FC1 weight gradient", BACKWARD, "fc1_grad_params", _WGRAD),
)


def _not_needed(module: Module) -> str | None:
    reason = no_fused_mlp(module)
    if reason is None and only_nvfp4_is_dense(module):
        return "one MXFP8 group takes no dense shortcut in this file (NVFP4's are left as they are)"
    if reason is None and assigned(module, FORWARD, DENSE) and assigned(module, BACKWARD, DENSE):
        check_questions(module)
        return f"the file already decides once ({DENSE})"
    return reason


def _verify(module: Module) -> None:
    """No shortcut may be left that asks by itself, and no call that is not told."""
    check_questions(module)
    for scope in ((_QUANTIZE,), (_QUANTIZE_AMAX,), (_WGRAD,), FORWARD, BACKWARD):
        for statement in walk(scope_body(module, *scope)):
            for callee in (_QUANTIZE, _QUANTIZE_AMAX, _WGRAD):
                call = m.Call(func=m.Name(callee))
                told = m.Call(
                    func=m.Name(callee),
                    args=[m.ZeroOrMore(), m.Arg(keyword=m.Name(DENSE)), m.ZeroOrMore()],
                )
                own = isinstance(statement, cst.SimpleStatementLine)
                if own and contains(statement, call) and not contains(statement, told):
                    raise Mismatch(scope, f"{callee} is called at a further place")


PATCH = Patch(
    name="te_one_decision",
    title="one decision",
    target=Target.TE,
    versions=("2.19.0",),
    looks_for="the shortcuts that compare the group count with one",
    changes=f"one value, {DENSE}, for all of them, from what the activation kernels can do",
    proof="tests/patches/test_published_te_runs.py",
    edits=_EDITS,
    not_needed=_not_needed,
    verify=_verify,
)
