# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One launch of a wrapper: what it shares with others, where it is queued, its checked offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_grouped_mlp.op.backends.cudnn import alignment, arguments, checks, signatures, streams
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.operands import Splits


class WrapperLaunch:
    """A launch in the making; `run` queues it."""

    def __init__(self, plan: Plan, wrapper: str, device: torch.device) -> None:
        self._plan, self._wrapper, self._device = plan, wrapper, device
        self.at = streams.lane(device)
        self.shared = arguments.SharedArguments(
            takes=signatures.takes(wrapper),
            stream=self.at.handle,
            all_rows=plan.layout.use_dense_single_group,
            alpha=self.ones(plan.layout.num_groups),
            norm=self.ones(1),
        )

    def ones(self, count: int) -> torch.Tensor:
        """Return fp32 ones (count,), to be read only."""
        return streams.ones(count, self._device, self.at)

    def group_end_offsets(self, splits: Splits) -> torch.Tensor:
        """Return the checked end rows of the experts."""
        checks.split_sizes(splits.sizes_on_host, self._plan.layout.buffer_rows)
        return alignment.readable(checks.end_offsets(splits, self._plan.layout.num_groups))

    def run(self, keywords: dict[str, Any], keep: object = None) -> Mapping[str, Any]:
        """Launch; returns the wrapper's outputs by name.

        Args:
            keywords: Made by `arguments`.
            keep: What holds memory that the keywords know by address alone. It must live until the
                launch is queued: the wrapper allocates, and would be given that memory.
        """
        outputs = streams.launch(self._wrapper, self._device, self.at, keywords)
        del keep
        return outputs
