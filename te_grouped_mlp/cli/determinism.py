# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Who computes each output on SM 10x under MXFP8, and whether it repeats: asked, not written down.

The table of docs/determinism.md is what `markdown` returns; a test compares the two.
"""

from __future__ import annotations

import itertools

from te_grouped_mlp.cli import frontend_releases, paths
from te_grouped_mlp.cli.paths import Answer, Bias, Question
from te_grouped_mlp.op.backends.cudnn.capability import DETERMINISTIC
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.problem import Activation, RecipeKind

COLUMNS = (
    "activation",
    "bias",
    f"`{DETERMINISTIC}`",
    "y, dx, dW1, dW2",
    "db1",
    "db2",
    "dprob",
    "on demand",
    "because otherwise",
)
"""Three that make the question, four for the default mode, two for a demand for determinism."""

# With these the native kernels run.
_VERSIONS = {
    "torch": "2.13.0",
    "transformer_engine": "2.20.2",
    "quack": "0.6.5",
    "cutlass_dsl": "4.8.1",
    "triton": "3.6.0",
}
_GROUPS = 8


def environment(has_argument: bool, **changes: object) -> Environment:
    """Return a Blackwell machine with TE's extension and every package.

    Args:
        has_argument: Whether the wrappers of the backward through the activation can be told to
            keep the order of their sums.
        **changes: Other fields.
    """
    wrappers = frontend_releases.wrappers(frontend_releases.RELEASES[-1])
    if not has_argument:
        wrappers = {name: taken - {DETERMINISTIC} for name, taken in wrappers.items()}
    fields: dict[str, object] = {
        "sm": (10, 0),
        "versions": _VERSIONS,
        "wrappers": wrappers,
        "switches": Switches(fused=True),
        "standalone": False,
        **changes,
    }
    return Environment(**fields)  # type: ignore[arg-type]


def cells(kind: Activation, bias: Bias, has_argument: bool) -> tuple[str, ...]:
    """Return what a row says of one activation: the cells after the question's."""
    env = environment(has_argument)
    plain, strict = (
        paths.answer(Question(kind, RecipeKind.MXFP8, bias, _GROUPS, demanded), env)
        for demanded in (False, True)
    )
    one_writer = {_cell(plain, each) for each in (Output.Y, Output.DX, Output.DW1, Output.DW2)}
    by_default = (
        "; ".join(sorted(one_writer)),
        *(_cell(plain, each, named=True) for each in (Output.DB1, Output.DB2, Output.DPROB)),
    )
    promised = strict.path if strict.repeats else f"{strict.path}, varies"
    return (*by_default, promised, strict.since)


def rows() -> list[tuple[str, ...]]:
    """Return the rows of the table; activations of a class with equal cells share one."""
    found = []
    questions = itertools.product(("gated", "unary"), Bias, (False, True))
    for name, bias, has_argument in questions:
        kinds = [kind for kind in Activation if kind.is_gated == (name == "gated")]
        groups: dict[tuple[str, ...], list[Activation]] = {}
        for kind in kinds:
            groups.setdefault(cells(kind, bias, has_argument), []).append(kind)
        for answer, members in groups.items():
            of_all = len(members) == len(kinds)
            who = name if of_all else ", ".join(kind.value for kind in members)
            found.append((who, bias.value, "yes" if has_argument else "no", *answer))
    return found


def markdown() -> str:
    """Return the table as docs/determinism.md has it."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows()]
    return "\n".join(f"| {' | '.join(cell or '-' for cell in line)} |" for line in lines)


def _cell(answer: Answer, output: Output, *, named: bool = False) -> str:
    """Say who computes an output, with the launches if `named`; "" where it is not wanted."""
    for each, launches, repeats in answer.outputs:
        if each is output:
            by = f" {launches.replace(', ', ' + ')}" if named else ""
            return f"{answer.path}{by}" + ("" if repeats else ", **varies**")
    return ""
