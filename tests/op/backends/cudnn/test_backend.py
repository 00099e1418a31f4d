# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole steps through the backend, over stand-ins, against the reference backend bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.op import fixtures
from tests.op.backends.cudnn.simulated import run_on, simulation
from tests.support import prequantized, step
from tests.support.frontend_signatures import VERSIONS, number
from tests.support.frontend_stand_in import StandIn
from tests.support.pairwise import pairwise_rows
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

ONE = StepCase(splits=(256,), hidden=192, ffn=128)
PADDED = ONE.but(buffer_rows=768, fill=float("nan"))
SEVERAL = StepCase(splits=(256, 0, 512), buffer_rows=1024, hidden=192, ffn=128, fill=float("nan"))
BASES = {"1g": ONE, "1g-pad": PADDED, "3g-pad": SEVERAL}
BIASES: dict[str, dict[str, Any]] = {
    "nobias": {},
    "fc1": {"bias": (True, False)},
    "fc2": {"bias": (False, True)},
    "scaledbias": {"bias": True, "scale_bias": True},
}


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The newest frontend, whose fresh buffers hold NaN."""
    with simulation(monkeypatch) as stand_in:
        yield stand_in


def called(stand_in: StandIn) -> list[str]:
    return [name for name, _ in stand_in.calls]


def assert_equal_to_reference(case: StepCase, stand_in: StandIn) -> None:
    """Compare the valid rows and the parameter gradients, and check that wrappers computed them.

    TE's dense product rounds the sum with a main_grad once; the reference rounds the product first.
    """
    found = run_on("cudnn", case)
    assert called(stand_in), "no wrapper was called"
    before = len(stand_in.calls)
    expected = run_on("reference", case)
    assert len(stand_in.calls) == before
    step.assert_present(case, found)
    for name, linear in zip(("dW1", "dW2"), case.linears, strict=True):
        if linear.accumulates and not linear.frozen and fixtures.is_dense(case):
            assert_one_rounding_apart(found.pop(name), expected.pop(name), name)
    step.assert_same(step.live(case, found), step.live(case, expected))


def assert_one_rounding_apart(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert (found - expected).abs().max() <= 2**-22 * expected.abs().max(), name


@pairwise_rows({"activation": step.ACTIVATIONS, "bias": tuple(BIASES), "base": tuple(BASES)})
def test_activations_and_biases(row: dict[str, Any], frontend: StandIn) -> None:
    case = BASES[row["base"]].but(activation=row["activation"], **BIASES[row["bias"]])
    assert_equal_to_reference(case, frontend)


LABELS = ("fc1", "fc2")


@pairwise_rows(
    {
        "base": ("1g", "3g-pad"),
        **{f"{label} weight": ("discrete", "grouped", "quantized") for label in LABELS},
        **{f"{label} grad": ("grad", "main_grad", "fused", "overwrite") for label in LABELS},
        **{f"{label} delay": (False, True) for label in LABELS},
        "bias": tuple(BIASES),
    }
)
def test_weights_and_where_gradients_go(row: dict[str, Any], frontend: StandIn) -> None:
    """FC1 and FC2 choose on their own."""
    pairs = {
        name: tuple(row[f"{label} {name}"] for label in LABELS)
        for name in ("weight", "grad", "delay")
    }
    assert_equal_to_reference(BASES[row["base"]].but(**pairs, **BIASES[row["bias"]]), frontend)


@pytest.mark.parametrize("weight", ["discrete", "grouped"])
@pytest.mark.parametrize("base", [ONE, SEVERAL], ids=["1g", "3g-pad"])
def test_main_grad_accumulates(base: StepCase, weight: str, frontend: StandIn) -> None:
    """Two micro-batches add up as on the reference backend."""
    case = base.but(grad="main_grad", weight=weight)
    sums = []
    for backend in ("cudnn", "reference"):
        model = step.make_model(case)
        with step.switches(NVTE_GROUPED_MLP_BACKEND=backend):
            for seed in (3, 4):
                step.run_model(model, case, step.make_inputs(case.but(seed=seed)))
        sums.append({name: p.main_grad for name, p in model.named_parameters()})
    assert called(frontend)
    assert any(grad.any() for grad in sums[0].values())
    if base is SEVERAL:
        step.assert_same(*sums)
    for name, grad in sums[0].items():
        assert_one_rounding_apart(grad, sums[1][name], name)


CHOICES = {
    "delayed": {"delay": True},
    "recomputed": {"activation": "srelu", "recompute": True, "bias": True},
    "bf16_prob": {"prob_dtype": torch.bfloat16},
    "fp16_prob": {"prob_dtype": torch.float16},
    "scaled_bias": {"bias": True, "scale_bias": True},
    "int32_splits": {"split_dtype": torch.int32},
    "wide": {"hidden": 320, "ffn": 576},
    "narrow": {"hidden": 64, "ffn": 64},
    "frozen_fc1": {"frozen": frozenset({"fc1"}), "bias": True},
    "frozen_fc2": {"frozen": frozenset({"fc2"}), "bias": True},
    "frozen_prob": {"frozen": frozenset({"prob"})},
    "frozen_prob_unary": {"frozen": frozenset({"prob"}), "activation": "srelu"},
    "frozen_x": {"frozen": frozenset({"x"})},
    "only_prob": {"frozen": frozenset({"fc1", "fc2", "x"})},
}


@pytest.mark.parametrize("base", [ONE, SEVERAL], ids=["1g", "3g-pad"])
@pytest.mark.parametrize("choice", CHOICES)
def test_choices(base: StepCase, choice: str, frontend: StandIn) -> None:
    assert_equal_to_reference(base.but(**CHOICES[choice]), frontend)


@pytest.mark.parametrize("base", [ONE, SEVERAL], ids=["1g", "3g-pad"])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_fp16_models(activation: str, base: StepCase, frontend: StandIn) -> None:
    """The pre-activation is kept in bf16, so the reference backend is not the oracle."""
    case = base.but(activation=activation, dtype=torch.float16, bias=True)
    found = run_on("cudnn", case)
    step.assert_close(case, found, step.reference(case))
    assert found["y"].dtype is found["dx"].dtype is found["dW1"].dtype is torch.float16
    kept = [given["c_tensor"].dtype for name, given in frontend.calls if name.startswith("d")]
    assert kept == [torch.bfloat16]


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_unit_scale_passes_no_offsets_where_the_wrapper_can(
    activation: str, frontend: StandIn
) -> None:
    """A shared expert: the gated kernels compute every row, the unary ones get ones."""
    assert_equal_to_reference(ONE.but(activation=activation, unit_scale=True), frontend)
    forward = frontend.calls[0][1]
    if activation == "swiglu":
        assert forward["prob_tensor"] is None
        assert forward["use_single_group_runtime_offsets"] is True
    else:
        assert (forward["prob_tensor"] == 1).all()


@pytest.mark.parametrize(
    ("base", "activation", "expected"),
    [
        (ONE, "swiglu", ["glu", "dglu"]),
        (PADDED, "swiglu", ["glu", "quant", "dglu", "wgrad", "quant", "wgrad"]),
        (ONE, "srelu", ["srelu", "quant", "dsrelu", "wgrad", "quant", "wgrad"]),
        (SEVERAL, "swiglu", ["glu", "quant", "dglu", "wgrad", "quant", "wgrad"]),
    ],
    ids=["full-gated", "padded-gated", "full-unary", "several"],
)
def test_which_wrappers_run(
    base: StepCase, activation: str, expected: list[str], frontend: StandIn
) -> None:
    """One full gated expert takes TE's dense products for what is not an activation."""
    run_on("cudnn", base.but(activation=activation))
    assert called(frontend) == expected
    all_rows = [
        arguments["use_single_group_runtime_offsets"]
        for name, arguments in frontend.calls
        if name in ("glu", "dglu", "quant")
    ]
    assert all_rows == [len(expected) == 2] * len(all_rows)


