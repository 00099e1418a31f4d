# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans that read values: the op gives the bits of a plan that reads bytes and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import environment
from te_grouped_mlp.op.tensors import dequantized_weights
from tests.support import step
from tests.support.step import StepCase
from tests.support.values_backend import in_use

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SEVERAL = StepCase(splits=(128, 0, 256), hidden=128, ffn=128)
WEIGHTS = ("discrete", "grouped", "quantized")


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
def test_equal_to_a_plan_over_bytes(
    activation: str, weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SEVERAL.but(
        activation=activation, weight=weight, bias=True, scale_bias=True, bias_weight="discrete",
        buffer_rows=640, fill=float("nan"),
    )  # fmt: skip
    expected = step.run_step(case)
    with in_use(monkeypatch) as calls:
        step.assert_same(step.run_step(case), expected)
    assert "quantize" in calls


@pytest.mark.parametrize(
    "changes",
    [
        {"delay": (True, False), "grad": ("fused", "main_grad")},
        {"weight": ("grouped", "quantized"), "bias": (False, True)},
        {"weight": ("quantized", "discrete"), "grad": ("grad", "overwrite")},
        {"activation": "srelu", "recompute": True},
        {"activation": "srelu", "recompute": True, "delay": True},
        {"unit_scale": True, "splits": (384,)},
        {"frozen": frozenset({"x"})},
        {"frozen": frozenset({"fc1", "prob", "x"})},
        {"frozen": frozenset({"fc2"})},
        {"hidden": 192, "ffn": 64},
        {"splits": (0, 0)},
    ],
    ids=lambda changes: "-".join(
        str(sorted(value) if isinstance(value, frozenset) else value) for value in changes.values()
    ),
)
def test_equal_in_every_kind_of_step(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SEVERAL.but(**changes)
    expected = step.run_step(case)
    with in_use(monkeypatch):
        step.assert_same(step.run_step(case), expected)


@pytest.mark.parametrize("reuse", [False, True], ids=["new", "reused"])
@pytest.mark.parametrize("reversed_experts", [False, True], ids=["scattered", "reversed"])
def test_what_the_forward_saves_may_come_back_as_other_tensors(
    reversed_experts: bool, reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it is offloaded; with weights that lie in one buffer, the last expert first, too."""
    expected = step.run_step(SEVERAL)
    model = step.make_model(SEVERAL)
    for op in (model[0], model[2]) if reversed_experts else ():
        weights = [getattr(op, f"weight{index}") for index in range(op.num_groups)]
        buffer = torch.stack([weight.detach() for weight in weights[::-1]])
        for weight, part in zip(weights, buffer.unbind(0)[::-1], strict=True):
            weight.data = part
    with in_use(monkeypatch, reuse_weights=reuse):
        for _ in range(2):
            model.zero_grad()
            inputs = step.make_inputs(SEVERAL)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                y = step.run_model(model, SEVERAL, inputs)
            step.assert_same(step.collect(SEVERAL, model, inputs, y), expected)


# Weights that are kept --------------------------------------------------------------------------


def weights_made(
    monkeypatch: pytest.MonkeyPatch, case: StepCase, change: Any, *, reuse: bool = True
) -> tuple[int, torch.Tensor]:
    """Run a step, change the model, run again; return how many linears' weights were remade then,
    and the second output."""
    made: list[int] = []
    original = dequantized_weights.of_plain
    monkeypatch.setattr(
        dequantized_weights, "of_plain", lambda *args, **kw: made.append(1) or original(*args, **kw)
    )
    model, inputs = step.make_model(case), step.make_inputs(case)
    with in_use(monkeypatch, reuse_weights=reuse):
        step.run_model(model, case, inputs)
        made.clear()
        change(model)
        y = step.run_model(model, case, inputs)
    return len(made), y.detach()


def nothing(model: Any) -> None:
    """Leave everything as it is."""


def in_place(model: Any) -> None:
    """Change one expert of FC1 as an optimizer's step does."""
    with torch.no_grad():
        model[0].weight1.mul_(2.0)


def repointed(model: Any) -> None:
    """Give one expert of FC2 new storage."""
    model[2].weight2.data = model[2].weight2.data * 2.0


def replaced(model: Any) -> None:
    """Put a new parameter in the first place."""
    old = model[0].weight0
    new = torch.nn.Parameter(old.detach() * 2.0)
    if hasattr(old, "main_grad"):
        new.main_grad = old.main_grad
    model[0].weight0 = new


class KernelOptimizer(torch.optim.Optimizer):
    """Writes as fused optimizers do, whose kernels move no version counter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(2.0)


def stepped(model: Any) -> None:
    """Change FC1's weights in a way that PyTorch does not count."""
    KernelOptimizer([model[0].weight0, model[0].weight1]).step()


@pytest.mark.parametrize(
    ("change", "remade"),
    [(nothing, 0), (in_place, 1), (repointed, 1), (replaced, 1), (stepped, 2)],
)
def test_kept_weights_follow_what_pytorch_counts(
    change: Any, remade: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SEVERAL
    count, y = weights_made(monkeypatch, case, change)
    model = step.make_model(case)
    change(model)
    fresh = step.forward(model, case, step.make_inputs(case)).detach()
    assert step.same_bits(y, fresh)
    assert count == remade


def test_new_storage_at_an_old_address_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when weights leave a GPU and others come: the allocator gives the same memory again."""
    case = SEVERAL
    model, inputs = step.make_model(case), step.make_inputs(case)
    weight = model[2].weight2
    memory = bytearray(weight.numel() * weight.element_size())

    def move(values: torch.Tensor) -> int:
        weight.data = torch.empty_like(values)
        weight.data = torch.frombuffer(memory, dtype=values.dtype).view(values.shape)
        weight.data.copy_(values)
        return weight.data_ptr()

    first = weight.detach().clone()
    with in_use(monkeypatch, reuse_weights=True):
        before = move(first), weight._version
        step.run_model(model, case, inputs)
        assert (move(first * 2.0), weight._version) == before
        y = step.run_model(model, case, inputs)
        with environment.override(
            switches=dataclasses.replace(environment.current().switches, reuse_weights=False)
        ):
            assert step.same_bits(y, step.run_model(model, case, inputs))


def test_copies_that_do_not_serve_go_before_others_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = SEVERAL
    model, inputs = step.make_model(case), step.make_inputs(case)
    before = len(dequantized_weights._reusable)
    with in_use(monkeypatch, reuse_weights=True):
        step.run_model(model, case, inputs)
        assert len(dequantized_weights._reusable) == before + 2
        in_place(model)
        original, held = dequantized_weights.of_plain, []

        def look(*args: Any, **kwargs: Any) -> Any:
            held.append(len(dequantized_weights._reusable))
            return original(*args, **kwargs)

        monkeypatch.setattr(dequantized_weights, "of_plain", look)
        step.run_model(model, case, inputs)
        assert held == [before + 1]
        stepped(model)
        assert len(dequantized_weights._reusable) == 0


def test_a_copy_serves_the_stream_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream may come to it before it is written."""

    def other_stream(_: Any) -> None:
        monkeypatch.setattr(dequantized_weights, "_stream", lambda device: 1)

    assert weights_made(monkeypatch, SEVERAL, other_stream)[0] == 2


def test_without_the_promise_weights_are_made_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, _ = weights_made(monkeypatch, SEVERAL, nothing, reuse=False)
    assert count == 2


def test_another_shape_of_the_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantizer that now gives one scale to 32 x 32 values; TE's recipe sets it."""

    def two_d(model: Any) -> None:
        model[0].get_quantizer("forward", 1).with_2d_quantization = True

    assert weights_made(monkeypatch, SEVERAL, two_d)[0] == 1


@pytest.mark.parametrize("weight", ["discrete", "grouped"])
def test_weights_of_inference_mode_are_not_kept(
    weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count no versions, so a write could not be seen."""
    case = SEVERAL.but(weight=weight, frozen=frozenset({"x", "prob", "fc1", "fc2"}))
    before = len(dequantized_weights._reusable)
    with in_use(monkeypatch, reuse_weights=True), torch.inference_mode():
        model, inputs = step.make_model(case), step.make_inputs(case)
        first = step.forward(model, case, inputs).clone()
        for parameter in model[0].parameters():
            storage = getattr(parameter, "rowwise_data", None)
            (parameter if storage is None else storage).mul_(2.0)
        second = step.forward(model, case, inputs)
        assert not step.same_bits(first, second)
    assert len(dequantized_weights._reusable) == before


def test_one_parameter_for_all_experts_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SEVERAL.but(weight="grouped")
    assert weights_made(monkeypatch, case, nothing)[0] == 0


def test_a_write_inside_one_parameter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(model: Any) -> None:
        model[0].weight.rowwise_data.mul_(2.0)

    assert weights_made(monkeypatch, SEVERAL.but(weight="grouped"), write)[0] == 1


def test_an_inference_pass_keeps_less_and_a_training_pass_asks_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = SEVERAL
    model, inputs = step.make_model(case), step.make_inputs(case)
    with in_use(monkeypatch, reuse_weights=True) as calls:
        with torch.no_grad():
            step.forward(model, case, inputs)
        calls.clear()
        y = step.run_model(model, case, inputs)
    assert calls.count("quantize") == 2 + 2  # both linears' columns now, x and dy
    assert y.requires_grad


def test_what_is_kept_goes_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(dequantized_weights._reusable)
    weights_made(monkeypatch, SEVERAL, nothing)
    assert len(dequantized_weights._reusable) == before
