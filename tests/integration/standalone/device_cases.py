# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What tex's functions give on a device, to be compared with what they give on the CPU.

    TRITON_INTERPRET=1 python -m tests.integration.standalone.device_cases

does so without a GPU: CPU tensors take the GPU's way through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.integration.standalone import naive
from tests.integration.standalone.test_quantize import make_matrix, make_quantizer

SPLITS = (128, 0, 256)
ROWS, COLUMNS = 512, 160
BF16 = 6
"""TE's number of bfloat16."""
Results = dict[str, torch.Tensor]


def dense(tensor: Any, name: str = "") -> Results:
    """The buffers of an MXFP8 tensor that are there."""
    fields = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    found = {f"{name}{field}": getattr(tensor, field) for field in fields}
    return {field: buffer for field, buffer in found.items() if buffer is not None}


def grouped(storage: Any) -> Results:
    """The buffers of grouped storage that are there."""
    fields = ("rowwise_data", "scale_inv", "columnwise_data", "columnwise_scale_inv")
    found = {field: getattr(storage, field) for field in fields}
    return {field: buffer for field, buffer in found.items() if buffer is not None}


def matrix(device: str, rows: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Finite values and special ones; NaN past the groups."""
    out = make_matrix(rows, COLUMNS, dtype, seed=rows)
    if rows == ROWS:
        out[sum(SPLITS) :] = float("nan")
    return out.to(device)


def counts(device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(SPLITS, dtype=dtype).to(device)


def quantize(tex: Any, device: str) -> Results:
    x = matrix(device, 192)
    found = dense(tex.quantize(x, make_quantizer(tex, swizzled=True)), "swizzled")
    found |= dense(tex.quantize(x.float(), make_quantizer(tex, fp8=naive.E5M2)), "e5m2")
    found |= dense(tex.quantize(x, make_quantizer(tex, rowwise=False)), "columns")
    found |= dense(tex.quantize(x.view(2, 96, COLUMNS), make_quantizer(tex, two_d=True)), "two_d")
    empty = tex.quantize(x[:0], make_quantizer(tex))
    assert empty._rowwise_data.shape == (0, COLUMNS)
    return found


def quantize_into(tex: Any, device: str) -> Results:
    quantizer = make_quantizer(tex, swizzled=True)
    output = tex.create_empty_quantized_tensor(
        quantizer, [96, COLUMNS], torch.bfloat16, torch.device(device), False
    )
    held = output._rowwise_data
    on, off = (torch.full((1,), value, device=device) for value in (1.0, 0.0))
    tex.quantize(matrix(device, 96), quantizer, output, off)
    assert output._rowwise_data is held
    tex.quantize(torch.ones_like(matrix(device, 96)), quantizer, output, on)
    return dense(output)


def split_quantize(tex: Any, device: str) -> Results:
    quantizers = [make_quantizer(tex, swizzled=True) for _ in range(3)]
    parts = tex.split_quantize(matrix(device, 192), [64, 0, 128], quantizers)
    return dense(parts[0], "first") | dense(parts[2], "last")


def dequantize(tex: Any, device: str) -> Results:
    x = matrix(device, 96)
    found = {}
    for swizzled in (False, True):
        for rowwise in (False, True):
            quantizer = make_quantizer(
                tex, rowwise=rowwise, columnwise=not rowwise, swizzled=swizzled
            )
            for otype in (4, 5, BF16):
                result = tex.dequantize(tex.quantize(x, quantizer), otype)
                found[f"{swizzled}{rowwise}{otype}"] = result
    return found


def swizzle(tex: Any, device: str) -> Results:
    quantized = tex.quantize(matrix(device, 192), make_quantizer(tex))
    tex.swizzle_scales_for_gemm_(quantized)
    return dense(quantized)


def pack(tex: Any, device: str) -> Results:
    found = {}
    for words in ("rowwise", "columnwise"):
        weights = [tex.quantize(matrix(device, r), make_quantizer(tex)) for r in (160, 160)]
        data = [getattr(one, f"_{words}_data") for one in weights]
        scales = [getattr(one, f"_{words}_scale_inv") for one in weights]
        pointers, where, swizzled = (
            tex.grouped_mlp_experimental.swizzle_scales_and_pack_ptrs_for_discrete_weights(  # noqa: E501
                data, scales, f"mxfp8_{words}", torch.device(device)
            )
        )
        assert pointers.tolist() == [one.data_ptr() for one in data]
        assert (where - swizzled.data_ptr()).tolist() == [0, swizzled.numel() // 2]
        found[words] = swizzled
    return found


def group_quantize(tex: Any, device: str) -> Results:
    quantizer = make_quantizer(tex, swizzled=True)
    storage = tex.group_quantize(matrix(device), quantizer, len(SPLITS), counts(device))
    return grouped(storage) | {"offsets": storage.tensor_offsets}


def group_quantize_equal(tex: Any, device: str) -> Results:
    x, quantizer = matrix(device, 384), make_quantizer(tex, swizzled=True)
    storage = tex.group_quantize(x, quantizer, 3, None)
    on = torch.ones(1, device=device)
    tex.group_quantize(torch.ones_like(x), quantizer, 3, None, noop_flag=on, output=storage)
    parts = grouped(tex.group_quantize(x, make_quantizer(tex), 4, None))
    return grouped(storage) | {f"part tiles {name}": value for name, value in parts.items()}


def group_dequantize(tex: Any, device: str) -> Results:
    found = {}
    for rowwise in (False, True):
        quantizer = make_quantizer(tex, rowwise=rowwise, columnwise=not rowwise)
        storage = tex.group_quantize(matrix(device), quantizer, len(SPLITS), counts(device))
        found[f"some {rowwise}"] = tex.group_dequantize(storage, BF16).rowwise_data
        storage = tex.group_quantize(matrix(device, 384), quantizer, 3, None)
        found[f"equal {rowwise}"] = tex.group_dequantize(storage, 4).rowwise_data
        storage = tex.group_quantize(matrix(device, 384), quantizer, 4, None)
        found[f"part tiles {rowwise}"] = tex.group_dequantize(storage, 4).rowwise_data
    return found


def requantize(tex: Any, device: str) -> Results:
    quantizer = make_quantizer(tex, columnwise=False)
    x = matrix(device)[:, :128].contiguous()
    storage = tex.group_quantize(x, quantizer, len(SPLITS), counts(device))
    both = make_quantizer(tex, swizzled=True)
    values = tex.group_requantize_inplace(
        storage, both, len(SPLITS), counts(device), BF16, return_dequantized=True
    )
    return grouped(storage) | {"values": values}


def grouped_swizzle(tex: Any, device: str) -> Results:
    storage = tex.group_quantize(matrix(device), make_quantizer(tex), len(SPLITS), counts(device))
    tex.grouped_swizzle_for_gemm(storage, True, True)
    equal = tex.group_quantize(matrix(device, 384), make_quantizer(tex), 3, None)
    tex.grouped_swizzle_for_gemm(equal, True, True)
    parts = tex.group_quantize(matrix(device, 384), make_quantizer(tex), 4, None)
    tex.grouped_swizzle_for_gemm(parts, True, True)
    found = {f"equal {name}": value for name, value in grouped(equal).items()}
    found |= {f"part tiles {name}": value for name, value in grouped(parts).items()}
    return grouped(storage) | found


def offsets(tex: Any, device: str) -> Results:
    found = {"one": tex.splits_to_offsets(counts(device), 96)}
    for dtype in (torch.int32, torch.int64):
        for many in (1, 3, 70):
            given = counts(device, dtype).repeat(many)
            sizes, results = tex.splits_to_offsets_multi(
                given, torch.device(device), strides=[1, 1, 640, 48],
                include_leading_zero=[False, True, True, False],
                dtypes=[torch.int32, torch.int64, torch.int64, torch.int32], bulk_allocate=True,
            )  # fmt: skip
            assert all(result.data_ptr() % 16 == 0 for result in results)
            found |= {f"{dtype}{many}{index}": one for index, one in enumerate([sizes, *results])}
    return found


def sums(tex: Any, device: str) -> Results:
    """Sums of rows, in an order that the devices do not share: near, not equal."""
    from transformer_engine.pytorch.triton import grouped_dbias_dscales as helpers

    x = torch.nan_to_num(matrix("cpu"), posinf=1.0, neginf=1.0).to(device)
    x[sum(SPLITS) :] = float("nan")
    edges = torch.tensor([0, 128, 128, 384]).to(device)
    scales = (torch.arange(ROWS) / ROWS).to(device)
    bias = (torch.arange(3 * COLUMNS) / 7.0).view(3, COLUMNS).to(device)
    quantizer = make_quantizer(tex)
    dbias, dscales = helpers.compute_grouped_dbias_dscales(x, scales, bias, edges)
    return {
        "dense": tex.bgrad_quantize(x[:384], quantizer)[0],
        "grouped": tex.bgrad_group_quantize(x, quantizer, 3, counts(device))[1],
        "dbias": helpers.compute_grouped_dbias(x, edges, 3),
        "scaled": dbias,
        "dscales": dscales,
    }


CASES: tuple[Callable[[Any, str], Results], ...] = (
    quantize, quantize_into, split_quantize, dequantize, swizzle, pack, group_quantize,
    group_quantize_equal, group_dequantize, requantize, grouped_swizzle, offsets,
)  # fmt: skip


def same(got: Results, want: Results) -> None:
    """Assert equal bytes."""
    assert got.keys() == want.keys()
    for name, one in want.items():
        other = got[name].cpu()
        assert (other.shape, other.dtype) == (one.shape, one.dtype), name
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (other, one))
        assert torch.equal(a, b), f"{name} differs at {torch.nonzero(a != b).flatten()[:8]}"


def near(got: Results, want: Results) -> None:
    """Assert equal up to the order of fp32 sums, and the rounding to bf16."""
    for name, one in want.items():
        scale = one.abs().max().item()
        bound = 2**-7 if one.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(got[name].cpu(), one, rtol=bound, atol=bound * scale)


class PlainSums:
    """The kernels of reductions in plain torch: not every Triton interprets its loops."""

    @staticmethod
    def column_sums(src: torch.Tensor, scale: Any, ends: torch.Tensor) -> torch.Tensor:
        rows = src.double() if scale is None else src.double() * scale.double()[:, None]
        edges = [0, *ends.tolist()]
        pairs = zip(edges, edges[1:], strict=False)
        return torch.stack([rows[a:b].sum(0) for a, b in pairs]).float()

    @staticmethod
    def row_dots(src: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        group = torch.bucketize(torch.arange(src.shape[0]), ends.long(), right=True)
        live = group < ends.numel()
        group = group.clamp(max=ends.numel() - 1)
        dots = (src.double() * bias.double()[group]).sum(1).float()
        return torch.where(live, dots, torch.zeros_like(dots))


def main() -> None:
    """Compare every case on the CPU with itself through the interpreter."""
    import te_grouped_mlp

    te_grouped_mlp.activate()
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    from te_grouped_mlp.integration.standalone import on_gpu
    from te_grouped_mlp.op.kernels import group_reductions
    from te_grouped_mlp.op.tensors import memory

    def addresses(values: list[int], device: torch.device) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    with memory.poisoned(0xFF):
        want = {case: case(tex, "cpu") for case in CASES}
        want_sums = sums(tex, "cpu")
        on_gpu.serves, on_gpu.addresses = lambda *given: True, addresses  # noqa: ARG005
        for case in CASES:
            same(case(tex, "cpu"), want[case])
        group_reductions._kernels = lambda _values: PlainSums
        near(sums(tex, "cpu"), want_sums)
    assert on_gpu.block_scale.cache_info().hits > len(CASES)
    print(f"{len(CASES)} cases")  # noqa: T201


if __name__ == "__main__":
    main()