@pytest.mark.parametrize("base", [ONE, SEVERAL], ids=["1g", "3g-pad"])
@pytest.mark.parametrize("ready", [False, True], ids=["compact", "ready"])
def test_tokens_that_arrive_quantized(base: StepCase, ready: bool, frontend: StandIn) -> None:
    case = base.but(fill=0.0, hidden=256)
    results = []
    for backend in ("cudnn", "reference"):
        with step.switches(NVTE_GROUPED_MLP_BACKEND=backend):
            results.append(prequantized.run_prequantized(case, x=ready, dy=ready, steps=2))
    assert called(frontend)
    step.assert_same(step.live(case, results[0]), step.live(case, results[1]))


@pytest.mark.parametrize("base", [ONE, PADDED, SEVERAL], ids=["1g", "1g-pad", "3g-pad"])
def test_the_callers_buffers(base: StepCase, frontend: StandIn) -> None:
    """They are written in place, and their tails are not."""
    expected = run_on("reference", base)
    model, inputs = step.make_model(base), step.make_inputs(base)
    out, dx = prequantized.buffers(base)
    kwargs = {2: {"output": out}, 0: {"grad_input": dx}}
    with step.switches(NVTE_GROUPED_MLP_BACKEND="cudnn"):
        y = step.run_model(model, base, inputs, op_kwargs=kwargs)
    assert y.data_ptr() == out.data_ptr()
    found = {**step.collect(base, model, inputs, y), "dx": dx}
    step.assert_same(step.live(base, found), step.live(base, expected))
    for buffer in (out, dx):
        assert (buffer[base.live :] == prequantized.SENTINEL).all()
    assert called(frontend)


