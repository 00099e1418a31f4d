# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the frontend's grouped weight-gradient kernel computes, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.support.frontend_machine import Machine, int32_offsets, require
from tests.support.frontend_tiles import column_blocks, tensor_at


def wgrad(k: SimpleNamespace, machine: Machine) -> dict[str, Any]:
    """Weight gradients; with accumulation the rounded product is added."""
    del machine
    require(k.sf_vec_size == 32, "sf_vec_size", k.sf_vec_size, 32)
    ends = int32_offsets(k.offsets_tensor, "offsets_tensor").tolist()
    shape, tokens = (k.a_tensor.shape[0], k.b_tensor.shape[1]), k.b_tensor.shape[0]
    require(k.a_tensor.shape[1] == tokens, "a_tensor", tuple(k.a_tensor.shape), ("m", tokens))
    valid = ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= tokens
    valid = valid and all(end % 128 == 0 for end in ends)
    require(valid, "offsets_tensor", ends, f"rising multiples of 128 up to {tokens}")
    targets = _wgrad_targets(k, len(ends), shape)
    left = column_blocks(k.a_tensor.t(), k.sfa_tensor, ends, "a")
    right = column_blocks(k.b_tensor, k.sfb_tensor, ends, "b")
    for target, a, b in zip(targets, left, right, strict=True):
        values = (a.T @ b).float().to(target.dtype)
        if k.accumulate_on_output:
            target += values
        else:
            target.copy_(values)
    return {"wgrad_tensor": k.wgrad_tensor if k.output_mode == "dense" else None}


def _wgrad_targets(k: SimpleNamespace, count: int, shape: tuple[int, int]) -> list[torch.Tensor]:
    workspace = getattr(k, "descriptor_workspace", None)
    needed = workspace_size(count, output_mode=k.output_mode)
    if workspace is not None:
        require(workspace.numel() >= needed, "descriptor_workspace", workspace.numel(), needed)
    dtype = k.wgrad_dtype or torch.bfloat16
    if k.output_mode == "dense":
        out = k.wgrad_tensor
        fits = out is not None and tuple(out.shape) == (count, *shape) and out.is_contiguous()
        require(fits and out.dtype == dtype, "wgrad_tensor", out, ((count, *shape), dtype))
        return list(out)
    require(k.output_mode == "discrete", "output_mode", k.output_mode, "dense or discrete")
    table = k.wgrad_ptrs
    fits = table is not None and table.dtype == torch.int64 and table.numel() == count
    require(fits, "wgrad_ptrs", table, f"int64 ({count})")
    return [tensor_at(address, shape, dtype) for address in table.tolist()]


def workspace_size(
    num_experts: int, *, output_mode: str = "dense", input_order: str = "tensor2d"
) -> int:
    """Return the size in bytes of the wgrad kernel's descriptor workspace."""
    del input_order
    return num_experts * (512 if output_mode == "dense" else 640)
