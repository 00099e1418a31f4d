# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp doctor`: is the overlay active, what is installed, which path runs, and why."""

from __future__ import annotations

import argparse
import dataclasses
import platform
from dataclasses import dataclass
from typing import Any

import te_grouped_mlp
from te_grouped_mlp.cli import determinism, machine, output, paths
from te_grouped_mlp.cli.remedies import REMEDIES
from te_grouped_mlp.integration import installed_te, overlay
from te_grouped_mlp.measure.selftest import record
from te_grouped_mlp.op.environment import FUSED_SWITCH, Environment, read_switches
from te_grouped_mlp.op.extension import SLOWER
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.packages import DISTRIBUTIONS, RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Reason, Reject

_ANY = "any"
_COLUMNS = ("activation", "recipe", "bias", "groups", "deterministic")
_HEADINGS = ("activation", "recipe", "bias", "groups", "demand")
"""The same in the table for people, where the last says whether determinism is demanded."""

_USE = {
    "torch": "needed",
    "transformer_engine": "needed",
    "cudnn_frontend": "kernels of SM 10x",
    "cutlass_dsl": "native kernels, and those of the cuDNN frontend",
    "quack": "native kernels",
    "triton": "comes with a GPU build of torch",
}


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="whether the overlay is active, what is installed, which path runs and why",
        description="Says in its first line whether the overlay is active in this process, or why "
        "not; then what is installed, and which path every kind of grouped MLP takes. Activates "
        "and changes nothing. Exit code 1 if the overlay is not active or the switch is off.",
    )
    parser.add_argument(
        "--assume",
        metavar="KEY=VALUE[,...]",
        help="ask about another machine: sm=100, frontend=1.32.0, te=2.20.2, torch=..., "
        "cutlass_dsl=..., quack=..., triton=...; none stands for an absence",
    )
    parser.add_argument(
        "--determinism",
        action="store_true",
        help="print who computes what on SM 10x, by default and when determinism is asked for: the "
        "table of docs/determinism.md, or with --assume that of another machine",
    )
    output.add_json(parser)


@dataclass(frozen=True)
class State:
    """The overlay's state; `overlay.Status`, or the value that it refuses to judge."""

    active: bool
    switched_on: bool
    reason: str
    remedy: str

    @property
    def line(self) -> str:
        """The first line of the report."""
        state = "active" if self.active and self.switched_on else "not active"
        if self.active and not self.switched_on:
            state = "in place, and switched off"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"overlay {state}: {self.reason}{remedy}"


def overlay_state() -> State:
    """Judge as `overlay.assert_active` does; a value that it refuses counts as not active."""
    try:
        status = overlay.status()
    except ValueError as error:
        return State(False, False, str(error), "correct the variable, and start a new process")
    return State(status.active, status.switched_on, status.reason, status.remedy)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    assumed = {} if args.assume is None else machine.parse_assumptions(args.assume)
    if args.determinism:
        if output.shows_text(args.json):
            print(determinism.markdown(assumed))
        output.write_json(args.json, determinism.records(assumed))
        return 0
    state = overlay_state()
    if output.shows_text(args.json):
        print(state.line, flush=True)
    env = machine.examine(assumed)
    answers = {question: paths.answer(question, env) for question in paths.questions()}
    if output.shows_text(args.json):
        _print_machine(env, assumed)
        _print_paths(answers, _conditions(env, state))
    output.write_json(args.json, _json(state, env, assumed, answers))
    return 0 if state.active and state.switched_on or assumed else 1


def _offer(name: str, env: Environment) -> str:
    """Say what a package offers here, or what it is for where it is absent."""
    found = env.versions[name]
    if isinstance(found, Absent):
        return f"{found.cause} ({_USE[name]})"
    if name == "transformer_engine":
        known = "supported" if installed_te.is_supported(found) else f"not {installed_te.SUPPORTED}"
        return f"{known}; {_standalone_offer()}" if env.standalone else known
    if name == "cudnn_frontend":
        return _frontend_offer(env)
    return _USE[name]


def _standalone_offer() -> str:
    lacking = ", ".join(installed_te.standalone_lacks())
    missing = f"; not installed: {lacking}; {installed_te.STANDALONE_REMEDY}" if lacking else ""
    return f"standalone, without its extension{missing}"


def _extension(env: Environment) -> tuple[str, str]:
    if isinstance(env.extension, Absent):
        return "absent", f"{env.extension.cause}. CPU tensors need it; {SLOWER}"
    return "here", "kernels for CPU tensors, and less host time for CUDA's"


def _frontend_offer(env: Environment) -> str:
    if isinstance(env.wrappers, Absent):
        return env.wrappers.cause
    parts = []
    for argument in (RUNTIME_OFFSETS, "deterministic"):
        having = [name for name in env.wrappers if env.wrapper_takes(name, argument)]
        parts.append(f"{argument}: {', '.join(having) or 'no wrapper'}")
    return "; ".join(parts)


