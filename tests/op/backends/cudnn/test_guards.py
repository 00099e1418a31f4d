# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the frontend does not check: each is refused before a launch, or made impossible."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.backends.base import (
    DactEpilogue,
    Fc1Epilogue,
    GemmEpilogue,
)
from te_grouped_mlp.op.backends.cudnn import arguments, capability, checks, streams, views
from te_grouped_mlp.op.backends.cudnn.backend import CudnnBackend
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand, WeightOperand
from tests.op.backends.cudnn import operands
from tests.op.backends.cudnn.facts import call, problem
from tests.op.backends.cudnn.simulated import environment_of, simulation
from tests.support.frontend_stand_in import StandIn

ROWS, H, FFN, GROUPS = 1024, 512, 256, 4


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with simulation(monkeypatch) as stand_in:
        yield stand_in


@dataclasses.dataclass
class Step:
    """The four operations of one small call, any operand of which a test may replace."""

    kind: Activation
    frontend: StandIn
    sizes: tuple[int, ...] = (256, 0, 512, 256)
    shifted: bool = False

    def __post_init__(self) -> None:
        self.plan = self._plan()
        self.splits = operands.splits(*self.sizes)
        wide = self.plan.problem.fc1.out_features
        self.x = self.tokens(H)
        self.mid = self.tokens(FFN)
        self.dy = self.tokens(H)
        self.dh = self.tokens(wide)
        self.w1 = self.weights(wide, H, Axis.ROW)
        self.w2 = self.weights(H, FFN, Axis.ROW)
        self.w2_back = self.weights(H, FFN, Axis.COLUMN)
        self.pre = torch.zeros(ROWS, wide, dtype=torch.bfloat16)
        self.prob: torch.Tensor | None = torch.ones(ROWS)
        self.out = torch.zeros(ROWS, H, dtype=torch.bfloat16)
        self.backend = CudnnBackend()

    def _plan(self) -> Plan:
        found = capability.plan(
            problem(self.kind, device="cpu"),
            call(),
            environment_of(self.frontend),
            capability.EMULATED,
        )
        assert isinstance(found, Plan)
        return found

    def tokens(self, cols: int) -> GroupedOperand:
        return operands.tokens(cols, self.plan.layout, self.splits)

    def weights(self, out: int, width: int, axis: Axis) -> WeightOperand:
        return operands.weights(GROUPS, out, width, axis, stacked=True, swizzled=True)

    def fc1(self) -> Any:
        epilogue = Fc1Epilogue(None, self.prob, True, True)
        return self.backend.fc1_act(self.plan, self.x, self.w1, epilogue)

    def fc2(self) -> None:
        self.backend.gemm(
            self.plan, Kernel.FC2_FORWARD, self.mid, self.w2, self.out, GemmEpilogue()
        )

    def dact(self) -> Any:
        epilogue = DactEpilogue(self.prob, True, False, True)
        return self.backend.dact_dgrad(self.plan, self.dy, self.w2_back, self.pre, epilogue)

    def wgrad(self, target: torch.Tensor | None = None, *, accumulate: bool = False) -> None:
        out = torch.zeros(GROUPS, H, FFN) if target is None else target
        self.backend.wgrad(
            self.plan, Kernel.FC2_WGRAD, self.mid, self.dy, WgradTarget(out, accumulate)
        )

    def every(self) -> None:
        for run in (self.fc1, self.fc2, self.dact, self.wgrad):
            run()


@pytest.fixture(params=[Activation.SWIGLU, Activation.SRELU], ids=["swiglu", "srelu"])
def a_step(request: pytest.FixtureRequest, frontend: StandIn) -> Step:
    return Step(request.param, frontend)


def test_a_sound_step_launches_everything(a_step: Step) -> None:
    a_step.every()
    assert len(a_step.frontend.calls) == 4


def refused(step: Step, *runs: Any, match: str) -> None:
    for run in runs:
        with pytest.raises(ValueError, match=match):
            run()
    assert step.frontend.calls == []


# Rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(128, 384, 256, 256), (256, 0, 256, 1), (256, -256, 0, 0)])
def test_splits_off_the_tile(sizes: tuple[int, ...], frontend: StandIn) -> None:
    step = Step(Activation.SWIGLU, frontend, sizes)
    refused(step, step.fc1, step.fc2, step.dact, step.wgrad, match=r"splits\[\d\] is -?\d+;")


