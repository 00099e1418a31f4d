# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - the main loop calls these methods with all its arguments.
"""Weight gradients: one product per expert, contracted over the expert's rows.

    A = dy^T (M, T) bf16 and B = x^T (N, T) bf16, both views of row-major buffers
    D (E, M, N) fp32 or bf16; C is D itself where the gradient is added to

An expert without rows gets zeros (or keeps its content when added to). The gradient of FC1's weight
behind a gated activation is computed in pair order and stored through a view in TE's order.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from te_grouped_mlp.op.backends.cutedsl.kernels.quack_base import Epilogue, Scalar, mlir_namedtuple


@mlir_namedtuple
class Arguments(NamedTuple):
    """The epilogue has no tensors of its own.

    Attributes:
        unused: Always None.
    """

    unused: cute.Tensor | None = None


class Wgrad(Epilogue):
    """The kernel."""

    _epi_ops = (Scalar("unused"),)
    EpilogueArguments = Arguments

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        """Add the content where there is one."""
        if const_expr(tRS_rC is not None):
            for i in cutlass.range(cute.size(tRS_rD), unroll_full=True):
                tRS_rD[i] = tRS_rD[i] + tRS_rC[i].to(Float32)
        return ()


class GatedWgrad(Wgrad):
    """The gradient of FC1's weight behind a gated activation."""

    pair_views = (("D", 0), ("C", 0))
