# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user can choose: parameters, gradients, precision, and where gradients go."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

from te_grouped_mlp.op.tensors.operands import Axis
from tests.op import fixtures
from tests.support import step
from tests.support.pairwise import pairwise_rows
from tests.support.step import StepCase
from tests.support.values_backend import in_use

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SMALL = StepCase(splits=(128, 0, 256), buffer_rows=512, hidden=128, ffn=64, fill=3.0)
SINGLE = StepCase(splits=(256,), hidden=128, ffn=64)

BASES = {"1g": SINGLE, "3g-pad": SMALL}
BIASES: dict[str, dict[str, Any]] = {
    "nobias": {},
    "fc1": {"bias": (True, False)},
    "fc2": {"bias": (False, True)},
    "bias": {"bias": True},
    "scaledbias": {"bias": True, "scale_bias": True},
}
WEIGHTS = ("discrete", "grouped", "quantized")
STORED = ("discrete", "grouped")


def rows(**choices: Any) -> Any:
    """Parametrize `row` by choices of which each two meet."""
    return pairwise_rows({name: tuple(of) for name, of in choices.items()})


def case_of(row: dict[str, Any], **more: Any) -> StepCase:
    """Return the case of a row: choices as "fc1 weight" and "fc2 weight" become a pair."""
    changes: dict[str, Any] = dict(BIASES[row["bias"]]) if "bias" in row else {}
    for name, value in row.items():
        label, _, choice = name.partition(" ")
        if choice:
            changes.setdefault(choice, [None, None])[label == "fc2"] = value
        elif name not in ("base", "bias"):
            changes[name] = value
    changes = {name: tuple(v) if isinstance(v, list) else v for name, v in changes.items()}
    return BASES[row.get("base", "3g-pad")].but(**changes, **more)


# Parameters and activations ---------------------------------------------------------------------


@rows(activation=step.ACTIVATIONS, bias=BIASES, base=BASES)
def test_biases_and_activations(row: dict[str, Any]) -> None:
    """The emulation's bits; per expert and stripe within MXFP8's bound on the inputs."""
    case = case_of(row)
    fixtures.assert_right(case, step.run_step(case))


@rows(**{"fc1 weight": WEIGHTS, "fc2 weight": WEIGHTS, "bias": BIASES})
def test_weight_modes(row: dict[str, Any]) -> None:
    case = case_of(row)
    fixtures.assert_right(case, step.run_step(case))


