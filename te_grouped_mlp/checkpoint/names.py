# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint are FC1's, by name, and what becomes of each. Imports no torch."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from te_grouped_mlp.op.shape_constraints import INTERLEAVE

MARKER = "te_grouped_mlp.glu_interleave"
"""The key of the marker in a file's metadata, and its file name without the suffix."""


class Refused(ValueError):
    """A checkpoint that is not converted; nothing was written."""


class Family(Enum):
    """Whose names a checkpoint has, and in which order its FC1 is without interleaving."""

    MEGATRON = "megatron"
    MIXTRAL = "mixtral"
    QWEN = "qwen"
    GPT_OSS = "gpt-oss"


class Step(Enum):
    """What becomes of the source tensors of one tensor."""

    COPY = "copied"
    INTERLEAVE = "halves to blocks"
    CONTIGUOUS = "blocks to halves"
    JOIN = "gate and linear joined in blocks"
    GATE = "gate taken out of blocks"
    LINEAR = "linear taken out of blocks"
    FROM_ALTERNATING = "alternating to blocks"
    TO_ALTERNATING = "blocks to alternating"


@dataclass(frozen=True)
class Output:
    """One tensor of the result.

    Attributes:
        name: Its name.
        shape: Its shape.
        step: How it is made.
        sources: The tensors that it is made of: gate and linear for JOIN, else one.
        is_weight: The output features are the last but one axis; of a bias they are the last.
    """

    name: str
    shape: tuple[int, ...]
    step: Step
    sources: tuple[str, ...]
    is_weight: bool = True


# A parameter, or an optimizer's state of its shape.
_STATE = r"(?:\.(?:exp_avg|exp_avg_sq|fp32_param|master_param|main_param|param|momentum_buffer))?"
_PREFIX = r"(?P<prefix>(?:.*\.)?experts\.)"
_FUSED = re.compile(
    rf"{_PREFIX}(?P<inner>(?:\w+\.)*?)linear_fc1\.(?P<kind>weight|bias)\d*(?P<rest>.*)"
)
_PAIRED = re.compile(
    rf"{_PREFIX}(?P<inner>\d+\.)(?P<part>w1|w3|gate_proj|up_proj)\.(?P<kind>weight|bias)(?P<rest>.*)"
)
_STACKED = re.compile(rf"{_PREFIX}gate_up_proj(?P<kind>_bias|)(?P<rest>(?:[._].*)?)")
_PARTS = {Family.MIXTRAL: ("w1", "w3"), Family.QWEN: ("gate_proj", "up_proj")}

Shapes = Mapping[str, tuple[int, ...]]


def family_of(shapes: Shapes, extra: Sequence[str] = ()) -> Family:
    """Return whose names these are.

    Raises:
        Refused: There is no FC1 of routed experts, or there are several families.
    """
    found: dict[Family, str] = {}
    for name in shapes:
        paired = _PAIRED.fullmatch(name)
        if paired:
            part = paired["part"]
            found.setdefault(Family.MIXTRAL if part.startswith("w") else Family.QWEN, name)
        elif _STACKED.fullmatch(name):
            found.setdefault(Family.GPT_OSS, name)
        elif _FUSED.fullmatch(name) or _is_extra(name, extra):
            found.setdefault(Family.MEGATRON, name)
    if len(found) == 1:
        return next(iter(found))
    if found:
        both = ", ".join(f"{name} ({family.value})" for family, name in found.items())
        raise Refused(f"names of several families: {both}; allowed: one")
    first = ", ".join(list(shapes)[:3]) or "none"
    raise Refused(
        "no FC1 of experts was found; allowed: names with experts.<...>.linear_fc1.weight "
        "(Megatron), experts.<n>.w1 and w3 (Mixtral), experts.<n>.gate_proj and up_proj (Qwen, "
        f"DeepSeek), experts.gate_up_proj (GPT-OSS), or --fc1 PATTERN; the first names are {first}"
    )


def plan_interleaved(shapes: Shapes, extra: Sequence[str] = ()) -> tuple[Family, list[Output]]:
    """Return how to bring FC1 into blocks of 32 gate and 32 linear features.

    Args:
        shapes: Every tensor of the checkpoint.
        extra: Patterns of further names of FC1's weights and biases in two halves.

    Raises:
        Refused: Unknown names, half of a pair, or features that do not fit.
    """
    family = family_of(shapes, extra)
    if family is Family.GPT_OSS and not any(name.endswith("gate_up_proj_bias") for name in shapes):
        raise Refused(
            "experts.gate_up_proj without gate_up_proj_bias: other models stack two halves under "
            "the name that GPT-OSS has for alternating features; allowed: GPT-OSS's, with its bias"
        )
    made: dict[str, Output] = {}
    for name, shape in shapes.items():
        output = _interleaved(name, shape, shapes, family, extra)
        if output is None:
            continue
        if output.name in made:
            raise Refused(f"{output.name} would be made twice, of {output.sources[0]} too")
        made[output.name] = output
    return family, list(made.values())


