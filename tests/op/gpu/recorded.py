# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A step with what its products read kept: results and quantized copies, to compare two backends.

A backend that computes exact products of the same quantized operands may differ from the reference
in the order of its fp32 sums, and in nothing else. What follows from that:

* x, dy and the weights are quantized from the caller's values: the same bytes.
* FC2's input and the gradient of FC1's output are quantized from computed fp32 values, so a value
  at a rounding boundary may get the neighbouring code: at most one code apart, and rarely.
* The backward reads FC1's output as it was stored in bf16, where a boundary costs 2^-8 of a value.
* FC1's bias gradient may be summed from its terms as they were stored, rounded to odd in bf16.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from te_grouped_mlp.op import environment, execution
from te_grouped_mlp.op.backends.checked import CheckedBackend
from te_grouped_mlp.op.layout import Kernel, RowExtent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    DequantizedCopy,
    GroupedOperand,
    WeightOperand,
)
from tests.integration.standalone import naive
from tests.support import step
from tests.support.step import StepCase

Found = dict[str, Any]

BACKENDS = {"cpu": "reference", "cuda": "cutedsl"}
"""The backend that is tested on a device."""

SHARE = 1e-3
"""Largest part of the elements of a requantized copy that may have another code."""

# One of the elements of a bf16 result in 2^-8; a thousandth of the codes of an operand 2^-4 apart
# adds less (2^-4 * sqrt(1e-3) = 2^-9), and fp32 sums of these lengths 2^-18.
BOUND = 2.0**-8
# dprob stays in fp32; what it adds comes from values in bf16 that are seldom 2^-8 apart.
DPROB_BOUND = 2.0**-10
# Rounded to odd, a term is off by up to 2^-7 of itself, independently of the others.
DB1_BOUND = 2.0**-7

_REQUANTIZED = ("activated", "dh")


@dataclass
class Copy:
    """One quantized copy as a product reads it, on the CPU; rows of no expert are left out.

    Attributes:
        values: float64 (rows, columns), what the copy is worth.
        units: float64 (rows, columns), the power of two that each element's block is scaled by;
            None where a backend hands on the values alone.
        codes, scales: The bytes, without padding; None likewise.
    """

    values: torch.Tensor
    units: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclass
class Recorded:
    """What one step gave and read.

    Attributes:
        found: Results by name, on the CPU.
        copies: Quantized copies by "tensor axis"; of weights with the expert's number.
        backends: Names of the backends that ran.
    """

    found: Found = field(default_factory=dict)
    copies: dict[str, Copy] = field(default_factory=dict)
    backends: set[str] = field(default_factory=set)


class _Recorder:
    """A checked backend that notes the operands of each product before it runs."""

    def __init__(self, inner: CheckedBackend, plan: Plan, into: Recorded) -> None:
        self._inner, self._into = inner, into
        self._gated = plan.problem.activation.is_gated
        into.backends.add(plan.backend)

    def fc1_act(self, x: GroupedOperand, w: WeightOperand, epilogue: Any) -> Any:
        self._note("x", x, Axis.ROW)
        self._note_weights("W1", w)
        return self._inner.fc1_act(x, w, epilogue)

    def gemm(
        self, kernel: Kernel, a: GroupedOperand, w: WeightOperand, out: Any, epilogue: Any
    ) -> None:
        forward = kernel is Kernel.FC2_FORWARD
        self._note("activated" if forward else "dh", a, Axis.ROW)
        self._note_weights("W2" if forward else "W1", w)
        self._inner.gemm(kernel, a, w, out, epilogue)

    def dact_dgrad(self, dy: GroupedOperand, w: WeightOperand, pre: Any, epilogue: Any) -> Any:
        self._note("dy", dy, Axis.ROW)
        self._note_weights("W2", w)
        return self._inner.dact_dgrad(dy, w, pre, epilogue)

    def wgrad(self, kernel: Kernel, x: GroupedOperand, dy: GroupedOperand, target: Any) -> None:
        second = kernel is Kernel.FC2_WGRAD
        self._note("activated" if second else "x", x, Axis.COLUMN)
        self._note("dy" if second else "dh", dy, Axis.COLUMN)
        self._inner.wgrad(kernel, x, dy, target)

    def _note(self, name: str, operand: GroupedOperand, axis: Axis) -> None:
        if not operand.format.is_block_scaled:
            return
        copy = _of_tokens(operand, axis)
        if name == "dh" and self._gated and operand.splits.sizes.is_cuda:
            copy = _out_of_pairs(copy)
        self._into.copies[f"{name} {axis.value}"] = copy

    def _note_weights(self, name: str, w: WeightOperand) -> None:
        if not w.format.is_block_scaled:
            return
        for index in range(w.num_groups):
            label = f"{name} {w.axis.value} {index}"
            self._into.copies[label] = _of_weight(w, index)


