# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Instructions matched with their forms: operands by letter, and the registers that they touch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from te_grouped_mlp.emulator import ptx
from te_grouped_mlp.emulator.forms import FORMS, Form

# Type -> (representation, bytes).
TYPES = {f"{kind}{bits}": (rep, bits // 8)
         for kind, rep in ("bu", "uu", "ss") for bits in (8, 16, 32, 64)}  # fmt: skip
TYPES |= {"f32": ("f", 4), "f64": ("u", 8), "f32x2": ("u", 8), "pred": ("p", 1), "b128": ("u", 16)}
TYPES |= dict.fromkeys(("bf16", "f16", "e4m3x2", "e5m2x2", "ue8m0x2"), ("u", 2))
TYPES |= dict.fromkeys(("bf16x2", "f16x2", "tf32"), ("u", 4))
_INTEGRAL = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_SIGN = {"add": "+", "sub": "-", "mul": "*"}


def refused(instruction: ptx.Instruction, why: str) -> NotImplementedError:
    """Return the error for an instruction that is not known."""
    return NotImplementedError(f"PTX line {instruction.line}: {instruction.source}: {why}")


def match(instruction: ptx.Instruction) -> tuple[Form, dict[str, ptx.Operand]]:
    """Return an instruction's form, and its operands by their letters.

    Raises:
        NotImplementedError: The opcode, the count or the kind of the operands is not in the table.
    """
    form = FORMS.get(instruction.op)
    if form is None:
        raise refused(instruction, "unknown instruction or modifier")
    operands: list[ptx.Operand] = []
    for each in instruction.operands:
        operands += [each.first, each.second] if isinstance(each, ptx.Pair) else [each]
    spare = len(operands) - len(form.required)
    letters, optional = "", list(form.letters)
    for letter in form.required:
        optional.remove(letter)
    for letter in form.letters:
        if letter not in optional or spare > 0:
            letters += letter
            spare -= letter in optional
    if len(operands) != len(letters):
        raise refused(instruction, f"{len(operands)} operands instead of {len(form.required)}")
    named = dict(zip(letters, operands, strict=True))
    for letter, operand in named.items():
        if not _fits(letter, operand):
            raise refused(instruction, f"operand {letter} is a {type(operand).__name__}")
    tensor = named.get("t")
    dims = re.search(r"tensor\.(\d)d", instruction.op)
    if isinstance(tensor, ptx.Address) and dims and len(tensor.coordinates) != int(dims[1]):
        raise refused(instruction, f"{len(tensor.coordinates)} coordinates")
    return form, named


def _fits(letter: str, operand: ptx.Operand) -> bool:
    if letter in "xyzt":
        return isinstance(operand, ptx.Address) and bool(operand.coordinates) == (letter == "t")
    if letter in "de":
        return isinstance(operand, ptx.Register)
    if letter == "D":
        return isinstance(operand, (ptx.Register, ptx.Vector))
    if letter in "ijk":
        return isinstance(operand, ptx.Immediate)
    return not isinstance(operand, (ptx.Address, ptx.Pair))


def used(instruction: ptx.Instruction) -> set[int]:
    """Return the registers that an instruction reads."""
    named = match(instruction)[1]
    sources = [v for k, v in named.items() if k not in "deD"]
    return _registers([*sources, *filter(None, [instruction.guard])])


def written(instruction: ptx.Instruction) -> set[int]:
    """Return the registers that an instruction writes."""
    return _registers([v for k, v in match(instruction)[1].items() if k in "deD"])


def _registers(operands: Iterable[ptx.Operand]) -> set[int]:
    found: set[int] = set()
    for each in operands:
        if isinstance(each, ptx.Register):
            found |= {each.index} if each.index >= 0 else set()
        elif isinstance(each, ptx.Vector):
            found |= _registers(each.items)
        elif isinstance(each, ptx.Address):
            found |= _registers((each.base, *each.coordinates))
    return found


def words_of(op: str) -> dict[str, str]:
    """Return what a meaning may say about its opcode."""
    parts = op.split(".")
    size = TYPES.get(parts[-1], ("u", 4))[1]
    count = next((p[1:] for p in parts if re.fullmatch(r"[vx]\d+", p)), "1")
    second = parts[2] if len(parts) > 2 else ""
    space = second if parts[1:2] == ["to"] else parts[1] if len(parts) > 1 else ""
    return {
        "T": parts[-1], "R": parts[-2].removesuffix("x2") if len(parts) > 1 else "",
        "sign": _SIGN.get(parts[0], ""),
        "extreme": {"min": "minimum", "max": "maximum"}.get(parts[0], ""),
        "integral": _INTEGRAL.get(parts[1] if len(parts) > 1 else "", ""), "up": str("rp" in parts),
        "space": space.replace("::", "_"), "size": str(size), "n": count,
        "group": "2" if "cta_group::2" in parts else "1",
        "relaxed": str("relaxed" in parts), "multicast": str("multicast::cluster::all" in parts),
        "axis": op.partition("ctaid::")[2][:1], "way": parts[1] if len(parts) > 1 else "",
        "mode": second, "shfl": second, "vote": second, "redux": second, "atom": second,
        "kind": op.partition("kind::")[2].partition(".")[0],
    }  # fmt: skip
