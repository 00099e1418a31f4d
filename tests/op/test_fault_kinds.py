# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of fault that people reported of fused MoE MLPs and grouped GEMMs, one test for each.

Names follow the fault, not the code: a fault found once stands for its kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import environment, selection
from te_grouped_mlp.op.layout import RowExtent
from te_grouped_mlp.op.plan import Plan, Reason
from te_grouped_mlp.op.tensors import memory
from tests.op import fixtures
from tests.op.fixtures import Replayed
from tests.support import step
from tests.support.prequantized import SENTINEL, buffers, run_plain, run_prequantized
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

# More than one 128-column scale tile each way, so that a wrong m-extent moves every later tile.
SINGLE = StepCase(splits=(256,), hidden=256, ffn=192)
SEVERAL = StepCase(splits=(128, 0, 256), hidden=128, ffn=128)
BIASES: dict[str, dict[str, bool]] = {
    "nobias": {},
    "bias": {"bias": True},
    "scaledbias": {"bias": True, "scale_bias": True},
}
WEIGHTS = ("discrete", "grouped", "quantized")
BASES = pytest.mark.parametrize("base", [SINGLE, SEVERAL], ids=["1g", "3g"])


def padded(case: StepCase, tiles: int = 1, fill: float = math.nan) -> StepCase:
    return case.but(buffer_rows=case.live + 128 * tiles, fill=fill)


# Row extents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("frontend", fixtures.FRONTENDS)
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
def test_reader_and_writer_agree_on_rows(activation: str, frontend: str) -> None:
    """One group, features over 128, a buffer one tile longer than the split, any frontend."""
    case = padded(SINGLE.but(activation=activation, bias=True), fill=0.0)
    with environment.override(wrappers=fixtures.FRONTENDS[frontend]):
        fixtures.assert_padding_invisible(case)


@pytest.mark.parametrize("fill", [fill for fill in fixtures.TAILS if fill])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_no_dense_shortcut_multiplies_the_tail(activation: str, bias: str, fill: float) -> None:
    case = padded(SINGLE.but(activation=activation, **BIASES[bias]), tiles=3, fill=fill)
    fixtures.assert_right(case, fixtures.assert_padding_invisible(case))


@pytest.mark.parametrize("fill", [0.0, math.nan])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("arrives", ["plain", "x", "dy", "both"])
def test_no_path_is_missed_by_the_repair(arrives: str, bias: str, fill: float) -> None:
    """Every way in which x and dy become operands, with a padded GLU group: as exact."""
    case = padded(SINGLE.but(**BIASES[bias]), fill=fill)
    x, dy = arrives in ("x", "both"), arrives in ("dy", "both")
    found = run_prequantized(case, x=False if x else None, dy=False if dy else None)
    exact = case.but(buffer_rows=None, fill=0.0)
    with environment.override(treat_rows_as_full=False):
        expected = run_plain(exact, x=x, dy=dy)
    step.assert_same(step.live(case, found), expected)


@pytest.mark.parametrize("arrives", ["x", "dy"])
@BASES
def test_the_callers_tensor_is_not_destroyed(base: StepCase, arrives: str) -> None:
    """A GEMM-ready tensor is used for two steps; `run_prequantized` compares its bytes."""
    ready = {arrives: True}
    found = run_prequantized(base, x=ready.get("x"), dy=ready.get("dy"), steps=2)
    step.assert_same(found, run_plain(base, x=False, dy=False))


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize(
    "splits",
    [(128, 384, 256, 256), (384, 128), (128,), (640, 128, 0, 256)],
    ids=lambda splits: "-".join(map(str, splits)),
)
def test_no_tile_runs_past_its_expert(splits: tuple[int, ...], activation: str) -> None:
    """Odd multiples of 128, under kernels whose tiles have 256 rows elsewhere."""
    case = StepCase(activation=activation, splits=splits, hidden=128, ffn=64, bias=True)
    case = case.but(buffer_rows=case.live + 128, fill=3.0)
    fixtures.assert_right(case, fixtures.assert_memory_invisible(case))


