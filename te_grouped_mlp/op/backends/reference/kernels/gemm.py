# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""FC2's forward product and FC1's data gradient.

A grouped kernel adds the bias to the fp32 accumulator and rounds once. The dense form is a plain
matrix product followed by an addition in the output dtype, so it rounds twice.
"""

from __future__ import annotations

import torch

from te_grouped_mlp.op.backends.base import GemmEpilogue
from te_grouped_mlp.op.backends.reference import arguments
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand, WeightOperand


def gemm(
    plan: Plan,
    kernel: Kernel,
    a: GroupedOperand,
    w: WeightOperand,
    out: torch.Tensor,
    epilogue: GemmEpilogue,
) -> None:
    """Compute the operation; see `backends.base.Backend.gemm`. CPU tensors only."""
    layout = plan.layout
    # The layout's extent, not the launch's: one dense group goes through an ordinary matrix
    # product, which has no group offsets and so reads and writes every row.
    for segment in arguments.segments(layout, layout.extent, a.splits, a.format):
        if not segment.rows:
            continue
        left = arguments.read(a, Axis.ROW, segment, "a")
        if kernel is Kernel.FC2_FORWARD:
            right = arguments.read_weight(w, Axis.ROW, segment.group, "w").T
        else:
            right = arguments.read_weight(w, Axis.COLUMN, segment.group, "w")
        values = (left @ right).float()
        if epilogue.bias is None:
            out[segment.span] = values
            continue
        bias, scale = epilogue.bias[segment.group, None], epilogue.bias_scale
        if layout.use_dense_single_group:
            added = bias.to(out.dtype)
            if scale is not None:
                added = added * scale[segment.span, None]
            out[segment.span] = values
            out[segment.span] += added
        else:
            added = bias.float()
            if scale is not None:
                added = added * scale[segment.span, None].float()
            out[segment.span] = values + added
    if epilogue.zero_tail and not layout.use_dense_single_group:
        out[arguments.live_rows(a.splits) :] = 0