def _interleaved(
    name: str, shape: tuple[int, ...], shapes: Shapes, family: Family, extra: Sequence[str]
) -> Output | None:
    """Return what is made of a tensor; None if another one's output takes it in."""
    if family in _PARTS and (found := _PAIRED.fullmatch(name)):
        _require_known(name, found["rest"])
        gate, linear = _PARTS[family]
        names = [
            f"{found['prefix']}{found['inner']}{part}.{found['kind']}{found['rest']}"
            for part in (gate, linear)
        ]
        for each in names:
            if each not in shapes:
                raise Refused(f"{name} has no {each} beside it")
        if shapes[names[0]] != shapes[names[1]]:
            raise Refused(f"{names[0]} is {shapes[names[0]]}, {names[1]} {shapes[names[1]]}")
        if found["part"] == linear:
            return None
        target = f"{found['prefix']}{found['inner']}linear_fc1.{found['kind']}{found['rest']}"
        weight = found["kind"] == "weight"
        joined = _with(shape, _axis(name, shape, weight), 2)
        return _checked(Output(target, joined, Step.JOIN, (names[0], names[1]), weight))
    if family is Family.GPT_OSS and (found := _STACKED.fullmatch(name)):
        _require_known(name, found["rest"])
        weight = not found["kind"]
        target = f"{found['prefix']}linear_fc1.{'weight' if weight else 'bias'}{found['rest']}"
        _axis(name, shape, weight)
        turned = (*shape[:-2], shape[-1], shape[-2]) if weight else shape
        return _checked(Output(target, turned, Step.FROM_ALTERNATING, (name,), weight))
    return _same_names(name, shape, Step.INTERLEAVE, extra)


def _same_names(name: str, shape: tuple[int, ...], step: Step, extra: Sequence[str]) -> Output:
    found = _FUSED.fullmatch(name)
    is_extra = found is None and _is_extra(name, extra)
    if (found is None and not is_extra) or not shape:
        # A scalar beside a parameter is the optimizer's count of steps.
        return Output(name, shape, Step.COPY, (name,))
    if found is not None:
        _require_known(name, found["rest"])
    weight = found["kind"] == "weight" if found is not None else "bias" not in name
    return _checked(Output(name, shape, step, (name,), weight))


def plan_contiguous(shapes: Shapes, family: Family, extra: Sequence[str] = ()) -> list[Output]:
    """Return how to bring FC1 back from blocks into the order and the names of `family`.

    Raises:
        Refused: No FC1 is there, or features that do not fit.
    """
    family_of({name: shape for name, shape in shapes.items() if not _other(name)}, extra)
    outputs: list[Output] = []
    for name, shape in shapes.items():
        output = _same_names(name, shape, Step.CONTIGUOUS, extra)
        if output.step is Step.COPY or family is Family.MEGATRON:
            outputs.append(output)
            continue
        outputs += _renamed(output, family)
    return outputs


def _other(name: str) -> bool:
    return bool(_PAIRED.fullmatch(name) or _STACKED.fullmatch(name))


def _renamed(output: Output, family: Family) -> Iterable[Output]:
    name, shape, weight = output.name, output.shape, output.is_weight
    head, _, tail = name.rpartition("linear_fc1.")
    kind = "weight" if weight else "bias"
    if family is Family.GPT_OSS:
        turned = (*shape[:-2], shape[-1], shape[-2]) if weight else shape
        rest = ("" if weight else "_bias") + tail.removeprefix(kind)
        yield Output(f"{head}gate_up_proj{rest}", turned, Step.TO_ALTERNATING, (name,), weight)
        return
    axis = len(shape) - (2 if weight else 1)
    half = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
    for part, step in zip(_PARTS[family], (Step.GATE, Step.LINEAR), strict=True):
        yield Output(f"{head}{part}.{tail}", half, step, (name,), weight)


def _is_extra(name: str, extra: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in extra)


def _require_known(name: str, rest: str) -> None:
    if not re.fullmatch(_STATE, rest):
        raise Refused(
            f"{name} is not known; allowed after a weight or bias: nothing, or the name of an "
            "optimizer's state. Quantized weights are to be dequantized first"
        )


def _axis(name: str, shape: tuple[int, ...], weight: bool) -> int:
    axis = len(shape) - (2 if weight else 1)
    if axis < 0:
        raise Refused(f"{name} has shape {shape}; allowed: at least two axes for a weight")
    return axis


def _with(shape: tuple[int, ...], axis: int, factor: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] * factor, *shape[axis + 1 :])


def _checked(output: Output) -> Output:
    axis = _axis(output.name, output.shape, output.is_weight)
    features, multiple = output.shape[axis], 2 * INTERLEAVE
    if features <= 0 or features % multiple:
        raise Refused(
            f"{output.name} has {features} output features (shape {output.shape}); allowed: "
            f"positive multiples of {multiple}"
        )
    return output


def marker_text(family: Family, extra: Sequence[str] = ()) -> str:
    """Return the marker: FC1 is in blocks, whose names it had, and which others are FC1's."""
    return json.dumps({"interleave": INTERLEAVE, "family": family.value, "fc1": list(extra)})


def read_marker(text: str) -> tuple[Family, list[str]]:
    """Return what `marker_text` was given.

    Raises:
        Refused: The marker is not one of this program.
    """
    try:
        found = json.loads(text)
        if found["interleave"] != INTERLEAVE:
            raise ValueError(f"interleave is {found['interleave']}")
        return Family(found["family"]), [str(each) for each in found["fc1"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"the marker is {text!r}, which is not known here: {error}") from None