@pytest.mark.parametrize("values", [False, True], ids=["bytes", "values"])
@pytest.mark.parametrize("lost", ["row", "column"])
@pytest.mark.parametrize(("op", "expert"), [(0, 0), (0, 2), (2, 1)])
def test_a_quantized_weight_that_lacks_a_copy_is_named(
    op: int, expert: int, lost: str, values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one made for inference lacks its column-wise copy: the forward says so, before any work,
    if a backward would read it."""
    case = SINGLE.but(splits=(128, 0, 128), weight="quantized")
    model, inputs = step.make_model(case), step.make_inputs(case)
    usage = {"row": "rowwise_usage", "column": "columnwise_usage"}[lost]
    getattr(model[op], f"weight{expert}").update_usage(**{usage: False})
    with in_use(monkeypatch) if values else contextlib.nullcontext():
        with pytest.raises(RuntimeError, match=f"a quantized weight has no {lost}-wise copy"):
            step.forward(model, case, inputs)
        if lost == "column":
            with torch.no_grad():
                y = step.forward(model, case, inputs)
            assert step.same_bits(y, step.run_step(case)["y"])


@rows(
    **{f"{label} {name}": STORED for label in ("fc1", "fc2") for name in ("weight", "bias_weight")},
    **{f"{label} grad": ("grad", "main_grad", "fused") for label in ("fc1", "fc2")},
    base=BASES,
)
def test_grouped_parameters_equal_discrete_ones(row: dict[str, Any]) -> None:
    """One parameter for all experts is another way to store the same numbers, `.grad` included."""
    fixtures.assert_emulated(case_of(row).but(bias=True), step.run_step(case_of(row, bias=True)))


@rows(**{f"{op} {name}": STORED for op in ("fc1", "fc2") for name in ("weight", "bias_weight")})
def test_gradients_leave_in_registration_order(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op returns one gradient per parameter, in the order of `named_parameters`."""
    case = case_of(row, bias=True)
    model, inputs = step.make_model(case), step.make_inputs(case)
    step.forward(model, case, inputs)
    fused, returned = step.fused_op(model), []
    original = type(fused).fuser_backward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        returned.append(found[1])
        return found

    monkeypatch.setattr(type(fused), "fuser_backward", spy)
    step.run_model(model, case, inputs)
    for op, grads in zip(model, returned[0], strict=True):
        named = list(op.named_parameters())
        assert len(named) == len(grads)
        for (name, parameter), grad in zip(named, grads, strict=True):
            assert torch.equal(grad, parameter.grad), name
            assert parameter.grad.shape == parameter.shape, name


PARAMETERS = {
    "qgeglu": ({"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}, {"limit": 0.4}),
    "situ": ({"beta1": 4.0, "beta2": 25.0}, {"beta1": 0.7}),
    "tanh_srelu": ({"tanh_clamp_scale": 1.0}, {"tanh_clamp_scale": 0.3}),
}


@pytest.mark.parametrize(
    ("activation", "params"),
    [(name, changes) for name, sets in PARAMETERS.items() for changes in sets],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_parameters_of_activations(activation: str, params: dict[str, float]) -> None:
    case = SINGLE.but(activation=activation, params=tuple(params.items()))
    found = step.run_step(case)
    fixtures.assert_emulated(case, found)
    other = step.run_step(case.but(params=()))
    assert not step.same_bits(found["y"], other["y"]), "the parameter changes nothing"


# What needs no gradient -------------------------------------------------------------------------

FROZEN = [
    frozenset(names)
    for count in range(1, 4)
    for names in itertools.combinations(("fc1", "fc2", "prob", "x"), count)
]


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda names: "+".join(sorted(names)))
@pytest.mark.parametrize(
    "base",
    [
        SMALL.but(bias=True, scale_bias=True, grad=("main_grad", "grad")),
        SINGLE.but(bias=(True, False), activation="srelu", grad=("grad", "fused")),
    ],
    ids=["3g-scaledbias", "1g-bias"],
)
def test_frozen_parts_get_nothing_and_change_nothing(
    base: StepCase, frozen: frozenset[str]
) -> None:
    case = base.but(frozen=frozen)
    found = step.run_step(case)
    step.assert_present(case, found)
    expected = step.run_step(base)
    for name in found.keys() - step.absent(case):
        assert step.same_bits(found[name], expected[name]), name


def test_nothing_is_computed_for_frozen_parts(saved_bytes: Any) -> None:
    """A frozen FC1 keeps no input, a frozen FC2 no activation, frozen probabilities no dprob."""
    rows, hidden, ffn = SMALL.rows, SMALL.hidden, SMALL.ffn
    everything = saved_bytes(SMALL)
    scales = rows * 128 // 32
    without_x = saved_bytes(SMALL.but(frozen=frozenset({"fc1"})))
    assert everything - without_x >= rows * hidden + scales
    without_act = saved_bytes(SMALL.but(frozen=frozenset({"fc2"})))
    assert everything - without_act >= rows * ffn + scales


@pytest.mark.parametrize("mode", ["no_grad", "inference", "all frozen", "eval"])
def test_without_gradients(mode: str) -> None:
    case = SMALL.but(bias=True)
    if mode == "all frozen":
        case = case.but(frozen=frozenset({"fc1", "fc2", "prob", "x"}))
    model, inputs = step.make_model(case), step.make_inputs(case)
    if mode == "eval":
        model.eval()
    context = {"no_grad": torch.no_grad(), "inference": torch.inference_mode()}
    with context.get(mode, contextlib.nullcontext()):
        y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__ == "GroupedMLP_CuTeGEMMGLU"
    assert step.same_bits(y.detach(), step.run_step(SMALL.but(bias=True))["y"])
    assert y.requires_grad is (mode == "eval")


# Where gradients go -----------------------------------------------------------------------------

BATCHES = (11, 12)


def two_batches(case: StepCase, model: Any) -> None:
    for seed in BATCHES:
        step.run_model(model, case, step.make_inputs(case.but(seed=seed)))


def main_grads(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.main_grad
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "main_grad")
    }


def of_each_batch(case: StepCase) -> list[dict[str, torch.Tensor]]:
    """Return the fp32 weight gradients of each micro-batch by itself."""
    found = []
    for seed in BATCHES:
        alone = case.but(grad="overwrite")
        model = step.make_model(alone)
        step.run_model(model, alone, step.make_inputs(alone.but(seed=seed)))
        found.append(main_grads(model))
    return found


@rows(
    base=BASES,
    **{f"{label} weight": STORED for label in ("fc1", "fc2")},
    **{f"{label} delay": (False, True) for label in ("fc1", "fc2")},
)
def test_main_grad_accumulates(row: dict[str, Any]) -> None:
    case = case_of(row, grad="main_grad")
    model = step.make_model(case)
    buffers = main_grads(model)
    start = {name: buffer.clone() for name, buffer in buffers.items()}
    two_batches(case, model)
    first, second = of_each_batch(case)
    for name, buffer in main_grads(model).items():
        assert buffer is buffers[name], "another buffer object"
        assert torch.equal(buffer, start[name] + first[name] + second[name]), name
    for parameter in model.parameters():
        assert parameter.grad is None


@rows(base=BASES, weight=STORED, overwrites=("fc1", "fc2", "both"))
def test_main_grad_is_overwritten_when_asked(row: dict[str, Any]) -> None:
    """Neither what the buffer held nor the first micro-batch stays, of the linear that asked."""
    overwrites = row.pop("overwrites")
    case = case_of(row, grad=tuple(
        "overwrite" if overwrites in (label, "both") else "fused" for label in ("fc1", "fc2")
    ))  # fmt: skip
    model = step.make_model(case)
    buffers = main_grads(model)
    start = {name: buffer.clone() for name, buffer in buffers.items()}
    two_batches(case, model)
    first, second = of_each_batch(case)
    for name, buffer in main_grads(model).items():
        linear = case.linears[0 if name.startswith("0.") else 1]
        kept = start[name] + first[name] if linear.accumulates else 0
        assert buffer is buffers[name]
        assert torch.equal(buffer, kept + second[name]), name


def test_bf16_main_grad_is_added_to_after_rounding_once() -> None:
    case = SMALL.but(grad="main_grad")
    model, exact = step.make_model(case), of_each_batch(case)[0]
    for parameter in model.parameters():
        parameter.main_grad = parameter.main_grad.bfloat16()
    start = {name: buffer.float() for name, buffer in main_grads(model).items()}
    step.run_model(model, case, step.make_inputs(case.but(seed=BATCHES[0])))
    for name, buffer in main_grads(model).items():
        expected = (exact[name].bfloat16().float() + start[name]).bfloat16()
        assert torch.equal(buffer, expected), name


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("weight", ["discrete", "grouped"])
def test_placeholders_where_main_grad_holds_the_gradient(weight: str, zero: bool) -> None:
    """Megatron's flag is set, and autograd gets a tensor of the shape; zeros where asked."""
    case = SMALL.but(grad="fused", weight=weight)
    model = step.make_model(case)
    for parameter in model.parameters():
        parameter.zero_out_wgrad = zero
    inputs = step.make_inputs(case)
    y = step.run_model(model, case, inputs)
    fixtures.assert_emulated(case, step.collect(case, model, inputs, y))
    for name, parameter in model.named_parameters():
        assert parameter.grad_added_to_main_grad, name
        assert parameter.grad.shape == parameter.shape, name
        if zero:
            assert not parameter.grad.any(), name


@pytest.mark.parametrize("stale", [False, True], ids=["none before", "stale before"])
@pytest.mark.parametrize("weight", ["discrete", "grouped"])
def test_fsdp_provides_main_grad_in_the_backward(weight: str, stale: bool) -> None:
    """With `__fsdp_param__` the buffer is fetched by the backward, also where one of an earlier
    step is still there; the forward asks for none."""
    case = SMALL.but(grad="main_grad", weight=weight)
    model, inputs = step.make_model(case), step.make_inputs(case)
    buffers = main_grads(model)
    asked: list[str] = []

    def provider(name: str) -> Any:
        def get_main_grad() -> torch.Tensor:
            asked.append(name)
            return buffers[name]

        return get_main_grad

    for name, parameter in model.named_parameters():
        del parameter.main_grad
        if stale:
            parameter.main_grad = torch.full_like(buffers[name], float("nan"))
        parameter.__fsdp_param__ = True
        parameter.get_main_grad = provider(name)
    y = step.forward(model, case, inputs)
    assert not asked
    y.backward(inputs.dy)
    assert set(asked) == set(buffers)
    expected = step.run_step(case)
    found = step.collect(case, model, inputs, y)
    step.assert_same(found, expected)


@rows(
    delay=((True, True), (True, False), (False, True)),
    **{f"{label} grad": ("grad", "main_grad", "fused") for label in ("fc1", "fc2")},
    **{f"{label} weight": STORED for label in ("fc1", "fc2")},
    bias=BIASES,
    frozen=("", "fc1", "fc2"),
)
def test_delayed_weight_gradients_equal_immediate_ones(row: dict[str, Any]) -> None:
    case = case_of({**row, "frozen": frozenset({row["frozen"]} - {""})})
    step.assert_same(step.run_step(case), step.run_step(case.but(delay=False)))


@pytest.mark.parametrize("grad", ["grad", "main_grad"])
@pytest.mark.parametrize(
    "delay", [(True, True), (True, False), (False, True)], ids=["both", "fc1", "fc2"]
)
def test_delayed_weight_gradients_wait_and_then_call_the_hooks(
    delay: tuple[bool, bool], grad: str
) -> None:
    case = SMALL.but(grad=grad, delay=delay, bias=True)
    model, inputs = step.make_model(case), step.make_inputs(case)
    called: list[str] = []
    for label, op in (("fc1", model[0]), ("fc2", model[2])):
        op.register_wgrad_accumulation_and_reduce_hooks(lambda label=label: called.append(label))
    y = step.forward(model, case, inputs)
    start = {name: buffer.clone() for name, buffer in main_grads(model).items() if grad != "grad"}
    y.backward(inputs.dy)
    assert inputs.x.grad.any()
    for index, waits in ((0, delay[0]), (2, delay[1])):
        op = model[index]
        assert op.bias0.grad.any(), "bias gradients are not delayed"
        if grad == "grad":
            assert (op.weight0.grad is None) is waits
        else:
            assert torch.equal(op.weight0.main_grad, start[f"{index}.weight0"]) is waits
    assert not called
    for op, waits in ((model[2], delay[1]), (model[0], delay[0])):
        if waits:
            op.backward_dw()
    assert called == ["fc2"] * delay[1] + ["fc1"] * delay[0]
    step.assert_same(step.collect(case, model, inputs, y), step.run_step(case.but(delay=False)))


class Shard(torch.Tensor):
    """The rows of an expert's weight that this rank owns, by TE's distributed-weight protocol."""

    is_distributed_weight = True
    is_routed_expert = True


def shard(
    model: Any, events: list[str], labels: tuple[str, ...] = ("dW1", "dW2")
) -> dict[str, torch.Tensor]:
    """Replace the weights of linears with shards of half their rows; returns the full gradients,
    which appear when the owner is given them."""
    received: dict[str, torch.Tensor] = {}
    for label in labels:
        op = model[0 if label == "dW1" else 2]
        full = [getattr(op, f"weight{index}").detach() for index in range(op.num_groups)]
        group = []
        for index, weight in enumerate(full):
            parameter = torch.nn.Parameter(
                weight[: weight.shape[0] // 2].clone().as_subclass(Shard)
            )
            parameter.grad_added_to_main_grad = False
            parameter.main_grad = torch.zeros(parameter.shape)
            setattr(op, f"weight{index}", parameter)
            group.append(parameter)
        lead = group[0]
        lead.weight_list = group

        def gather(pass_: str, label: str = label, full: Any = full) -> list[torch.Tensor]:
            events.append(f"{label} {pass_}")
            return full

        def finalize(grads: Any, label: str = label) -> None:
            events.append(f"{label} grads")
            received[label] = torch.stack(list(grads))

        lead.materialize_group_for_forward = lambda gather=gather: gather("forward")
        lead.materialize_group_for_backward = lambda gather=gather: gather("backward")
        lead.finalize_group_grads = finalize
    return received


@pytest.mark.parametrize("grad", ["grad", "fused"])
@pytest.mark.parametrize("labels", [("dW1", "dW2"), ("dW1",), ("dW2",)], ids="+".join)
@pytest.mark.parametrize("base", [SINGLE.but(splits=(128, 128)), SMALL], ids=["2g", "3g-pad"])
def test_distributed_weights(base: StepCase, labels: tuple[str, ...], grad: str) -> None:
    """Gathered for each pass, not saved; full gradients go to the owner, autograd gets dummies.
    The other linear's go where they always go."""
    case = base.but(grad=grad, bias=True)
    model, inputs, events = step.make_model(case), step.make_inputs(case), []
    received = shard(model, events, labels)
    y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__ == "GroupedMLP_CuTeGEMMGLU"
    every = ["dW1 forward", "dW2 forward", "dW2 backward", "dW2 grads", "dW1 backward", "dW1 grads"]
    assert events == [event for event in every if event[:3] in labels]
    expected = step.run_step(case.but(grad="grad"))
    found = {"y": y.detach(), "dx": inputs.x.grad, "dprob": inputs.prob.grad, **received}
    step.assert_same(found, {name: expected[name] for name in found})
    whole = step.run_step(case)
    for label in {"dW1", "dW2"} - set(labels):
        own = step.collect(case, model, inputs, y)[label]
        assert step.same_bits(own, whole[label])
    for name, parameter in model.named_parameters():
        if "weight" in name and ("dW1" if name.startswith("0.") else "dW2") in labels:
            assert parameter.grad_added_to_main_grad, name
            assert parameter.grad is None or parameter.grad.shape == parameter.shape, name


def only(axis: Axis, weights: list[torch.Tensor]) -> list[Any]:
    """MXFP8 copies of weights along one axis, as an owner gathers what a pass reads."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    row = axis is Axis.ROW
    quantizer = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=row, columnwise=not row)
    return [quantizer(weight) for weight in weights]


@pytest.mark.parametrize("values", [False, True], ids=["bytes", "values"])
def test_distributed_weights_gathered_quantized(
    values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass asks for the copy that it reads: the other one was not gathered."""
    case = SMALL
    model, inputs = step.make_model(case), step.make_inputs(case)
    received = shard(model, [])
    for op in model[0], model[2]:
        lead = op.weight0
        full = lead.materialize_group_for_forward()
        lead.materialize_group_for_forward = lambda full=full: only(Axis.ROW, full)
        lead.materialize_group_for_backward = lambda full=full: only(Axis.COLUMN, full)
    with in_use(monkeypatch) if values else contextlib.nullcontext():
        y = step.run_model(model, case, inputs)
    expected = step.run_step(case)
    found = {"y": y.detach(), "dx": inputs.x.grad, "dprob": inputs.prob.grad, **received}
    step.assert_same(found, {name: expected[name] for name in found})


# TE itself cannot make a grouped weight at the first call: it tries to copy into quantized storage.
@pytest.mark.parametrize(
    ("training", "weight"),
    [(True, "discrete"), (True, "grouped"), (False, "discrete")],
    ids=["training-discrete", "training-grouped", "inference-discrete"],
)
def test_construction_on_the_meta_device(training: bool, weight: str) -> None:
    """Parameters appear by `reset_parameters`, or at the first call without gradients; for one
    with gradients that is too late, since TE's fuser has collected the parameters before."""
    case = SMALL.but(bias=True, weight=weight, device="meta")
    model, inputs = step.make_model(case), step.make_inputs(case)
    assert all(parameter.is_meta for parameter in model.parameters())
    if training:
        for op in model[0], model[2]:
            op.reset_parameters()
    with contextlib.nullcontext() if training else torch.no_grad():
        y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__ == "GroupedMLP_CuTeGEMMGLU"
    assert not any(parameter.is_meta for parameter in model.parameters())
    plain = case.but(device=None)
    twin, again = step.make_model(plain), step.make_inputs(plain)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    expected = step.collect(plain, twin, again, step.run_model(twin, plain, again))
    if training:
        step.assert_same(step.collect(case, model, inputs, y), expected)
    else:
        assert step.same_bits(y, expected["y"])


# Memory and precision ---------------------------------------------------------------------------


@pytest.fixture
def saved_bytes() -> Any:
    """Return a function that counts the bytes that a forward keeps for the backward."""

    def count(case: StepCase) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is torch.Tensor:
                storages[tensor.data_ptr()] = tensor.nbytes
            return tensor

        model, inputs = step.make_model(case), step.make_inputs(case)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step.forward(model, case, inputs)
        return sum(storages.values())

    return count


@rows(base=BASES, bias=BIASES, **{f"{label} weight": WEIGHTS for label in ("fc1", "fc2")})
def test_activation_recompute(row: dict[str, Any]) -> None:
    """FC2's input is made anew from the stored pre-activation, whose rounding it then has."""
    case = case_of(row, activation="srelu")
    kept, recomputed = step.run_step(case), step.run_step(case.but(recompute=True))
    for name in kept.keys() - {"dW2"}:
        assert step.same_bits(kept[name], recomputed[name]), name
    fixtures.assert_right(case.but(recompute=True), recomputed)
    # 2^-8 is one rounding of the pre-activation, squared; E4M3 then turns it into a step of 2^-3
    # where it crosses a code's boundary, which few values do.
    error = (kept["dW2"] - recomputed["dW2"]).double().norm() / kept["dW2"].double().norm()
    assert error < 0.02


def test_activation_recompute_saves_memory(saved_bytes: Any) -> None:
    case = SMALL.but(activation="srelu")
    saved = saved_bytes(case) - saved_bytes(case.but(recompute=True))
    assert saved == case.rows * case.ffn + case.rows * 128 // 32


@pytest.mark.parametrize("prob_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype, prob_dtype: torch.dtype) -> None:
    case = SMALL.but(dtype=dtype, prob_dtype=prob_dtype, bias=True, scale_bias=True)
    found = step.run_step(case)
    assert {found[name].dtype for name in ("y", "dx", "dW1", "dW2", "db1", "db2")} == {dtype}
    assert found["dprob"].dtype is prob_dtype
    fixtures.assert_right(case, found)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast_decides_the_compute_dtype(x_dtype: torch.dtype) -> None:
    """fp32 parameters under bf16 autocast: the step is a bf16 one, gradients return in fp32."""
    case = SMALL.but(dtype=torch.float32, bias=True)
    model, inputs = step.make_model(case), step.make_inputs(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    inputs.x = inputs.x.detach().bfloat16().to(x_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = step.forward(model, case, inputs)
    assert y.dtype is torch.bfloat16
    y.backward(inputs.dy.bfloat16())
    expected = step.run_step(SMALL.but(bias=True))
    found = step.collect(case, model, inputs, y)
    assert {found[name].dtype for name in ("dW1", "dW2", "db1", "db2")} == {torch.float32}
    assert found["dx"].dtype is x_dtype
    for name in found.keys() - {"dprob"}:
        found[name] = found[name].bfloat16()
    step.assert_same(found, expected)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("bias", ["nobias", "fc1", "fc2", "bias"])
def test_unit_activation_scale(activation: str, bias: str) -> None:
    """A shared expert: the probabilities are one, are not read, and get no gradient."""
    case = SINGLE.but(activation=activation, unit_scale=True, **BIASES[bias])
    found = step.run_step(case)
    fixtures.assert_right(case, found)
    model, inputs = step.make_model(case), step.make_inputs(case)
    with torch.no_grad():
        inputs.prob.fill_(float("nan"))
    step.assert_same(step.collect(case, model, inputs, step.run_model(model, case, inputs)), found)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_an_attribute_may_be_that_of_a_subclass(activation: str) -> None:
    """A user's activation that says for all its objects that its scale is one."""
    case = SINGLE.but(activation=activation, unit_scale=True)
    expected, plain = step.run_step(case), case.but(unit_scale=False)
    model, inputs = step.make_model(plain), step.make_inputs(plain)
    own = type(model[1])
    model[1].__class__ = type("Own", (own,), {"_grouped_mlp_unit_activation_scale": True})
    y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
    step.assert_same(step.collect(case, model, inputs, y), expected)


def test_unit_activation_scale_of_several_experts_is_not_one() -> None:
    """As upstream: the mark counts for one expert only; routed ones use their probabilities."""
    case = SMALL.but(unit_scale=True)
    model, inputs = step.make_model(case), step.make_inputs(case)
    with torch.no_grad():
        inputs.prob.fill_(0.5)
    y = step.run_model(model, case, inputs)
    plain = SMALL.but(unit_scale=False)
    twin, again = step.make_model(plain), step.make_inputs(plain)
    with torch.no_grad():
        again.prob.fill_(0.5)
    expected = step.collect(plain, twin, again, step.run_model(twin, plain, again))
    step.assert_same(step.collect(case, model, inputs, y), expected)


@pytest.mark.parametrize("base", [SINGLE, SMALL], ids=["1g", "3g-pad"])
def test_split_dtypes_are_equal(base: StepCase) -> None:
    step.assert_same(step.run_step(base.but(split_dtype=torch.int32)), step.run_step(base))


def test_one_parameter_for_both_linears() -> None:
    """A tied weight gets the sum of both gradients, as autograd gives it."""
    case = StepCase(activation="srelu", splits=(128,), hidden=128, ffn=128)
    model, inputs = step.make_model(case), step.make_inputs(case)
    model[2].weight0 = model[0].weight0
    y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__ == "GroupedMLP_CuTeGEMMUnary"
    twin, again = step.make_model(case), step.make_inputs(case)
    with torch.no_grad():
        twin[2].weight0.copy_(model[0].weight0)
    expected = step.collect(case, twin, again, step.run_model(twin, case, again))
    assert step.same_bits(y.detach(), expected["y"])
    assert torch.equal(model[0].weight0.grad, expected["dW1"][0] + expected["dW2"][0])
