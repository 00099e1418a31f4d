# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the caller of a step may own: quantized x and dy, an output and a grad-input buffer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from te_grouped_mlp.op import environment
from tests.integration.standalone import naive
from tests.support import step
from tests.support.step import StepCase

SENTINEL = -17.0


def buffers(case: StepCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output and a grad-input buffer that hold a recognisable value."""
    shape = (case.rows, case.hidden)
    return tuple(
        torch.full(shape, SENTINEL, dtype=case.dtype, device=case.device) for _ in range(2)
    )


def prequantize(tensor: torch.Tensor, case: StepCase, *, ready: bool) -> Any:
    """Return a GroupedTensor: row-wise with compact scales, or both copies ready for the GEMMs."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    quantizer = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=ready)
    quantizer.optimize_for_gemm = ready
    made = tex.group_quantize(
        tensor=tensor.detach(),
        quantizer=quantizer,
        num_tensors=len(case.splits),
        first_dims=torch.tensor(case.splits, device=tensor.device),
    )
    blocks = tensor.shape[1] // 32
    if not ready and blocks % 4:
        # Nobody reads what lies between the last scale of a row and the next row.
        made.scale_inv.view(tensor.shape[0], -1)[:, blocks:] = 0xFF
    return made


def quantized_values(tensor: torch.Tensor, case: StepCase) -> torch.Tensor:
    """Return what the row-wise copy is worth; rows past the valid ones as they were."""
    out = tensor.detach().clone()
    out[: case.live] = naive.values_of(out[: case.live].cpu(), column=False).to(out)
    return out


def parts(grouped: Any) -> dict[str, torch.Tensor]:
    names = ("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv")
    found = {name: getattr(grouped, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def run_prequantized(
    case: StepCase, *, x: bool | None, dy: bool | None, steps: int = 1
) -> dict[str, Any]:
    """Run steps in which x or dy arrive quantized (None: plain, else whether GEMM-ready).

    Checks that the caller's tensors are the same afterwards; returns the last step's result.
    """
    model, inputs = step.make_model(case), step.make_inputs(case)
    plain_x, dx = inputs.x, buffers(case)[1]
    given_dy = inputs.dy if dy is None else prequantize(inputs.dy, case, ready=dy)
    if x is not None:
        inputs.x = prequantize(plain_x, case, ready=x)
    owned = [
        (tensor, {name: value.clone() for name, value in parts(tensor).items()})
        for tensor, arrived in ((inputs.x, x), (given_dy, dy))
        if arrived is not None
    ]
    for _ in range(steps):
        for tensor in (*model.parameters(), inputs.prob, plain_x):
            tensor.grad = None
        y = step.run_model(model, case, inputs, dy=given_dy, op_kwargs={0: {"grad_input": dx}})
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
    for tensor, before in owned:
        assert parts(tensor).keys() == before.keys()
        for name, value in parts(tensor).items():
            assert step.same_bits(value, before[name]), f"the caller's {name} was changed"
    inputs.x = plain_x
    return {**step.collect(case, model, inputs, y), "dx": dx}


def run_plain(case: StepCase, *, x: bool, dy: bool) -> dict[str, Any]:
    """Run a step on plain tensors that hold the row-wise quantized values of x or dy."""
    model, inputs = step.make_model(case), step.make_inputs(case)
    if x:
        inputs.x = quantized_values(inputs.x, case).requires_grad_()
    if dy:
        inputs.dy = quantized_values(inputs.dy, case)
    padded = case.rows > case.live
    with environment.override(treat_rows_as_full=False) if padded else contextlib.nullcontext():
        return step.collect(case, model, inputs, step.run_model(model, case, inputs))


def packed_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bf16-typed tensor of the same shape whose storage holds E4M3 bytes and scales."""
    codes, scale = naive.quantize(tensor.detach(), column=False)
    raw = torch.zeros(tensor.numel() * 2, dtype=torch.uint8)
    raw[: codes.numel()] = codes.reshape(-1)
    raw[codes.numel() : codes.numel() + scale.numel()] = scale.reshape(-1)
    return raw.view(torch.bfloat16).view(tensor.shape)