def test_splits_past_the_buffer(frontend: StandIn) -> None:
    step = Step(Activation.SRELU, frontend, (512, 512, 256, 0))
    refused(step, step.fc1, step.fc2, step.dact, step.wgrad, match="sum to 1280; the buffer has")


def test_splits_on_the_device_are_not_looked_at(a_step: Step) -> None:
    """Reading them would synchronise; NVTE_GROUPED_MLP_CHECK=1 reads them once, for `host`."""
    sizes = operands.splits(128, 384, 256, 256).sizes
    checks.split_sizes(None, ROWS)
    a_step.splits = dataclasses.replace(a_step.splits, sizes=sizes, sizes_on_host=None)
    a_step.x = a_step.tokens(H)
    a_step.fc1()


OFFSETS = {
    "int64": lambda ends: ends.long(),
    "leading zero": lambda ends: torch.cat((torch.zeros(1, dtype=torch.int32), ends)),
    "strided": lambda ends: torch.stack((ends, ends), 1)[:, 0],
}


@pytest.mark.parametrize("change", OFFSETS)
def test_offsets_of_another_kind(a_step: Step, change: str) -> None:
    ends = OFFSETS[change](a_step.splits.group_end_offsets)
    a_step.splits = dataclasses.replace(a_step.splits, group_end_offsets=ends)
    for name, cols in (("x", H), ("mid", FFN), ("dy", H)):
        setattr(a_step, name, a_step.tokens(cols))
    refused(
        a_step,
        a_step.fc1,
        a_step.fc2,
        a_step.dact,
        a_step.wgrad,
        match=r"splits.group_end_offsets is torch.int",
    )


# Columns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 32, 272])
def test_widths_that_a_kernel_in_the_cache_would_take(width: int) -> None:
    """The frontend checks them when it builds a kernel, and then finds that kernel again."""
    copy = operands.copy(256, width, Axis.ROW)
    with pytest.raises(ValueError, match=f"columns of x is {width}"):
        views.tokens("x", copy, (256, width), torch.tensor([256], dtype=torch.int32))
    for shape in ((width, 256), (256, width)):
        w = operands.weights(1, *shape, Axis.ROW, stacked=True, swizzled=True)
        with pytest.raises(ValueError, match=f"columns of w is {width}"):
            views.weights(w)


def test_another_number_of_experts(a_step: Step) -> None:
    refused(a_step, lambda: a_step.wgrad(torch.zeros(3, H, FFN)), match="target has 3 members")


# Scales ------------------------------------------------------------------------------------------


def damaged(operand: GroupedOperand, **changes: Any) -> GroupedOperand:
    assert operand.row is not None
    assert operand.column is not None
    return dataclasses.replace(
        operand,
        row=dataclasses.replace(operand.row, **changes),
        column=dataclasses.replace(operand.column, **changes),
    )


def test_compact_scales_of_tokens(a_step: Step) -> None:
    """They have as many bytes as swizzled ones, so the frontend takes them."""
    for name in ("x", "mid", "dy"):
        setattr(a_step, name, damaged(getattr(a_step, name), swizzled=False))
    refused(a_step, a_step.fc1, a_step.fc2, a_step.dact, a_step.wgrad, match="has compact")


def test_too_few_scales(a_step: Step) -> None:
    a_step.x = damaged(a_step.x, scale=torch.zeros(128, dtype=torch.uint8))
    refused(a_step, a_step.fc1, match="x has 128 row scales; allowed: 16384")


def test_compact_scales_of_weights_are_brought_into_tile_order(a_step: Step) -> None:
    """Not refused: a parameter's scales are compact, and stay so."""
    compact = dataclasses.replace(a_step.w1, swizzled=False)
    compact.scale[0][5, 7] = 130
    before = compact.scale[0].clone()
    found = views.weights(compact)
    assert found.stacked is not None
    flat = found.stacked[1].view(torch.uint8)
    assert flat[5, 0, 0, 3, 1, 0] == 130
    assert (flat == 130).sum() == 1
    assert torch.equal(compact.scale[0], before)


def test_missing_copies(a_step: Step) -> None:
    a_step.x = dataclasses.replace(a_step.x, row=None)
    a_step.mid = dataclasses.replace(a_step.mid, column=None)
    refused(a_step, a_step.fc1, match="x has no row copy")
    refused(a_step, a_step.wgrad, match="x has no column copy")


# Dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_the_backward_reach_the_kernel_in_fp32(
    a_step: Step, dtype: torch.dtype
) -> None:
    a_step.prob = torch.ones(ROWS, dtype=dtype)
    a_step.fc1()
    a_step.dact()
    forward, backward = (given for _, given in a_step.frontend.calls)
    kept = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    assert forward["prob_tensor"].dtype is kept
    assert backward["prob_tensor"].dtype is torch.float32
    assert backward["dprob_tensor"].dtype is torch.float32


def derivative(**changes: Any) -> arguments.Derivative:
    fields: dict[str, Any] = {
        "pre_activation": torch.zeros(ROWS, 2 * FFN, dtype=torch.bfloat16),
        "prob": torch.ones(ROWS),
        "dprob": torch.zeros(ROWS),
        "want_bias_grad": False,
        "deterministic": False,
    }
    return arguments.Derivative(**{**fields, **changes})


@pytest.mark.parametrize("name", ["prob", "dprob"])
@pytest.mark.parametrize(
    "bad", [torch.ones(ROWS).bfloat16(), torch.ones(ROWS - 1), torch.ones(2 * ROWS)[::2]]
)
def test_the_builder_takes_fp32_per_row_only(a_step: Step, name: str, bad: torch.Tensor) -> None:
    shared = arguments.SharedArguments(frozenset(), None, False, torch.ones(GROUPS), torch.ones(1))
    assert a_step.dy.row is not None
    tokens = views.tokens("dy", a_step.dy.row, (ROWS, H), a_step.splits.group_end_offsets)
    experts = views.weights(a_step.w2_back)
    spec = a_step.plan.problem.activation
    build = arguments.dglu if spec.is_gated else arguments.dsrelu
    with pytest.raises(ValueError, match=name):
        build(shared, tokens, experts, spec, derivative(**{name: bad}))


def test_a_bias_scale_without_a_bias_would_scale_the_product(a_step: Step) -> None:
    epilogue = GemmEpilogue(bias=None, bias_scale=torch.full((ROWS,), 0.5))
    a_step.backend.gemm(
        a_step.plan, Kernel.FC2_FORWARD, a_step.mid, a_step.w2, a_step.out, epilogue
    )
    ((_, given),) = a_step.frontend.calls
    assert given["prob_tensor"] is None
    shared = arguments.SharedArguments(frozenset(), None, False, torch.ones(GROUPS), torch.ones(1))
    assert a_step.mid.row is not None
    tokens = views.tokens("a", a_step.mid.row, (ROWS, FFN), a_step.splits.group_end_offsets)
    with pytest.raises(ValueError, match="bias_scale is given without a bias"):
        arguments.quant(
            shared, tokens, views.weights(a_step.w2), a_step.out,
            bias=None, bias_scale=torch.ones(ROWS),
        )  # fmt: skip


def test_unary_kernels_get_probabilities_whatever_happens(frontend: StandIn) -> None:
    step = Step(Activation.SRELU, frontend)
    step.prob = None
    step.fc1()
    step.dact()
    for _, given in frontend.calls:
        assert torch.equal(given["prob_tensor"].flatten(), torch.ones(ROWS))
    shared = arguments.SharedArguments(frozenset(), None, False, torch.ones(GROUPS), torch.ones(1))
    assert step.dy.row is not None
    tokens = views.tokens("dy", step.dy.row, (ROWS, H), step.splits.group_end_offsets)
    experts, spec = views.weights(step.w2_back), step.plan.problem.activation
    with pytest.raises(ValueError, match="prob is None"):
        arguments.dsrelu(shared, tokens, experts, spec, derivative(prob=None))


