# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the self-test runs here: every activation, bias and row layout that a backend computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from te_grouped_mlp.op import environment, selection
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED, DType, Format
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import (
    LinearSpec,
    Problem,
    RecipeKind,
)
from te_grouped_mlp.op.shape_constraints import INTERLEAVE

BACKENDS = tuple(name for name in selection.NAMES if name != selection.UPSTREAM)
"""What `--backend` may name, besides "auto"."""

_BLACKWELL, _FALLBACK = 10, "cutedsl"
_RECIPES = {MXFP8: RecipeKind.MXFP8, UNQUANTIZED: RecipeKind.NONE}


@dataclass(frozen=True)
class Layout:
    """How the rows lie.

    Attributes:
        name: For the report.
        splits: Live rows of each expert.
        padding: Further rows of the buffer, filled with NaN; 0 for none.
    """

    name: str
    splits: tuple[int, ...]
    padding: int

    @property
    def live(self) -> int:
        """The number of live rows."""
        return sum(self.splits)


@dataclass(frozen=True)
class Case:
    """One row of the report.

    Attributes:
        backend: The backend, by name.
        device: "cpu" or "cuda".
        format: Of the operands of the matrix products.
        activation: The activation; its parameters have the trial values.
        bias: Biases on both linears, FC2's scaled by the probabilities.
        layout: Of the rows.
        hidden, ffn: In features of FC1 and of FC2.
        declined: Why the backend does not compute this here; None where it does.
    """

    backend: str
    device: str
    format: Format
    activation: Activation
    bias: bool
    layout: Layout
    hidden: int
    ffn: int
    declined: Reject | None = None

    @property
    def label(self) -> str:
        """The case in one line."""
        bias = "bias" if self.bias else "no bias"
        parts = (self.backend, self.format.name, self.activation.value, bias, self.layout.name)
        return ", ".join(parts)

    @property
    def spec(self) -> ActivationSpec:
        """The activation with its parameters."""
        kind = self.activation
        values: dict[str, Any] = {each.name: each.trial for each in kind.row.parameters}
        return ActivationSpec(kind, INTERLEAVE if kind.is_gated else None, **values)

    @property
    def problem(self) -> Problem:
        """What fusion is decided on."""
        spec, bias = self.spec, self.bias
        return Problem(
            num_groups=len(self.layout.splits),
            fc1=LinearSpec(self.hidden, spec.expansion * self.ffn, bias, main_grad=True),
            fc2=LinearSpec(self.ffn, self.hidden, bias, scale_bias=bias, main_grad=True),
            activation=spec,
            recipe=_RECIPES[self.format],
            recipe_detail="",
            device=self.device,
            dtype=DType.BFLOAT16,
        )


def layouts(device: str, fmt: Format, *, quick: bool) -> tuple[Layout, ...]:
    """Return the row layouts to test; the quick ones are those that have padding."""
    several: tuple[int, ...]
    if not fmt.is_block_scaled:
        several, one, padding = (129, 0, 300, 33, 127), 300, 51
    elif device == "cuda":
        # Some kernels take whole 256-row tiles alone.
        several, one, padding = (256, 0, 512, 256), 512, 512
    else:
        several, one, padding = (128, 0, 256, 128), 384, 128
    found = [Layout("one, padded", (one,), padding), Layout("several, padded", several, padding)]
    if not quick:
        found.append(Layout("one, full", (one,), 0))
    return tuple(found)


def find(
    requested: str, devices: Sequence[str], kinds: Sequence[Activation], *, quick: bool
) -> tuple[list[Case], list[tuple[str, Reject]]]:
    """Find out what runs here.

    Args:
        requested: A backend, or "auto": what that chooses, and on SM 10.x under MXFP8 the native
            kernels, which take the calls that the chosen backend cannot make deterministic.
        devices: Types of the devices whose tensors can be used.
        kinds: The activations that TE has.
        quick: Leave layouts out.

    Returns:
        The cases of every backend, device and format that runs at least one of them, each case
        once; and, for what runs none, the refusals.
    """
    asked = list(itertools.product([requested], devices, _RECIPES))
    sm = environment.current().sm
    blackwell = not isinstance(sm, Absent) and sm[0] == _BLACKWELL
    if requested == selection.AUTO and blackwell and "cuda" in devices:
        asked.append((_FALLBACK, "cuda", MXFP8))
    found: dict[Case, None] = {}
    refused: dict[tuple[str, Reject], None] = {}
    for name, device, fmt in asked:
        cases = list(_cases(name, device, fmt, kinds, quick=quick))
        declined = [(each.backend, each.declined) for each in cases if each.declined is not None]
        if len(declined) == len(cases):
            refused |= dict.fromkeys(declined)
        else:
            found |= dict.fromkeys(cases)
    return list(found), list(refused)


def _cases(
    requested: str, device: str, fmt: Format, kinds: Sequence[Activation], *, quick: bool
) -> Iterator[Case]:
    hidden, ffn = (512, 1536) if device == "cuda" else (256, 128)
    switches = dataclasses.replace(environment.current_switches(), fused=True, backend=requested)
    env = dataclasses.replace(environment.current(), switches=switches)
    for kind in kinds:
        for bias in (False, True):
            for layout in layouts(device, fmt, quick=quick):
                case = Case(requested, device, fmt, kind, bias, layout, hidden, ffn)
                chosen = selection.choose(case.problem, env)
                if chosen is not None:
                    yield dataclasses.replace(case, backend=chosen)
                    continue
                refusals = selection.refusals(case.problem, env)
                # That "auto" leaves a backend out is no news where another one has a cause.
                telling = {
                    name: reject
                    for name, reject in refusals.items()
                    if reject.reason is not Reason.NOT_NAMED
                }
                for name, reject in (telling or refusals).items():
                    yield dataclasses.replace(case, backend=name, declined=reject)
