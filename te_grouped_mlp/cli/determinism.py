# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Who computes each output on SM 10x under MXFP8, and whether it repeats: asked, not written down.

The table of docs/determinism.md is what `markdown` returns; a test compares the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from te_grouped_mlp.cli import frontend_releases, machine, paths
from te_grouped_mlp.cli.paths import Answer, Bias, Question
from te_grouped_mlp.op.activations import Activation, wrappers
from te_grouped_mlp.op.backends.cudnn.capability import DETERMINISTIC
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.problem import RecipeKind

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


def machines(assumed: Mapping[str, str]) -> tuple[Environment, ...]:
    """Return the machines that the table is about.

    Args:
        assumed: Of `machine.parse_assumptions`; what is not named is a Blackwell machine with every
            package. Empty for two of these, whose frontends differ in the argument.
    """
    if not assumed:
        return environment(False), environment(True)
    newest = {"sm": "100", "frontend": frontend_releases.RELEASES[-1], "te": "2.20.2"}
    others = {key: version for key, version in _VERSIONS.items() if key in machine.ASSUMABLE}
    return (machine.examine({**others, **newest, **assumed}),)


def cells(kind: Activation, bias: Bias, env: Environment) -> tuple[str, ...]:
    """Return what a row says of one activation: the cells after the question's."""
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


def rows(assumed: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the rows of the table; activations of a class with equal cells share one."""
    found = []
    questions = itertools.product(("gated", "unary"), Bias, machines(assumed))
    for name, bias, env in questions:
        has_argument = env.wrapper_takes(wrappers(name == "gated")[1], DETERMINISTIC)
        kinds = [kind for kind in Activation if kind.is_gated == (name == "gated")]
        groups: dict[tuple[str, ...], list[Activation]] = {}
        for kind in kinds:
            groups.setdefault(cells(kind, bias, env), []).append(kind)
        for answer, members in groups.items():
            of_all = len(members) == len(kinds)
            who = name if of_all else ", ".join(kind.value for kind in members)
            found.append((who, bias.value, "yes" if has_argument else "no", *answer))
    return found


def records(assumed: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the rows by the headings, for programs."""
    names = [name.strip("`") for name in COLUMNS]
    return [
        dict(zip(names, (cell.replace("**", "") for cell in row), strict=True))
        for row in rows(assumed)
    ]


def markdown(assumed: Mapping[str, str]) -> str:
    """Return the table as docs/determinism.md has it, where nothing is assumed."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(assumed)]
    return "\n".join(f"| {' | '.join(cell or '-' for cell in line)} |" for line in lines)


def _cell(answer: Answer, output: Output, *, named: bool = False) -> str:
    """Say who computes an output, with the launches if `named`; "" where it is not wanted."""
    for each, launches, repeats in answer.outputs:
        if each is output:
            by = f" {launches.replace(', ', ' + ')}" if named else ""
            return f"{answer.path}{by}" + ("" if repeats else ", **varies**")
    return ""