def test_probability_gradients_begin_at_zero(a_step: Step) -> None:
    """The kernel adds to what it finds: two calls give the same, and padded rows stay zero."""
    first, second = a_step.dact(), a_step.dact()
    assert torch.equal(first.dprob, second.dprob)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_weight_gradients_of_another_dtype(a_step: Step, dtype: torch.dtype) -> None:
    target = torch.zeros(GROUPS, H, FFN, dtype=dtype)
    refused(a_step, lambda: a_step.wgrad(target), match=f"target is {dtype}")


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values that begins one element after a multiple of 16 bytes."""
    raw = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    found = raw[1:].view(tensor.shape).copy_(tensor)
    assert found.data_ptr() % 16
    return found


def results(step: Step) -> list[torch.Tensor]:
    """Everything that the four operations of a step with biases write."""
    bias1, bias2 = (torch.rand(GROUPS, width).bfloat16() for width in (step.w1.shape[0], H))
    wrap = misaligned if step.shifted else torch.clone
    assert step.prob is not None
    first = step.backend.fc1_act(
        step.plan, step.x, step.w1, Fc1Epilogue(wrap(bias1), step.prob, True, True)
    )
    epilogue = GemmEpilogue(wrap(bias2), step.prob)
    step.backend.gemm(step.plan, Kernel.FC2_FORWARD, step.mid, step.w2, step.out, epilogue)
    back = step.dact()
    target = wrap(torch.zeros(GROUPS, H, FFN))
    step.wgrad(target)
    column = first.activated.column
    return [
        first.activated.row.data, first.activated.row.scale, column.data, column.scale,
        first.pre_activation, step.out, back.grad.row.data, back.grad.row.scale, back.dprob, target,
    ]  # fmt: skip


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_begins_anywhere_gives_the_same(
    a_step: Step, dtype: torch.dtype, stacked: bool
) -> None:
    """Slices of a caller's tensors: the built kernels refuse every tensor off a multiple of 16."""
    a_step.prob = torch.linspace(0.25, 1, ROWS).to(dtype)
    for name in ("w1", "w2", "w2_back"):
        w = getattr(a_step, name)
        new = operands.weights(GROUPS, *w.shape, w.axis, stacked=stacked, swizzled=True)
        setattr(a_step, name, new)
    torch.manual_seed(0)
    expected = results(a_step)
    for name in ("prob", "pre", "out"):
        setattr(a_step, name, misaligned(getattr(a_step, name)))
    splits = dataclasses.replace(
        a_step.splits, group_end_offsets=misaligned(a_step.splits.group_end_offsets)
    )
    for name in ("x", "mid", "dy"):
        operand = getattr(a_step, name)
        row, column = (
            dataclasses.replace(copy, scale=misaligned(copy.scale))
            for copy in (operand.row, operand.column)
        )
        changed = dataclasses.replace(operand, row=row, column=column, splits=splits)
        setattr(a_step, name, changed)
    for name in ("w1", "w2", "w2_back"):
        w = getattr(a_step, name)
        shape = (GROUPS, *w.scale[0].shape) if stacked else (2 * GROUPS, *w.scale[0].shape)
        scale = misaligned(torch.full(shape, 127, dtype=torch.uint8))
        parts = (scale if stacked else scale[::2]).unbind(0)
        setattr(a_step, name, dataclasses.replace(w, scale=tuple(parts)))
    a_step.shifted = True
    torch.manual_seed(0)
    for one, other in zip(results(a_step), expected, strict=True):
        assert torch.equal(one, other)


def test_an_operand_that_begins_anywhere_is_refused(a_step: Step) -> None:
    """Its bytes are many, and nobody but the op or a caller's quantizer lays them out."""
    odd = torch.zeros(ROWS * H + 1, dtype=torch.uint8)[1:].view(ROWS, H)
    a_step.x = damaged(a_step.x, data=odd)
    refused(a_step, a_step.fc1, match="x begins at an address that is 1 past")


@pytest.mark.parametrize("accumulate", [False, True])
def test_an_unaligned_weight_gradient_is_written_through_a_copy(
    a_step: Step, accumulate: bool
) -> None:
    expected = torch.full((GROUPS, H, FFN), 3.0)
    a_step.wgrad(expected, accumulate=accumulate)
    found = misaligned(torch.full((GROUPS, H, FFN), 3.0))
    a_step.wgrad(found, accumulate=accumulate)
    assert torch.equal(found, expected)
    assert (found != 3.0).any()


# Memory that launches share -----------------------------------------------------------------------


