# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user changes between two steps is seen by the second: nothing that was read is kept.

Records are shared by equal facts (`te_adapter.problem_of`, `environment.current`), and tensors are
looked at in every pass. So each fact is changed here after a step that read another one.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch  # noqa: F401  (before what needs its extension)

from te_grouped_mlp.op import environment
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.problem import Problem, RecipeKind
from te_grouped_mlp.op.te import adapter
from tests.support import step
from tests.support.step import StepCase

CASE = StepCase(splits=(64, 32, 128), hidden=64, ffn=64, mxfp8=False, grad="fused")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch, fused_switch: None, poisoned_memory: None) -> None:
    del fused_switch, poisoned_memory
    monkeypatch.setenv(environment.BACKEND_SWITCH, "reference")


def weights(model: Any) -> list[torch.nn.Parameter]:
    return [value for name, value in model.named_parameters() if "weight" in name]


def results(model: Any, case: StepCase = CASE) -> dict[str, torch.Tensor]:
    """One step with fresh inputs and zeroed main_grads."""
    inputs = step.make_inputs(case)
    for weight in weights(model):
        weight.main_grad.zero_()
    y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
    found = {"y": y.detach(), "dx": inputs.x.grad, "dprob": inputs.prob.grad}
    for index, weight in enumerate(weights(model)):
        found[f"dW{index}"] = weight.main_grad.clone()
    return found


