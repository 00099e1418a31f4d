# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Each repair is needed: its check holds, and fails when that repair alone is switched off.

`docs/repairs.md` lists the same repairs by the same names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import math
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch  # noqa: F401  (brings tex, which the op imports)

from te_grouped_mlp.op import environment
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.plan import Reason
from te_grouped_mlp.op.step import bias_gradient, inputs, intact, saved, weight_gradient
from te_grouped_mlp.op.te import adapter, quantizers
from te_grouped_mlp.op.tensors import checks, quantize
from tests.op import fixtures
from tests.support import step
from tests.support.prequantized import packed_carrier, run_plain, run_prequantized
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SINGLE = StepCase(splits=(256,), hidden=256, ffn=192)
PADDED = SINGLE.but(buffer_rows=512)
SEVERAL = StepCase(splits=(128, 0, 256), buffer_rows=512, hidden=128, ffn=128, fill=math.nan)

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Repair:
    """A repair of something that upstream gets wrong.

    Attributes:
        check: Asserts the right behaviour.
        switch_off: Restores upstream's behaviour until the patch is undone.
    """

    check: Callable[[], None]
    switch_off: Callable[[Patch], contextlib.AbstractContextManager[None] | None]


REPAIRS: dict[str, Repair] = {}


def repair(name: str, switch_off: Callable[[Patch], Any]) -> Callable[[Any], Any]:
    """Register the decorated check under `name`."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        REPAIRS[name] = Repair(check, switch_off)
        return check

    return register


def forked() -> types.ModuleType:
    return importlib.import_module("transformer_engine.pytorch.ops.fused.grouped_mlp")


# Row extents ------------------------------------------------------------------------------------


def dense_by_group_count(_patch: Patch) -> Any:
    return environment.override(single_group_is_always_dense=True)


@repair("padded single group", dense_by_group_count)
def _padded() -> None:
    fixtures.assert_padding_invisible(PADDED.but(activation="srelu"))


@repair("tail in dW", dense_by_group_count)
def _tail() -> None:
    fixtures.assert_padding_invisible(PADDED.but(fill=3.0))


def pack_gradients_of_biased_linears(patch: Patch) -> Any:
    """Quantize dy packed to the splits under a dense layout, as upstream does for its bias sums."""
    original, calls = quantize.tex.quantize, []

    def quantize_(tensor: torch.Tensor, quantizer: Any, **options: Any) -> Any:
        if tensor.shape != (PADDED.rows, PADDED.hidden):
            return original(tensor=tensor, quantizer=quantizer, **options)
        calls.append(tensor)
        if len(calls) == 1:
            return original(tensor=tensor, quantizer=quantizer, **options)
        grouped = quantize.tex.group_quantize(
            tensor=tensor,
            quantizer=quantizer,
            num_tensors=1,
            first_dims=torch.tensor(PADDED.splits),
        )
        return types.SimpleNamespace(
            _rowwise_data=grouped.rowwise_data.view(tensor.shape),
            _rowwise_scale_inv=grouped.scale_inv,
            _columnwise_data=grouped.columnwise_data.view(tensor.shape),
            _columnwise_scale_inv=grouped.columnwise_scale_inv,
            _with_gemm_swizzled_scales=True,
        )

    patch.setattr(quantize.tex, "quantize", quantize_)
    return dense_by_group_count(patch)


@repair("FC2 bias with a padded group", pack_gradients_of_biased_linears)
def _fc2_bias() -> None:
    """Tails are zero here, so that only the packed quantize can show."""
    fixtures.assert_padding_invisible(PADDED.but(bias=True, fill=0.0))


def _check_prequantized(x: bool, dy: bool) -> None:
    case = PADDED.but(fill=0.0)
    found = run_prequantized(case, x=False if x else None, dy=False if dy else None)
    exact = case.but(buffer_rows=None)
    with environment.override(treat_rows_as_full=False):
        expected = run_plain(exact, x=x, dy=dy)
    step.assert_same(step.live(case, found), expected)


@repair("prequantized input with a padded group", dense_by_group_count)
def _prequantized_x() -> None:
    _check_prequantized(x=True, dy=False)


@repair("prequantized gradient with a padded group", dense_by_group_count)
def _prequantized_dy() -> None:
    _check_prequantized(x=False, dy=True)


def leave_tails(patch: Patch) -> None:
    module = forked()
    original = module.GemmEpilogue

    def epilogue(*args: Any, zero_tail: bool, **options: Any) -> Any:
        return original(*args, zero_tail=False, **options)

    patch.setattr(module, "GemmEpilogue", epilogue)


@repair("tails of returned tensors", leave_tails)
def _tails() -> None:
    fixtures.assert_padding_invisible(SEVERAL)


# The probability gradient -----------------------------------------------------------------------


def round_dprob(patch: Patch) -> None:
    original = ReferenceBackend.dact_dgrad

    def dact_dgrad(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        return dataclasses.replace(found, dprob=found.dprob.bfloat16().float())

    patch.setattr(ReferenceBackend, "dact_dgrad", dact_dgrad)


@repair("dtype of dprob", round_dprob)
def _dprob_dtype() -> None:
    fixtures.assert_emulated(SEVERAL, step.run_step(SEVERAL))


def always_want_dprob(patch: Patch) -> None:
    original = inputs._wanted
    patch.setattr(inputs, "_wanted", lambda *args: original(*args) | {Output.DPROB})


@repair("no dprob that nobody needs", always_want_dprob)
def _no_dprob() -> None:
    """With frozen probabilities no kernel is asked for it, so none can be refused for it."""
    asked = []
    original = ReferenceBackend.dact_dgrad

    def spy(self: Any, plan: Any, dy: Any, w: Any, pre: Any, epilogue: Any) -> Any:
        asked.append(epilogue.want_dprob)
        return original(self, plan, dy, w, pre, epilogue)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceBackend, "dact_dgrad", spy)
        for case in (SEVERAL, SINGLE):
            step.run_step(case.but(frozen=frozenset({"prob"})))
    assert asked == [False, False]


def accept_any_bias_scale(patch: Patch) -> None:
    patch.setattr(checks, "same_values", lambda *_tensors: None)


@repair("scale_bias with two probability tensors", accept_any_bias_scale)
def _two_scales() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling

    case = SEVERAL.but(bias=True, scale_bias=True)
    model, given = step.make_model(case), step.make_inputs(case)
    other = given.prob.detach().clone().requires_grad_()
    extra = (given.split_sizes, given.prob, given.split_sizes, other)
    with (
        te.autocast(enabled=True, recipe=MXFP8BlockScaling()),
        pytest.raises(ValueError, match="same tensor"),
    ):
        model(given.x, *extra)


# What belongs to others -------------------------------------------------------------------------


def own_every_input(patch: Patch) -> None:
    """Give back what FC1's weight gradient has read, whoever allocated it; others write there."""

    def clear(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.fill_(0xFF)

    patch.setattr(weight_gradient, "clear_tensor_data", clear)
    patch.setattr(adapter, "is_gemm_ready", lambda _tensor: False)


@repair("the caller's quantized tensor is kept", own_every_input)
def _callers_tensor() -> None:
    run_prequantized(SINGLE, x=True, dy=None, steps=2)


def mutate_quantizers(patch: Patch) -> None:
    def own(quantizer: Any, *, row: bool, column: bool, swizzled: bool) -> Any:
        assert swizzled
        quantizer.set_usage(rowwise=row, columnwise=column)
        quantizer.optimize_for_gemm = True
        quantizer.internal = True
        return quantizer

    patch.setattr(quantizers, "own", own)
    patch.setattr(quantizers, "copied", lambda op, *which: op.get_quantizer(*which))


@repair("quantizers are not changed", mutate_quantizers)
def _quantizers() -> None:
    model, given = step.make_model(SEVERAL), step.make_inputs(SEVERAL)
    step.forward(model, SEVERAL, given)
    found = [model[0].get_quantizer("forward", 0), model[2].get_quantizer("backward", 0)]
    for each in found:
        each.optimize_for_gemm = False
    before = [(q.internal, q.optimize_for_gemm) for q in found]
    step.run_model(model, SEVERAL, given)
    assert before == [(q.internal, q.optimize_for_gemm) for q in found]


def read_carriers_as_bf16(patch: Patch) -> None:
    patch.setattr(quantizers, "refuse_carriers", lambda _fc1, _fc2: None)


@repair("carriers are not read as bf16", read_carriers_as_bf16)
def _carriers() -> None:
    model, given = step.make_model(SINGLE), step.make_inputs(SINGLE)
    model[0].ep_mxfp8_carrier_input = True
    given.x = packed_carrier(given.x).requires_grad_()
    with pytest.raises(RuntimeError, match="ep_mxfp8_carrier_input"):
        step.run_model(model, SINGLE, given)


def offload_probabilities(patch: Patch) -> None:
    """Offload the probabilities as well: they are the caller's routing tensor."""
    original = saved.activations
    patch.setattr(saved, "activations", lambda state: [*original(state), state.prob])


@repair("offload leaves the caller's probabilities", offload_probabilities)
def _offload() -> None:
    module, told = forked(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "is_cpu_offload_enabled", lambda: True)
        patch.setattr(module, "start_offload", lambda *tensors: told.extend(tensors))
        patch.setattr(module, "mark_activation_offload", lambda *_tensors: None)
        given = step.make_inputs(SEVERAL)
        step.forward(step.make_model(SEVERAL), SEVERAL, given)
    assert all(tensor.data_ptr() != given.prob.data_ptr() for tensor in told)


# Which gradients, and in which order ------------------------------------------------------------


def one_flag_for_both_linears(patch: Patch) -> None:
    """Compute all weight gradients when any weight needs one, as upstream's common flag does."""
    original = inputs._wanted

    def wanted(*args: Any) -> frozenset[Output]:
        found = original(*args)
        both = {Output.DW1, Output.DW2}
        return found | both if found & both else found

    patch.setattr(inputs, "_wanted", wanted)


@repair("frozen weights cost nothing", one_flag_for_both_linears)
def _frozen() -> None:
    launched = []
    original = ReferenceBackend.wgrad

    def spy(self: Any, plan: Any, kernel: Any, *rest: Any) -> None:
        launched.append(kernel.value)
        original(self, plan, kernel, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceBackend, "wgrad", spy)
        step.run_step(SEVERAL.but(frozen=frozenset({"fc1"})))
    assert launched == ["fc2_wgrad"]


def add_in_any_order(patch: Patch) -> None:
    """Add rows as float atomics do: in an order that changes from run to run."""
    seeds = itertools.count()

    def column_sums(
        values: torch.Tensor,
        sizes: Any = None,
        *,
        weights: Any = None,
        group_end_offsets: Any = None,
    ) -> torch.Tensor:
        values = values.float() if weights is None else values.float() * weights.float()[:, None]
        counts = [values.shape[0]] if sizes is None else sizes.tolist()
        sums = []
        for group in values[: sum(counts)].split(counts):
            order = torch.randperm(len(group), generator=torch.Generator().manual_seed(next(seeds)))
            total = torch.zeros(values.shape[1])
            for row in group[order]:
                total = total + row
            sums.append(total)
        return torch.stack(sums)

    patch.setattr(bias_gradient.group_reductions, "column_sums", column_sums)


@repair("bias gradients in a fixed order", add_in_any_order)
def _fixed_order() -> None:
    fixtures.assert_repeats(SEVERAL.but(bias=True, dtype=torch.float32, fill=0.0), runs=3)


def ignore_the_gradient_format(patch: Patch) -> None:
    patch.setattr(quantizers, "HYBRID", "")


@repair("gradients in E4M3 only", ignore_the_gradient_format)
def _hybrid() -> None:
    """A recipe with E5M2 gradients is declined with its reason, not computed as E4M3."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Format, MXFP8BlockScaling

    from te_grouped_mlp.op import selection

    case = SEVERAL
    model = step.make_model(case)
    with te.autocast(enabled=True, recipe=MXFP8BlockScaling(fp8_format=Format.HYBRID)):
        problem = adapter.problem_of(*model, MXFP8BlockScaling(fp8_format=Format.HYBRID))
    refused = selection.refusals(problem, environment.current())
    assert "reference" in refused
    assert refused["reference"].reason is Reason.GRADIENT_FORMAT


def ask_the_op_in_the_backward(patch: Patch) -> None:
    live = []

    class Live:
        """A quantizer of the op, whatever it is when it is used."""

        def copy(self) -> Any:
            return live[-1].get_quantizer("backward", 0).copy()

    def kept(op: Any, *_which: Any) -> Any:
        live.append(op)
        return Live()

    patch.setattr(quantizers, "copied", kept)


@repair("a backward uses its forward's quantizers", ask_the_op_in_the_backward)
def _own_quantizers() -> None:
    model, given = step.make_model(SINGLE), step.make_inputs(SINGLE)
    y = step.forward(model, SINGLE, given)
    for quantizer in model[2]._quantizers["backward"]:
        quantizer.dtype = type(quantizer.dtype).kFloat8E5M2
    y.backward(given.dy)
    step.assert_same(step.collect(SINGLE, model, given, y), step.run_step(SINGLE))


def count_no_writes(patch: Patch) -> None:
    patch.setattr(intact, "_written", lambda _weights: ())


@repair("a backward refuses rewritten weights", count_no_writes)
def _rewritten_weights() -> None:
    case = SINGLE.but(weight="quantized")
    model, given = step.make_model(case), step.make_inputs(case)
    y = step.forward(model, case, given)
    with torch.no_grad():
        model[2].weight0.mul_(2)
    with pytest.raises(RuntimeError, match="FC2 weight0 is at version 2; expected 1"):
        y.backward(given.dy)


# The proof --------------------------------------------------------------------------------------


# A check fails by an assertion, or by an error that did not come.
FAILURES = (AssertionError, pytest.fail.Exception)


@pytest.mark.parametrize("name", REPAIRS)
def test_repair_is_needed(name: str, monkeypatch: Patch) -> None:
    REPAIRS[name].check()
    with monkeypatch.context() as patch:
        context = REPAIRS[name].switch_off(patch)
        with context or contextlib.nullcontext(), pytest.raises(FAILURES):
            REPAIRS[name].check()
    REPAIRS[name].check()


def page() -> str:
    """Return the text of the page, or skip where the tests were copied without it."""
    file = Path(__file__).resolve().parents[2] / "docs" / "repairs.md"
    if not file.exists():
        pytest.skip("a copy of the tests without the repository")
    return file.read_text(encoding="utf-8")


def test_the_page_lists_every_repair() -> None:
    first = page().split("\n## ", 1)[0]
    listed = re.findall(r"^\| (.+?) \|", first, re.M)
    assert set(listed) - {"repair"} == set(REPAIRS)


def test_the_page_names_tests_that_exist() -> None:
    sources = "".join(
        file.read_text(encoding="utf-8") for file in Path(__file__).resolve().parent.glob("*.py")
    )
    named = set(re.findall(r"`(?:[\w.]+::)?(test_\w+)`", page()))
    missing = {name for name in named if f"def {name}(" not in sources}
    assert len(named) > 20
    assert not missing
