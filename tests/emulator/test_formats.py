# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversions, against a search for the nearest value and the hash of a GPU's results."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import pytest

from te_grouped_mlp.emulator import formats
from te_grouped_mlp.emulator.codegen import TYPES, expression

F32, U32 = np.float32, np.uint32

# SHA-256 of the results of an H200 over `_inputs`: the first half, which is enough to tell.
_GPU = {
    "cvt.rn.bf16x2.f32": "3669ca0ce64e1ee57a044c2968949374",
    "cvt.rz.bf16x2.f32": "857739fb27b73017d73647a1eaffe3a4",
    "cvt.rn.f16x2.f32": "38f1f54819240a5cd47f0eed6a99630c",
    "cvt.rn.satfinite.e4m3x2.f32": "be31b9d051581821190802f00c7fa5bf",
    "cvt.rn.satfinite.e5m2x2.f32": "2a94b9e2b7ef40826db2faad2abe4048",
    "cvt.rn.f16x2.e4m3x2": "bc2a4bb7c0a27718211ee725ecf57a50",
    "cvt.rn.f16x2.e5m2x2": "fd3a673cbf5f1c28fe90d2e71e95e279",
    "cvt.rn.satfinite.e4m3x2.f16x2": "e23983f2722d93b556d046e8b546550f",
    "cvt.rna.tf32.f32": "e91279862e20f30c902a257772dd3dc1",
    "cvt.rzi.s32.f32": "e9a2d4bbef94ccc86aa68d2f248867f0",
    "cvt.rni.f32.f32": "7ac416a31c31c8e3bb57fd4575daf201",
    "cvt.rpi.f32.f32": "286450142ca32dd1298ef64fffce900a",
    "cvt.rmi.f32.f32": "9950eddc6544c1ed2cc98034d1fb6465",
    "cvt.rn.relu.bf16x2.f32": "677243a695648555e4906f49391763f3",
    "max.NaN.f32": "839c6ab8280f7f3e8968aa39a2aed364",
    "max.f32": "4e43c13ffccf5cd1e2a86cab5e6dba70",
    "min.f32": "e7105495689c781f2870ec3215284f89",
    "mul.ftz.f32": "4590ffc79c08f4f89457d7d518db82b0",
    "fma.rn.ftz.f32": "6996dc2b2a39ab725c80d1a2be417e02",
    "fma.rn.f32": "6996dc2b2a39ab725c80d1a2be417e02",
    "fma.rn.bf16x2": "69bae33805cf940658d328f141180c02",
    "abs.bf16x2": "dcae026be433263233f05c74fe02d21b",
    "div.rn.f32": "a97d754a8b6bd10ab4dd4b0789fe924b",
    "add.rn.f32": "4f4a9fcb64f3950c12fe4460d3f49897",
    "add.ftz.f32": "ade034202c59b063d9bd4e5225ddcaeb",
}


@cache
def _inputs() -> np.ndarray:
    """Return every bf16, a million random words and half a million normal values, as bits."""
    random = np.random.default_rng(0)
    every = np.arange(65536, dtype=U32) << 16
    words = random.integers(0, 2**32, 1 << 20, dtype=U32)
    return np.concatenate([every, words, random.standard_normal(1 << 19).astype(F32).view(U32)])


def _operands(op: str) -> tuple[np.ndarray, ...]:
    """Return what the GPU was given."""
    inputs = _inputs()
    if op.endswith((".e4m3x2", ".e5m2x2", ".f16x2")):
        inputs = np.arange(65536, dtype=U32)
    second = {"max.NaN.f32": 0, "max.f32": 0, "min.f32": 0x7F800000, "mul.ftz.f32": 0x3F000000,
              "add.rn.f32": 0x3F800001, "add.ftz.f32": 0x00400000}  # fmt: skip
    one = np.full_like(inputs, 0x3F800000)
    if op in second:
        return inputs, np.full_like(inputs, second[op])
    if op == "div.rn.f32":
        return one, inputs
    if op.startswith("fma"):
        return inputs, inputs, inputs if "bf16" in op else one
    return inputs, inputs


