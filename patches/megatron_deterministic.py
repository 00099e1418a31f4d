# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's deterministic mode on the operation-fuser path.

The fused op sums the probability gradient with float atomics. In deterministic mode it gets unit
probabilities, which need no gradient, and its output is scaled here, in float32 and cast back, so
that the gradient is a plain row sum. Three settings cannot be kept that way and are refused
before any op runs.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Mismatch, Module, Patch, Statement, Target
from te_grouped_mlp.patches.expressions import expression, replace
from te_grouped_mlp.patches.megatron_sites import (
    CLASS,
    FUSED,
    SETTING,
    no_fused_experts,
    request_statements,
)
from te_grouped_mlp.patches.structure import (
    assigns_call,
    contains,
    defines,
    is_definition,
    mismatch_at,
    scope_body,
    target_of,
)

_BEHIND = "tegm_behind"

_HELPERS = '''
def _tegm_check_probs_behind_fc2(config, fc2_has_bias, zero_copy_buffer=None):
    """Refuse what cannot be kept when the probabilities are applied behind FC2.

    Raises:
        RuntimeError: names the setting, its value, and what to change.
    """
    mode = "deterministic_mode=True on the TE operation fuser applies the routing probabilities"
    if fc2_has_bias:
        raise RuntimeError(
            f"{mode} to the output of FC2, which an FC2 bias (add_bias_linear=True) does not "
            "allow. Set add_bias_linear=False, or deterministic_mode=False."
        )
    if zero_copy_buffer is not None:
        raise RuntimeError(
            f"{mode} to a new output tensor, so the zero-copy output buffer "
            "(moe_ncclep_zero_copy=True) would not hold the result. Set "
            "moe_ncclep_zero_copy=False, or deterministic_mode=False."
        )
    combine = getattr(config, "moe_combine_bwd_dtype", "bf16")
    if combine == "mxfp8":
        raise RuntimeError(
            f"{mode} behind FC2, but with moe_combine_bwd_dtype={combine!r} the output gradient "
            "is an opaque carrier that must reach FC2 unmodified. Set "
            "moe_combine_bwd_dtype='bf16', or deterministic_mode=False."
        )


def _tegm_scale_rows(output, probs):
    """Multiply each row by its probability, in float32, and cast back to the output's dtype."""
    return (output.float() * probs.float().reshape(-1, 1)).to(output.dtype)
'''

_INPUTS = frozenset({"self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"})
_OUTPUT_BUFFER = "output_buffer"
_BUFFERS = frozenset({_OUTPUT_BUFFER, "grad_input_buffer"})

_GUARD = f"""
{_BEHIND} = getattr(self.config, "{SETTING}", False)
if {_BEHIND}:
    _tegm_check_probs_behind_fc2(self.config, self.linear_fc2.use_bias)
"""
_GUARD_WITH_BUFFER = _GUARD.replace(".use_bias)", f".use_bias, {_OUTPUT_BUFFER})")

_SCALE = f"""
if {_BEHIND}:
    output = _tegm_scale_rows(output, permuted_probs)
"""

_PROBS = m.Arg(value=m.Name("permuted_probs"), keyword=None, star="")


def _guard(module: Module) -> str:
    """The guards; Megatron-Core before 0.19 has no zero-copy buffer to be asked about."""
    return _GUARD_WITH_BUFFER if _OUTPUT_BUFFER in _parameters(module) else _GUARD


def _parameters(module: Module) -> set[str]:
    (function,) = (s for s in scope_body(module, CLASS) if is_definition(s, FUSED[-1]))
    params = function.params
    every = [*params.posonly_params, *params.params, *params.kwonly_params]
    every += [p for p in (params.star_arg, params.star_kwarg) if isinstance(p, cst.Param)]
    return {param.name.value for param in every}


def _makes_ops(statement: Statement) -> bool:
    return (
        isinstance(statement, cst.If)
        and contains(statement, m.Attribute(m.Name("self"), m.Name("_fused_ops")))
        and contains(statement, m.Comparison())
    )


