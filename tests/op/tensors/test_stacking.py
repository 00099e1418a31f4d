# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One look at the tensors of all experts says what asking each of them says."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest
import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op.backends.cutedsl import arguments
from te_grouped_mlp.op.tensors import stacking
from tests.support.gpu import no_waiting

SHAPE = (16, 16)
HAS_TABLE = stacking._TABLE is not None

needs_table = pytest.mark.skipif(not HAS_TABLE, reason="this PyTorch describes no tensors to C")


@pytest.fixture(autouse=True, params=[pytest.param("table", marks=needs_table), "each"])
def way(request, monkeypatch):
    """Look by PyTorch's table, and as without one."""
    if request.param == "each":
        monkeypatch.setattr(stacking, "_TABLE", None)


def members(count: int = 4, step: int = 256, dtype: torch.dtype = torch.bfloat16):
    """Stacked at a distance (in elements) in one storage."""
    buffer = torch.zeros(count * step + 256, dtype=dtype)
    return [buffer.as_strided(SHAPE, (SHAPE[1], 1), index * step) for index in range(count)]


class Subclass(torch.Tensor):
    """Describes itself in its own way, perhaps."""


def changed(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Members of which one was changed, at the same address."""
    found = members()
    before = found[index].data_ptr()
    found[index] = change(found[index])
    assert found[index].data_ptr() == before
    return found


@pytest.mark.parametrize("wrap", [list, tuple])
@pytest.mark.parametrize("parameter", [False, True])
def test_even_tensors(parameter, wrap):
    found = members(step=300)
    if parameter:
        found = [torch.nn.Parameter(each) for each in found]
    assert stacking.uniform_stride(wrap(found)) == 600
    assert stacking.uniform_stride(wrap(found[::-1])) == -600
    assert stacking.uniform_stride(wrap(found[:1])) == 0


def test_uneven_tensors_are_still_alike():
    found = members(5)
    del found[2]
    assert stacking.uniform_stride(found) == 0
    assert stacking.uniform_stride([found[0], found[0], found[1]]) == 0


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda each: each.t(),
        lambda each: each.view(torch.float16),
        lambda each: each.view(torch.int16),
        lambda each: each.view(8, 32),
        lambda each: each[:8],
        lambda each: each[None],
        lambda each: each.view(torch.uint8),
        lambda each: each.as_subclass(Subclass),
    ],
    ids=["strides", "float16", "int16", "shape", "rows", "dimensions", "bytes", "subclass"],
)
def test_another_one_at_the_same_address_is_seen(change, index):
    """Nothing of a tensor goes by its address alone."""
    assert stacking.uniform_stride(members()) is not None
    assert stacking.uniform_stride(changed(index, change)) is None


@pytest.mark.parametrize(
    "odd",
    [
        torch.empty(SHAPE, dtype=torch.bfloat16, device="meta"),
        torch.eye(16).to_sparse(),
        torch.eye(16, dtype=torch.bfloat16).to_sparse(),
        None,
        7,
    ],
    ids=["meta", "sparse", "sparse16", "none", "number"],
)
def test_what_cannot_be_described_must_be_asked(odd):
    assert stacking.uniform_stride([*members(), odd]) is None
    assert stacking.uniform_stride([odd]) is None


@needs_table
def test_no_error_is_left_behind():
    sparse = torch.eye(16).to_sparse()
    table = torch.Tensor.__dlpack_c_exchange_api__
    assert _C.uniform_stride(table, [sparse], torch.Tensor, torch.nn.Parameter) is None
    assert _C.uniform_stride(object(), members(), torch.Tensor, torch.nn.Parameter) is None
    assert _C.uniform_stride(table, {}, torch.Tensor, torch.nn.Parameter) is None
    assert _C.uniform_stride(table, [], torch.Tensor, torch.nn.Parameter) is None
    # A pending error would surface in the next call.
    assert stacking.uniform_stride(members()) == 512


class Table(ctypes.Structure):
    """The part of a table that all versions share."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
    )


@needs_table
def test_a_table_of_a_later_version_is_used_by_way_of_an_older_one():
    name = b"dlpack_exchange_api"
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    def capsule(table):
        return python.PyCapsule_New(ctypes.addressof(table), name, None)

    real = python.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, name)
    second = Table(2, 0, real)
    third = Table(3, 1, ctypes.addressof(second))
    alone = Table(2, 0, None)
    for table in (second, third):
        usable = stacking._usable(capsule(table))
        assert usable is not None
        assert _C.uniform_stride(usable, members(), torch.Tensor, torch.nn.Parameter) == 512
    assert stacking._usable(capsule(alone)) is None
    assert stacking._usable(object()) is None
    assert stacking._usable(None) is None


