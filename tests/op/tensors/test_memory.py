# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a program may do to a tensor that the op reads or writes: named before any work.

A parameter may be replaced, repointed or freed between two passes; a quantized tensor may come with
buffers that are shorter than its shape asks for. Nothing is read or written past a buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_grouped_mlp.op.tensors import stacking
from tests.op.test_bad_input import Given, is_fused, work
from tests.support.prequantized import prequantize
from tests.support.step import StepCase

__all__ = ["work"]

pytestmark = [
    pytest.mark.usefixtures("fused_switch", "poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Quantizer is being updated:UserWarning"),
]

BASE = StepCase(splits=(128, 0, 256), buffer_rows=512, hidden=128, ffn=64, bias=True)
GROUPED, QUANTIZED = BASE.but(weight="grouped"), BASE.but(weight="quantized")
MAIN = BASE.but(grad="main_grad")
Spoil = Callable[[Given], Any]


def freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Give a parameter memory of its own: the experts' may be one."""
    tensor.data = tensor.data.clone()
    return tensor


def lost(tensor: torch.Tensor) -> None:
    freed(alone(tensor))


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape."""
    found = tensor.clone()
    freed(found)
    return found


def cut(tensor: torch.Tensor) -> None:
    """Leave all but the last byte."""
    alone(tensor).untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)


def repointed(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.data = make(tensor.data)

    return change


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: len(tensor) // 2].clone()


def view_of_freed(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose address is a small number: its place in memory that is gone."""
    flat = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    view = flat[tensor.numel() :].view(tensor.shape)
    freed(flat)
    return view


def parameter(op: int, name: str, change: Callable[[torch.Tensor], Any]) -> Spoil:
    return lambda given: change(getattr(given.model[op], name))


