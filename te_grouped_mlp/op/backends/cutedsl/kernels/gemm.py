# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - the main loop calls these methods with all its arguments.
"""A grouped product with an optional bias: FC2's forward, and FC1's data gradient.

    A (T, K) bf16, rows of all experts; B (E, N, K), or (E, K, N) for the data gradient, bf16
    D (T, N) bf16

FC1's data gradient contracts over FC1's output features. The gradient holds them in pair order, so
B is seen as pairs along k. The bias is added in fp32, times a value per row where there is one.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from te_grouped_mlp.op.backends.cutedsl.kernels.quack_base import (
    Epilogue,
    RowValue,
    RowVecLoad,
    mlir_namedtuple,
)


@mlir_namedtuple
class Arguments(NamedTuple):
    """Tensors of the epilogue.

    Attributes:
        bias: (E, N) fp32, or None.
        bias_scale: (T,) fp32 or bf16, or None for one.
    """

    bias: cute.Tensor | None = None
    bias_scale: cute.Tensor | None = None


class Gemm(Epilogue):
    """The kernel."""

    _epi_ops = (RowVecLoad("bias"), RowValue("bias_scale"))
    EpilogueArguments = Arguments

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        """Add the bias of one sub-tile."""
        bias, scale = epi_loop_tensors.get("bias"), epi_loop_tensors.get("bias_scale")
        if const_expr(bias is not None):
            for i in cutlass.range(cute.size(tRS_rD), unroll_full=True):
                added = bias[i] * scale[i] if const_expr(scale is not None) else bias[i]
                tRS_rD[i] = tRS_rD[i] + added
        return ()


class GatedDgrad(Gemm):
    """FC1's data gradient behind a gated activation."""

    pair_views = (("B", 1),)
