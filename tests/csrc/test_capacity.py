# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory that is shorter than the shape asks for is refused by name, before anything is read."""

import random

import pytest
import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors import capacity
from tests.csrc.random_calls import Call, draw_call

SEED = 20261130
NAMES = (
    "mxfp8_quantize",
    "mxfp8_dequantize",
    "swizzle_scales",
    "column_sums",
    "weighted_column_sums",
    "row_dots",
)


def whole_call(name: str) -> Call:
    """A call with enough of everything, with splits and both directions."""
    draw = random.Random(SEED)
    while True:
        call = draw_call(draw, marked=False)
        wanted = not call.strange and not call.short and call.arguments["splits"] is not None
        if call.name == name and wanted and call.arguments.get("col_data", 1) is not None:
            return call


def spans(call: Call) -> dict[str, tuple[int, int]]:
    return {name: value for name, value in call.arguments.items() if isinstance(value, tuple)}


@pytest.mark.parametrize("name", NAMES)
def test_a_byte_less_is_refused(name: str) -> None:
    call = whole_call(name)
    assert call.run() is None
    assert len(spans(call)) >= 3
    for argument, (address, size) in spans(call).items():
        message = rf"^{argument} is {size - 1} bytes long, allowed: at least {size} bytes"
        with pytest.raises(ValueError, match=message):
            getattr(_C, name)(**(call.arguments | {argument: (address, size - 1)}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("span", [(0, 2**40), (0, 0), (64, -1), (64, -(2**63))])
def test_what_is_no_memory_is_refused(name: str, span: tuple[int, int]) -> None:
    call = whole_call(name)
    for argument in spans(call):
        with pytest.raises(ValueError, match=rf"^{argument} is (0|-\d+) bytes long"):
            getattr(_C, name)(**(call.arguments | {argument: span}))


@pytest.mark.parametrize("span", [0, 4096, (1,), (1, 2, 3), ("a", 1), (-1, 4), (2**64, 4), [1, 2]])
def test_what_is_no_span_is_a_type_error(span: object) -> None:
    call = whole_call("swizzle_scales")
    with pytest.raises(TypeError):
        _C.swizzle_scales(**(call.arguments | {"src": span}))


@pytest.mark.parametrize("name", ["column_sums", "row_dots", "mxfp8_dequantize"])
def test_an_address_between_elements_is_refused(name: str) -> None:
    call = whole_call(name)
    argument = "out" if name == "mxfp8_dequantize" else "out_f32"
    room = torch.zeros(1 << 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"^{argument} is at an address that is no multiple of"):
        getattr(_C, name)(**(call.arguments | {argument: (room.data_ptr() + 1, 1 << 19)}))


def test_scales_that_overlap_are_refused() -> None:
    room = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match="dst is in the memory of src"):
        _C.swizzle_scales(
            capacity.span(room), capacity.span(room, 511), 0, 128, 128, None, 0, False
        )
    _C.swizzle_scales(capacity.span(room), capacity.span(room, 512), 0, 128, 128, None, 0, False)


def test_numbers_that_overflow_are_refused() -> None:
    room = torch.zeros(4096, dtype=torch.uint8)
    span, splits = capacity.span(room), (room.data_ptr(), 8)
    with pytest.raises(ValueError, match="splits is 8 bytes long"):
        _C.column_sums(span, 0, 1, 8, 8, splits, 2**61, span, 1)
    with pytest.raises(ValueError, match="src is 4096 bytes long"):
        _C.column_sums(span, 3, 2**30, 2**20, 2**20, None, 0, span, 1)
    with pytest.raises(ValueError, match="out_f32 is 4096 bytes long"):
        _C.column_sums(span, 0, 0, 2**51, 2**51, None, 0, span, 1)


class TestSpan:
    """A tensor's memory ends where it does, or where its storage does."""

    def test_of_a_view(self) -> None:
        whole = torch.zeros(8, 16, dtype=torch.float32)
        assert capacity.span(whole) == (whole.data_ptr(), 512)
        assert capacity.span(whole[2:4]) == (whole.data_ptr() + 128, 128)
        assert capacity.span(whole[:, 4:8]) == (whole.data_ptr() + 16, 7 * 64 + 16)
        assert capacity.span(whole, 500) == (whole.data_ptr() + 500, 12)
        assert capacity.span(whole[0:0])[1] == 0
        assert capacity.span(None) is None

    def test_of_what_lost_its_storage(self) -> None:
        whole = torch.zeros(8, 16, dtype=torch.float32)
        part = whole[4:]
        whole.untyped_storage().resize_(300)
        assert capacity.span(whole)[1] == 300
        assert capacity.span(part) == (whole.data_ptr() + 256, 44)
        whole.untyped_storage().resize_(0)
        assert capacity.span(part)[1] == capacity.span(whole)[1] == 0
        with pytest.raises(ValueError, match=r"it of shape \(4, 16\) has 0 bytes of memory"):
            capacity.require_memory("it", part)


def test_random_calls() -> None:
    """Refused where memory is short, and only there."""
    draw = random.Random(SEED)
    seen = {True: 0, False: 0}
    for number in range(300):
        call = draw_call(draw)
        raised = call.run()
        if call.strange:
            continue
        short = bool(call.short)
        seen[short] += 1
        assert (raised is not None) == short, (SEED, number, call.name, call.short, raised)
        assert not short or any(name in str(raised) for name in call.short)
    assert min(seen.values()) > 80
