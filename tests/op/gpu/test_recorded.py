# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison of two backends sees what it is for, and lets rounding through."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from te_grouped_mlp.op.backends.reference import arguments
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.tensors.operands import Axis
from tests.op.gpu import recorded
from tests.op.gpu.recorded import Recorded
from tests.support import step, values_backend
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

CASE = StepCase(splits=(128, 0, 256), buffer_rows=512, hidden=128, ffn=192, bias=True)
COPIES = {
    *(f"{name} {axis}" for name in ("x", "dy", "activated", "dh") for axis in ("row", "column")),
    *(
        f"{name} {axis} {i}"
        for name in ("W1", "W2")
        for axis in ("row", "column")
        for i in range(3)
    ),
}


def changed(record: Recorded, name: str, share: float, codes: int, scales: int = 0) -> Recorded:
    """Return a record in which some elements of a copy are `codes` codes off."""
    copy, axis = record.copies[name], Axis.COLUMN if "column" in name else Axis.ROW
    new, units = copy.codes.clone(), copy.scales.clone()
    # Neither near zero, where a code less would be negative, nor near the largest.
    fit = ((new & 0x7F) > 0x10) & ((new & 0x7F) < 0x70)
    places = fit.view(-1).nonzero().view(-1)
    count = max(1, int(share * new.numel()))
    new.view(-1)[places[:: len(places) // count][:count]] += codes
    units.view(-1)[:1] += scales
    return dataclasses.replace(
        record, copies={**record.copies, name: recorded._valued(new, units, axis)}
    )


def test_every_copy_is_recorded() -> None:
    record = recorded.reference(CASE)
    assert record.copies.keys() == COPIES
    assert record.copies["x row"].values.shape == (384, 128)
    assert record.copies["dh column"].scales.shape == (12, 384)
    assert record.copies["W1 column 2"].codes.shape == (384, 128)
    given = step.make_inputs(CASE).x.detach()[: CASE.live].double()
    for axis in ("row", "column"):
        off = (record.copies[f"x {axis}"].values - given).abs()
        assert 0 < float(off.max()) <= float(given.abs().max()) * 2.0**-4


@pytest.mark.parametrize("name", ["x row", "dy column", "W1 row 0", "W2 column 2"])
def test_one_code_of_a_given_tensor_is_seen(name: str) -> None:
    record = recorded.reference(CASE)
    with pytest.raises(AssertionError, match=f"{name} has other values"):
        recorded.assert_same_copies(CASE, changed(record, name, 0.0, 1), record)


@pytest.mark.parametrize("name", ["x column", "W2 row 1"])
def test_another_encoding_of_the_same_values_is_seen(name: str) -> None:
    record = recorded.reference(CASE)
    copy = dataclasses.replace(record.copies[name], codes=record.copies[name].codes + 1)
    other = dataclasses.replace(record, copies={**record.copies, name: copy})
    with pytest.raises(AssertionError, match=f"{name} has other bytes"):
        recorded.assert_same_copies(CASE, other, record)


@pytest.mark.parametrize("name", ["activated row", "activated column", "dh row", "dh column"])
def test_rounding_of_computed_values_passes_and_nothing_else(name: str) -> None:
    record = recorded.reference(CASE)
    shares = recorded.assert_same_copies(CASE, changed(record, name, 5e-4, 1), record)
    assert 0 < shares[name] < recorded.SHARE
    assert sum(shares.values()) == shares[name]
    with pytest.raises(AssertionError, match="of the codes differ"):
        recorded.assert_same_copies(CASE, changed(record, name, 1e-2, 1), record)
    with pytest.raises(AssertionError, match="codes apart"):
        recorded.assert_same_copies(CASE, changed(record, name, 5e-4, 9), record)
    with pytest.raises(AssertionError, match="codes apart|differ"):
        recorded.assert_same_copies(CASE, changed(record, name, 0.0, 0, scales=3), record)


def test_values_without_bytes_are_compared() -> None:
    record = recorded.reference(CASE)
    copies = {name: recorded.Copy(copy.values) for name, copy in record.copies.items()}
    recorded.assert_same_copies(CASE, dataclasses.replace(record, copies=copies), record)
    copies["x row"] = recorded.Copy(copies["x row"].values * (1 + 2.0**-8))
    with pytest.raises(AssertionError, match="x row has other values"):
        recorded.assert_same_copies(CASE, dataclasses.replace(record, copies=copies), record)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_a_backend_that_reads_values(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes of x, dy and the weights are values, or bytes where a later pass reads them."""
    case = CASE.but(activation=activation)
    wanted = recorded.reference(case)
    with values_backend.in_use(monkeypatch):
        found = recorded.run(case, backend=values_backend.NAME)
    assert found.copies["x row"].codes is None
    assert found.copies["W1 column 0"].codes is None
    assert found.copies["x column"].codes is not None
    assert not any(recorded.assert_same_copies(case, found, wanted).values())
    recorded.assert_close(case, found.found, wanted.found)


def test_pair_order_is_put_back() -> None:
    """Gate j and linear j lie beside each other there, and 32 columns apart here."""
    here = torch.arange(128.0)[None]
    gates = here.view(2, 2, 32)[:, 0].reshape(-1)
    pairs = torch.stack([gates, gates + 32], 1).view(1, -1)
    assert torch.equal(recorded._out_of_pairs(recorded.Copy(pairs)).values, here)


@pytest.mark.parametrize("name", ["y", "dx", "dprob", "dW1", "dW2", "db1", "db2"])
def test_a_small_fault_in_one_stripe_is_seen(name: str) -> None:
    record = recorded.reference(CASE)
    recorded.assert_close(CASE, record.found, record.found)
    fault = record.found[name].clone()
    if name[:2] in ("dW", "db"):
        fault[2, ..., 16:32] *= 1.02
    elif name == "dprob":
        fault[128 : CASE.live] *= 1.02
    else:
        fault[128 : CASE.live, 16:32] *= 1.02
    with pytest.raises(AssertionError, match=f"{name} expert 2"):
        recorded.assert_close(CASE, {**record.found, name: fault}, record.found)


@pytest.mark.parametrize("name", ["y", "dx", "dprob"])
def test_a_tail_that_is_not_zero_is_seen(name: str) -> None:
    record = recorded.reference(CASE)
    fault = record.found[name].clone()
    fault[-1] = 1e-30
    with pytest.raises(AssertionError, match=f"tail of {name}"):
        recorded.assert_close(CASE, {**record.found, name: fault}, record.found)


def test_a_backend_that_rounds_its_activation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """FC2's input from the stored bf16 values instead of the fp32 ones: 2^-9 in every value."""
    wanted = recorded.reference(CASE)
    original = ReferenceBackend.fc1_act

    write = arguments.write

    def rounded(self: Any, *args: Any) -> Any:
        with monkeypatch.context() as inner:
            inner.setattr(
                arguments, "write", lambda to, values, at: write(to, values.bfloat16().float(), at)
            )
            return original(self, *args)

    monkeypatch.setattr(ReferenceBackend, "fc1_act", rounded)
    with pytest.raises(AssertionError, match=r"activated \w+: .* of the codes differ"):
        recorded.assert_same_copies(CASE, recorded.run(CASE), wanted)


def test_a_quantizer_that_reads_the_tail_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group boundaries shifted by a tile: other column scales."""
    wanted = recorded.reference(CASE)
    from te_grouped_mlp.op.tensors import quantize

    original = quantize.tokens

    def shifted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.roll(1, 0), *args, **kwargs)

    monkeypatch.setattr(quantize, "tokens", shifted)
    with pytest.raises(AssertionError, match="x row has other values"):
        recorded.assert_same_copies(CASE, recorded.run(CASE), wanted)