def _print_machine(env: Environment, assumed: dict[str, str]) -> None:
    found = output.table("", "version", "")
    found.add_row(
        "te-grouped-mlp", te_grouped_mlp.__version__, f"Python {platform.python_version()}"
    )
    found.add_row("its C++ extension", *_extension(env))
    for name, version in env.versions.items():
        shown = "absent" if isinstance(version, Absent) else version
        found.add_row(DISTRIBUTIONS[name], shown, _offer(name, env))
    gpu = "none" if isinstance(env.sm, Absent) else f"SM {env.sm[0]}{env.sm[1]}"
    found.add_row("GPU", gpu, env.sm.cause if isinstance(env.sm, Absent) else "")
    output.show(found)
    if assumed:
        told = ", ".join(f"{key}={value}" for key, value in assumed.items())
        output.show_text(f"Assumed, not found here: {told}")
        return
    for line in record.lines(env):
        output.show_text(line)


def _conditions(env: Environment, state: State) -> list[str]:
    """Return what the table takes for given and is not so in this process."""
    found = {
        "Transformer Engine installed": bool(env.versions["transformer_engine"]),
        "the overlay active": state.active,
        f"{FUSED_SWITCH}=1": read_switches().fused,
    }
    return [text for text, holds in found.items() if not holds]


def _print_paths(answers: dict[paths.Question, paths.Answer], missing: list[str]) -> None:
    if missing:
        print()
        output.show_text(f"With {' and '.join(missing)}, which is not so here, this would run:")
    else:
        print("\nWhat runs:")
    numbers: dict[tuple[str, Reject], int] = {}
    found = output.table(*_HEADINGS, "path", "rows", "repeats", "why")
    for key, (*cells, refusals) in merged({each: _shown(answers[each]) for each in answers}):
        why = [f"[{numbers.setdefault(each, len(numbers) + 1)}]" for each in refusals]
        # Without the word that all classes begin with, so that a terminal has room for the rest.
        found.add_row(key[0].replace("Scaled", ""), *key[1:], *cells, " ".join(why))
    output.show(found)
    for (step, reject), number in numbers.items():
        output.show_text(f"[{number}] not {step}: {reject}. Remedy: {REMEDIES[reject.reason]}.")


def _shown(answer: paths.Answer) -> tuple[Any, ...]:
    """Return the cells of an answer, and the refusals."""
    repeats = {True: "yes", False: "no", None: ""}[answer.repeats]
    if answer.varying:
        repeats = f"all but {', '.join(answer.varying)}"
    return answer.text, answer.rows, repeats, answer.refusals


def merged(answers: dict[paths.Question, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Join questions with the same answer, so that a person can read the table.

    Args:
        answers: What is shown of every answer; it can be compared and hashed.

    Returns:
        The texts of _COLUMNS ("any" where the answer does not depend on one) and what is shown.
    """
    texts = [(_texts(question), answer) for question, answer in answers.items()]
    values = [list(dict.fromkeys(key[index] for key, _ in texts)) for index in range(len(_COLUMNS))]
    for index in range(len(_COLUMNS)):
        groups: dict[Any, list[str]] = {}
        for key, answer in texts:
            rest = (key[:index], key[index + 1 :], answer)
            groups.setdefault(rest, []).append(key[index])
        texts = []
        for (head, tail, answer), joined in groups.items():
            text = _ANY if len(joined) == len(values[index]) else ", ".join(joined)
            texts.append(((*head, text, *tail), answer))
    return texts


def _texts(question: paths.Question) -> tuple[str, ...]:
    return (
        question.activation.value,
        question.recipe.value,
        question.bias.value,
        str(question.groups),
        "yes" if question.deterministic else "no",
    )


def _json(
    state: State,
    env: Environment,
    assumed: dict[str, str],
    answers: dict[paths.Question, paths.Answer],
) -> dict[str, object]:
    def text(value: object) -> object:
        return {"absent": value.cause} if isinstance(value, Absent) else value

    rows = [
        {
            **dict(zip(_COLUMNS, _texts(question), strict=True)),
            "path": answer.path,
            "rows": answer.rows,
            "since": answer.since,
            "dprob": answer.by(Output.DPROB),
            "dbias": answer.by(Output.DB1, Output.DB2),
            "outputs": {
                output.value: {"by": launches, "repeats": repeats}
                for output, launches, repeats in answer.outputs
            },
            "repeats": answer.repeats,
            "refusals": [_refusal(step, reject) for step, reject in answer.refusals],
        }
        for question, answer in answers.items()
    ]
    return {
        "overlay": dataclasses.asdict(state),
        "switch": read_switches().fused,
        "versions": {
            "te_grouped_mlp": te_grouped_mlp.__version__,
            **{name: text(value) for name, value in env.versions.items()},
        },
        "extension": text(env.extension),
        "sm": text(env.sm) if isinstance(env.sm, Absent) else f"{env.sm[0]}{env.sm[1]}",
        "standalone": env.standalone,
        "assumed": assumed,
        "selftest": None if assumed else record.here(env),
        "paths": rows,
    }


def _refusal(step: str, reject: Reject) -> dict[str, str]:
    reason: Reason = reject.reason
    return {
        "step": step,
        "reason": reason.name,
        "detail": reject.detail,
        "remedy": REMEDIES[reason],
    }
