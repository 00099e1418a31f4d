# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of one or several layers, captured as a CUDA graph and replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tests.op import fixtures
from tests.support import step
from tests.support.step import StepCase

Found = dict[str, Any]


@dataclasses.dataclass
class Layers:
    """Layers of one shape, each with weights of its own, run one after another.

    Attributes:
        case: What each layer is; its seed is the first layer's.
        models: One per layer.
        inputs: Of the first layer; splits and probabilities are shared.
    """

    case: StepCase
    models: list[Any]
    inputs: step.Inputs

    @classmethod
    def make(cls, case: StepCase, count: int = 1) -> Layers:
        """Build `count` layers with the weights of seeds of their own."""
        models = [step.make_model(case.but(seed=case.seed + 10 * i)) for i in range(count)]
        return cls(case, models, step.make_inputs(case))

    def load(self, item: fixtures.Replayed) -> StepCase:
        """Put data and splits of a step into the buffers of this one, change weights in place."""
        case = self.case.but(seed=item.seed, splits=item.splits, buffer_rows=self.case.rows)
        drawn = step.make_inputs(case)
        with torch.no_grad():
            for name in ("x", "dy", "prob", "split_sizes"):
                getattr(self.inputs, name).copy_(getattr(drawn, name))
        for model in self.models:
            fixtures.shift(model, item.shift)
        return case

    def clear(self) -> None:
        """Set buffers that gradients are added to back to zero."""
        for model in self.models:
            for parameter in model.parameters():
                if getattr(parameter, "main_grad", None) is not None:
                    parameter.main_grad.zero_()

    def step(self) -> Found:
        """Run forward and backward; gradients are new tensors, by layer and name."""
        inputs, case = self.inputs, self.case
        parameters = [p for model in self.models for p in model.parameters()]
        for tensor in (*parameters, inputs.x, inputs.prob):
            tensor.grad = None
        y = inputs.x
        for model in self.models:
            y = step.forward(model, case, dataclasses.replace(inputs, x=y))
        y.backward(inputs.dy)
        for model in self.models:
            step.run_delayed(model, case)
        found: Found = {}
        for index, model in enumerate(self.models):
            for name, value in step.collect(case, model, inputs, y).items():
                if name in ("y", "dx", "dprob"):
                    found[name] = value
                else:
                    # What is added to lives on after the step.
                    found[f"{name} of layer {index}"] = None if value is None else value.clone()
        return found


@dataclasses.dataclass
class Captured:
    """A captured step.

    Attributes:
        found: Its results; each replay overwrites them.
        replay: Runs it again.
    """

    found: Found
    replay: Callable[[], None]


def capture(layers: Layers, beside: Callable[[], None] = lambda: None) -> Captured:
    """Capture a step after three on a side stream; on a CPU a replay is the step itself.

    Args:
        layers: What to run; the step reads and writes its buffers.
        beside: Called while the capture goes on, to start other work.
    """
    if layers.inputs.x.device.type == "cpu":
        layers.step()
        found = layers.step()
        beside()

        def again() -> None:
            for name, value in layers.step().items():
                if value is not None:
                    found[name].copy_(value)

        return Captured(found, again)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layers.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        beside()
        found = layers.step()
        beside()
    return Captured(found, graph.replay)


def live(case: StepCase, found: Found) -> Found:
    """Cut the token tensors to the valid rows, and copy everything."""
    cut = {}
    for name, value in found.items():
        if value is not None and name in ("y", "dx", "dprob"):
            value = value[: case.live]
        cut[name] = None if value is None else value.clone()
    return cut


def assert_replay_equals_eager(
    case: StepCase, sequence: list[fixtures.Replayed], layers: int = 1
) -> None:
    """Replay a sequence of steps; compare each bit by bit with the step of new layers.

    Eager steps of the captured layers themselves come between capture and first replay, and after
    every replay.
    """
    static = Layers.make(case, layers)
    captured = capture(static)
    replayed = 0
    for count, item in enumerate(sequence):
        current = static.load(item)
        fresh = Layers.make(case, layers)
        # Rounded at every change, as the weights of the captured layers are.
        for each in sequence[: count + 1]:
            fresh.load(each)
        fresh.clear()
        expected = live(current, fresh.step())
        for _ in range(1 + (replayed == 0)):
            static.clear()
            step.assert_same(live(current, static.step()), expected)
            static.clear()
            captured.replay()
            step.assert_same(live(current, captured.found), expected)
            replayed += 1
