# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the Triton kernels of MXFP8 with the C++ ones, byte for byte.

    TRITON_INTERPRET=1 python -m tests.op.block_scale_cases

runs every case on CPU tensors in Triton's interpreter; on a GPU the tests call `check` themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.csrc import calls
from tests.csrc.naive_mxfp8 import POISON

AXES = ("row", "column")
NO_GROUPS = None


@dataclass(frozen=True)
class Case:
    """One matrix: its shape, how its rows are divided, and how it is quantized."""

    rows: int
    cols: int
    splits: tuple[int, ...] | None = NO_GROUPS
    members: int = 1
    e5m2: bool = False
    swizzled: bool = True
    two_d: bool = False
    nan_in_scale: bool = False
    dtype: torch.dtype = torch.bfloat16
    kind: str = "special"
    extra_stride: int = 0

    @property
    def id(self) -> str:
        rows = "+".join(map(str, self.splits)) + f"of{self.rows}" if self.splits else self.rows
        flags = [n for n in ("e5m2", "two_d", "nan_in_scale") if getattr(self, n)]
        layout = "swizzled" if self.swizzled else "compact"
        names = [self.members, rows, self.cols, layout, *flags, str(self.dtype)[6:], self.kind]
        return "-".join(map(str, names)) + f"-{self.extra_stride}" * bool(self.extra_stride)


SMALL = (
    Case(384, 160, (128, 0, 128, 0)),
    Case(384, 32, (0, 0, 384), swizzled=False, e5m2=True, dtype=torch.float32, kind="bits"),
    Case(256, 128, (128,), nan_in_scale=True, kind="bits", extra_stride=8),
    Case(192, 96, members=2, dtype=torch.float16, kind="bits", e5m2=True),
    Case(160, 288, two_d=True, dtype=torch.float32, kind="wide"),
    Case(96, 64, members=3, swizzled=False, two_d=True, nan_in_scale=True, extra_stride=3),
    Case(128, 160, (0, 0), kind="normal"),
)


def source_of(case: Case, device: str) -> torch.Tensor:
    """The case's matrix, its rows apart as far as the case says; NaN past the groups' rows."""
    x = calls.sample(case.rows, case.cols, case.dtype, case.kind, seed=7)
    if case.splits is not None:
        x[sum(case.splits) :] = float("nan")
    wide = torch.zeros(case.rows, case.cols + case.extra_stride, dtype=case.dtype, device=device)
    wide[:, : case.cols] = x
    return wide[:, : case.cols]


