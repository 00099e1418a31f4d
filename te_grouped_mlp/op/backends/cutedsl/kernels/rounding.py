# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounding to odd: values that are rounded once more, to a narrower type, by a later kernel.

A value that bf16 cannot hold becomes the neighbour whose last bit is one. Rounding the result to
nearest in a type with at least two bits less (E4M3 has four) then gives what rounding the value
itself gives, and comparing it with a number that has a zero as last bit (448 times a power of two)
answers as for the value itself. So a block-scaled copy made of the stored values is the copy that
would have been made of the registers, for blocks whose largest magnitude is above 448 * 2^-123
(scale byte 5): below, bf16's subnormals have too few bits, and a code may be another. (S. Boldo and
G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to
odd", 2008.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

_LOW, _ODD = 0xFFFF, 0x10000


@cute.jit
def round_to_odd(values: cute.Tensor):
    """Round fp32 registers in place to numbers of bf16; infinities stay, NaN stays NaN."""
    bits = cute.recast_tensor(values, Int32)
    for i in cutlass.range(cute.size(bits), unroll_full=True):
        # The sum carries into the bit above unless all sixteen low ones are zero.
        sticky = ((bits[i] & _LOW) + _LOW) & _ODD
        bits[i] = (bits[i] & ~_LOW) | sticky