def _of_tokens(operand: GroupedOperand, axis: Axis) -> Copy:
    assert operand.layout.extent is RowExtent.PACKED, "a comparison needs one row layout"
    sizes = operand.splits.sizes.tolist()
    live, cols = sum(sizes), operand.shape[1]
    copy = operand.row if axis is Axis.ROW else operand.column
    assert copy is not None
    if isinstance(copy, DequantizedCopy):
        return Copy(copy.values[:live].double().cpu())
    codes = copy.data[:live].cpu().clone()
    flat = copy.scale.view(-1).cpu()
    if axis is Axis.ROW:
        scales = _unpadded(flat, live, cols, axis, copy.swizzled)
    else:
        parts, start = [], 0
        for size in sizes:
            block = flat[start // 32 * naive.round_up(cols, 128) :]
            parts.append(_unpadded(block, size, cols, axis, copy.swizzled))
            start += size
        scales = torch.cat(parts)
    return _valued(codes, scales, axis)


def _out_of_pairs(copy: Copy) -> Copy:
    """Put columns in pair order (gate 0, linear 0, gate 1, ...) where FC1's output has them: 32
    gates, 32 linear ones, and so on."""
    cols = copy.values.shape[1]
    column = torch.arange(cols)
    pair = 2 * (column // 64 * 32 + column % 32) + column % 64 // 32
    units = None if copy.units is None else copy.units[:, pair]
    return Copy(copy.values[:, pair], units)


def _of_weight(w: WeightOperand, index: int) -> Copy:
    if not len(w.scale):
        return Copy(w.data[index].double().cpu())
    codes = w.data[index].view(torch.uint8).cpu().clone()
    flat = w.scale[index].reshape(-1).view(torch.uint8).cpu()
    return _valued(codes, _unpadded(flat, *w.shape, w.axis, w.swizzled), w.axis)


def _unpadded(flat: torch.Tensor, rows: int, cols: int, axis: Axis, swizzled: bool) -> torch.Tensor:
    """Read the scales of one matrix by the written-out addresses, without their padding."""
    column = axis is Axis.COLUMN
    outer, inner = (cols, rows // 32) if column else (rows, cols // 32)
    i, j = torch.arange(outer)[:, None], torch.arange(inner)[None, :]
    if swizzled:
        at = naive.swizzled_offset(i, j, naive.round_up(inner, 4) // 4)
    elif column:
        at = j * naive.round_up(outer, 128) + i
    else:
        at = i * naive.round_up(inner, 4) + j
    found = flat[at]
    return found.t().contiguous() if column else found


def _valued(codes: torch.Tensor, scales: torch.Tensor, axis: Axis) -> Copy:
    units = torch.exp2(scales.double() - 127.0)
    units = torch.where(scales == 0xFF, torch.nan, units)
    units = units.repeat_interleave(32, dim=0 if axis is Axis.COLUMN else 1)
    values = codes.view(naive.E4M3).double() * units
    return Copy(values, units, codes, scales)


@contextlib.contextmanager
def recording() -> Iterator[Recorded]:
    """Note what every fused step reads while the block runs; this synchronises."""
    into, run = Recorded(), execution.operations
    execution.operations = lambda plan: _Recorder(run(plan), plan, into)  # type: ignore[assignment]
    try:
        yield into
    finally:
        execution.operations = run


@contextlib.contextmanager
def backends_used() -> Iterator[set[str]]:
    """Collect the names of the backends of fused passes; this does not synchronise."""
    names: set[str] = set()
    run = execution.operations

    def noted(plan: Plan) -> CheckedBackend:
        names.add(plan.backend)
        return run(plan)

    execution.operations = noted
    try:
        yield names
    finally:
        execution.operations = run


def plain_step(case: StepCase) -> Found:
    """Run one step of fresh parameters."""
    return step.run_step(case)


Runner = Callable[[StepCase], Found]


def run(case: StepCase, runner: Runner = plain_step, backend: str = "") -> Recorded:
    """Run a step on a backend, that of the case's device if none is named; keep what it read."""
    name = backend or BACKENDS[case.device or "cpu"]
    with (
        step.switches(NVTE_GROUPED_MLP_BACKEND=name),
        # A GPU's splits are not read, so its layout does not know of full rows.
        environment.override(treat_rows_as_full=False),
        recording() as into,
    ):
        found = runner(case)
    assert into.backends == {name}, into.backends
    into.found = {key: None if value is None else value.cpu() for key, value in found.items()}
    return into


def reference(case: StepCase, runner: Runner = plain_step) -> Recorded:
    """Run the same step on CPU tensors on the reference backend; equal steps run once.

    Parameters that are quantized for each pass have the bytes of quantized parameters, which
    Transformer Engine cannot place on the CPU of a machine with a GPU.
    """
    weights = (linear.weight for linear in case.linears)
    weight = tuple("discrete" if kind == "quantized" else kind for kind in weights)
    return _reference(case.but(device="cpu", weight=weight), runner)


@functools.lru_cache(maxsize=64)
def _reference(case: StepCase, runner: Runner) -> Recorded:
    return run(case, runner)


# Comparing --------------------------------------------------------------------------------------


def codes_apart(found: Copy, wanted: Copy) -> torch.Tensor:
    """Return by how many codes each element differs, counted in steps of the coarser block."""
    assert wanted.units is not None
    units = wanted.units if found.units is None else torch.maximum(found.units, wanted.units)
    size = torch.maximum(found.values.abs(), wanted.values.abs()) / units
    # E4M3: three bits behind the leading one, and nothing below 2^-9.
    _, exponent = torch.frexp(size)
    steps = torch.exp2((exponent - 1 - 3).double()).clamp_min(2.0**-9)
    return (found.values - wanted.values).abs() / (steps * units)


def assert_same_copies(case: StepCase, actual: Recorded, wanted: Recorded) -> dict[str, float]:
    """Compare the quantized copies of two steps.

    Returns:
        For each requantized copy, the part of its elements that have another value.
    """
    assert actual.copies.keys() == wanted.copies.keys()
    shares = {}
    for name, expected in wanted.copies.items():
        found = actual.copies[name]
        assert found.values.isfinite().all(), name
        if not name.startswith(_REQUANTIZED):
            _assert_equal(name, found, expected)
            continue
        if not expected.values.numel():
            continue
        apart = codes_apart(found, expected)
        far = apart > 1
        if name.startswith("dh") or case.recompute:
            # One rounding of the stored pre-activation, as a part of the block's range.
            assert expected.units is not None
            far &= (found.values - expected.values).abs() > 2.0**-8 * 448 * expected.units
        # Where a clamp's derivative jumps, the last bit of a pre-activation decides.
        jumps = 2e-4 if case.activation == "qgeglu" and name.startswith("dh") else 0.0
        assert far.double().mean() <= jumps, f"{name}: up to {float(apart.max()):.1f} codes apart"
        shares[name] = float((found.values != expected.values).double().mean())
        assert shares[name] <= SHARE, f"{name}: {shares[name]:.2%} of the codes differ"
    return shares


def _assert_equal(name: str, found: Copy, wanted: Copy) -> None:
    assert torch.equal(found.values, wanted.values), f"{name} has other values"
    if found.codes is not None:
        assert torch.equal(found.codes, wanted.codes), f"{name} has other bytes"
        assert torch.equal(found.scales, wanted.scales), f"{name} has other scales"


def assert_close(
    case: StepCase, actual: Found, wanted: Found, terms: torch.Tensor | None = None
) -> None:
    """Compare results per expert and 16-column stripe, within what fp32 sums in another order do;
    rows of no expert must be zero. `terms` is what `terms_of_db1` says of the wanted step."""
    for name in ("y", "dx", "dprob"):
        if actual[name] is not None:
            assert not actual[name][case.live :].any(), f"tail of {name} is not zero"
    for name, expected in step.live(case, wanted).items():
        if expected is not None:
            assert actual[name].dtype is expected.dtype, name
    expected = {
        name: None if value is None else shaped(case, name, value).double()
        for name, value in step.live(case, wanted).items()
    }
    if case.activation == "qgeglu":
        # Jumps of the clamps' derivative add up over the rows while the sum cancels.
        expected["db1"] = None
    actual = {
        name: None if value is None else shaped(case, name, value) for name, value in actual.items()
    }
    _assert_sums_close(case, actual["db1"], expected.pop("db1"), terms)
    for name, value in expected.items():
        step.assert_close(case, actual, {name: value}, _bound(case, name))


def terms_of_db1(case: StepCase, found: Recorded) -> torch.Tensor | None:
    """Return the norm over an expert's rows of the terms of FC1's bias gradient, (G, N), read off a
    quantized copy of them; None where the step reads none."""
    name = next((name for name in found.copies if name.startswith("dh ")), None)
    if name is None:
        return None
    return torch.stack([part.norm(dim=0) for part in found.copies[name].values.split(case.splits)])


def _assert_sums_close(
    case: StepCase,
    found: torch.Tensor | None,
    expected: torch.Tensor | None,
    terms: torch.Tensor | None,
) -> None:
    """Compare FC1's bias gradient per expert and 16-column stripe.

    Errors of terms do not cancel where the terms do, so they are judged beside the terms' norm.
    """
    if found is None or expected is None:
        return
    assert found.isfinite().all()
    scale = expected.abs() if terms is None else torch.maximum(expected.abs(), terms)
    error = (found.double() - expected).view(*expected.shape[:-1], -1, 16).norm(dim=-1)
    allowed = DB1_BOUND * scale.view(*expected.shape[:-1], -1, 16).norm(dim=-1)
    for group, stripe in (error > allowed).nonzero().tolist():
        raise AssertionError(
            f"db1 expert {group} columns {16 * stripe}: off by {float(error[group, stripe]):.1e}; "
            f"allowed: {float(allowed[group, stripe]):.1e}"
        )


def _bound(case: StepCase, name: str) -> float:
    if name == "dprob" and case.prob_dtype is torch.float32:
        return DPROB_BOUND
    return BOUND


def shaped(case: StepCase, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a result as it is, or a weight's gradient with the experts as its first dimension."""
    return value.view(len(case.splits), -1, value.shape[-1]) if name[:2] == "dW" else value
