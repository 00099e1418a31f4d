# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - the main loop calls these methods with all its arguments.
"""FC2's data gradient through the activation, with the probability's gradient.

    A = dy (T, K) bf16, rows of all experts; B = FC2's weight (E, K, N) bf16 as stored
    C = pre-activation, D = its gradient: (T, 2 N) bf16 in pair order (gated), or (T, N) (unary)
    row_partials (T, N tiles) fp32 with strides (1, T): partial sums of the probability's gradient
    activated (T, N) bf16: FC2's input, made anew (unary only)

Per row, dprob = sum_j G_j act(h_j) with G the unrounded fp32 accumulator. A thread sums its columns
in order, four lanes join by shuffles, and one lane stores one partial: no atomics, and the order
depends on the tile only. `reduce_row_partials` adds a row's partials in order. With `round_to_odd`,
D and activated are rounded so.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, const_expr

from te_grouped_mlp.op.backends.cutedsl.kernels.activations import (
    gated_derivative,
    unary_derivative,
)
from te_grouped_mlp.op.backends.cutedsl.kernels.quack_base import (
    Epilogue,
    RowPartials,
    RowValue,
    TileStore,
    mlir_namedtuple,
)
from te_grouped_mlp.op.backends.cutedsl.kernels.rounding import round_to_odd


@mlir_namedtuple
class Arguments(NamedTuple):
    """Tensors of the epilogue.

    Attributes:
        prob: (T,) fp32 or bf16, or None.
        row_partials: (T, N tiles) fp32, or None when the gradient of `prob` is not wanted.
        activated: (T, N) bf16, or None.
    """

    prob: cute.Tensor | None = None
    row_partials: cute.Tensor | None = None
    activated: cute.Tensor | None = None


class DactGated(Epilogue):
    """The kernel for gated activations; C and D are 32-bit elements that hold a pair."""

    _epi_ops = (RowValue("prob"), RowPartials("row_partials"))
    EpilogueArguments = Arguments

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        """The gradient of one sub-tile."""
        prob, partials = epi_loop_tensors.get("prob"), epi_loop_tensors.get("row_partials")
        stored = cute.recast_tensor(tRS_rC, BFloat16)
        pairs = stored.to(Float32)
        grads = cute.make_rmem_tensor(stored.layout, Float32)
        for i in cutlass.range(cute.size(tRS_rD), unroll_full=True):
            g = tRS_rD[i]
            value, d_gate, d_linear = gated_derivative(self.spec, pairs[2 * i], pairs[2 * i + 1])
            if const_expr(partials is not None):
                partials[i] = partials[i] + g * value
            if const_expr(prob is not None):
                g = g * prob[i]
            grads[2 * i] = g * d_gate
            grads[2 * i + 1] = g * d_linear
        if const_expr(self.round_to_odd):
            round_to_odd(grads)
        tRS_rD.store(cute.recast_tensor(grads.to(BFloat16), Float32).load())
        return ()


class DactUnary(Epilogue):
    """The kernel for unary activations."""

    _epi_ops = (RowValue("prob"), RowPartials("row_partials"), TileStore("activated"))
    EpilogueArguments = Arguments

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        """The gradient of one sub-tile."""
        prob, partials = epi_loop_tensors.get("prob"), epi_loop_tensors.get("row_partials")
        recompute = const_expr(any(op.name == "activated" for op in self._epi_ops))
        stored = tRS_rC.to(Float32)
        activated = cute.make_rmem_tensor(tRS_rD.layout.shape, Float32)
        for i in cutlass.range(cute.size(tRS_rD), unroll_full=True):
            g = tRS_rD[i]
            value, slope = unary_derivative(self.spec, stored[i])
            if const_expr(partials is not None):
                partials[i] = partials[i] + g * value
            if const_expr(prob is not None):
                g = g * prob[i]
                value = value * prob[i]
            tRS_rD[i] = g * slope
            activated[i] = value
        if const_expr(self.round_to_odd):
            round_to_odd(tRS_rD)
        if const_expr(recompute):
            if const_expr(self.round_to_odd):
                round_to_odd(activated)
            return (activated,)
        return ()