def of_weights(values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results of a new model with these weights."""
    model = step.make_model(CASE)
    with torch.no_grad():
        for weight, value in zip(weights(model), values, strict=True):
            weight.copy_(value)
    return results(model)


def replaced(model: Any) -> None:
    for op in model[0], model[2]:
        old = op.weight1
        new = torch.nn.Parameter(old.detach() * -2)
        new.main_grad, new.grad_added_to_main_grad = old.main_grad, False
        op.weight1 = new


def repointed(model: Any) -> None:
    for weight in weights(model):
        weight.data = weight.data * -2


def packed(model: Any) -> None:
    """Into one storage, as a framework does after construction."""
    for op in model[0], model[2]:
        found = [getattr(op, f"weight{index}") for index in range(op.num_groups)]
        whole = torch.stack([weight.detach() for weight in found]) * -2
        for weight, value in zip(found, whole.unbind(0), strict=True):
            weight.data = value


def exchanged(model: Any) -> None:
    """Experts swap memory; the set of addresses stays the same."""
    for op in model[0], model[2]:
        op.weight0.data, op.weight2.data = op.weight2.data, op.weight0.data


def transposed(model: Any) -> None:
    """Another matrix at the same address, of the same shape."""
    model[2].weight2.data = model[2].weight2.data.t()


# autograd says that the gradient of a transposed parameter has other strides.
@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")
@pytest.mark.parametrize("start_packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("change", [replaced, repointed, packed, exchanged, transposed])
def test_weights(change: Callable[[Any], None], start_packed: bool) -> None:
    model = step.make_model(CASE)
    if start_packed:
        packed(model)
    before = results(model)
    change(model)
    after = results(model)
    expected = of_weights([weight.detach().clone() for weight in weights(model)])
    step.assert_same(after, expected)
    assert not torch.equal(before["y"], after["y"])


@pytest.mark.parametrize("at", ["before the forward", "before the backward"])
def test_another_main_grad(at: str) -> None:
    model, inputs = step.make_model(CASE), step.make_inputs(CASE)
    expected = results(model)
    old = [weight.main_grad for weight in weights(model)]
    kept = [grad.clone() for grad in old]
    y = step.forward(model, CASE, inputs) if at == "before the backward" else None
    for weight in weights(model):
        weight.main_grad = torch.zeros_like(weight.main_grad)
    if y is None:
        y = step.forward(model, CASE, inputs)
    y.backward(inputs.dy)
    for index, weight in enumerate(weights(model)):
        assert torch.equal(weight.main_grad, expected[f"dW{index}"])
        assert torch.equal(old[index], kept[index])


def test_a_main_grad_of_another_dtype() -> None:
    model = step.make_model(CASE)
    expected = results(model)
    for weight in weights(model):
        weight.main_grad = weight.main_grad.bfloat16()
    found = results(model)
    for index in range(len(weights(model))):
        assert found[f"dW{index}"].dtype is torch.bfloat16
        assert torch.equal(found[f"dW{index}"], expected[f"dW{index}"].bfloat16())


def test_a_main_grad_that_was_right_before() -> None:
    model = step.make_model(CASE)
    results(model)
    weight = model[2].weight1
    weight.main_grad = weight.main_grad[:32]
    with pytest.raises(RuntimeError, match=r"FC2 weight1.main_grad has shape \(32, 64\)"):
        step.run_model(model, CASE, step.make_inputs(CASE))
    weight.main_grad = None
    with pytest.raises(RuntimeError, match="FC2 weight1.main_grad is missing"):
        step.run_model(model, CASE, step.make_inputs(CASE))


@pytest.mark.parametrize("frozen", [0, 2])
def test_requires_grad(frozen: int) -> None:
    model = step.make_model(CASE)
    expected = results(model)
    for toggled in (False, True):
        model[frozen].requires_grad_(toggled)
        found = results(model)
        assert torch.equal(found["y"], expected["y"])
        for index, weight in enumerate(weights(model)):
            frozen_one = not toggled and weight in set(model[frozen].parameters())
            name = f"dW{index}"
            assert torch.equal(found[name], expected[name]) is not frozen_one


def test_without_gradients_in_between() -> None:
    """Tensors of inference mode count no versions and take no gradients."""
    model = step.make_model(CASE)
    expected = results(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = step.run_model(model, CASE, step.make_inputs(CASE), backward=False)
        assert torch.equal(y, expected["y"])
        step.assert_same(results(model), expected)


def test_autocast_in_between() -> None:
    """The compute dtype is the region's; the weights stay in theirs."""
    case = CASE.but(dtype=torch.float32)
    model = step.make_model(case)
    alone = results(model, case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = step.run_model(model, case, step.make_inputs(case), backward=False)
    assert y.dtype is torch.bfloat16
    rounded = step.make_model(CASE)
    with torch.no_grad():
        for weight, value in zip(weights(rounded), weights(model), strict=True):
            weight.copy_(value)
    assert torch.equal(y, results(rounded)["y"])
    step.assert_same(results(model, case), alone)


def test_a_copy_is_a_model_of_its_own() -> None:
    model = step.make_model(CASE)
    before = results(model)
    other = copy.deepcopy(model)
    for weight, twin in zip(weights(model), weights(other), strict=True):
        twin.main_grad, twin.grad_added_to_main_grad = torch.zeros_like(weight.main_grad), False
    repointed(other)
    expected = of_weights([weight.detach().clone() for weight in weights(other)])
    step.assert_same(results(other), expected)
    step.assert_same(results(model), before)


def test_threads() -> None:
    """Models with the same facts share records; each step has its own tensors."""
    models = [step.make_model(CASE.but(seed=seed)) for seed in range(4)]
    expected = [results(model) for model in models]
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def work(index: int) -> None:
        for turn in range(5):
            found[index, turn] = results(models[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for (index, _), each in found.items():
        step.assert_same(each, expected[index])


def set_to(path: str, value: Any) -> Callable[[Any], None]:
    """Set an attribute of one of the three ops, such as ``2.use_bias``."""
    index, name = path.split(".", 1)

    def change(model: Any) -> None:
        setattr(model[int(index)], name, value)

    return change


def delayed(index: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model[index].wgrad_store.enabled = True

    return change


def distributed(index: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model[index].weight0.is_distributed_weight = True

    return change


def in_float(model: Any) -> None:
    model.float()


# What a user changes -> the fields of Problem that must follow.
FACTS: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "groups": (set_to("0.num_groups", 5), {"num_groups": 5}),
    "dtype": (in_float, {"dtype": DType.FLOAT32}),
    "interleave": (set_to("1.glu_interleave_size", None), {"activation.interleave": None}),
    "recompute": (set_to("1.activation_recompute_in_mlp", True), {"activation.recompute": True}),
}
for _index, _linear in ((0, "fc1"), (2, "fc2")):
    FACTS |= {
        f"{_linear} in": (set_to(f"{_index}.in_features", 8), {f"{_linear}.in_features": 8}),
        f"{_linear} out": (set_to(f"{_index}.out_features", 8), {f"{_linear}.out_features": 8}),
        f"{_linear} bias": (set_to(f"{_index}.use_bias", True), {f"{_linear}.has_bias": True}),
        f"{_linear} scale": (
            set_to(f"{_index}._scale_bias", True),
            {f"{_linear}.scale_bias": True},
        ),
        f"{_linear} grouped bias": (
            set_to(f"{_index}.single_grouped_bias", True),
            {f"{_linear}.single_grouped_bias": True},
        ),
        f"{_linear} main_grad": (
            set_to(f"{_index}._accumulate_into_main_grad", False),
            {f"{_linear}.main_grad": False},
        ),
        f"{_linear} delayed": (delayed(_index), {f"{_linear}.delay_wgrad": True}),
        f"{_linear} distributed": (distributed(_index), {f"{_linear}.distributed": True}),
    }


def fields_of(problem: Problem) -> dict[str, Any]:
    """Every leaf of the record by its path."""
    found: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(Problem)):
        value = getattr(problem, name)
        if dataclasses.is_dataclass(value):
            parts = dataclasses.fields(value)
            found |= {f"{name}.{part.name}": getattr(value, part.name) for part in parts}
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("fact", FACTS)
def test_an_option_of_the_ops(fact: str) -> None:
    change, expected = FACTS[fact]
    model = step.make_model(CASE)
    before = adapter.problem_of(*model, None)
    change(model)
    after = fields_of(adapter.problem_of(*model, None))
    assert {name for name, value in fields_of(before).items() if after[name] != value} == {
        *expected
    }
    assert {name: after[name] for name in expected} == expected
    # And the record of the others is untouched.
    assert adapter.problem_of(*step.make_model(CASE), None) is before


@pytest.mark.parametrize(
    ("activation", "change", "field"),
    [
        ("qgeglu", ("_clamped.limit", 3.5), "limit"),
        ("qgeglu", ("_clamped.alpha", 1.5), "alpha"),
        ("qgeglu", ("_clamped.glu_linear_offset", 0.25), "linear_offset"),
        ("situ", ("beta1", 2.0), "beta1"),
        ("situ", ("beta2", 9.0), "beta2"),
        ("tanh_srelu", ("tanh_clamp_scale", 3.0), "clamp_scale"),
    ],
)
def test_a_parameter_of_an_activation(
    activation: str, change: tuple[str, float], field: str
) -> None:
    model = step.make_model(CASE.but(activation=activation))
    before = adapter.problem_of(*model, None).activation
    path, value = change
    owner = model[1]
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, value)
    after = adapter.problem_of(*model, None).activation
    assert after == dataclasses.replace(before, **{field: value})
    assert after != before


def test_equal_facts_share_a_record() -> None:
    first, second = step.make_model(CASE), step.make_model(CASE.but(seed=1))
    problem = adapter.problem_of(*first, None)
    assert adapter.problem_of(*second, None) is problem
    assert problem.recipe is RecipeKind.NONE


def test_the_machine_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment.current()
    assert environment.current() is before
    monkeypatch.setenv(environment.CHECK_SWITCH, "1")
    assert environment.current().switches.check
    monkeypatch.delenv(environment.CHECK_SWITCH)
    assert environment.current() == before
    monkeypatch.setattr(environment, "_probe_sm", lambda: (9, 0))
    assert environment.current().sm == (9, 0)
    monkeypatch.setattr(environment, "_standalone_active", lambda: not before.standalone)
    assert environment.current().standalone is not before.standalone


def test_switches_where_the_environment_keeps_no_encoded_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(environment.DETERMINISM_SWITCH, "0")
    expected = environment.read_switches()
    assert not expected.allow_nondeterministic
    monkeypatch.setattr(environment.os, "environ", dict(environment.os.environ))
    assert environment.read_switches() == expected
