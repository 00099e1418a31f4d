# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Each comparison of operand and plan that stands before a device call, and that nothing passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import execution
from te_grouped_mlp.op.backends.base import DactResult
from te_grouped_mlp.op.backends.checked import CheckedBackend
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED
from te_grouped_mlp.op.layout import Kernel, LayoutMismatchError, RowExtent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis
from tests.op.backends.reference import cases

FORMATS = {"mxfp8": MXFP8, "unquantized": UNQUANTIZED}
# No two of the features are equal, so that none can stand for another.
HIDDEN, FFN, WIDE, ROWS = 192, 128, 256, 512
CASE = cases.Case(cases.ACTIVATIONS["swiglu"], (128, 0, 256), ROWS, hidden=HIDDEN, ffn=FFN)


class Recorder:
    """A backend that does nothing but remember what reached it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = DactResult(grad=None, dprob=None, bias_grad=None, activated=None)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> object:
            self.calls.append((name, *arguments))
            return self.result

        return call


@dataclasses.dataclass(frozen=True)
class Operation:
    """One device call.

    Attributes:
        name: Method.
        kernel: First argument, or None.
        tokens: Argument name of each token operand to its features and the axis that is read.
        weight: Which weight and the axis that is read, or None without one.
        buffer: The plain tensor of rows: its argument's name and its features.
    """

    name: str
    kernel: Kernel | None
    tokens: dict[str, tuple[int, Axis]]
    weight: tuple[int, Axis] | None
    buffer: tuple[str, int] | None = None


OPERATIONS = {
    "fc1_act": Operation("fc1_act", None, {"x": (HIDDEN, Axis.ROW)}, (1, Axis.ROW)),
    "fc2_forward": Operation(
        "gemm", Kernel.FC2_FORWARD, {"a": (FFN, Axis.ROW)}, (2, Axis.ROW), ("out", HIDDEN)
    ),
    "fc1_dgrad": Operation(
        "gemm", Kernel.FC1_DGRAD, {"a": (WIDE, Axis.ROW)}, (1, Axis.COLUMN), ("out", HIDDEN)
    ),
    "dact_dgrad": Operation(
        "dact_dgrad", None, {"dy": (HIDDEN, Axis.ROW)}, (2, Axis.COLUMN), ("pre_activation", WIDE)
    ),
    "fc2_wgrad": Operation(
        "wgrad", Kernel.FC2_WGRAD, {"x": (FFN, Axis.COLUMN), "dy": (HIDDEN, Axis.COLUMN)}, None
    ),
    "fc1_wgrad": Operation(
        "wgrad", Kernel.FC1_WGRAD, {"x": (HIDDEN, Axis.COLUMN), "dy": (WIDE, Axis.COLUMN)}, None
    ),
}


class Call:
    """Fitting arguments of an operation, by name; `run` makes the call."""

    def __init__(self, operation: Operation, fmt: str = "mxfp8") -> None:
        case = dataclasses.replace(CASE, fmt=FORMATS[fmt])
        self.plan: Plan = case.plan()
        self.operation, self.backend = operation, Recorder()
        self.arguments: dict[str, Any] = {}
        for name, (features, _) in operation.tokens.items():
            parts = [torch.zeros(size, features) for size in case.splits]
            self.arguments[name] = cases.token_operand(case, self.plan.layout, parts)
        if operation.weight is not None:
            linear, axis = operation.weight
            shape = (WIDE, HIDDEN) if linear == 1 else (HIDDEN, FFN)
            weights = [torch.zeros(shape) for _ in case.splits]
            self.arguments["w"] = cases.weight_operand(case, weights, axis)
        if operation.buffer is not None:
            name, features = operation.buffer
            self.arguments[name] = torch.zeros(ROWS, features)
        # An epilogue or a target is not compared, and goes through as it is.
        self.rest = [object()]

    def run(self) -> Any:
        first = [] if self.operation.kernel is None else [self.operation.kernel]
        method = getattr(CheckedBackend(self.backend, self.plan), self.operation.name)
        return method(*first, *self.arguments.values(), *self.rest)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_fits_reaches_the_backend_as_it_is(operation: str, fmt: str) -> None:
    call = Call(OPERATIONS[operation], fmt)
    result = call.run()
    (seen,) = call.backend.calls
    kernel = OPERATIONS[operation].kernel
    expected = [call.plan, *([] if kernel is None else [kernel])]
    expected += [*call.arguments.values(), *call.rest]
    assert seen[0] == OPERATIONS[operation].name
    assert all(one is other for one, other in zip(seen[1:], expected, strict=True))
    wanted = None if call.operation.name in ("gemm", "wgrad") else call.backend.result
    assert result is wanted


Change = Callable[[Any, Axis], Any]


def _without(which: str) -> Change:
    def change(operand: Any, axis: Axis) -> Any:
        lost = axis if which == "read" else next(each for each in Axis if each is not axis)
        return dataclasses.replace(operand, **{lost.value: None})

    return change


def _layout(**changes: Any) -> Change:
    return lambda operand, _: dataclasses.replace(
        operand, layout=dataclasses.replace(operand.layout, **changes)
    )


def _shape(rows: int, features: int) -> Change:
    return lambda operand, _: dataclasses.replace(
        operand, shape=(operand.shape[0] + rows, operand.shape[1] + features)
    )


def _copy(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the tensors of the copy that is read."""

    def change(operand: Any, axis: Axis) -> Any:
        copy = getattr(operand, axis.value)
        made = {name: make(getattr(copy, name)) for name, make in changes.items()}
        return dataclasses.replace(operand, **{axis.value: dataclasses.replace(copy, **made)})

    return change


