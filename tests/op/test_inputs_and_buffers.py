# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors that belong to others: the caller's buffers and quantized inputs, and what is saved."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import environment
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.step.saved import STASH_MARK
from tests.op import fixtures
from tests.support import step
from tests.support.pairwise import pairwise_rows
from tests.support.prequantized import (
    SENTINEL,
    buffers,
    packed_carrier,
    prequantize,
    quantized_values,
    run_plain,
    run_prequantized,
)
from tests.support.step import StepCase
from tests.support.values_backend import in_use

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SMALL = StepCase(splits=(128, 0, 256), buffer_rows=512, hidden=128, ffn=128, fill=math.nan)
SINGLE = StepCase(splits=(256,), hidden=128, ffn=128)
PADDED = SINGLE.but(buffer_rows=512, fill=3.0)
BASES = pytest.mark.parametrize("base", [SINGLE, PADDED, SMALL], ids=["1g", "1g-pad", "3g-pad"])


# The caller's buffers ---------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@BASES
def test_the_caller_owns_output_and_grad_input(base: StepCase, bias: bool, activation: str) -> None:
    """Valid rows are the op's own, bit by bit, for two steps; the tail is not written."""
    case = base.but(activation=activation, bias=bias)
    expected, model = step.run_step(case), step.make_model(case)
    out, dx = buffers(case)
    kwargs = {2: {"output": out}, 0: {"grad_input": dx}}
    for _ in range(2):
        inputs = step.make_inputs(case)
        for parameter in model.parameters():
            parameter.grad = None
        y = step.run_model(model, case, inputs, op_kwargs=kwargs)
        assert y.data_ptr() == out.data_ptr()
        found = step.collect(case, model, inputs, y)
        found["dx"] = dx
        step.assert_same(step.live(case, found), step.live(case, expected))
        for name, buffer in (("output", out), ("grad_input", dx)):
            assert (buffer[case.live :] == SENTINEL).all(), f"tail of {name} was written"


Maker = Callable[[StepCase, torch.Tensor], torch.Tensor]