@pytest.mark.parametrize("op", _GPU)
def test_results_are_those_of_a_gpu(op: str) -> None:
    operands = _operands(op)
    if TYPES[op.rpartition(".")[2]][1] == 2:
        operands = tuple(o.astype(np.uint16) for o in operands)
    got = np.asarray(expression(op)(*operands)).astype(U32)
    if op.endswith(".f32") and not op.startswith(("cvt.rn.", "cvt.rz.", "cvt.rna", "cvt.rzi.s32")):
        # numpy keeps the payload of a NaN; the GPU has one NaN.
        got = np.where(np.isnan(got.view(F32)), U32(0x7FFFFFFF), got)
    assert hashlib.sha256(got.tobytes()).hexdigest()[:32] == _GPU[op]


@pytest.mark.parametrize(
    ("op", "bound"),
    [
        ("ex2.approx.ftz.f32", 2.0**-22),
        ("rcp.approx.ftz.f32", 2.0**-23),
        ("tanh.approx.f32", 2.0**-10),
    ],
)
def test_approximations_keep_the_bound_of_the_isa(op: str, bound: float) -> None:
    x = np.linspace(-20, 20, 4001).astype(F32)[1::2]
    exact = {"ex2": np.exp2, "rcp": np.reciprocal, "tan": np.tanh}[op[:3]](x.astype(np.float64))
    got = expression(op)(x.view(U32)).view(F32)
    assert (np.abs(got - exact) <= bound * np.abs(exact)).all()


@pytest.mark.parametrize(
    ("table", "narrow"),
    [
        (formats.E4M3, formats.narrow_e4m3),
        (formats.E5M2, formats.narrow_e5m2),
        (formats.E2M1, formats.narrow_e2m1),
    ],
    ids=["e4m3", "e5m2", "e2m1"],
)
def test_narrowing_finds_the_nearest(table: np.ndarray, narrow) -> None:  # noqa: ANN001
    half = table[: len(table) // 2]
    codes = np.flatnonzero(np.isfinite(half))
    values = half[codes].astype(np.float64)
    random = np.random.default_rng(2)
    middle = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, middle, middle * (1 + 1e-6), middle * (1 - 1e-6), [values[-1] * 9]])
    x = np.concatenate([x, random.standard_normal(999) * values[-1] / 4]).astype(F32)
    distance = np.abs(np.abs(x.astype(np.float64))[:, None] - values)
    best = distance.min(axis=1, keepdims=True)
    # Of two that are as near, the even code.
    expected = np.where(distance == best, codes + 1000 * (codes % 2), 9999).min(axis=1) % 1000
    got = narrow(x)
    assert (got & (len(half) - 1) == expected).all()
    assert ((got >= len(half)) == np.signbit(x)).all()


def test_powers_of_two_are_rounded_up_or_cut() -> None:
    x = np.array([0, 1e-45, 2.0**-127, 2.0**-126, 1, 1.5, -3, 3e38, np.inf, np.nan], F32)
    assert formats.narrow_e8m0(x, True).tolist() == [0, 0, 0, 1, 127, 128, 129, 255, 255, 255]
    assert formats.narrow_e8m0(x, True, True).tolist() == [0, 0, 0, 1, 127, 128, 129, 254, 254, 255]
    assert formats.narrow_e8m0(x, False, True).tolist() == [
        0,
        0,
        0,
        1,
        127,
        127,
        128,
        254,
        254,
        255,
    ]


def test_fma_rounds_once() -> None:
    # In float64 the sum is a tie of float32, which the lost part of c decides.
    a, b, c = F32(1 + 2.0**-12), F32(1 + 2.0**-12), F32(2.0**-60)
    assert formats.fma(a, b, c) == F32(1 + 2.0**-11 + 2.0**-23)
    assert formats.fma(a, b, -c) == F32(1 + 2.0**-11)


def test_minima_and_maxima_of_zeros_and_nans() -> None:
    plus, minus, nan = (np.array([v], F32).view(U32) for v in (0.0, -0.0, np.nan))
    assert expression("max.f32")(minus, plus)[0] == 0
    assert expression("min.f32")(plus, minus)[0] == 0x80000000
    assert expression("max.f32")(nan, plus)[0] == 0
    assert expression("max.NaN.f32")(nan, plus)[0] == 0x7FFFFFFF


def test_the_unit_interval_holds_no_nan() -> None:
    values = np.array([-1.0, -0.0, 0.25, 1.0, 7.0, np.inf, -np.inf, np.nan], np.float32)
    assert formats.unit(values).tolist() == [0.0, 0.0, 0.25, 1.0, 1.0, 1.0, 0.0, 0.0]