TOKEN_FAULTS: dict[str, tuple[Change, str]] = {
    "of another extent": (_layout(extent=RowExtent.BUFFER), "was made for .*the plan has"),
    "of a longer buffer": (_layout(buffer_rows=ROWS + 128), "was made for .*the plan has"),
    "of more experts": (_layout(num_groups=4), "was made for .*the plan has"),
    "too many rows": (_shape(128, 0), r"has shape \(640, .*; allowed: \(512, "),
    "too wide": (_shape(0, 64), r"has shape \(512, .*; allowed: \(512, "),
    "of another format": (
        lambda operand, _: dataclasses.replace(operand, format=UNQUANTIZED),
        "is unquantized; allowed: mxfp8",
    ),
    "with a row less": (
        _copy(data=lambda data: data[:-1]),
        r"has elements of shape \(511, .*; allowed: \(512, ",
    ),
    "with a scale less": (
        _copy(scale=lambda scale: scale[:-1]),
        r"has \d+ (row|column) scales; allowed: \d+",
    ),
    "without the copy that is read": (_without("read"), "lacks its (row|column) copy"),
}
TOKENS = [
    (operation, name, fault)
    for operation, each in OPERATIONS.items()
    for name in each.tokens
    for fault in TOKEN_FAULTS
    # A weight gradient has the width that its operands have.
    if not (each.name == "wgrad" and fault == "too wide")
]


@pytest.mark.parametrize(("operation", "name", "fault"), TOKENS)
def test_tokens_that_the_plan_would_misread(operation: str, name: str, fault: str) -> None:
    call, (change, words) = Call(OPERATIONS[operation]), TOKEN_FAULTS[fault]
    axis = OPERATIONS[operation].tokens[name][1]
    call.arguments[name] = change(call.arguments[name], axis)
    with pytest.raises(LayoutMismatchError, match=f"^{name} {words}"):
        call.run()
    assert call.backend.calls == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_other_copy_may_be_gone(operation: str) -> None:
    call = Call(OPERATIONS[operation])
    for name, (_, axis) in OPERATIONS[operation].tokens.items():
        call.arguments[name] = _without("other")(call.arguments[name], axis)
    call.run()
    assert len(call.backend.calls) == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_of_fewer_rows(operation: str) -> None:
    for name in OPERATIONS[operation].tokens:
        call = Call(OPERATIONS[operation], "unquantized")
        operand = call.arguments[name]
        call.arguments[name] = dataclasses.replace(operand, plain=operand.plain[:-1])
        with pytest.raises(LayoutMismatchError, match=f"^{name} has elements of shape"):
            call.run()
        assert call.backend.calls == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_that_are_missing(operation: str) -> None:
    """Without a block-scaled format the values themselves are read, whatever copies there are."""
    call = Call(OPERATIONS[operation], "unquantized")
    quantized = Call(OPERATIONS[operation])
    for name in call.operation.tokens:
        operand, copies = call.arguments[name], quantized.arguments[name]
        call.arguments[name] = dataclasses.replace(
            operand, plain=None, row=copies.row, column=copies.column
        )
    with pytest.raises(LayoutMismatchError, match="lacks its"):
        call.run()
    assert call.backend.calls == []


