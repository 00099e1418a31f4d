# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a kernel's PTX says about the sums that it leaves in memory."""

from __future__ import annotations

import re

_ATOMIC = re.compile(r"\b(?:atom|red)\.global\S*\.add\S*\.f32\s+(?:%\w+, )?\[(%\w+)\], (%\w+);")
_BF16 = re.compile(r"\b(?:atom|red)\.global\S*\.add\S*\.bf16x2")
_DEFINITION = re.compile(r"^\s*([a-z][\w.]*)\s+(%\w+), (.+);$")


def float_atomics(ptx: str) -> list[tuple[str, str]]:
    """Return address and value register of every fp32 addition to global memory."""
    return _ATOMIC.findall(ptx)


def bf16_atomics(ptx: str) -> int:
    """Count the bf16 additions to global memory."""
    return len(_BF16.findall(ptx))


def local_bytes(ptx: str) -> int:
    """Return the bytes of local memory that a thread has."""
    return sum(int(size) for size in re.findall(r"__local_depot\d+\[(\d+)\]", ptx))


def added_in_order(ptx: str) -> int:
    """Return how many values, one after another from zero, make what the atomic adds.

    0 when the value is made otherwise: in a loop whose direction may differ.
    """
    found, (_, register) = _definitions(ptx), float_atomics(ptx)[0]
    count = 0
    while (
        register in found and found[register][0].startswith("add") and ".f32" in found[register][0]
    ):
        register, other = found[register][1][:2]
        count += 1
        if other == "0f00000000":
            return count
    return 0


def address_factors(ptx: str) -> set[int]:
    """Return the constants by which the atomic's address multiplies, element size left out."""
    found, (register, _) = _definitions(ptx), float_atomics(ptx)[0]
    factors, waiting, seen = set(), [register], set()
    while waiting:
        register = waiting.pop()
        if register in seen or register not in found:
            continue
        seen.add(register)
        operation, operands = found[register]
        constant = operands[-1]
        if operation.startswith("mul") and constant.isdigit():
            factors.add(int(constant))
        if operation == "shl.b32" and constant.isdigit():
            factors.add(2 ** int(constant))
        waiting += [operand for operand in operands if operand.startswith("%")]
    return factors


def _definitions(ptx: str) -> dict[str, tuple[str, list[str]]]:
    """Return register -> (operation, operands) of the last definition before the atomic."""
    lines = ptx.splitlines()
    end = next(index for index, line in enumerate(lines) if _ATOMIC.search(line))
    found: dict[str, tuple[str, list[str]]] = {}
    # Within the straight run of instructions that leads to it.
    for line in lines[max(0, end - 24) : end]:
        match = _DEFINITION.match(line)
        if match is not None:
            found[match[2]] = (match[1], match[3].split(", "))
    return found