def _runs_ops(statement: Statement) -> bool:
    return assigns_call("output", "ops")(statement) and contains(statement, _PROBS)


def _removes_padding(statement: Statement) -> bool:
    return (
        isinstance(statement, cst.If)
        and contains(statement, m.Name("unpadded_tokens_per_expert"))
        and [target_of(s) for s in statement.body.body] == ["output"]
    )


def _unit_probs(statement: Statement) -> Statement:
    unit = expression(f"torch.ones_like(permuted_probs) if {_BEHIND} else permuted_probs")

    def new(node: cst.CSTNode) -> cst.Arg:
        assert isinstance(node, cst.Arg)
        return node.with_changes(value=unit)

    return replace(statement, _PROBS, new, "permuted_probs as an argument of its own")


def _not_needed(module: Module) -> str | None:
    reason = no_fused_experts(module)
    if reason is not None:
        return reason
    known = request_statements(module)
    if known:
        return f"the class already asks for determinism itself, in {CLASS}.{known[0][0]}"
    return None


def _verify(module: Module) -> None:
    """The guards must know every way out of the method, and come before the one call of the ops."""
    (function,) = (s for s in scope_body(module, CLASS) if is_definition(s, FUSED[-1]))
    _check_parameters(module, function)
    # `ops` and what it is made from: bound, and called once.
    called = m.findall(function, m.Call(func=m.Name("ops")))
    used = m.findall(function, m.Name("ops"))
    kept = m.findall(function, m.Call(func=m.Subscript(m.Attribute(attr=m.Name("_fused_ops")))))
    if len(called) != 1 or len(used) != 2 or kept:
        text = "the ops are used at a further place"
        raise mismatch_at(module, FUSED, text, [*used, *kept])
    for statement in function.body.body:
        if m.findall(statement, m.Call(func=m.Name("_tegm_check_probs_behind_fc2"))):
            return
        if m.findall(statement, m.Call(func=m.Name("ops"))):
            break
    raise Mismatch(FUSED, f"{FUSED[-1]} runs the ops before the guards")


def _check_parameters(module: Module, function: cst.FunctionDef) -> None:
    """Before 0.19 there is no zero-copy buffer; then nothing in the method may be one."""
    names = _parameters(module)
    unknown = sorted(names - _INPUTS - _BUFFERS)
    if unknown:
        text = f"{FUSED[-1]} has the parameter {unknown[0]}, which the guards do not know"
        raise Mismatch(FUSED, text)
    if _OUTPUT_BUFFER not in names:
        buffers = m.findall(function, m.Name(m.MatchIfTrue(lambda name: "buffer" in name.lower())))
        if buffers:
            text = f"{FUSED[-1]} has no parameter {_OUTPUT_BUFFER}, but a buffer"
            raise mismatch_at(module, FUSED, text, buffers)


PATCH = Patch(
    name="megatron_deterministic",
    title="deterministic probabilities",
    target=Target.MEGATRON,
    versions=("0.18.x", "0.19.x"),
    looks_for=f"{CLASS}._fused_forward, its one call of the fused ops, and the step behind it",
    changes="with deterministic_mode, unit probabilities go in and the output is scaled",
    proof="tests/patches/test_published_megatron.py",
    edits=(
        Edit(
            "helpers",
            (),
            find=defines(CLASS),
            before=_HELPERS,
            blank_lines=2,
        ),
        Edit(
            "guards",
            FUSED,
            find=_makes_ops,
            before=_guard,
            wanted="the `if` that asks whether self._fused_ops is None",
        ),
        Edit(
            "unit probabilities",
            FUSED,
            find=_runs_ops,
            rewrite=_unit_probs,
            wanted="an assignment to output that calls ops with permuted_probs",
        ),
        Edit(
            "scaled output",
            FUSED,
            find=_removes_padding,
            before=_SCALE,
            wanted="the `if` with unpadded_tokens_per_expert over an assignment to output",
        ),
    ),
    not_needed=_not_needed,
    verify=_verify,
)
