# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight gradients.

With accumulation the grouped kernel adds the rounded product, the dense one rounds the sum; for an
fp32 target they agree.
"""

from __future__ import annotations

from te_grouped_mlp.op.backends.reference import arguments
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand


def wgrad(plan: Plan, x: GroupedOperand, dy: GroupedOperand, target: WgradTarget) -> None:
    """Compute the operation; see `backends.base.Backend.wgrad`. CPU tensors only."""
    layout, members = plan.layout, target.members()
    for segment in arguments.segments(layout, layout.extent, dy.splits, dy.format):
        out = members[segment.group]
        if not segment.rows:
            if not target.accumulate:
                out.zero_()
            continue
        left = arguments.read(dy, Axis.COLUMN, segment, "dy")
        right = arguments.read(x, Axis.COLUMN, segment, "x")
        values = (left.T @ right).float()
        if not target.accumulate:
            out.copy_(values)
        elif layout.use_dense_single_group:
            out.copy_(values + out.float())
        else:
            out += values.to(out.dtype)