def of_shape(rows: int = 0, columns: int = 0) -> Maker:
    """Return a maker of buffers that are so much larger than asked."""

    def make(case: StepCase, _x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(case.rows + rows, case.hidden + columns, dtype=case.dtype)

    return make


BAD_BUFFERS: dict[str, tuple[type[Exception], Maker]] = {
    "too few rows": (ValueError, of_shape(rows=-128)),
    "too many rows": (ValueError, of_shape(rows=128)),
    "too wide": (ValueError, of_shape(columns=64)),
    "dtype": (TypeError, lambda case, x: torch.zeros(case.rows, case.hidden)),
    "strided": (ValueError, lambda case, x: strided(torch.zeros_like(x), "gaps")),
    "gradient": (ValueError, lambda case, x: torch.zeros_like(x).requires_grad_()),
    "aliased": (ValueError, lambda case, x: x.detach()),
}


@pytest.mark.parametrize("bad", BAD_BUFFERS)
@pytest.mark.parametrize(("index", "key"), [(2, "output"), (0, "grad_input")])
def test_bad_buffers_are_refused_before_any_work(
    index: int, key: str, bad: str, no_work: None
) -> None:
    error, make = BAD_BUFFERS[bad]
    model, inputs = step.make_model(SMALL), step.make_inputs(SMALL.but(fill=0.0))
    buffer, before = make(SMALL, inputs.x), inputs.x.detach().clone()
    content = buffer.detach().clone()
    with pytest.raises(error, match=key):
        step.forward(model, SMALL, inputs, {index: {key: buffer}})
    assert step.same_bits(buffer.detach(), content)
    assert step.same_bits(inputs.x.detach(), before)


@pytest.mark.parametrize(
    ("index", "key", "owner"), [(0, "output", "FC2"), (2, "grad_input", "FC1")]
)
def test_buffers_of_the_wrong_op_are_refused(
    index: int, key: str, owner: str, no_work: None
) -> None:
    model, inputs = step.make_model(SMALL), step.make_inputs(SMALL)
    buffer = buffers(SMALL)[0]
    with pytest.raises(ValueError, match=f"{key}.*{owner}"):
        step.forward(model, SMALL, inputs, {index: {key: buffer}})
    assert (buffer == SENTINEL).all()


def test_one_buffer_for_both_is_refused(no_work: None) -> None:
    model, inputs = step.make_model(SMALL), step.make_inputs(SMALL)
    buffer = buffers(SMALL)[0]
    with pytest.raises(ValueError, match="shares memory"):
        step.forward(model, SMALL, inputs, {2: {"output": buffer}, 0: {"grad_input": buffer}})


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when a kernel of the backend runs or a token tensor is quantized."""
    from te_grouped_mlp.op.tensors import quantize

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("work was done")

    for name in ("fc1_act", "gemm", "dact_dgrad", "wgrad"):
        monkeypatch.setattr(ReferenceBackend, name, refuse)
    monkeypatch.setattr(quantize.tex, "group_quantize", refuse)
    monkeypatch.setattr(quantize.tex, "quantize", refuse)


# Quantized inputs -------------------------------------------------------------------------------


ARRIVALS = pytest.mark.parametrize("arrives", ["x", "dy", "both"])


@pytest.mark.parametrize("bias", [{}, {"bias": True}, {"bias": True, "scale_bias": True}],
                         ids=["nobias", "bias", "scaledbias"])  # fmt: skip
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@ARRIVALS
@BASES
def test_compact_quantized_tensors(
    base: StepCase, arrives: str, activation: str, bias: dict[str, bool]
) -> None:
    """The column copy is made of the row copy's values, so the step is that of those values."""
    case = base.but(activation=activation, **bias)
    x, dy = arrives in ("x", "both"), arrives in ("dy", "both")
    found = run_prequantized(case, x=False if x else None, dy=False if dy else None, steps=2)
    step.assert_same(step.live(case, found), step.live(case, run_plain(case, x=x, dy=dy)))


@pairwise_rows(
    {
        "arrives": ("x", "dy", "both"),
        "features": ((64, 64), (192, 64), (320, 128)),
        "base": ("1g", "1g-pad", "3g-pad"),
        "bias": (False, True),
        "frozen": ("", "fc2", "prob"),
        "values": (False, True),
    }
)
def test_compact_quantized_tensors_of_any_width(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TE's requantization wants multiples of 128 features; the op takes what it takes of plain
    tensors. What the padding of the caller's scales holds is not read."""
    hidden, ffn = row["features"]
    base = {"1g": SINGLE, "1g-pad": PADDED, "3g-pad": SMALL}[row["base"]]
    case = base.but(
        hidden=hidden, ffn=ffn, bias=row["bias"], scale_bias=row["bias"],
        frozen=frozenset({row["frozen"]} - {""}),
    )  # fmt: skip
    x, dy = row["arrives"] in ("x", "both"), row["arrives"] in ("dy", "both")
    expected = run_plain(case, x=x, dy=dy)
    with in_use(monkeypatch) if row["values"] else contextlib.nullcontext():
        found = run_prequantized(case, x=False if x else None, dy=False if dy else None, steps=2)
    step.assert_same(step.live(case, found), step.live(case, expected))


def spoiled(tensor: Any, how: str) -> Any:
    """Return a quantized tensor that cannot be made ready for the products."""
    import transformer_engine_torch as tex

    if how == "another format":
        tensor.quantizer = tensor.quantizer.copy()
        tensor.quantizer.dtype = tex.DType.kFloat8E5M2
    elif how == "no rows":
        tensor.rowwise_data = tensor.scale_inv = None
    else:
        tensor.columnwise_data = tensor.rowwise_data.clone()
        tensor.columnwise_scale_inv = tensor.scale_inv.clone()
    return tensor


@pytest.mark.parametrize("arrives", ["x", "dy"])
@pytest.mark.parametrize("hidden", [128, 192])
@pytest.mark.parametrize("how", ["another format", "no rows", "compact columns"])
def test_quantized_tensors_that_cannot_be_read_are_refused(
    how: str, hidden: int, arrives: str, no_launch: list[str]
) -> None:
    """Of any width, before a device operation of the pass."""
    case = SMALL.but(hidden=hidden, fill=0.0)
    model, inputs = step.make_model(case), step.make_inputs(case)
    if arrives == "x":
        inputs.x = spoiled(prequantize(inputs.x, case, ready=False), how)
        with pytest.raises((ValueError, RuntimeError), match="GroupedTensor|grouped_x|Grouped"):
            step.forward(model, case, inputs)
    else:
        y = step.forward(model, case, inputs)
        no_launch.clear()
        dy = spoiled(prequantize(inputs.dy, case, ready=False), how)
        with pytest.raises((ValueError, RuntimeError), match="GroupedTensor|grouped_x|Grouped"):
            y.backward(dy)
    assert no_launch == []
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device operations that ran."""
    ran: list[str] = []

    def spy(name: str) -> None:
        original = getattr(ReferenceBackend, name)

        def record(self: Any, *args: Any) -> Any:
            ran.append(name)
            return original(self, *args)

        monkeypatch.setattr(ReferenceBackend, name, record)

    for name in ("fc1_act", "gemm", "dact_dgrad", "wgrad"):
        spy(name)
    return ran


@ARRIVALS
@BASES
def test_gemm_ready_tensors_survive_two_steps(base: StepCase, arrives: str) -> None:
    """Both copies come from the caller and are not freed, so the step is that of the values."""
    x, dy = arrives in ("x", "both"), arrives in ("dy", "both")
    found = run_prequantized(base, x=True if x else None, dy=True if dy else None, steps=2)
    step.assert_same(step.live(base, found), step.live(base, run_plain(base, x=False, dy=False)))


@BASES
def test_bias_gradients_of_a_gemm_ready_gradient(base: StepCase) -> None:
    """Sums over rows read the row copy, whose scales are in tile order."""
    case = base.but(bias=True, scale_bias=True)
    found = run_prequantized(case, x=None, dy=True)
    values = step.live(case, run_plain(case, x=False, dy=True))
    for name in ("db2", "dprob"):
        assert step.same_bits(step.live(case, found)[name], values[name]), name


EQUAL = StepCase(splits=(128, 128), hidden=128, ffn=128, bias=True, scale_bias=True)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("ready", [False, True], ids=["compact", "ready"])
@pytest.mark.parametrize("says", ["nothing", "counts", "both"])
def test_bias_gradients_whatever_a_quantized_gradient_says_of_its_groups(
    says: str, ready: bool, frozen: bool
) -> None:
    """TE's kernels want offsets beside row counts; a caller's tensor may lack either."""
    results = []
    for quantized in (False, True):
        model, inputs = step.make_model(EQUAL), step.make_inputs(EQUAL)
        for parameter in model.parameters():
            parameter.requires_grad_(not frozen)
        dy = quantized_values(inputs.dy, EQUAL)
        if quantized:
            dy = prequantize(inputs.dy, EQUAL, ready=ready)
            dy.first_dims = dy.first_dims if says != "nothing" else None
            dy.tensor_offsets = dy.tensor_offsets if says == "both" else None
        y = step.run_model(model, EQUAL, inputs, dy=dy)
        assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
        results.append(step.collect(EQUAL, model, inputs, y))
    for name in ("dprob",) if frozen else ("db2", "dprob"):
        assert step.same_bits(results[1][name], results[0][name]), name


@pytest.mark.parametrize("ready", [False, True], ids=["compact", "ready"])
@BASES
def test_row_bytes_reach_the_kernels_unmodified(
    base: StepCase, ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy is made: FC1 and FC2's dgrad read the caller's own memory."""
    seen: dict[str, int] = {}

    def spy(name: str) -> None:
        original = getattr(ReferenceBackend, name)

        def record(self: Any, plan: Any, operand: Any, *rest: Any) -> Any:
            seen[name] = operand.row.data.data_ptr()
            return original(self, plan, operand, *rest)

        monkeypatch.setattr(ReferenceBackend, name, record)

    spy("fc1_act")
    spy("dact_dgrad")
    model, inputs = step.make_model(base), step.make_inputs(base)
    inputs.x, dy = (prequantize(each, base, ready=ready) for each in (inputs.x, inputs.dy))
    step.run_model(model, base, inputs, dy=dy)
    assert seen == {
        "fc1_act": inputs.x.rowwise_data.data_ptr(),
        "dact_dgrad": dy.rowwise_data.data_ptr(),
    }


@pytest.mark.parametrize("arrives", ["x", "dy"])
def test_old_decision_misreads_quantized_tensors(arrives: str) -> None:
    """The repair switched off: a packed requantize whose result is read as one dense matrix."""
    case = PADDED.but(fill=0.0)
    expected = run_prequantized(case, x=False if arrives == "x" else None,
                                dy=False if arrives == "dy" else None)  # fmt: skip
    with environment.override(single_group_is_always_dense=True):
        found = run_prequantized(case, x=False if arrives == "x" else None,
                                 dy=False if arrives == "dy" else None)  # fmt: skip
    wrong = "dW1" if arrives == "x" else "dW2"
    assert not step.same_bits(found[wrong], expected[wrong])
    assert expected[wrong].isfinite().all()


@pytest.mark.parametrize(
    ("index", "attribute"), [(0, "ep_mxfp8_carrier_input"), (2, "ep_mxfp8_carrier_grad")]
)
def test_carriers_are_refused_before_any_work(index: int, attribute: str, no_work: None) -> None:
    """Bytes of another format under a bf16 dtype: reading them as bf16 would be finite nonsense."""
    model, inputs = step.make_model(SINGLE), step.make_inputs(SINGLE)
    setattr(model[index], attribute, True)
    if index == 0:
        inputs.x = packed_carrier(inputs.x).requires_grad_()
    with pytest.raises(RuntimeError, match=attribute):
        step.forward(model, SINGLE, inputs)


@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize(
    ("index", "attribute"), [(0, "ep_mxfp8_carrier_input"), (2, "ep_mxfp8_carrier_grad")]
)
def test_carriers_are_refused_where_the_unfused_ops_run(
    index: int, attribute: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would read the bytes as bf16, unless their Transformer Engine decodes them."""
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", switch)
    case = SINGLE.but(mxfp8=False)
    model, inputs = step.make_model(case), step.make_inputs(case)
    setattr(model[index], attribute, True)
    with pytest.raises(RuntimeError, match=f"{attribute} is set.*no released Transformer Engine"):
        step.forward(model, case, inputs)
    ep = importlib.import_module("transformer_engine.pytorch.ep")
    monkeypatch.setattr(ep, "mxfp8_carrier_to_grouped", lambda *_: None, raising=False)
    step.forward(step.make_model(case), case, inputs)
    step.forward(model, case, inputs)


def test_a_carrier_announced_after_the_forward_is_refused_by_the_backward() -> None:
    model, inputs = step.make_model(SINGLE), step.make_inputs(SINGLE)
    y = step.forward(model, SINGLE, inputs)
    model[2].ep_mxfp8_carrier_grad = True
    with pytest.raises(RuntimeError, match="ep_mxfp8_carrier_grad"):
        y.backward(packed_carrier(inputs.dy))
    assert inputs.x.grad is None


# Shapes and strides -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 256), (4, 2, 64)], ids=["3d", "4d"])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    """x, dy and the probabilities in any leading shape; the results in the caller's shapes."""
    case = SMALL.but(bias=True, scale_bias=True)
    expected, model, inputs = step.run_step(case), step.make_model(case), step.make_inputs(case)
    wide = (*shape, case.hidden)
    inputs.x = inputs.x.detach().view(wide).requires_grad_()
    inputs.prob = inputs.prob.detach().view(shape).requires_grad_()
    y = step.run_model(model, case, inputs, dy=inputs.dy.view(wide))
    assert y.shape == wide
    assert inputs.x.grad.shape == wide
    assert inputs.prob.grad.shape == shape
    found = step.collect(case, model, inputs, y)
    for name in ("y", "dx", "dprob"):
        found[name] = found[name].reshape(expected[name].shape)
    step.assert_same(found, expected)


def strided(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return equal values at other strides."""
    if kind == "transposed":
        return tensor.t().contiguous().t()
    wide = torch.full((2 * tensor.shape[0], 3 * tensor.shape[1]), math.nan, dtype=tensor.dtype)
    view = wide[::2, 1::3]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("kind", ["transposed", "gaps"])
@BASES
def test_strides_do_not_matter(base: StepCase, kind: str) -> None:
    expected, model, inputs = step.run_step(base), step.make_model(base), step.make_inputs(base)
    inputs.x = strided(inputs.x.detach(), kind).requires_grad_()
    prob = torch.full((base.rows, 2), math.nan)
    prob[:, 0] = inputs.prob.detach()
    inputs.prob = prob[:, 0].requires_grad_()
    y = step.run_model(model, base, inputs, dy=strided(inputs.dy, kind))
    step.assert_same(step.collect(base, model, inputs, y), expected)


def test_an_expanded_gradient() -> None:
    """`y.sum().backward()` hands in one number at strides 0."""
    model, inputs = step.make_model(SINGLE), step.make_inputs(SINGLE)
    y = step.forward(model, SINGLE, inputs)
    y.sum().backward()
    twin, again = step.make_model(SINGLE), step.make_inputs(SINGLE)
    ones = step.run_model(twin, SINGLE, again, dy=torch.ones_like(again.dy))
    step.assert_same(
        step.collect(SINGLE, model, inputs, y), step.collect(SINGLE, twin, again, ones)
    )


# What is saved ----------------------------------------------------------------------------------


class PagedStash:
    """Keeps only the valid row prefix of marked tensors, as Megatron's paged stash does, and gives
    them back in full-size buffers whose tails are NaN."""

    def __init__(self, case: StepCase) -> None:
        self._case = case
        self.marks: list[tuple[bool, torch.dtype, int]] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        mark = getattr(tensor, STASH_MARK, None)
        if mark is None:
            return tensor
        self.marks.append((mark, tensor.dtype, tensor.numel()))
        live, rows = self._case.live, self._case.rows
        # Both the bytes of a row and those of its share of column scales are the same for each row.
        prefix = tensor.detach().reshape(-1)[: tensor.numel() * live // rows].clone()
        return prefix, tensor.shape, tensor.dtype

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        prefix, shape, dtype = packed
        full = torch.full((math.prod(shape) * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
        full[: prefix.numel()] = prefix
        return full.view(shape)


def run_stashed(case: StepCase) -> tuple[fixtures.Found, PagedStash]:
    stash = PagedStash(case)
    model, inputs = step.make_model(case), step.make_inputs(case)
    with torch.autograd.graph.saved_tensors_hooks(stash.pack, stash.unpack):
        y = step.forward(model, case, inputs)
    y.backward(inputs.dy)
    return step.collect(case, model, inputs, y), stash


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@BASES
def test_a_stash_that_keeps_the_live_prefix_changes_nothing(
    base: StepCase, bias: bool, activation: str
) -> None:
    case = base.but(activation=activation, bias=bias, scale_bias=bias)
    step.assert_same(run_stashed(case)[0], step.run_step(case))


def test_a_stash_breaks_the_old_decision() -> None:
    """The repair switched off: dense readers take the tail, which the stash does not keep."""
    with environment.override(single_group_is_always_dense=True):
        found = run_stashed(PADDED)[0]
    assert not found["dW1"].isfinite().any()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@BASES
def test_marks_are_those_of_upstream(base: StepCase, recompute: bool) -> None:
    """True on column scales; False on both quantized inputs, pre-activation and probabilities."""
    case = base.but(activation="srelu", recompute=recompute)
    marks = run_stashed(case)[1].marks
    rows, u8 = case.rows, torch.uint8

    def quantized(features: int) -> list[tuple[bool, torch.dtype, int]]:
        return [(False, u8, rows * features), (True, u8, rows * features // 32)]

    expected = quantized(case.hidden)
    expected += [(False, case.dtype, rows * case.ffn), (False, torch.float32, rows)]
    if not recompute:
        expected += quantized(case.ffn)
    assert sorted(marks, key=str) == sorted(expected, key=str)


def test_cpu_offload_is_told_of_the_saved_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and scales of both quantized inputs, and the pre-activation; no weight, no routing."""
    module = importlib.import_module("transformer_engine.pytorch.ops.fused.grouped_mlp")
    told: dict[str, list[torch.Tensor]] = {"start": [], "mark": []}
    stays: list[torch.Tensor] = []
    monkeypatch.setattr(module, "is_cpu_offload_enabled", lambda: True)
    monkeypatch.setattr(module, "start_offload", lambda *tensors: told["start"].extend(tensors))
    monkeypatch.setattr(
        module, "mark_activation_offload", lambda *tensors: told["mark"].extend(tensors)
    )
    monkeypatch.setattr(module, "mark_not_offload", lambda *tensors: stays.extend(tensors))
    saved: list[torch.Tensor] = []
    model, inputs = step.make_model(SMALL), step.make_inputs(SMALL)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step.forward(model, SMALL, inputs)
    rows, u8 = SMALL.rows, torch.uint8
    expected = [
        (u8, rows * SMALL.hidden),
        (u8, rows * SMALL.hidden // 32),
        (SMALL.dtype, rows * 2 * SMALL.ffn),
        (u8, rows * SMALL.ffn),
        (u8, rows * SMALL.ffn // 32),
    ]
    for tensors in told.values():
        assert sorted(((t.dtype, t.numel()) for t in tensors), key=str) == sorted(expected, key=str)
        assert all(any(tensor is other for other in saved) for tensor in tensors)
    # Codes and scales of both weights' column copies.
    assert sum(tensor.numel() for tensor in stays) == sum(
        weight.numel() * 33 // 32 for weight in model.parameters()
    )
    left = {id(tensor) for tensor in (*stays, *told["mark"])}
    rest = [tensor for tensor in saved if id(tensor) not in left]
    assert max(tensor.numel() for tensor in rest) <= rows
    y.backward(inputs.dy)
    step.assert_same(step.collect(SMALL, model, inputs, y), step.run_step(SMALL))


# No tokens --------------------------------------------------------------------------------------

NOTHING = {
    "1g": SINGLE.but(splits=(0,)),
    "1g-pad": SINGLE.but(splits=(0,), buffer_rows=256, fill=math.nan),
    "3g": SMALL.but(splits=(0, 0, 0), buffer_rows=None),
    "3g-pad": SMALL.but(splits=(0, 0, 0), buffer_rows=256),
}


@pairwise_rows(
    {
        "case": tuple(NOTHING),
        "activation": ("swiglu", "srelu"),
        **{f"{label} weight": ("discrete", "grouped") for label in ("fc1", "fc2")},
        **{f"{label} grad": ("grad", "main_grad", "overwrite") for label in ("fc1", "fc2")},
        "delay": (False, True),
    }
)
def test_zero_tokens_twice(row: dict[str, Any]) -> None:
    """Empty or zero results, zero gradients, unchanged accumulators; every hook fires."""
    pairs = {name: (row[f"fc1 {name}"], row[f"fc2 {name}"]) for name in ("weight", "grad")}
    case = NOTHING[row["case"]].but(
        activation=row["activation"], delay=row["delay"], bias=True, scale_bias=True, **pairs
    )
    model = step.make_model(case)
    fired: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    for _ in range(2):
        inputs = step.make_inputs(case)
        y = step.run_model(model, case, inputs)
        found = step.collect(case, model, inputs, y)
        assert found["y"].shape == (case.rows, case.hidden)
        for name, value in found.items():
            kept = torch.zeros(())
            if "W" in name and case.linears[name == "dW2"].accumulates:
                kept = step.main_grad_start(case, int(name == "dW2")).view_as(value)
            assert (value == kept).all(), name
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
    names = {name for name, p in model.named_parameters() if any(p is each for each in fired)}
    autograd = {
        name
        for name, _ in model.named_parameters()
        if "bias" in name or not case.linears[not name.startswith("0.")].has_main_grad
    }
    assert autograd <= names
