# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The dense layout only where the rows are known to be full.

A dense product takes every row of the buffer, so the rows behind the split sizes would enter the
weight and bias gradients, and operands that are packed to the split sizes would be read with the
wrong extent. Rows are known to be full for a unit-scale shared expert, for split sizes that live
on the host and add up, or by the user's promise.
"""

from __future__ import annotations

import libcst.matchers as m

from te_grouped_mlp.patches.base import Edit, Mismatch, Module, Patch, Statement, Target
from te_grouped_mlp.patches.expressions import change_value, expression
from te_grouped_mlp.patches.structure import assigns, contains, scope_body, target_of, walk
from te_grouped_mlp.patches.te_sites import (
    BACKWARD,
    DENSE,
    FORWARD,
    assigned,
    check_questions,
    helper,
    no_fused_mlp,
    only_nvfp4_is_dense,
    resets_unit_scale,
)

_SAVED = "fc1_ctx.tegm_dense_single_group"

_HELPER = '''
def _tegm_rows_are_full(split_sizes, rows, unit_scale):
    """Whether the only group is known to fill the buffer.

    Never waits for the device, unless NVTE_GROUPED_MLP_CHECK=1 asks for it.

    Raises:
        ValueError: the rows were promised to be full, and the split sizes say otherwise.
    """
    wish = os.environ.get("NVTE_GROUPED_MLP_FULL_ROWS", "0")
    if wish not in ("0", "1"):
        raise ValueError(f"NVTE_GROUPED_MLP_FULL_ROWS is {wish!r}; allowed: 0, 1 or unset")
    promise = unit_scale or wish == "1"
    on_host = split_sizes.device.type == "cpu"
    checked = promise and os.environ.get("NVTE_GROUPED_MLP_CHECK", "0") == "1"
    if not on_host and not checked:
        return promise
    live = int(split_sizes.sum())
    if promise and live != rows:
        source = "NVTE_GROUPED_MLP_FULL_ROWS"
        if unit_scale:
            source = "a unit activation scale"
        raise ValueError(
            f"split_sizes add up to {live}, but the buffer has {rows} rows, and {source} promises "
            "that every row is live"
        )
    return live == rows
'''

_NARROW = f"""
{DENSE} = {DENSE} and _tegm_rows_are_full(
    split_sizes, in_shape[0], unit_activation_scale
)
{_SAVED} = {DENSE}
"""


def _use_saved(statement: Statement) -> Statement:
    return change_value(statement, lambda _: expression(_SAVED))


def _not_needed(module: Module) -> str | None:
    reason = no_fused_mlp(module)
    if reason is None and only_nvfp4_is_dense(module):
        return "one MXFP8 group is packed in this file, never dense (NVFP4 is left as it is)"
    return reason


def _verify(module: Module) -> None:
    """No shortcut asks by itself, and before its narrowing nobody has used the decision."""
    check_questions(module)
    narrowed = False
    for statement in walk(scope_body(module, *FORWARD)):
        if contains(statement, m.Call(func=m.Name("_tegm_rows_are_full"))):
            narrowed = True
        elif target_of(statement) == DENSE:
            if narrowed:
                raise Mismatch(FORWARD, f"{DENSE} is decided again behind the row check")
        elif not narrowed and contains(statement, m.Name(DENSE)):
            raise Mismatch(FORWARD, f"{DENSE} is read before the split sizes are known")
    for name in ("split_sizes", "in_shape", "unit_activation_scale"):
        if not assigned(module, FORWARD, name):
            raise Mismatch(FORWARD, f"{name} is not assigned")


PATCH = Patch(
    name="te_full_rows",
    title="full rows",
    target=Target.TE,
    versions=("2.19.0", "2.20.2"),
    looks_for=f"the one decision, {DENSE}, in the forward and the backward",
    changes="it holds only where the rows are known to be full; the backward uses the forward's",
    proof="tests/patches/test_published_te_runs.py",
    edits=(
        helper(_HELPER),
        Edit(
            "forward: known rows",
            FORWARD,
            find=resets_unit_scale,
            after=_NARROW,
            wanted="the `if` that resets unit_activation_scale where num_groups != 1",
        ),
        Edit("backward: the forward's decision", BACKWARD, assigns(DENSE), rewrite=_use_saved),
    ),
    not_needed=_not_needed,
    verify=_verify,
    builds_on="te_one_decision",
)