@pytest.mark.parametrize("frontend", fixtures.FRONTENDS)
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_versions_and_absences_decide_by_signature(
    activation: str, frontend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full single group is dense only where every wrapper of the plan takes the argument."""
    plans: list[Plan] = []
    original = selection.make_plan

    def record(*args: Any) -> Plan:
        plans.append(original(*args))
        return plans[-1]

    monkeypatch.setattr(selection, "make_plan", record)
    case = SINGLE.but(activation=activation)
    with environment.override(wrappers=fixtures.FRONTENDS[frontend]):
        found = step.run_step(case)
        fixtures.assert_right(case, found)
    takes_all = {"swiglu": ("none", "new", "all"), "srelu": ("all", "all but dglu")}
    dense = frontend in takes_all[activation]
    assert plans[0].layout.extent is (RowExtent.BUFFER if dense else RowExtent.PACKED)


# The probability gradient -----------------------------------------------------------------------


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@BASES
def test_fp32_probabilities_are_not_rounded(base: StepCase, activation: str) -> None:
    """fp32 in, fp32 out; a detour through bf16 is seen, since the values are none of bf16's."""
    case = base.but(activation=activation)
    found = step.run_step(case)
    fixtures.assert_emulated(case, found)
    rounded = step.run_step(case.but(round_prob=True))
    assert not step.same_bits(rounded["y"], found["y"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dprob_is_rounded_once(dtype: torch.dtype) -> None:
    """The sum over 1024 features in fp32, then one rounding to the probabilities' dtype."""
    case = SEVERAL.but(ffn=1024, prob_dtype=dtype)
    fixtures.assert_emulated(case, step.run_step(case))


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_sums_are_bit_identical(activation: str, bias: str) -> None:
    """FFN wider than a tile, several tiles of rows per expert, several threads: one hash."""
    case = StepCase(
        activation=activation, splits=(384, 0, 256), hidden=128, ffn=512, **BIASES[bias]
    )
    fixtures.assert_repeats(case)


# Stale and empty --------------------------------------------------------------------------------


def empty_cases() -> Iterator[Any]:
    for groups, slow in ((2, False), (8, False), (64, True)):
        for name, splits in fixtures.empty_expert_splits(groups).items():
            if groups == 2 and name == "two in a row":
                continue  # that is all of them
            case = StepCase(splits=splits, buffer_rows=sum(splits) + 128, hidden=64, ffn=64)
            marks = [pytest.mark.slow] if slow and name not in ("all but one", "all") else []
            yield pytest.param(case.but(fill=math.nan), id=f"{groups}g-{name}", marks=marks)


@pytest.mark.parametrize("case", list(empty_cases()))
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_empty_experts_get_zero_and_disturb_nobody(case: StepCase, activation: str) -> None:
    """Stale memory is no gradient: zeros, bit for bit, and the others as without the empty ones."""
    case = case.but(activation=activation, bias=True)
    model, inputs = step.make_model(case), step.make_inputs(case)
    found = step.collect(case, model, inputs, step.run_model(model, case, inputs))
    for name in ("dW1", "dW2", "db1", "db2"):
        for index, size in enumerate(case.splits):
            assert size or not found[name][index].any(), f"{name} of empty expert {index}"
    if case.live:
        expected = fixtures.without_empty_experts(model, case)
        step.assert_same(step.live(case, found), step.live(case, expected))


@pytest.mark.parametrize("weight", ["discrete", "grouped"])
@pytest.mark.parametrize("grad", ["grad", "main_grad", "overwrite"])
def test_stale_memory_is_no_gradient(grad: str, weight: str) -> None:
    """A dense run fills the allocator's blocks; the next run's experts without tokens take them."""
    dense = StepCase(splits=(128, 128, 128), hidden=128, ffn=64, weight=weight, grad=grad)
    with memory.poisoned(None):
        step.run_step(dense)
        case = dense.but(splits=(0, 128, 0))
        model, inputs = step.make_model(case), step.make_inputs(case)
        for parameter in model.parameters():
            if grad == "main_grad":
                parameter.main_grad.fill_(3.0)
        found = step.collect(case, model, inputs, step.run_model(model, case, inputs))
    kept = 3.0 if grad == "main_grad" else 0.0
    for name in ("dW1", "dW2"):
        rows = found[name].view(3, -1)
        assert (rows[0] == kept).all()
        assert (rows[2] == kept).all()
        assert (rows[1] != kept).any()


@pytest.mark.parametrize("rows", [0, 256])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_zero_tokens(activation: str, groups: int, rows: int) -> None:
    case = StepCase(activation=activation, splits=(0,) * groups, buffer_rows=rows, fill=math.nan)
    model, inputs = step.make_model(case), step.make_inputs(case)
    for _ in range(2):
        y = step.run_model(model, case, inputs)
    found = step.collect(case, model, inputs, y)
    step.assert_present(case, found)
    assert found["y"].shape == (rows, case.hidden)
    assert not any(value.any() for value in found.values() if value is not None)


@pytest.mark.parametrize("tail_prob", [0.0, math.nan])
@BASES
def test_undefined_tails_do_not_poison_later_steps(base: StepCase, tail_prob: float) -> None:
    """Two layers in a row, tails NaN, probabilities of the tail zero: 0 x NaN is NaN. Three steps
    of training stay finite and equal those of the exact size."""
    losses = []
    for case in (padded(base), base):
        first, second = step.make_model(case), step.make_model(case.but(seed=1))
        weights = [*first.parameters(), *second.parameters()]
        for number in range(3):
            inputs = step.make_inputs(case.but(seed=number))
            with torch.no_grad():
                inputs.prob[case.live :] = tail_prob
            out = torch.full((case.rows, case.hidden), math.nan, dtype=case.dtype)
            with environment.override(treat_rows_as_full=False):
                y = step.forward(first, case, inputs, {2: {"output": out}})
                z = step.forward(second, case, step.Inputs(y, inputs.dy, inputs.prob,
                                                           inputs.split_sizes))  # fmt: skip
                z.backward(inputs.dy)
            assert inputs.x.grad.isfinite().all()
            losses.append(z.detach()[: case.live].double().square().mean().item())
            with torch.no_grad():
                for weight in weights:
                    assert weight.grad.isfinite().all()
                    weight -= 1e-3 * weight.grad
                    weight.grad = None
    assert losses[:3] == losses[3:]
    assert all(math.isfinite(loss) for loss in losses)


# Biases, weights and their gradients ------------------------------------------------------------


@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@BASES
def test_padded_rows_add_nothing_to_bias_gradients(
    base: StepCase, activation: str, scale_bias: bool
) -> None:
    case = padded(base.but(activation=activation, bias=True, scale_bias=scale_bias))
    fixtures.assert_right(case, fixtures.assert_padding_invisible(case))


@pytest.mark.parametrize("weight", ["discrete", "grouped"])
def test_preallocated_bf16_gradients_are_added_to_in_fp32(weight: str) -> None:
    """A bf16 accumulator that holds 256 takes a gradient of order 1 by one rounding of the sum."""
    case = SEVERAL.but(grad="main_grad", weight=weight)
    model, inputs = step.make_model(case), step.make_inputs(case)
    for parameter in model.parameters():
        parameter.main_grad = torch.full(parameter.shape, 256.0, dtype=torch.bfloat16)
    found = step.collect(case, model, inputs, step.run_model(model, case, inputs))
    alone = step.run_step(case.but(grad="overwrite"))
    for name in ("dW1", "dW2"):
        grad = alone[name].view(found[name].shape).bfloat16().float()
        assert step.same_bits(found[name], (256.0 + grad).bfloat16()), name


def test_delayed_gradients_of_tied_experts_are_refused() -> None:
    case = StepCase(splits=(128, 128), hidden=128, ffn=64, delay=True)
    model, inputs = step.make_model(case), step.make_inputs(case)
    model[0].weight1 = model[0].weight0
    with pytest.raises(ValueError, match="two experts share a weight"):
        step.forward(model, case, inputs)


def test_delayed_gradients_of_tied_linears() -> None:
    """One weight in FC1 and FC2: refused where one `.grad` would replace the other, and the sum of
    both where they are added into `main_grad`."""
    case = StepCase(activation="srelu", splits=(128,), hidden=128, ffn=128, delay=True)
    model, inputs = step.make_model(case), step.make_inputs(case)
    model[2].weight0 = model[0].weight0
    with pytest.raises(ValueError, match="FC1 and FC2 share a weight"):
        step.forward(model, case, inputs)
    found = {}
    for delay in (True, False):
        added = case.but(grad="main_grad", delay=delay)
        model = step.make_model(added)
        model[2].weight0 = model[0].weight0
        step.run_model(model, added, step.make_inputs(added))
        found[delay] = model[0].weight0.main_grad
    assert found[True].any()
    # The delayed products are added in the other order.
    torch.testing.assert_close(found[True], found[False], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_expert_is_computed(weight: str, activation: str) -> None:
    """Each expert's rows and gradients equal those of a model that has this expert alone."""
    case = StepCase(activation=activation, splits=(128, 256, 128), hidden=128, ffn=64)
    case = case.but(weight=weight)
    model, inputs = step.make_model(case), step.make_inputs(case)
    out, dx = buffers(case)
    y = step.run_model(model, case, inputs, op_kwargs={2: {"output": out}, 0: {"grad_input": dx}})
    for buffer in (out, dx):
        assert not (buffer == SENTINEL).all(1).any(), "a row was not written"
    found = step.collect(case, model, inputs, y)
    plain = step.make_model(case.but(weight="discrete"))
    start = 0
    for index, size in enumerate(case.splits):
        rows, start = slice(start, start + size), start + size
        alone = case.but(splits=(size,), weight="discrete")
        single = step.make_model(alone)
        with torch.no_grad():
            for mine, theirs in ((single[0], plain[0]), (single[2], plain[2])):
                mine.weight0.copy_(getattr(theirs, f"weight{index}"))
        own = step.Inputs(
            x=inputs.x.detach()[rows].requires_grad_(),
            dy=inputs.dy[rows],
            prob=inputs.prob.detach()[rows].requires_grad_(),
            split_sizes=torch.tensor([size]),
        )
        with environment.override(treat_rows_as_full=False):
            expected = step.collect(alone, single, own, step.run_model(single, alone, own))
        for name in ("y", "dx", "dprob"):
            assert step.same_bits(found[name][rows], expected[name]), f"{name} of expert {index}"
        for name in ("dW1", "dW2"):
            assert step.same_bits(found[name][index], expected[name][0]), f"{name} of {index}"


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", ["srelu", "tanh_srelu"])
@BASES
def test_recompute_changes_no_other_gradient(base: StepCase, activation: str, weight: str) -> None:
    """SReLU alone makes its output anew; the flag means nothing to the clamped one."""
    case = base.but(activation=activation, weight=weight, recompute=True)
    found, kept = step.run_step(case), step.run_step(case.but(recompute=False))
    if activation == "srelu":
        fixtures.assert_right(case, found)
        found.pop("dW2")
        kept.pop("dW2")
    step.assert_same(found, kept)


@pytest.mark.parametrize("name", ["ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSiTUGLU"])
def test_recompute_is_refused_where_there_is_none(name: str) -> None:
    import transformer_engine.pytorch as te

    with pytest.raises(ValueError, match="recomput"):
        getattr(te.ops, name)(glu_interleave_size=32, activation_recompute_in_mlp=True)


# Tests that see it ------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", step.ACTIVATIONS)
@BASES
def test_intermediates_are_of_order_one(base: StepCase, activation: str) -> None:
    """Outputs of 1e-5 pass any absolute tolerance; these do not."""
    case = base.but(activation=activation, bias=True)
    for name, value in step.reference(case).items():
        size = value[value != 0].abs().mean()
        assert 0.02 < size < 200, f"{name} is of order {size:.1e}"


@pytest.mark.parametrize("name", ["y", "dx", "dprob", "dW1", "dW2", "db1", "db2"])
def test_the_smallest_fault_is_seen(name: str) -> None:
    """The last bit of one value."""
    case = SEVERAL.but(bias=True)
    found = step.run_step(case)
    fixtures.assert_right(case, found)
    fault = found[name].clone()
    bits = fault.view(-1).view(torch.int16 if fault.itemsize == 2 else torch.int32)
    bits[-17] ^= 1
    with pytest.raises(AssertionError, match=f"{name} differs in 1 of {bits.numel()} places"):
        fixtures.assert_right(case, {**found, name: fault})


# Not fused, and told so -------------------------------------------------------------------------

UNFUSED = {
    "switch off": ({}, {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "0"}, Reason.SWITCH_OFF, ""),
    "interleave 64": ({"interleave": 64, "ffn": 128}, {}, Reason.INTERLEAVE, "64"),
    "no interleave": ({"interleave": None}, {}, Reason.INTERLEAVE, "None"),
    "hidden 96": ({"hidden": 96}, {}, Reason.FEATURES, "96"),
    "hidden 160": ({"hidden": 160}, {}, Reason.FEATURES, "160"),
    "ffn 96": ({"ffn": 96}, {}, Reason.FEATURES, "96"),
}


@pytest.mark.parametrize("kind", UNFUSED)
def test_nothing_is_silently_unfused(kind: str) -> None:
    """The step still runs, and `explain` names the condition and the value."""
    changes, switches, reason, value = UNFUSED[kind]
    # A group count of its own, since equal decisions are kept once.
    groups = 2 + list(UNFUSED).index(kind)
    case = StepCase(splits=(128,) * groups, hidden=128, ffn=64).but(**changes)
    assert value in fixtures.assert_unfused(case, reason, **switches).detail


def test_the_switch_may_be_set_after_import() -> None:
    """The module was imported long before `fused_switch` set it."""
    step.run_step(SEVERAL, fused="GroupedMLP_CuTeGEMMGLU")


# Shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [128, 384])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize(
    ("hidden", "ffn"),
    [(64, 64), (64, 192), (128, 64), (192, 128), (320, 64), (64, 320),
     pytest.param(2880, 64, marks=pytest.mark.slow),
     pytest.param(64, 2880, marks=pytest.mark.slow),
     pytest.param(5760, 64, marks=pytest.mark.slow)],
)  # fmt: skip
def test_padding_of_scales_is_not_read(hidden: int, ffn: int, activation: str, rows: int) -> None:
    """Features that do not fill a 128x4 scale tile; whatever unwritten memory holds."""
    case = StepCase(
        activation=activation, splits=(rows, 128), buffer_rows=rows + 256, hidden=hidden, ffn=ffn
    )
    fixtures.assert_right(case, fixtures.assert_memory_invisible(case))


@pytest.mark.parametrize("rows", [32, 160, 129])
def test_row_counts_that_fit_no_scale_tile_are_refused(rows: int) -> None:
    case = StepCase(splits=(rows, 128), buffer_rows=512, hidden=128, ffn=64)
    model, inputs = step.make_model(case), step.make_inputs(case)
    with pytest.raises(ValueError, match=rf"split_sizes\[0\] is {rows}.*multiple of 128"):
        step.forward(model, case, inputs)


ODD = (1, 31, 32, 0, 127, 128, 129, 255, 257)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("weight", ["discrete", "grouped"])
def test_odd_group_sizes_in_bf16(weight: str, activation: str) -> None:
    """Without a recipe any size is right, where the backend that can is named."""
    case = StepCase(activation=activation, splits=ODD, buffer_rows=1000, hidden=64, ffn=64)
    case = case.but(mxfp8=False, weight=weight, bias=True, fill=math.nan)
    with step.switches(NVTE_GROUPED_MLP_BACKEND="reference"):
        found = fixtures.assert_padding_invisible(case)
    fixtures.assert_emulated(case, found)


# Order of steps ---------------------------------------------------------------------------------

SEQUENCE = [
    Replayed(seed=1, splits=(128, 0, 256)),
    Replayed(seed=2, splits=(128, 0, 256)),
    Replayed(seed=2, splits=(0, 512, 0)),
    Replayed(seed=3, splits=(128, 128, 128), shift=0.125),
    Replayed(seed=4, splits=(0, 0, 0)),
    Replayed(seed=1, splits=(128, 0, 256)),
]


@pytest.mark.parametrize("weight", ["discrete", "grouped"])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_a_model_remembers_nothing_between_steps(activation: str, weight: str) -> None:
    """New data, new splits and changed weights in the same memory, in the order of a replay."""
    case = SEVERAL.but(activation=activation, buffer_rows=640, fill=math.nan, bias=True)
    fixtures.assert_order_invisible(case.but(weight=weight), SEQUENCE)


def test_one_group_alternates_between_dense_and_packed() -> None:
    """The layout is a value of the call: nothing of a padded step stays for a full one."""
    case = SINGLE.but(buffer_rows=512, fill=3.0)
    sizes = (512, 256, 512, 0, 128, 512)
    steps = [Replayed(seed=n, splits=(size,)) for n, size in enumerate(sizes)]
    fixtures.assert_order_invisible(case, steps)


# On a device ------------------------------------------------------------------------------------

# Without a recipe the native kernels run on any GPU that they run on at all.
NATIVE = [name for name in selection.NAMES if name == "cutedsl"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("activation", step.ACTIVATIONS)
def test_sums_are_bit_identical_on_a_device(activation: str, backend: str) -> None:
    """A second stream moves the order of the tiles."""
    case = StepCase(activation=activation, splits=(384, 0, 256), hidden=256, ffn=512, bias=True)
    with step.switches(NVTE_GROUPED_MLP_BACKEND=backend):
        fixtures.assert_repeats_on_device(case.but(device="cuda", mxfp8=False))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_replay_equals_eager_on_a_device(activation: str, backend: str) -> None:
    case = SEVERAL.but(activation=activation, buffer_rows=640, device="cuda", mxfp8=False)
    with step.switches(NVTE_GROUPED_MLP_BACKEND=backend):
        fixtures.assert_replay_equals_eager(case, SEQUENCE)
