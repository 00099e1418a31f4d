# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Offsets, address tables, shared buffers, and the sums behind the bias gradients."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.standalone import naive
from tests.support.gpu import no_waiting

COUNTS = st.lists(st.integers(0, 2000), min_size=1, max_size=9)


@given(counts=COUNTS, width=st.integers(1, 5000))
def test_splits_to_offsets(tex, counts, width):
    got = tex.splits_to_offsets(torch.tensor(counts), width)
    assert got.dtype == torch.int64
    assert got.tolist() == [0, *(end * width for end in accumulate(counts))]


@settings(deadline=None)
@given(
    counts=COUNTS,
    wide=st.booleans(),
    columns=st.lists(
        st.tuples(st.integers(1, 300), st.booleans(), st.sampled_from([torch.int32, torch.int64])),
        min_size=1,
        max_size=6,
    ),
    bulk=st.booleans(),
)
def test_splits_to_offsets_multi(tex, counts, wide, columns, bulk):
    splits = torch.tensor(counts, dtype=torch.int64 if wide else torch.int32)
    same, results = tex.splits_to_offsets_multi(
        splits,
        torch.device("cpu"),
        strides=[column[0] for column in columns],
        include_leading_zero=[column[1] for column in columns],
        dtypes=[column[2] for column in columns],
        bulk_allocate=bulk,
    )
    assert (same is splits) == wide
    assert same.dtype == torch.int64
    assert same.tolist() == counts
    for got, (stride, zero, dtype) in zip(results, columns, strict=True):
        assert got.dtype == dtype
        assert got.tolist() == [0] * zero + [end * stride for end in accumulate(counts)]
        if bulk:
            assert got.data_ptr() % 16 == 0
            storage = got.untyped_storage().data_ptr()
            assert storage == results[0].untyped_storage().data_ptr()


def test_bulk_allocate(tex):
    shapes = [(3, 5), (0,), (7,), (2, 2, 2)]
    dtypes = [torch.uint8, torch.float32, torch.int64, torch.bfloat16]
    made = tex.bulk_allocate(shapes, dtypes, torch.device("cpu"), [1, 64, 256, 16])
    assert [tuple(one.shape) for one in made] == shapes
    assert [one.dtype for one in made] == dtypes
    for one, alignment in zip(made, [1, 64, 256, 16], strict=True):
        assert one.numel() == 0 or one.data_ptr() % alignment == 0
    for index, one in enumerate(made):
        one.fill_(index + 1)
    for index, one in enumerate(made):
        assert bool((one == index + 1).all())


def test_copy_data_ptrs(tex):
    tensors = [torch.empty(3), torch.empty(5)]
    got = tex.copy_data_ptrs_to_device(tensors, torch.device("cpu"))
    assert got.dtype == torch.int64
    assert got.tolist() == [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_bias_gradients(te, dtype):
    from transformer_engine.pytorch.triton.grouped_dbias_dscales import (
        compute_grouped_dbias,
        compute_grouped_dbias_dscales,
    )

    splits = [128, 0, 200]
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(400, 96, generator=generator).to(dtype)
    dy[328:] = float("nan")
    scales = torch.rand(400, generator=generator)
    bias = torch.randn(3, 96, generator=generator).to(dtype)
    offsets = torch.tensor([0, 128, 128, 328])
    parts = naive.split_rows(dy, splits)
    exact = torch.stack([naive.column_sums(part) for part in parts])
    assert torch.equal(compute_grouped_dbias(dy, offsets, 3), exact)
    held = torch.ones(3, 96)
    assert compute_grouped_dbias(dy, offsets, 3, dbias=held) is held
    assert torch.equal(held, exact + 1)

    dbias, dscales = compute_grouped_dbias_dscales(dy, scales, bias, offsets=offsets)
    weighted = naive.split_rows(dy.double() * scales[:, None].double(), splits)
    torch.testing.assert_close(
        dbias.double(), torch.stack([part.sum(0) for part in weighted]), rtol=1e-5, atol=1e-5
    )
    dots = torch.cat(
        [(part.double() * bias[index].double()).sum(1) for index, part in enumerate(parts)]
    )
    torch.testing.assert_close(dscales[:328].double(), dots, rtol=1e-5, atol=1e-5)
    assert bool((dscales[328:] == 0).all())
    again = compute_grouped_dbias_dscales(dy, scales, bias, offsets=offsets)
    assert torch.equal(again[0], dbias)
    assert torch.equal(again[1], dscales)
    with pytest.raises(ValueError, match="offsets"):
        compute_grouped_dbias(dy, torch.tensor([0, 500]), 1)
    with pytest.raises(ValueError, match="float64"):
        compute_grouped_dbias(dy, offsets, 3, dbias=held.double())


@pytest.mark.gpu
@pytest.mark.parametrize("bulk", [False, True])
def test_offsets_on_a_gpu_equal_the_cpus_without_a_wait(bulk):
    # The functions themselves: Transformer Engine need not run over them here.
    from te_grouped_mlp.integration.standalone.tex import offsets

    counts = torch.tensor([3, 0, 129, 7], dtype=torch.int32)
    options = {
        "strides": [1, 1, 640],
        "include_leading_zero": [False, True, True],
        "dtypes": [torch.int32, torch.int64, torch.int64],
        "bulk_allocate": bulk,
    }
    given, tensors = counts.cuda(), [torch.empty(3), torch.empty(5)]
    with no_waiting():
        sizes, found = offsets.splits_to_offsets_multi(given, given.device, **options)
        single = offsets.splits_to_offsets(sizes, 640)
        table = offsets.copy_data_ptrs_to_device(tensors, given.device)
    wanted_sizes, wanted = offsets.splits_to_offsets_multi(counts, counts.device, **options)
    assert sizes.tolist() == wanted_sizes.tolist()
    for got, want in zip(found, wanted, strict=True):
        assert got.is_cuda
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
        assert not bulk or got.data_ptr() % 16 == 0
    assert single.tolist() == wanted[2].tolist()
    assert table.tolist() == [tensor.data_ptr() for tensor in tensors]
