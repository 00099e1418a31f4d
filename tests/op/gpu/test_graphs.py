# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: a replay is the eager step on the same inputs, bit by bit.

On CPU tensors a replay is the step itself: that proves the bodies of the tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_grouped_mlp.op.tensors import memory
from tests.op.fixtures import Replayed
from tests.op.gpu import graphs, recorded
from tests.op.gpu.graphs import Layers
from tests.support import step
from tests.support.step import StepCase

# Read when Transformer Engine is first imported; where its extension is there it has no effect.
os.environ.setdefault("NVTE_GROUPED_MLP_STANDALONE", "1")

pytestmark = [
    pytest.mark.usefixtures("fused_switch", "poisoned_memory", "device"),
    # A parameter is used on several streams here, each waiting for the other.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

GPU = [pytest.mark.gpu, pytest.mark.sm90]
BASE = StepCase(splits=(128, 0, 256), buffer_rows=640, hidden=256, ffn=192, fill=math.nan)
SCALED = {"bias": True, "scale_bias": True}
BF16 = BASE.but(mxfp8=False)
CASES: dict[str, StepCase] = {
    "bf16": BF16.but(**SCALED),
    "bf16-srelu-grouped-fused": BF16.but(activation="srelu", weight="grouped", grad="fused"),
    "bf16-delayed": BF16.but(delay=True, grad="fused"),
    "bf16-recompute": BF16.but(activation="srelu", recompute=True),
    "mxfp8": BASE.but(**SCALED),
    "mxfp8-srelu-grouped-fused": BASE.but(activation="srelu", weight="grouped", grad="fused"),
    "mxfp8-situ-quantized": BASE.but(activation="situ", weight="quantized", grad="main_grad"),
    "mxfp8-delayed": BASE.but(delay=True, grad="fused", **SCALED),
    "mxfp8-recompute": BASE.but(activation="srelu", recompute=True, **SCALED),
    "mxfp8-one-group": BASE.but(splits=(256,), grad="fused"),
}
# New data, new splits, changed weights, no tokens at all, and the first step again.
SEQUENCE = [
    Replayed(seed=1, splits=(128, 0, 256)),
    Replayed(seed=2, splits=(0, 512, 0)),
    Replayed(seed=2, splits=(0, 512, 0), shift=2.0**-5),
    Replayed(seed=3, splits=(128, 384, 128), shift=-(2.0**-6)),
    Replayed(seed=4, splits=(0, 0, 0)),
    Replayed(seed=1, splits=(128, 0, 256)),
]
ONE_GROUP = [
    Replayed(seed=1, splits=(256,)),
    Replayed(seed=2, splits=(640,), shift=2.0**-5),
    Replayed(seed=3, splits=(0,)),
    Replayed(seed=4, splits=(128,)),
]
ODD = [
    Replayed(seed=1, splits=(129, 1, 300)),
    Replayed(seed=2, splits=(0, 31, 0), shift=2.0**-5),
    Replayed(seed=3, splits=(640, 0, 0)),
]


def forms(*names: str) -> pytest.MarkDecorator:
    """Parametrize (name, device): every case on a GPU, those with a recipe on a CPU too.

    Where there is a GPU, Transformer Engine places quantized parameters on it.
    """
    on_gpu = [pytest.param(name, "cuda", marks=GPU) for name in names]
    on_cpu = [(name, "cpu") for name in names if "mxfp8" in name and "quantized" not in name]
    return pytest.mark.parametrize(("name", "device"), [*on_cpu, *on_gpu], indirect=["device"])


def case_of(name: str, device: str) -> StepCase:
    """Return a case, small where it only proves the test."""
    return CASES[name].but(device=device, **({"hidden": 128, "ffn": 64} if device == "cpu" else {}))


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device; every fused pass of the test must run on the backend that is tested there."""
    name = recorded.BACKENDS[request.param]
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", name)
    with recorded.backends_used() as used:
        yield request.param
    assert used == {name}


@forms(*CASES)
def test_replay_equals_eager(name: str, device: str) -> None:
    case = case_of(name, device)
    sequence = ONE_GROUP if name.endswith("one-group") else SEQUENCE
    graphs.assert_replay_equals_eager(case, sequence)


@forms("mxfp8", "mxfp8-srelu-grouped-fused")
def test_replay_where_copies_of_weights_are_kept(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture makes its own copies, so that a replay sees the weights of its moment."""
    monkeypatch.setenv("NVTE_GROUPED_MLP_REUSE_WEIGHTS", "1")
    graphs.assert_replay_equals_eager(case_of(name, device), SEQUENCE)


@forms("bf16")
def test_replay_with_splits_of_any_size(name: str, device: str) -> None:
    case = case_of(name, device)
    graphs.assert_replay_equals_eager(case, ODD)


@forms("bf16", "mxfp8", "mxfp8-srelu-grouped-fused", "mxfp8-delayed")
def test_several_layers_of_one_shape_in_one_graph(name: str, device: str) -> None:
    """Two launches that shared a workspace would overwrite each other's values."""
    case = case_of(name, device).but(fill=0.0)
    graphs.assert_replay_equals_eager(case, SEQUENCE[:4], layers=3)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_copies_of_old_weights_are_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph does that was captured with copies made before: the comparison fails."""
    from te_grouped_mlp.op.tensors import weights

    kept: dict[int, tuple[Any, Any]] = {}
    original = weights.for_forward

    def stale(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # The parameter is kept with its copies, so that no other gets its identity.
        first = parameters[0]
        return kept.setdefault(id(first), (first, original(parameters, *args, **kwargs)))[1]

    monkeypatch.setattr(weights, "for_forward", stale)
    case = case_of("mxfp8", device)
    graphs.assert_replay_equals_eager(case, SEQUENCE[:2])
    with pytest.raises(AssertionError, match="differ"):
        graphs.assert_replay_equals_eager(case, SEQUENCE[:3])


class Load:
    """Work of another stream on memory of its own; nothing on a CPU."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            self.stream = torch.cuda.Stream()
            self.values, self.out = torch.randn(2, 1 << 22, device=device).unbind(0)

    def __call__(self) -> None:
        if self.on_gpu:
            with torch.cuda.stream(self.stream):
                for _ in range(20):
                    torch.tanh(self.values, out=self.out)


@forms("bf16", "mxfp8")
def test_capture_beside_work_of_another_stream(name: str, device: str) -> None:
    case = case_of(name, device)
    layers, load = Layers.make(case), Load(device)
    load()
    captured = graphs.capture(layers, load)
    for item in SEQUENCE[:3]:
        current = layers.load(item)
        load()
        expected = graphs.live(current, layers.step())
        load()
        captured.replay()
        step.assert_same(graphs.live(current, captured.found), expected)


@forms("bf16", "mxfp8", "mxfp8-srelu-grouped-fused")
def test_replay_beside_an_eager_step(name: str, device: str) -> None:
    """Two layers of one shape on two streams at once: a graph and an eager step."""
    case = case_of(name, device)
    if device == "cuda":
        case = case.but(hidden=512, ffn=1024)
    captured_layers, eager = Layers.make(case), Layers.make(case.but(seed=5))
    captured = graphs.capture(captured_layers)
    captured_layers.clear()
    expected = graphs.live(case, captured_layers.step())
    eager.clear()
    expected_eager = graphs.live(case, eager.step())
    for _ in range(4):
        captured_layers.clear()
        eager.clear()
        if device == "cuda":
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            captured.replay()
            with torch.cuda.stream(other):
                found = graphs.live(case, eager.step())
            torch.cuda.current_stream().wait_stream(other)
            torch.cuda.synchronize()
        else:
            captured.replay()
            found = graphs.live(case, eager.step())
        step.assert_same(graphs.live(case, captured.found), expected)
        step.assert_same(found, expected_eager)


@forms("bf16", "mxfp8")
def test_two_graphs_of_one_layer(name: str, device: str) -> None:
    """As for two micro-batch sizes: they share the weights and nothing else."""
    case = case_of(name, device)
    long = Layers.make(case)
    short = Layers(case, long.models, step.make_inputs(case.but(buffer_rows=384)))
    short.case = case.but(buffer_rows=384)
    first, second = graphs.capture(long), graphs.capture(short)
    for seed in (7, 8):
        current = long.load(Replayed(seed=seed, splits=(128, 128, 384)))
        expected = graphs.live(current, long.step())
        smaller = short.load(Replayed(seed=seed, splits=(128, 256, 0)))
        expected_short = graphs.live(smaller, short.step())
        first.replay()
        second.replay()
        step.assert_same(graphs.live(current, first.found), expected)
        step.assert_same(graphs.live(smaller, second.found), expected_short)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_recompute_needs_less_memory(name: str, device: str) -> None:
    """FC2's input is made anew instead of kept: less is held between the passes, and at most."""
    case = StepCase(
        activation="srelu", splits=(2048, 2048), hidden=256, ffn=4096, device=device,
        mxfp8=name == "mxfp8", grad="fused",
    )  # fmt: skip
    held, peak = {}, {}
    for recompute in (False, True):
        with memory.poisoned(None):
            held[recompute], peak[recompute] = _memory(case.but(recompute=recompute))
    # A byte for each element in MXFP8 (the copy that dW2 reads), two in bf16.
    kept = case.live * case.ffn * (1 if case.mxfp8 else 2)
    assert held[False] - held[True] >= 0.95 * LAYERS * kept
    # While a layer's backward runs its input is there again: in bf16, and as dW2 reads it.
    assert peak[False] - peak[True] >= 0.95 * (LAYERS - 4) * kept


LAYERS = 6


def _memory(case: StepCase) -> tuple[int, int]:
    """Return the bytes that lie between forward and backward, and the most of a step."""
    stack = Layers.make(case, LAYERS)
    stack.step()
    for model in stack.models:
        for parameter in model.parameters():
            parameter.grad = None
    stack.inputs.x.grad = stack.inputs.prob.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = stack.inputs.x
    for model in stack.models:
        inputs = step.Inputs(y, stack.inputs.dy, stack.inputs.prob, stack.inputs.split_sizes)
        y = step.forward(model, case, inputs)
    held = torch.cuda.memory_allocated() - before
    y.backward(stack.inputs.dy)
    torch.cuda.synchronize()
    return held, torch.cuda.max_memory_allocated() - before
