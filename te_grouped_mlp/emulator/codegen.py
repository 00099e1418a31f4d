# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs: entries with the Python functions of their blocks.

A block has two of them, for all lanes and for some, made when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from te_grouped_mlp.emulator import formats, lanes, ptx
from te_grouped_mlp.emulator.block import RESULT, Block
from te_grouped_mlp.emulator.forms import FORMS
from te_grouped_mlp.emulator.operands import TYPES, match, used, written

EXIT = 1 << 30
Function = Callable[[object, list, np.ndarray], "int | np.ndarray"]

NAMESPACE: dict[str, object] = {
    "np": np, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "I8": np.int8,
    "I16": np.int16, "I32": np.int32, "I64": np.int64, "F32": np.float32, "F64": np.float64,
    "EXIT": EXIT,
    **{k: v for m in (formats, lanes) for k, v in vars(m).items() if not k.startswith("_")},
}  # fmt: skip


def expression(op: str) -> Callable[..., np.ndarray]:
    """Return a pure instruction as a function of arrays of its operands' bits, for tests."""
    form = FORMS[op]
    types = [op.split(".")[-1]] * (len(form.required) - 1)
    text = ".entry k () { .reg .b32 %r<9>; .reg .b16 %h<9>; .reg .b64 %d<9>; @; }"
    names = [{2: "%h", 4: "%r", 8: "%d"}[TYPES[t][1]] + str(k) for k, t in enumerate(types, 1)]
    result = RESULT.fullmatch(form.meaning)
    assert result is not None
    size = int(result[2]) // 8 if result[2] else TYPES[op.split(".")[-1]][1]
    text = text.replace(
        "@", f"{op} { ({1: '%h', 2: '%h', 4: '%r', 8: '%d'}[size]) }0, {', '.join(names)}"
    )
    entry = ptx.entries(text)["k"]
    block = Block(entry, 0, False, -1, False, [])
    block.translate()
    function, _ = _compile(block, "expression")
    first = match(entry.blocks[0][0])[1]["d"]
    assert isinstance(first, ptx.Register)

    def evaluate(*arrays: np.ndarray) -> np.ndarray:
        registers: list = [None] * len(entry.registers)
        for operand, array in zip(entry.blocks[0][0].operands[1:], arrays, strict=False):
            assert isinstance(operand, ptx.Register)
            registers[operand.index] = array
        with np.errstate(all="ignore"):
            function(None, registers, lanes.ALL)
        return registers[first.index]

    return evaluate


def _compile(block: Block, name: str) -> tuple[Function, list[ptx.Instruction | None]]:
    """Return the function, and the instruction of each of its lines."""
    source = "def block(W, R, M):\n" + "".join(f" {text}\n" for text, _ in block.code)
    space = NAMESPACE | block.constants
    exec(compile(source, name, "exec"), space)
    function: Function = space["block"]  # type: ignore[assignment]
    return function, [None, None, *(instruction for _, instruction in block.code)]


class Program:
    """An entry with the functions of its blocks, made when they are first run."""

    def __init__(self, entry: ptx.Entry) -> None:
        """Match every instruction, so that what is unknown is refused before anything runs."""
        self.entry = entry
        self.lengths = [len(b) for b in entry.blocks]
        self.functions: dict[tuple[int, bool, bool], Function] = {}
        self.lines: dict[str, list[ptx.Instruction | None]] = {}
        self.live = _liveness(entry)
        self.loaded = [("tcgen05.ld", _loaded(entry, "tcgen05.ld"), "tensor.wait_load(W)")]
        if any(i.op.startswith("st.async") for block in entry.blocks for i in block):
            self.loaded.append(("ld.shared", _loaded(entry, "ld.shared"), "W.use_loads()"))

    def function(self, index: int, masked: bool, traced: bool) -> Function:
        """Return the code of a block."""
        key = (index, masked, traced)
        if key not in self.functions:
            block = Block(self.entry, index, masked, self.live[index], traced, self.loaded)
            block.translate()
            name = f"<ptx {id(self)} {key}>"
            self.functions[key], self.lines[name] = _compile(block, name)
        return self.functions[key]


def _loaded(entry: ptx.Entry, prefix: str) -> set[int]:
    """Return the registers that hold what some loads brought, copies by `mov` included."""
    every = [i for block in entry.blocks for i in block]
    found = set().union(*(written(i) for i in every if i.op.startswith(prefix)))
    moves = [(used(i), written(i)) for i in every if i.op.startswith("mov.")] if found else []
    before = -1
    while before != len(found):
        before = len(found)
        for source, to in moves:
            if source & found:
                found |= to
    return found


def _liveness(entry: ptx.Entry) -> list[int]:
    """Return for each block the registers (a bit each) that something reads after it."""
    uses, kills, following = [], [], []
    for index, block in enumerate(entry.blocks):
        use = kill = 0
        for instruction in block:
            read = sum(1 << r for r in used(instruction))
            use |= read & ~kill
            if instruction.guard is None:
                kill |= sum(1 << r for r in written(instruction))
        last = block[-1] if block else None
        leaves = (
            last is not None
            and last.guard is None
            and bool(last.target or last.op in ("ret", "exit"))
        )
        target = entry.labels.get(last.target) if last is not None else None
        after = [] if leaves or index + 1 >= len(entry.blocks) else [index + 1]
        following.append(
            after + ([] if target is None or target >= len(entry.blocks) else [target])
        )
        uses.append(use)
        kills.append(kill)
    entering, leaving = list(uses), [0] * len(uses)
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(uses))):
            out = 0
            for each in following[index]:
                out |= entering[each]
            new = uses[index] | (out & ~kills[index])
            leaving[index] = out
            if new != entering[index]:
                entering[index], changed = new, True
    return leaving


@lru_cache(maxsize=64)
def program(text: str, name: str) -> Program:
    """Return the program of an entry of a module; by its text, since variants share names.

    Raises:
        ValueError: There is no such entry.
        NotImplementedError: An instruction is not known.
    """
    found = ptx.entries(text)
    if name not in found:
        raise ValueError(f"entry={name!r} is none of {sorted(found)}")
    return Program(found[name])
