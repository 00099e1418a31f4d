# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The code of a basic block.

A register holds the bits of its 32 lanes, or a numpy scalar where all lanes agree. A block becomes
`block(W, R, M)`: warp, registers, active lanes; it returns the next block, or one for each lane.
"""

from __future__ import annotations

import re

import numpy as np

from te_grouped_mlp.emulator import ptx
from te_grouped_mlp.emulator.forms import Form
from te_grouped_mlp.emulator.operands import TYPES, match, refused, used, words_of, written

LOCAL_BASE = 1 << 47
# First letters of loads, the registers that hold what they loaded, and what to call at a use.
Loaded = list[tuple[str, set[int], str]]

_DTYPE = {"u": "u", "s": "i", "f": "f"}
_PREFIX = {"u": "U", "s": "I", "f": "F"}
_SPECIAL = re.compile(r"%(?:(?:n?tid|n?ctaid|cluster_n?ctaid|n?clusterid)"
                      r"\.[xyz]|laneid|warpid|cluster_ctarank|cluster_nctarank)\Z")  # fmt: skip
_HOLE = re.compile(r"\{(\w+)(?::(\w+))?\}")
RESULT = re.compile(r"([usfpTv])(\d*) = (.*)", re.S)
_NOTHING = ptx.Instruction("", (), None, False, 0, "")


class Block:
    """The code of one block."""

    def __init__(
        self, entry: ptx.Entry, index: int, masked: bool, live: int, traced: bool, loaded: Loaded
    ) -> None:
        self.entry, self.index, self.masked = entry, index, masked
        self.live, self.traced = live, traced
        self.code: list[tuple[str, ptx.Instruction | None]] = []
        self.instruction: ptx.Instruction = _NOTHING
        self.held: dict[int, set[str]] = {}
        self.dirty: set[int] = set()
        self.constants: dict[str, np.generic] = {}
        self.temporaries = 0
        self.left = False
        self.loaded, self.noted = loaded, set[str]()

    def translate(self) -> None:
        """Fill in the code."""
        for instruction in self.entry.blocks[self.index]:
            self.instruction = instruction
            if self.traced:
                self.emit(f"W.trace({self.instruction.line}, {self.instruction.source!r})")
            form, named = match(self.instruction)
            self._note_uses()
            if form.meaning in ("@branch", "@leave"):
                self._jump()
            elif self.instruction.guard is None:
                self._translate(form, named)
            else:
                self._guarded(form, named)
        if not self.left:
            self.flush()
            self.emit(f"return {self.index + 1}")

    def _note_uses(self) -> None:
        """Note the first use of what a load brought: the machine has waited for it then.

        The ISA wants a wait after `tcgen05.ld`, and a proxy fence from `ld.shared` to `st.async`;
        right kernels leave both out where they use the values. A `mov` is no use.
        """
        for prefix, registers, call in self.loaded:
            if self.instruction.op.startswith(prefix):
                self.noted.discard(prefix)
            elif prefix in self.noted or self.instruction.op.startswith("mov."):
                continue
            elif used(self.instruction) & registers:
                self.emit(call)
                self.noted.add(prefix)

    def emit(self, text: str) -> None:
        """Append a line."""
        self.code.append((text, self.instruction))

    def temporary(self, expression: str) -> str:
        """Give an expression a name."""
        self.temporaries += 1
        self.emit(f"t{self.temporaries} = {expression}")
        return f"t{self.temporaries}"

    def flush(self) -> None:
        """Store the registers that something reads later."""
        for index in sorted(self.dirty):
            if self.live >> index & 1:
                self.emit(f"R[{index}] = {self.bits(index)}")
        self.dirty.clear()

    def bits(self, index: int) -> str:
        """Return the variable that holds a register's bits."""
        held = self.held.setdefault(index, set())
        if not held:
            self.emit(f"u{index} = R[{index}]")
            held.add("u")
        elif "u" not in held:
            self.emit(f"u{index} = {next(iter(held))}{index}.view(U{8 * self.width(index)})")
            held.add("u")
        return f"u{index}"

    def width(self, index: int) -> int:
        """Return a register's bytes."""
        return TYPES[self.entry.registers[index][1]][1]

    def value(self, operand: ptx.Operand, kind: str, size: int) -> str:
        """Return an expression of an operand in a representation."""
        if isinstance(operand, ptx.Immediate):
            return self._constant(operand, kind, size)
        if isinstance(operand, ptx.Symbol):
            return self._symbol(operand, size)
        if not isinstance(operand, ptx.Register):
            raise refused(self.instruction, f"a {type(operand).__name__} is no value")
        if operand.index < 0:
            if not _SPECIAL.match(operand.name):
                raise refused(self.instruction, f"unknown register {operand.name}")
            return f"W.special[{operand.name!r}]"
        index, width = operand.index, self.width(operand.index)
        if kind == "p" or size == width == 16:
            return self.bits(index)
        if width < size or width == 16:
            raise refused(self.instruction, f"{operand.name} is too narrow")
        if width > size:
            narrow = f"{self.bits(index)}.astype(U{8 * size})"
            return narrow if kind == "u" else f"{narrow}.view({_PREFIX[kind]}{8 * size})"
        if kind not in self.held.get(index, ()):
            bits = self.bits(index)
            if kind == "u":
                return bits
            self.emit(f"{kind}{index} = {bits}.view({_PREFIX[kind]}{8 * size})")
            self.held[index].add(kind)
        return f"{kind}{index}"

    def _constant(self, operand: ptx.Immediate, kind: str, size: int) -> str:
        if kind == "p":
            return "np.True_" if operand.bits else "np.False_"
        raw = (operand.bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        name = f"c{kind}{size}_{raw.hex()}"
        self.constants[name] = np.frombuffer(raw, f"{_DTYPE[kind]}{size}")[0]
        return name

    def _symbol(self, operand: ptx.Symbol, size: int) -> str:
        name = operand.name
        if name in self.entry.shared:
            return f"W.symbols[{name!r}].astype(U{8 * size})"
        if name in self.entry.parameters:
            return f"(W.parameter_base + U64({self.entry.parameters[name][0]}))"
        if name in self.entry.local:
            return f"U64({LOCAL_BASE + self.entry.local[name]})"
        raise refused(self.instruction, f"unknown name {name}")

    def _address(self, operand: ptx.Address) -> str:
        base = operand.base
        if isinstance(base, ptx.Symbol) and self.instruction.op.startswith("ld.param"):
            if base.name not in self.entry.parameters:
                raise refused(self.instruction, f"unknown parameter {base.name}")
            return f"None, {self.entry.parameters[base.name][0] + operand.offset}"
        shared = isinstance(base, ptx.Symbol) and base.name in self.entry.shared
        if isinstance(base, ptx.Register) and base.index >= 0:
            text = self.bits(base.index)
        else:
            text = self.value(base, "u", 4 if shared else 8)
        if operand.coordinates:
            parts = "".join(f"{self.value(c, 's', 4)}, " for c in operand.coordinates)
            return f"{text}, ({parts})"
        return f"{text}, {operand.offset}"

    def assign(self, operand: ptx.Operand, expression: str, kind: str, size: int) -> None:
        """Store an expression in a register."""
        if not isinstance(operand, ptx.Register):
            raise refused(self.instruction, f"a {type(operand).__name__} is no destination")
        if operand.index < 0:
            if operand.name == "_":
                self.emit(expression)
                return
            raise refused(self.instruction, f"unknown register {operand.name}")
        index, width = operand.index, self.width(operand.index)
        if kind == "p":
            kind = "u"
        elif size > width:
            raise refused(self.instruction, f"{operand.name} is too narrow")
        elif size < width:
            signed = f".view(U{8 * width})" if kind == "s" else ""
            expression = f"({expression}).astype({_PREFIX[kind]}{8 * width}){signed}"
            kind = "u"
        if self.masked:
            old = self.bits(index)
            raw = expression if kind == "u" else f"({expression}).view(U{8 * width})"
            self.emit(f"u{index} = blend(M, {raw}, {old})")
            self.held[index] = {"u"}
        else:
            self.emit(f"{kind}{index} = {expression}")
            self.held[index] = {kind}
        self.dirty.add(index)

    def _translate(self, form: Form, named: dict[str, ptx.Operand]) -> None:
        if form.meaning.startswith("@"):
            getattr(self, form.meaning[1:])(named)
            return
        words = words_of(form.op)

        def fill(hole: re.Match[str]) -> str:
            name, wanted = hole[1], hole[2]
            if name in words:
                return words[name]
            operand = named.get(name)
            if operand is None:
                return "None"
            if isinstance(operand, ptx.Address):
                return self._address(operand)
            if name in "ijk" and isinstance(operand, ptx.Immediate):
                return str(operand.bits)
            if name == "V":
                items = operand.items if isinstance(operand, ptx.Vector) else (operand,)
                if len(items) != int(words["n"]):
                    raise refused(self.instruction, f"{len(items)} values")
                return "(" + "".join(f"{self.value(v, 'u', words_size)}, " for v in items) + ")"
            kind, size = self._wanted(name, wanted, words["T"])
            return self.value(operand, kind, size)

        words_size = TYPES.get(words["T"], ("u", 4))[1]
        meaning = form.meaning
        if meaning.startswith("do "):
            self.emit(_HOLE.sub(fill, meaning[3:]))
            return
        result = RESULT.fullmatch(meaning)
        assert result is not None, meaning
        expression = _HOLE.sub(fill, result[3])
        kind, size = TYPES.get(words["T"], ("u", 4))
        if result[1] == "v":
            self._scatter(named["D"], expression, int(words["n"]), size)
            return
        kind = kind if result[1] == "T" else result[1]
        size = int(result[2]) // 8 if result[2] else size
        self.assign(named["d"], expression, kind, size)

    def _wanted(self, name: str, wanted: str | None, natural: str) -> tuple[str, int]:
        if name in "pqr":
            return "p", 1
        kind, size = TYPES.get(natural, ("u", 4))
        if wanted == "u":
            return "u", size
        return TYPES[wanted] if wanted else (kind, size)

    def _scatter(self, operand: ptx.Operand, expression: str, count: int, size: int) -> None:
        items = operand.items if isinstance(operand, ptx.Vector) else (operand,)
        if len(items) != count:
            raise refused(self.instruction, f"{len(items)} destinations")
        name = self.temporary(expression)
        for position, item in enumerate(items):
            self.assign(item, f"{name}[{position}]", "u", size)

    def _guarded(self, form: Form, named: dict[str, ptx.Operand]) -> None:
        """Run one instruction in the lanes where its guard holds."""
        for index in sorted(used(self.instruction) | written(self.instruction)):
            self.bits(index)
        assert self.instruction.guard is not None
        sign = "~" if self.instruction.negated else ""
        self.emit(f"G = narrowed(M, {sign}{self.value(self.instruction.guard, 'p', 1)})")
        outer, held, masked = self.code, {k: set(v) for k, v in self.held.items()}, self.masked
        self.code, self.masked = [], True
        self._translate(form, named)
        body, self.code, self.held, self.masked = self.code, outer, held, masked
        for index in written(self.instruction):
            self.held[index] = {"u"}
        self.emit("if G is not None:")
        self.emit("    M0, M = M, G")
        self.code += [(f"    {text}", instruction) for text, instruction in body]
        self.emit("    M = M0")

    def _jump(self) -> None:
        instruction, after = self.instruction, self.index + 1
        target = "EXIT"
        if instruction.op.startswith("bra"):
            if instruction.target not in self.entry.labels:
                raise refused(instruction, "unknown label")
            target = str(self.entry.labels[instruction.target])
        if instruction.guard is None:
            self.flush()
            self.emit(f"return {target}")
            self.left = True
            return
        guard = self.value(instruction.guard, "p", 1)
        self.flush()
        where = f"{after}, {target}" if instruction.negated else f"{target}, {after}"
        self.emit(f"return branch({guard}, {where}, M)")
        self.left = True

    def move(self, named: dict[str, ptx.Operand]) -> None:
        """`mov`: plain, or a vector into a wide register, or out of one."""
        to, source = named["D"], named["a"]
        size = TYPES[self.instruction.op.rpartition(".")[2]][1]
        if isinstance(to, ptx.Vector):
            name, each = self.temporary(self.value(source, "u", size)), size // len(to.items)
            for k, item in enumerate(to.items):
                shifted = f"({name} >> U{8 * size}({8 * each * k}))" if k else name
                part = f"{name}[{k}]" if size == 16 else f"{shifted}.astype(U{8 * each})"
                self.assign(item, part, "u", each)
        elif isinstance(source, ptx.Vector):
            each = size // len(source.items)
            parts = [self.value(item, "u", each) for item in source.items]
            if size == 16:
                self.assign(to, f"({', '.join(parts)})", "u", size)
                return
            kind = f"U{8 * size}"
            shifts = [f" << {kind}({8 * each * k})" if k else "" for k in range(len(parts))]
            wide = [f"({p}.astype({kind}){s})" for p, s in zip(parts, shifts, strict=True)]
            self.assign(to, " | ".join(wide), "u", size)
        else:
            self.assign(to, self.value(source, "u", size), "u", size)

    def resize(self, named: dict[str, ptx.Operand]) -> None:
        """`cvt` between integers: truncate, or extend by the source's sign."""
        to, source = (TYPES[t] for t in self.instruction.op.split(".")[-2:])
        value = self.value(named["a"], *source)
        self.assign(named["d"], f"{value}.astype({_PREFIX[to[0]]}{8 * to[1]})", *to)

    def elect(self, named: dict[str, ptx.Operand]) -> None:
        """`elect.sync`: the lowest active lane."""
        lane = self.temporary("first(M)")
        self.assign(named["d"], f"U32({lane})", "u", 4)
        self.assign(named["e"], f"LANES == {lane}", "p", 1)
