# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""PTX text to entries of basic blocks (PTX ISA, sections 4 to 6).

Only syntax is known here; what an instruction means is in `forms` and `codegen`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

_STATEMENT = re.compile(
    r"\s*(?:(?P<label>[A-Za-z_$][\w$]*)\s*:(?!:)|(?P<open>\{)|(?P<close>\})"
    r"|(?P<text>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
_INSTRUCTION = re.compile(r"(?:@(?P<negated>!?)(?P<guard>[\w%$]+)\s+)?(?P<op>[a-z][\w.:]*)\s*")
_REGISTERS = re.compile(r"\.reg\s+(?:\.v[24]\s+)?\.(?P<type>\w+)\s+(?P<names>.*)", re.S)
_PARAMETER = re.compile(
    r"\s*\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+)(?P<bits>\d+)\s+"
    r"(?:\.ptr(?:\s+\.(?:global|const|local|shared))?(?:\s+\.align\s+\d+)?\s+)?"
    r"(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?\s*\Z"
)
_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*(?:\((?P<parameters>[^)]*)\))?(?P<head>[^{]*)\{")
_ARRAY = re.compile(
    r"\.(?P<space>shared|local)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.b(?P<bits>\d+)\s+"
    r"(?P<name>[\w$]+)(?:\[(?P<count>\d*)\])?"
)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?\Z|0[fFdD][0-9a-fA-F]+\Z")
_TOKEN = re.compile(r"[\w%$.:-]+")

# What a block ends with besides jumps: after these, another warp may have to run first.
WAITS = ("bar", "barrier", "mbarrier.try_wait", "mbarrier.test_wait", "nanosleep")


@dataclass(frozen=True)
class Register:
    """A register by its number in the entry, or a special one (`%tid.x`) with number -1."""

    name: str
    index: int = -1


@dataclass(frozen=True)
class Immediate:
    """A literal, as its bits; `floating` for `0f` and `0d`."""

    bits: int
    floating: bool = False


@dataclass(frozen=True)
class Symbol:
    """The name of a parameter, or of a shared or local array."""

    name: str


@dataclass(frozen=True)
class Vector:
    """Operands in braces."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations, `d|p`."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Address:
    """`[base+offset]`, or `[map, {coordinates}]`."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Immediate | Symbol | Vector | Pair | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction with its place in the text."""

    op: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    line: int
    source: str
    target: str = ""


@dataclass
class Entry:
    """A kernel.

    Attributes:
        parameters: Name -> (offset, bytes) in the parameter space.
        shared: Name -> (alignment, bytes) of the module's shared arrays; zero bytes: the launch's.
        local: Name -> offset in a thread's local memory.
        threads: What `.reqntid` demands, if it does.
        blocks: Basic blocks; control passes from one to the next.
        labels: Label -> block.
        registers: Number -> (name, type).
    """

    name: str
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    parameter_bytes: int = 0
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    threads: tuple[int, ...] | None = None
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[tuple[str, str]] = field(default_factory=list)


@lru_cache(maxsize=64)
def entries(text: str) -> dict[str, Entry]:
    """Parse a module; the result is shared and must not be changed.

    Raises:
        NotImplementedError: Text that is not understood, with its line.
    """
    text = re.sub(r"//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.M)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    found = {}
    outside = text
    for match in _ENTRY.finditer(text):
        end = _closing(text, match.end())
        entry = Entry(match["name"])
        _read_parameters(entry, match["parameters"] or "")
        threads = re.search(r"\.reqntid\s+([\d,\s]+)", match["head"])
        if threads:
            entry.threads = tuple(int(x) for x in threads[1].split(","))
        found[entry.name] = entry
        _Body(entry, text[match.end() : end], text.count("\n", 0, match.end()) + 1).read()
        outside = outside.replace(text[match.end() : end], "")
    for match in _ARRAY.finditer(outside):
        size = int(match["count"] or 0) * int(match["bits"]) // 8
        for entry in found.values():
            entry.shared[match["name"]] = (int(match["align"] or 1), size)
    return found


def _closing(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise NotImplementedError("PTX: an entry's body has no end")


def _read_parameters(entry: Entry, text: str) -> None:
    offset = 0
    for part in filter(str.strip, text.split(",")):
        match = _PARAMETER.match(part)
        if match is None:
            raise NotImplementedError(f"PTX parameter: {part.strip()}")
        element = int(match["bits"]) // 8
        size, align = element * int(match["count"] or 1), int(match["align"] or element)
        offset = -(-offset // align) * align
        entry.parameters[match["name"]] = (offset, size)
        offset += size
    entry.parameter_bytes = offset


class _Body:
    """Reads the statements of one entry."""

    def __init__(self, entry: Entry, text: str, line: int) -> None:
        self.entry, self.text, self.first_line = entry, text, line
        self.scopes: list[dict[str, str]] = [{}]
        self.parents: list[int] = [-1]
        self.numbers: dict[str, int] = {}

    def read(self) -> None:
        """Fill in the entry: declarations and labels first, since a label is used before it."""
        statements = list(self._statements())
        for scope, line, text, label in statements:
            if label:
                self.scopes[scope][text] = f"{text}:{scope}" if scope else text
            elif text.startswith(".reg"):
                self._declare(scope, line, text)
            elif text.startswith(".local"):
                self._declare_local(line, text)
        blocks: list[list[Instruction]] = [[]]
        for scope, line, text, label in statements:
            if label:
                if blocks[-1]:
                    blocks.append([])
                self.entry.labels[self._resolve(scope, text)] = len(blocks) - 1
            elif not text.startswith((".reg", ".local", ".pragma")):
                instruction = self._instruction(scope, line, text)
                blocks[-1].append(instruction)
                if instruction.target or instruction.op.startswith(("ret", "exit", *WAITS)):
                    blocks.append([])
        self.entry.blocks = blocks

    def _statements(self) -> Iterator[tuple[int, int, str, bool]]:
        """Yield (scope, line, text, whether it is a label)."""
        stack, position, line, counted = [0], 0, self.first_line, 0
        while self.text[position:].strip():
            match = _STATEMENT.match(self.text, position)
            if match is None:
                rest = self.text[position:].strip().splitlines()[0]
                raise NotImplementedError(f"PTX line {line}: {rest}")
            kind = match.lastgroup or ""
            start = match.start(kind) + len(match[kind]) - len(match[kind].lstrip())
            line += self.text.count("\n", counted, start)
            counted, position = start, match.end()
            if kind == "open":
                self.scopes.append({})
                self.parents.append(stack[-1])
                stack.append(len(self.scopes) - 1)
            elif kind == "close":
                stack.pop()
            elif match[kind].strip():
                yield stack[-1], line, " ".join(match[kind].split()), kind == "label"

    def _declare(self, scope: int, line: int, text: str) -> None:
        match = _REGISTERS.match(text)
        if match is None:
            raise NotImplementedError(f"PTX line {line}: {text}")
        wide = re.match(r"\.reg\s+\.v([24])", text)
        for name in (x.strip() for x in match["names"].split(",")):
            many = re.fullmatch(r"(.*)<(\d+)>", name)
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
            if wide:
                names = [f"{n}.{c}" for n in names for c in "xyzw"[: int(wide[1])]]
                self.scopes[scope][name] = f"{name}:{scope}"
            for each in names:
                unique = f"{each}:{scope}" if scope else each
                if not many:
                    self.scopes[scope][each] = unique
                self.numbers[unique] = len(self.entry.registers)
                self.entry.registers.append((each, match["type"]))

    def _declare_local(self, line: int, text: str) -> None:
        match = _ARRAY.search(text)
        if match is None:
            raise NotImplementedError(f"PTX line {line}: {text}")
        align = int(match["align"] or 1)
        offset = -(-self.entry.local_bytes // align) * align
        self.entry.local[match["name"]] = offset
        size = int(match["count"] or 1) * int(match["bits"]) // 8
        self.entry.local_bytes = offset + size

    def _resolve(self, scope: int, name: str) -> str:
        while scope > 0 and name not in self.scopes[scope]:
            scope = self.parents[scope]
        return self.scopes[scope].get(name, name)

    def _instruction(self, scope: int, line: int, text: str) -> Instruction:
        match = _INSTRUCTION.match(text)
        if match is None:
            raise NotImplementedError(f"PTX line {line}: {text}")
        rest = text[match.end() :]
        op = match["op"]
        guard = self._name(scope, line, match["guard"]) if match["guard"] else None
        target = ""
        operands: tuple[Operand, ...] = ()
        if op in ("bra", "bra.uni"):
            target = self._resolve(scope, rest)
        else:
            operands = tuple(self._operand(scope, line, x) for x in _split(rest))
        negated = match["negated"] == "!"
        return Instruction(op, operands, guard, negated, line, text, target)

    def _operand(self, scope: int, line: int, text: str) -> Operand:
        if text[0] == "{":
            return Vector(tuple(self._operand(scope, line, x) for x in _split(text[1:-1])))
        if text[0] == "[":
            parts = _split(text[1:-1])
            coordinates = self._operand(scope, line, parts[1]) if len(parts) == 2 else Vector(())
            base, _, offset = parts[0].partition("+")
            if len(parts) > 2 or not isinstance(coordinates, Vector):
                raise NotImplementedError(f"PTX line {line}: {text}")
            value = int(offset.strip() or "0", 0)
            return Address(self._operand(scope, line, base.strip()), value, coordinates.items)
        if "|" in text:
            first, _, second = text.partition("|")
            pair = (self._operand(scope, line, x.strip()) for x in (first, second))
            return Pair(*pair)
        if _NUMBER.match(text):
            floating = text[:2].lower() in ("0f", "0d")
            return Immediate(int(text[2:], 16) if floating else int(text.rstrip("U"), 0), floating)
        return self._name(scope, line, text)

    def _name(self, scope: int, line: int, text: str) -> Register | Symbol | Vector:
        unique = self._resolve(scope, text)
        if unique in self.numbers:
            return Register(text, self.numbers[unique])
        parts = [self._resolve(scope, f"{text}.{c}") for c in "xyzw"]
        if parts[0] in self.numbers:
            return Vector(tuple(Register(p, self.numbers[p]) for p in parts if p in self.numbers))
        if text.startswith("%") or text == "_":
            return Register(text)
        if not _TOKEN.fullmatch(text):
            raise NotImplementedError(f"PTX line {line}: {text}")
        return Symbol(text)


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