def test_tensors_at_even_distances_in_storages_of_their_own_are_not_one():
    """An allocator may well hand out blocks that follow each other."""
    memory, size = bytearray(4 * 1024), SHAPE[0] * SHAPE[1]
    found = [
        torch.frombuffer(memory, dtype=torch.float32, offset=1024 * index, count=size).view(SHAPE)
        for index in range(4)
    ]
    assert stacking.uniform_stride(found) == 1024
    assert stacking.as_stacked_view(found) is None
    assert arguments.addressable_view(found) is None
    assert arguments.addressable_view(found[::-1]) is None


def moved(kind: str) -> list[torch.Tensor]:
    """Members as a user may leave them between two steps."""
    found = [torch.nn.Parameter(each, requires_grad=False) for each in members()]
    if kind == "repointed":
        found[2].data = torch.zeros(SHAPE, dtype=torch.bfloat16)
    elif kind == "transposed":
        found[2].data = found[2].data.t()
    elif kind == "replaced":
        found[2] = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    elif kind == "swapped":
        found[1].data, found[2].data = found[2].data, found[1].data
    elif kind == "dtype":
        found[2].data = found[2].data.view(torch.float16)
    elif kind == "freed":
        found[0].untyped_storage().resize_(0)
    return found


@pytest.mark.parametrize(
    "kind", ["repointed", "transposed", "replaced", "swapped", "dtype", "freed"]
)
def test_a_look_remembers_nothing(kind):
    """In turn, so that a view that was right before would be given again if it were kept."""
    for _ in range(2):
        assert arguments.addressable_view(moved("as before")) is not None
        assert arguments.addressable_view(moved(kind)) is None
    found = moved("as before")
    view = arguments.addressable_view(found)
    assert view is not None
    for each in found:
        each.data = each.data.clone()
    again = arguments.addressable_view(found)
    assert again is None or again.values.data_ptr() != view.values.data_ptr()


def lie_evenly(found):
    """Whether TMA can see matrices as one, and where the first of them lies: by the addresses."""
    first = found[0]
    if any(
        (each.shape, each.dtype, each.stride()) != (first.shape, first.dtype, first.stride())
        for each in found
    ):
        return None
    size = first.element_size()
    if first.stride(1) != 1 or first.stride(0) * size % 16:
        return None
    at = [each.data_ptr() for each in found]
    steps = {b - a for a, b in zip(at, at[1:], strict=False)}
    extent = first.shape[0] * first.stride(0) * size
    if len(steps) > 1 or any(abs(step) < extent or step % 16 for step in steps) or min(at) % 16:
        return None
    storages = {each.untyped_storage().data_ptr() for each in found}
    return min(at) if len(storages) == 1 else None


def test_one_look_agrees_with_the_addresses():
    draw = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(300):
        count, step = draw.randint(1, 5), draw.choice([192, 256, 260, 264, 512])
        found = members(count, step, draw.choice([torch.bfloat16, torch.float32]))
        for _ in range(draw.choice([0, 0, 1])):
            index = draw.randrange(count)
            found[index] = draw.choice(
                [
                    lambda each: each.t(),
                    lambda each: each.clone(),
                    lambda each: each[:8],
                    lambda each: each.as_strided(SHAPE, (SHAPE[1], 1), each.storage_offset() + 8),
                ]
            )(found[index])
        if draw.random() < 0.3:
            found.reverse()
        found_view, expected = arguments.addressable_view(found), lie_evenly(found)
        seen[found_view is not None] += 1
        assert (found_view is None) == (expected is None)
        if found_view is None:
            continue
        view = found_view.values
        assert view.data_ptr() == expected
        for index, each in enumerate(reversed(found) if found_view.reversed_experts else found):
            assert view[index].data_ptr() == each.data_ptr()
            assert view[index].stride() == each.stride()
    assert min(seen.values()) > 20


@pytest.mark.gpu
def test_on_a_gpu():
    """Neither a look nor a view waits for the GPU; both may be captured."""
    buffer = torch.zeros(4, *SHAPE, dtype=torch.bfloat16, device="cuda")
    found = [torch.nn.Parameter(each) for each in buffer.unbind(0)]
    apart = [each.detach().clone() for each in found]
    foreign = torch.zeros(SHAPE, dtype=torch.bfloat16)
    with no_waiting():
        assert stacking.uniform_stride(found) == 512
        assert stacking.uniform_stride(found[::-1]) == -512
        assert stacking.uniform_stride([*found[:3], foreign]) is None
        assert stacking.uniform_stride([*found[:3], found[3].detach().t()]) is None
        assert stacking.uniform_stride(apart) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        stacking.as_stacked_view(found).values.add_(1)
    graph.replay()
    assert torch.equal(buffer, torch.ones_like(buffer))


def test_a_buffer_that_was_filled_from_its_end_is_read_so():
    experts = torch.arange(24.0).view(4, 2, 3).unbind(0)[::-1]
    view = stacking.as_stacked_view(experts)
    assert view is not None
    assert view.reversed_experts
    assert all(map(torch.equal, view, experts))
    assert all(torch.equal(view[index], each) for index, each in enumerate(experts))