def replaced(op: int, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(given: Given) -> None:
        old = getattr(given.model[op], name)
        setattr(given.model[op], name, torch.nn.Parameter(make(old.detach())))

    return spoil


def loaded(given: Given) -> None:
    """A state in another type, assigned."""
    weight = given.model[2].weight2.detach().double()
    given.model[2].load_state_dict({"weight2": weight}, strict=False, assign=True)


def part_of(op: int, weight: str, part: str, make: Callable[[torch.Tensor], Any]) -> Spoil:
    """Change a buffer of a quantized parameter."""

    def spoil(given: Given) -> None:
        owner = getattr(given.model[op], weight)
        setattr(owner, part, make(getattr(owner, part)))

    return spoil


def main_grad(op: int, name: str, change: Callable[[torch.Tensor], Any]) -> Spoil:
    return lambda given: change(getattr(given.model[op], name).main_grad)


def argument(name: str, change: Callable[[torch.Tensor], Any]) -> Spoil:
    return lambda given: change(getattr(given.inputs, name))


def buffers(given: Given) -> None:
    given.kwargs.update({2: {"output": given.buffer()}, 0: {"grad_input": given.buffer()}})


def output_freed(given: Given) -> None:
    buffers(given)
    freed(given.kwargs[2]["output"])


def splits_freed(given: Given) -> None:
    freed(given.extra[0])


def prequantized(ready: bool, **changes: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """Give x as a quantized tensor of which a buffer was changed."""

    def spoil(given: Given) -> None:
        given.inputs.x = prequantize(given.inputs.x, given.case, ready=ready)
        for part, make in changes.items():
            setattr(given.inputs.x, part, make(getattr(given.inputs.x, part)))

    return spoil


LOST = r"has \d+ bytes of memory; allowed: at least \d+"
FORWARD: dict[str, tuple[StepCase, Spoil, str]] = {
    "weight repointed": (
        BASE,
        parameter(0, "weight0", repointed(narrow)),
        r"fc1\.weight0 has shape \(64, 128\); allowed: \(128, 128\)",
    ),
    "weight replaced": (BASE, replaced(2, "weight1", narrow), r"fc2\.weight1 has shape \(64, 64\)"),
    "weight transposed": (
        BASE.but(ffn=128),
        parameter(0, "weight1", repointed(lambda w: w.t().contiguous())),
        r"fc1\.weight1 has shape \(128, 256\); allowed: \(256, 128\)",
    ),
    "weight loaded": (BASE, loaded, r"fc2\.weight2 is torch\.float64; allowed: torch\.bfloat16"),
    "all weights repointed": (
        BASE,
        lambda g: [repointed(narrow)(getattr(g.model[0], f"weight{i}")) for i in range(3)],
        r"fc1\.weight0 has shape \(64, 128\)",
    ),
    "weight of integers": (
        BASE,
        replaced(0, "weight2", torch.Tensor.double),
        r"fc1\.weight2 is torch\.float64; allowed: torch\.bfloat16",
    ),
    "weight elsewhere": (
        BASE,
        replaced(2, "weight2", lambda w: w.to("meta")),
        r"fc2\.weight2 is on meta; allowed: cpu",
    ),
    "weight freed": (BASE, parameter(0, "weight1", lost), rf"fc1\.weight1 .*{LOST}"),
    "weight cut": (BASE, parameter(2, "weight2", cut), rf"fc2\.weight2 .*{LOST}"),
    "weight in freed memory": (
        BASE,
        parameter(0, "weight2", repointed(view_of_freed)),
        rf"fc1\.weight2 .*{LOST}",
    ),
    "grouped weight freed": (
        GROUPED,
        lambda g: freed(g.model[0].weight.rowwise_data),
        rf"fc1\.weight .*{LOST}",
    ),
    "bias repointed": (
        BASE,
        parameter(0, "bias1", repointed(narrow)),
        r"fc1\.bias1 has shape \(64,\); allowed: \(128,\)",
    ),
    "all biases repointed": (
        BASE,
        lambda g: [repointed(narrow)(getattr(g.model[2], f"bias{i}")) for i in range(3)],
        r"fc2\.bias0 has shape \(64,\); allowed: \(128,\)",
    ),
    "bias freed": (BASE, parameter(2, "bias2", lost), rf"fc2\.bias2 .*{LOST}"),
    "quantized weight with short data": (
        QUANTIZED,
        part_of(0, "weight1", "_rowwise_data", narrow),
        r"fc1\.weight1\._rowwise_data has shape \(64, 128\); allowed: \(128, 128\)",
    ),
    "quantized weight with few scales": (
        QUANTIZED,
        part_of(2, "weight0", "_rowwise_scale_inv", lambda s: s[:1, :4].contiguous()),
        r"fc2\.weight0\._rowwise_scale_inv has 4 bytes .*allowed: at least 512",
    ),
    "quantized weight with few column scales": (
        QUANTIZED,
        part_of(2, "weight2", "_columnwise_scale_inv", lambda s: s[:1, :4].contiguous()),
        r"fc2\.weight2\._columnwise_scale_inv has 4 bytes .*allowed: at least 512",
    ),
    "quantized weight freed": (
        QUANTIZED,
        part_of(0, "weight2", "_columnwise_data", without_memory),
        rf"fc1\.weight2\._columnwise_data .*{LOST}",
    ),
    "main_grad freed": (MAIN, main_grad(2, "weight1", lost), rf"FC2 weight1\.main_grad .*{LOST}"),
    "input freed": (BASE, argument("x", freed), rf"input .*{LOST}"),
    "sparse input": (
        BASE,
        lambda g: setattr(g.inputs, "x", g.inputs.x.detach().to_sparse()),
        r"input has layout torch\.sparse_coo; allowed: torch\.strided",
    ),
    "probabilities freed": (BASE, argument("prob", freed), rf"probabilities .*{LOST}"),
    "splits freed": (BASE, splits_freed, rf"split_sizes .*{LOST}"),
    "output freed": (BASE, output_freed, rf"output .*{LOST}"),
    "input with short data": (
        BASE,
        prequantized(False, rowwise_data=lambda d: d[:64].clone()),
        r"input\.rowwise_data has 64 bytes .*allowed: at least 65536",
    ),
    "input with few scales": (
        BASE,
        prequantized(False, scale_inv=lambda s: s[:8].clone()),
        r"input\.scale_inv has 8 bytes .*allowed: at least 2048",
    ),
    "input with scales of a view": (
        BASE,
        prequantized(False, scale_inv=lambda s: s[:8]),
        r"input\.scale_inv has 8 bytes .*allowed: at least 2048",
    ),
    "ready input with few scales": (
        BASE,
        prequantized(True, columnwise_scale_inv=lambda s: s[:8].clone()),
        r"input\.columnwise_scale_inv has 8 bytes .*allowed: at least 2048",
    ),
    "input with scales of floats": (
        BASE,
        prequantized(False, scale_inv=torch.Tensor.float),
        r"input\.scale_inv is torch\.float32; allowed: uint8",
    ),
}


def forward(given: Given) -> torch.Tensor:
    """Like `Given.forward`, also outside autocast."""
    out = given.forward() if given.case.mxfp8 else given.model(given.inputs.x, *given.extra)
    assert is_fused(given.model)
    return out


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference backend takes plain bf16 only by name."""
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", "reference")


@pytest.fixture(params=["table", "each"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at experts by PyTorch's table, and as without one."""
    if request.param == "each":
        monkeypatch.setattr(stacking, "_TABLE", None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
def test_a_forward_refuses_it(name: str, grad: bool, work: list[str]) -> None:
    case, spoil, message = FORWARD[name]
    if not grad and case is MAIN:
        pytest.skip("nothing reads a main_grad")
    given = Given.of(case)
    given.forward()
    spoil(given)
    work.clear()
    error = RuntimeError if case is MAIN else ValueError
    with torch.set_grad_enabled(grad), pytest.raises(error, match=message):
        given.forward()
    assert work == []
    assert is_fused(given.model)


BETWEEN: dict[str, tuple[StepCase, Spoil, str]] = {
    "weight repointed": (
        BASE.but(mxfp8=False),
        parameter(2, "weight1", repointed(narrow)),
        r"FC2 weight1 is torch\.bfloat16 of shape \(64, 64\) now; expected .* \(128, 64\)",
    ),
    "weight freed": (
        BASE.but(mxfp8=False),
        parameter(0, "weight2", lost),
        rf"fc1\.weight2 .*{LOST}",
    ),
    "main_grad freed": (MAIN, main_grad(0, "weight1", lost), rf"FC1 weight1\.main_grad .*{LOST}"),
    "main_grad cut": (MAIN, main_grad(0, "weight2", cut), rf"FC1 weight2\.main_grad .*{LOST}"),
    "main_grad narrowed": (
        MAIN,
        main_grad(0, "weight1", repointed(narrow)),
        r"FC1 weight1\.main_grad has shape \(64, 128\)",
    ),
    "quantized weight freed": (
        QUANTIZED,
        lambda g: freed(g.model[2].weight0._columnwise_data),
        rf"fc2\.weight0 .*{LOST}",
    ),
    "probabilities freed": (BASE, argument("prob", freed), rf"saved probabilities .*{LOST}"),
    "output gradient freed": (BASE, argument("dy", freed), rf"grad_output .*{LOST}"),
}


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("name", BETWEEN)
def test_a_backward_refuses_what_changed_after_its_forward(name: str, work: list[str]) -> None:
    case, spoil, message = BETWEEN[name]
    given = Given.of(case)
    out = forward(given)
    spoil(given)
    sums = {
        name: parameter.main_grad.clone()
        for name, parameter in given.model.named_parameters()
        if case is MAIN and name.startswith("2.weight")
    }
    work.clear()
    with pytest.raises((ValueError, RuntimeError), match=message):
        out.backward(given.inputs.dy)
    assert work == []
    for name, kept in sums.items():
        assert torch.equal(kept, given.model.get_parameter(name).main_grad)


def test_a_delayed_weight_gradient_refuses_what_was_freed_meanwhile(work: list[str]) -> None:
    given = Given.of(MAIN.but(delay=True))
    forward(given).backward(given.inputs.dy)
    main_grad(0, "weight1", lost)(given)
    work.clear()
    with pytest.raises(ValueError, match=rf"target1 of a delayed weight gradient .*{LOST}"):
        given.model[0].backward_dw()
    assert work == []


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    "case", [BASE, BASE.but(mxfp8=False), QUANTIZED, GROUPED], ids=["mxfp8", "bf16", "own", "one"]
)
def test_a_saved_tensor_that_comes_back_shorter_is_refused(case: StepCase) -> None:
    """Each of them in turn, given back by a hook of autograd without its last row."""
    count = step_with_short(case, None)
    assert count > 10
    for place in range(count):
        with pytest.raises((ValueError, RuntimeError), match="allowed|expected"):
            step_with_short(case, place)


def step_with_short(case: StepCase, chosen: int | None) -> int:
    """Run a step whose saved tensor of that number loses its last row; return their number."""
    places = itertools.count()

    def pack(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        return next(places), tensor

    def unpack(packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        place, tensor = packed
        return tensor[:-1] if place == chosen else tensor

    given = Given.of(case)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = forward(given)
    out.backward(given.inputs.dy)
    return next(places)