class FakeStream:
    """A stream that remembers on which others it was told to wait."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waited = handle, []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other)


CUDA = torch.device("cuda", 0)


@pytest.fixture
def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_last", "_workspaces", "_ones"):
        monkeypatch.setattr(streams, name, {})


@pytest.mark.usefixtures("no_history")
def test_a_launch_on_another_stream_waits_for_the_one_before() -> None:
    a, b = FakeStream(1), FakeStream(2)
    for stream in (a, a, b, b, a):
        streams.take_turn("glu", CUDA, streams.Lane(stream))
    assert (b.waited, a.waited) == ([a], [b])
    c = FakeStream(3)
    streams.take_turn("quant", CUDA, streams.Lane(c))
    assert c.waited == []


@pytest.mark.usefixtures("no_history")
def test_turns_are_taken_inside_a_capture_and_not_across_its_border() -> None:
    a, b, c = FakeStream(1), FakeStream(2), FakeStream(3)
    streams.take_turn("glu", CUDA, streams.Lane(a))
    streams.take_turn("glu", CUDA, streams.Lane(b, capture=7))
    assert b.waited == []
    streams.take_turn("glu", CUDA, streams.Lane(c, capture=7))
    assert c.waited == [b]
    streams.take_turn("glu", CUDA, streams.Lane(a))
    assert a.waited == []
    # The one before it outside the capture.
    streams.take_turn("glu", CUDA, streams.Lane(c))
    assert c.waited == [b, a]


@pytest.mark.usefixtures("no_history")
def test_a_capture_does_not_hide_the_launch_before_it() -> None:
    a, b, c = FakeStream(1), FakeStream(2), FakeStream(3)
    streams.take_turn("glu", CUDA, streams.Lane(a))
    streams.take_turn("glu", CUDA, streams.Lane(b, capture=7))
    streams.take_turn("glu", CUDA, streams.Lane(c))
    assert c.waited == [a]


@pytest.mark.parametrize("newest", ["cudaStreamGetCaptureInfo", "cudaStreamGetCaptureInfo_v3"])
@pytest.mark.parametrize("capturing", [False, True])
def test_a_lane_knows_its_capture(
    capturing: bool, newest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the query that takes edges with data: by its name of CUDA 12, or of CUDA 13."""
    stream, error = FakeStream(5), 0
    runtime = ModuleType("cuda.bindings.runtime")
    runtime.cudaStreamGetCaptureInfo = lambda _: pytest.fail("not the newest")  # type: ignore[attr-defined]
    setattr(runtime, newest, lambda handle: (error, 1, 70 + handle, None))
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    found = streams.lane(CUDA)
    assert (found.stream, found.handle) == (stream, 5)
    assert found.capture == (75 if capturing else None)
    assert streams.lane(torch.device("cpu")) == streams.Lane(None)
    error = 900
    if capturing:
        with pytest.raises(RuntimeError, match=f"{newest} of stream 5 failed: 900"):
            streams.lane(CUDA)


@pytest.mark.usefixtures("no_history")
def test_descriptors_have_memory_of_their_own(frontend: StandIn) -> None:
    cpu = torch.device("cpu")
    lanes = [
        streams.Lane(None),
        streams.Lane(FakeStream(1)),
        streams.Lane(FakeStream(2)),
        streams.Lane(FakeStream(2), capture=7),
        streams.Lane(FakeStream(2), capture=8),
    ]
    # Held together: a graph holds its own, which the next capture on the stream does not get.
    made = [
        streams.wgrad_workspace(kernel, 4, "dense", cpu, lane)
        for kernel in (Kernel.FC1_WGRAD, Kernel.FC2_WGRAD)
        for lane in lanes
    ]
    found = {each.data_ptr() for each in made if each is not None}
    assert len(found) == 2 * len(lanes)
    again = streams.wgrad_workspace(Kernel.FC1_WGRAD, 4, "dense", cpu, streams.Lane(FakeStream(2)))
    assert again is not None
    assert again.data_ptr() in found


@pytest.mark.usefixtures("no_history")
def test_both_weight_gradients_of_a_step_pass_their_own_memory(a_step: Step) -> None:
    a_step.wgrad()
    target = WgradTarget(torch.zeros(GROUPS, H, FFN), accumulate=False)
    a_step.backend.wgrad(a_step.plan, Kernel.FC1_WGRAD, a_step.mid, a_step.dy, target)
    first, second = (given["descriptor_workspace"] for _, given in a_step.frontend.calls)
    assert first.data_ptr() != second.data_ptr()
    assert first.dtype is torch.uint8


CPU = torch.device("cpu")


@pytest.mark.usefixtures("no_history")
def test_ones_made_inside_a_capture_are_not_kept() -> None:
    inside = streams.ones(4, CPU, streams.Lane(None, capture=7))
    kept = streams.ones(4, CPU, streams.Lane(None))
    assert kept.data_ptr() != inside.data_ptr()
    assert streams.ones(4, CPU, streams.Lane(None)).data_ptr() == kept.data_ptr()