def _per_member(case: Case, x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.split(case.rows // case.members))


def expected(case: Case, x: torch.Tensor, swizzled: bool) -> dict[str, torch.Tensor]:
    """Buffers of the C++ kernels, flat, and the values that the bytes stand for."""
    fp8 = int(case.e5m2)
    splits = None if case.splits is None else list(case.splits)
    found: dict[str, list[torch.Tensor]] = {}
    for part in _per_member(case, x):
        buffers = calls.quantize(
            part, fp8, swizzled=swizzled, splits=splits, two_d=case.two_d,
            nan_in_scale=case.nan_in_scale,
        )  # fmt: skip
        for axis, name in enumerate(AXES):
            data, scale = buffers[2 * axis : 2 * axis + 2]
            value = calls.dequantize(data, scale, fp8, axis, swizzled, torch.bfloat16, splits)
            for key, buffer in (("data", data), ("scale", scale), ("values", value)):
                found.setdefault(f"{name}_{key}", []).append(buffer.reshape(-1))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _same(case: Case, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    got = got.reshape(-1).cpu()
    if name.endswith("values"):
        # A NaN is any NaN there.
        got, want = (torch.where(t.isnan(), torch.full_like(t, -7.0), t) for t in (got, want))
    left, right = got.view(torch.uint8), want.view(torch.uint8)
    wrong = torch.nonzero(left != right).flatten()
    assert wrong.numel() == 0, f"{case.id}: {name} differs at {wrong.numel()} bytes: {wrong[:8]}"


def check(case: Case, device: str = "cpu") -> None:
    """Assert that every function gives the bytes of the C++ kernels, in memory full of POISON."""
    from te_grouped_mlp.op.kernels import block_scale

    x = source_of(case, device)
    host = x.cpu()
    want = expected(case, host, case.swizzled)
    ends = None
    if case.splits is not None:
        ends = torch.tensor(case.splits).cumsum(0).int().to(device)

    def poisoned(size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return calls.poisoned((size,), dtype).to(device)

    got = {name: poisoned(one.numel(), one.dtype) for name, one in want.items()}
    assert all(bool((one.view(torch.uint8) == POISON).all()) for one in got.values())
    block_scale.quantize(
        x, ends, members=case.members, **got, e5m2=case.e5m2, swizzled=case.swizzled,
        two_d=case.two_d, nan_in_scale=case.nan_in_scale,
    )  # fmt: skip
    for name, buffer in got.items():
        _same(case, name, buffer, want[name])
    splits = None if case.splits is None else list(case.splits)
    moved = expected(case, host, not case.swizzled)
    for axis, name in enumerate(AXES):
        data, scale = got[f"{name}_data"], got[f"{name}_scale"]
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            out = poisoned(x.numel(), dtype).view(x.shape)
            block_scale.dequantize(
                data, scale, ends, out, axis_column=bool(axis), members=case.members,
                swizzled=case.swizzled, e5m2=case.e5m2,
            )  # fmt: skip
            exact = [
                calls.dequantize(d.view(-1, case.cols), s, int(case.e5m2), axis, case.swizzled,
                                 dtype, splits)
                for d, s in zip(data.cpu().chunk(case.members), scale.cpu().chunk(case.members),
                                strict=True)
            ]  # fmt: skip
            _same(case, f"dequantized {name}", out, torch.cat(exact).reshape(-1))
        out = poisoned(scale.numel())
        block_scale.swizzle(
            scale, ends, case.rows, case.cols, out, axis_column=bool(axis), members=case.members,
            inverse=case.swizzled,
        )  # fmt: skip
        _same(case, f"moved {name} scales", out, moved[f"{name}_scale"])


def check_pairs(device: str = "cpu") -> None:
    """Assert that pairs are quantized like the two matrices that they interleave, in place too."""
    from te_grouped_mlp.op.kernels import block_scale

    # Far apart in size, so that a block of both parts has another scale.
    gate, linear = (
        source_of(Case(384, 96, (128, 128), kind="wide"), device) * f for f in (1.0, 2.0**-9)
    )
    pairs = torch.stack([gate, linear], 2).view(384, 192)
    ends = torch.tensor([128, 256], dtype=torch.int32, device=device)
    wanted = [torch.empty_like(one) for one in (gate, linear, pairs)]
    block_scale.quantize(gate, ends, row_values=wanted[0])
    block_scale.quantize(linear, ends, row_values=wanted[1])
    block_scale.quantize(pairs, ends, column_values=wanted[2])
    column = torch.empty_like(pairs)
    block_scale.quantize(
        pairs, ends, row_values=pairs, column_values=column, gate_linear_interleaved=True
    )
    assert torch.equal(pairs[:256].view(256, 96, 2).unbind(2)[0], wanted[0][:256])
    assert torch.equal(pairs[:256].view(256, 96, 2).unbind(2)[1], wanted[1][:256])
    assert torch.equal(column[:256], wanted[2][:256])


def check_stray_ends(device: str = "cpu") -> None:
    """Assert that row ends of nonsense, which no host has read, lead to no write past a buffer."""
    from te_grouped_mlp.op.kernels import block_scale

    room = 1 << 16
    for rows, cols, ends in (
        (128, 128, (56, 2**31 - 1)),
        (256, 96, (56, 256)),
        (384, 288, (-500, 128, 10**6)),
        (256, 32, (384, 100)),
    ):
        src = torch.ones(rows, cols, dtype=torch.bfloat16, device=device)
        sizes = rows * cols, *block_scale._scale_bytes(rows, cols, 1)
        names = {"row_data": 0, "row_scale": 1, "column_data": 0, "column_scale": 2}
        raw = {
            name: torch.full((2 * room + sizes[size],), POISON, dtype=torch.uint8, device=device)
            for name, size in names.items()
        }
        outputs = {name: buffer[room:-room] for name, buffer in raw.items()}
        stray = torch.tensor(ends, dtype=torch.int32, device=device)
        block_scale.quantize(src, stray, **outputs)
        values = torch.empty(rows, cols, dtype=torch.bfloat16, device=device)
        block_scale.dequantize(
            outputs["column_data"], outputs["column_scale"], stray, values, axis_column=True
        )
        for name, buffer in raw.items():
            outside = torch.cat((buffer[:room], buffer[-room:]))
            assert (outside == POISON).all(), (name, rows, cols, ends)


def main() -> None:
    """Check every small case."""
    for case in SMALL:
        check(case)
    check_pairs()
    check_stray_ends()
    print(f"{len(SMALL)} cases")  # noqa: T201


if __name__ == "__main__":
    main()