WEIGHED = [name for name, each in OPERATIONS.items() if each.weight is not None]


@pytest.mark.parametrize("operation", WEIGHED)
def test_a_weight_of_the_other_axis(operation: str) -> None:
    call = Call(OPERATIONS[operation])
    other = {Axis.ROW: Axis.COLUMN, Axis.COLUMN: Axis.ROW}[OPERATIONS[operation].weight[1]]
    call.arguments["w"] = dataclasses.replace(call.arguments["w"], axis=other)
    with pytest.raises(LayoutMismatchError, match=f"^w is quantized along {other.value}; allowed"):
        call.run()
    assert call.backend.calls == []


@pytest.mark.parametrize("operation", WEIGHED)
def test_plain_weights_have_no_axis(operation: str) -> None:
    call = Call(OPERATIONS[operation], "unquantized")
    for axis in Axis:
        call.arguments["w"] = dataclasses.replace(call.arguments["w"], axis=axis)
        call.run()
    assert len(call.backend.calls) == 2


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("operation", WEIGHED)
def test_weights_of_fewer_experts(operation: str, fmt: str) -> None:
    call = Call(OPERATIONS[operation], fmt)
    weight = call.arguments["w"]
    call.arguments["w"] = dataclasses.replace(weight, data=weight.data[:2], scale=weight.scale[:2])
    with pytest.raises(LayoutMismatchError, match="^w has 2 experts; allowed: 3"):
        call.run()
    assert call.backend.calls == []


@pytest.mark.parametrize("change", [(1, 0), (0, 1)], ids=["rows", "features"])
@pytest.mark.parametrize("operation", [name for name, each in OPERATIONS.items() if each.buffer])
def test_buffers_of_another_shape(operation: str, change: tuple[int, int]) -> None:
    call = Call(OPERATIONS[operation])
    name, features = call.operation.buffer
    rows, columns = ROWS - change[0], features - change[1]
    call.arguments[name] = torch.zeros(rows, columns)
    text = rf"^{name} has shape \({rows}, {columns}\); allowed: \({ROWS}, {features}\)"
    with pytest.raises(LayoutMismatchError, match=text):
        call.run()
    assert call.backend.calls == []


@pytest.mark.parametrize(
    ("operation", "allowed"),
    [("fc2_forward", "fc2_forward, fc1_dgrad"), ("fc1_wgrad", "fc1_wgrad, fc2_wgrad")],
)
def test_kernels_of_other_operations(operation: str, allowed: str) -> None:
    call = Call(dataclasses.replace(OPERATIONS[operation], kernel=Kernel.FC1_ACT))
    with pytest.raises(ValueError, match=f"^kernel is fc1_act; allowed: {allowed}$"):
        call.run()
    assert call.backend.calls == []


def test_a_plan_runs_through_the_checks() -> None:
    """`execution.operations` is the way to a backend's operations."""
    plan = CASE.plan()
    run = execution.operations(plan)
    assert type(run) is CheckedBackend
    assert run._plan is plan
    target = WgradTarget((), accumulate=False)
    call = Call(OPERATIONS["fc1_wgrad"])
    wrong = _layout(buffer_rows=ROWS + 128)(call.arguments["x"], Axis.COLUMN)
    with pytest.raises(LayoutMismatchError, match="^x was made for"):
        run.wgrad(Kernel.FC1_WGRAD, wrong, call.arguments["dy"], target)