@pytest.mark.parametrize("base", [PADDED, SEVERAL], ids=["1g-pad", "3g-pad"])
def test_tails_of_the_ops_own_tensors_are_zero(base: StepCase, frontend: StandIn) -> None:
    found = run_on("cudnn", base)
    for name in ("y", "dx", "dprob"):
        assert not found[name][base.live :].any(), name


@pytest.mark.parametrize("splits", [(0,), (0, 0, 0)], ids=["1g", "3g"])
@pytest.mark.parametrize("rows", [0, 256])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_no_tokens(activation: str, rows: int, splits: tuple[int, ...], frontend: StandIn) -> None:
    case = StepCase(
        activation=activation, splits=splits, buffer_rows=rows, hidden=128, ffn=64, bias=True,
        scale_bias=True, fill=float("nan"), recompute=activation == "srelu",
    )  # fmt: skip
    found, expected = run_on("cudnn", case), run_on("reference", case)
    step.assert_same(step.live(case, found), step.live(case, expected))
    assert not found["dW1"].any()
    assert not found["dW2"].any()
    assert bool(called(frontend)) == bool(rows)


# Frontends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [ONE, SEVERAL], ids=["1g", "3g-pad"])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("version", [v for v in VERSIONS if number(v) >= (1, 27)])
def test_every_frontend(
    version: str, activation: str, base: StepCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped weights, so that a stacked gradient meets a frontend that cannot take one."""
    with simulation(monkeypatch, version) as stand_in:
        assert_equal_to_reference(base.but(activation=activation, weight="grouped"), stand_in)
        modes = {a["output_mode"] for name, a in stand_in.calls if name == "wgrad"}
        assert modes <= ({"dense"} if number(version) >= (1, 30) else {"discrete"})


def test_an_older_frontend_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulation(monkeypatch, "1.26.0") as stand_in:
        with pytest.raises(ValueError, match="absent, broken or too old.*glu has no argument"):
            run_on("cudnn", ONE)
        assert called(stand_in) == []


# Determinism -------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("asked", [False, True])
def test_the_wrapper_is_told_the_plans_determinism(
    asked: bool, activation: str, frontend: StandIn
) -> None:
    with step.switches(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0" if asked else None):
        run_on("cudnn", SEVERAL.but(activation=activation, fill=0.0))
    told = [a["deterministic"] for name, a in frontend.calls if name in ("dglu", "dsrelu")]
    assert told == [asked]


def test_what_the_kernel_cannot_keep_in_order_raises_before_any_launch(frontend: StandIn) -> None:
    with (
        step.switches(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"),
        pytest.raises(RuntimeError, match=r"db1.*dprob|dprob.*db1"),
    ):
        run_on("cudnn", SEVERAL.but(bias=True))
    assert called(frontend) == []


def test_a_demand_that_comes_after_the_forward_raises(frontend: StandIn) -> None:
    model, inputs = step.make_model(ONE), step.make_inputs(ONE)
    with step.switches(NVTE_GROUPED_MLP_BACKEND="cudnn"):
        y = step.forward(model, ONE, inputs)
        with (
            step.switches(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"),
            pytest.raises(RuntimeError, match="demand it before the forward"),
        ):
            y.backward(inputs.dy)


# Tiles of 256 rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["first", "last"])
def test_splits_off_the_tile_are_refused_before_any_launch(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SEVERAL.but(splits=(128, 384, 256))
    with simulation(monkeypatch, spill_256=order) as stand_in:
        with pytest.raises(ValueError, match="all splits is 128; allowed: multiples of 256"):
            run_on("cudnn", case)
        assert called(stand_in) == []


def test_splits_on_the_tile_never_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulation(monkeypatch, spill_256="last") as stand_in:
        assert_equal_to_reference(SEVERAL, stand_in)
        assert stand_in.machine.out_of_bounds == []


def test_buffers_off_the_tile_are_refused(frontend: StandIn) -> None:
    with pytest.raises(ValueError, match="rows is 640"):
        run_on("cudnn", SEVERAL.but(splits=(256, 0, 256), buffer_rows=640))
    assert called(frontend) == []
