# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - the main loop calls these methods with all its arguments.
"""FC1's product with bias, activation and probability, in one pass over the tiles.

    A (T, K) bf16, rows of all experts; B (E, N, K) bf16, FC1's weight as stored, seen as pairs
    D (T, N) bf16, the pre-activation (pair order for gated activations); absent in inference
    activated (T, N / 2) or (T, N) bf16

Per tile: accumulate, add the bias in fp32, store D rounded, evaluate the activation on the
unrounded values, times the probability, store. N is a multiple of 64. With `round_to_odd`, what is
stored as activated is rounded so.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from te_grouped_mlp.op.backends.cutedsl.kernels.activations import value_gated, value_unary
from te_grouped_mlp.op.backends.cutedsl.kernels.quack_base import (
    Epilogue,
    RowValue,
    RowVecLoad,
    TileStore,
    mlir_namedtuple,
)
from te_grouped_mlp.op.backends.cutedsl.kernels.rounding import round_to_odd


@mlir_namedtuple
class Arguments(NamedTuple):
    """Tensors of the epilogue.

    Attributes:
        activated: (T, N / 2) or (T, N) bf16.
        bias: (E, N) fp32 in the kernel's column order, or None.
        prob: (T,) fp32 or bf16, or None.
    """

    activated: cute.Tensor | None = None
    bias: cute.Tensor | None = None
    prob: cute.Tensor | None = None


class FC1ActUnary(Epilogue):
    """The kernel for unary activations."""

    _epi_ops = (TileStore("activated"), RowVecLoad("bias"), RowValue("prob"))
    EpilogueArguments = Arguments

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        """Bias, activation and probability of one sub-tile."""
        bias, prob = epi_loop_tensors.get("bias"), epi_loop_tensors.get("prob")
        out = cute.make_rmem_tensor(tRS_rD.layout.shape, Float32)
        for i in cutlass.range(cute.size(tRS_rD), unroll_full=True):
            if const_expr(bias is not None):
                tRS_rD[i] = tRS_rD[i] + bias[i]
            value = value_unary(self.spec, tRS_rD[i])
            out[i] = value * prob[i] if const_expr(prob is not None) else value
        if const_expr(self.round_to_odd):
            round_to_odd(out)
        return (out,)


class FC1ActGated(Epilogue):
    """The kernel for gated activations; column 2j is gate j, column 2j + 1 is linear j."""

    _epi_ops = (TileStore("activated", gated=True), RowVecLoad("bias"), RowValue("prob"))
    EpilogueArguments = Arguments
    pair_views = (("B", 0),)

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        """Bias, activation and probability of one sub-tile."""
        bias, prob = epi_loop_tensors.get("bias"), epi_loop_tensors.get("prob")
        out = cute.make_rmem_tensor(cute.recast_layout(2, 1, tRS_rD.layout).shape, Float32)
        for i in cutlass.range(cute.size(out), unroll_full=True):
            if const_expr(bias is not None):
                tRS_rD[2 * i] = tRS_rD[2 * i] + bias[2 * i]
                tRS_rD[2 * i + 1] = tRS_rD[2 * i + 1] + bias[2 * i + 1]
            value = value_gated(self.spec, tRS_rD[2 * i], tRS_rD[2 * i + 1])
            out[i] = value * prob[2 * i] if const_expr(prob is not None) else value
        if const_expr(self.round_to_odd):
            round_to_odd(out)
        return (out,)