@pytest.mark.usefixtures("no_history")
def test_ones_serve_the_stream_that_writes_them() -> None:
    """Another stream may read them before they are written."""
    a, b = streams.Lane(FakeStream(1)), streams.Lane(FakeStream(2))
    made = streams.ones(4, CPU, a).data_ptr()
    assert streams.ones(4, CPU, b).data_ptr() != made
    assert streams.ones(4, CPU, a).data_ptr() == made
    captured = streams.Lane(FakeStream(3), capture=7)
    assert streams.ones(4, CPU, captured).data_ptr() == made
    assert torch.equal(streams.ones(5, CPU, a), torch.ones(5))


@pytest.mark.usefixtures("no_history")
def test_ones_do_not_grow_with_the_number_of_row_counts() -> None:
    """A graph may read all that were ever handed out, so they are few, and none is freed."""
    lane, most = streams.Lane(FakeStream(1)), 1 << 20
    handed_out = [streams.ones(rows, CPU, lane) for rows in range(256, most + 1, 256 * 17)]
    kept = streams._ones[CPU, 1]
    assert sum(each.numel() for each in kept) <= 4 * most
    assert len(kept) <= 12
    starts = {each.data_ptr() for each in kept}
    assert {each.data_ptr() for each in handed_out} <= starts
    assert all(torch.equal(each, torch.ones_like(each)) for each in handed_out[:9])


@pytest.mark.usefixtures("no_history")
def test_nothing_grows_with_the_number_of_captured_graphs(frontend: StandIn) -> None:
    main, side = FakeStream(1), FakeStream(2)
    eager = streams.wgrad_workspace(Kernel.FC1_WGRAD, 4, "dense", CPU, streams.Lane(main))
    for capture in range(100):
        for stream in (main, side):
            lane = streams.Lane(stream, capture)
            streams.take_turn("glu", CUDA, lane)
            first = streams.wgrad_workspace(Kernel.FC1_WGRAD, 4, "dense", CPU, lane)
            assert streams.wgrad_workspace(Kernel.FC1_WGRAD, 4, "dense", CPU, lane) is first
            assert first is not eager
    assert len(streams._workspaces) == 3
    assert sum(map(len, streams._last.values())) <= streams._CAPTURES_KEPT
    again = streams.wgrad_workspace(Kernel.FC1_WGRAD, 4, "dense", CPU, streams.Lane(main))
    assert again is eager


@pytest.mark.usefixtures("no_history")
def test_many_captures_do_not_hide_the_launch_before_them() -> None:
    a, b = FakeStream(1), FakeStream(2)
    streams.take_turn("glu", CUDA, streams.Lane(a))
    for capture in range(100):
        streams.take_turn("glu", CUDA, streams.Lane(FakeStream(3), capture))
    streams.take_turn("glu", CUDA, streams.Lane(b))
    assert b.waited == [a]


def test_a_wrapper_does_not_remember_every_row_count() -> None:
    memo: dict[int, int] = {}
    scope = {"_glu_wrapper_memo": memo}
    exec("def wrapper(rows):\n    _glu_wrapper_memo[rows] = rows", scope)
    for rows in range(3 * streams.MEMO_LIMIT):
        scope["wrapper"](rows)  # type: ignore[operator]
        streams.forget_old_shapes("glu", scope["wrapper"])  # type: ignore[arg-type]
        assert len(memo) <= streams.MEMO_LIMIT
    assert memo


def test_tables_of_addresses_outlive_the_call_that_reads_them(a_step: Step) -> None:
    """Scales in tile order exist only behind the table; nothing else may get their memory."""
    for name in ("w1", "w2", "w2_back"):
        w = getattr(a_step, name)
        apart = operands.weights(GROUPS, *w.shape, w.axis, stacked=False, swizzled=False)
        setattr(a_step, name, apart)
    alive = []
    inner = streams.launch

    def launch(name: str, device: Any, at: Any, keywords: dict[str, Any]) -> Any:
        if "sfb_ptrs" in keywords:
            before = [torch.zeros(1 << 14, dtype=torch.uint8) for _ in range(64)]
            alive.append(_bytes_at(int(keywords["sfb_ptrs"][0]), 4) == [127] * 4)
            del before
        return inner(name, device, at, keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "launch", launch)
        a_step.every()
    assert alive == [True] * 3


def _bytes_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint8 * count).from_address(address))
