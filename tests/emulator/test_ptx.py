# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The text: what is read, and what is refused by its line before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from te_grouped_mlp.emulator import GlobalMemory, Launch, execute, parameter_sizes
from te_grouped_mlp.emulator.forms import FORMS
from tests.emulator.kernels import launch, line_of, run


def test_parameters_have_the_sizes_of_their_types() -> None:
    text = (
        ".visible .entry k(\n.param .align 8 .b8 a[20],\n.param .u64 .ptr .global .align 16 b,\n"
        ".param .f32 c,\n.param .b8 d\n)\n{\nret;\n}\n.entry other()\n{\nret;\n}"
    )
    assert parameter_sizes(text, "k") == (20, 8, 4, 1)
    assert parameter_sizes(text, "other") == ()
    with pytest.raises(ValueError, match=r"'none'.*'k', 'other'"):
        parameter_sizes(text, "none")


def test_inner_scopes_have_names_of_their_own() -> None:
    out = np.zeros(2, np.uint32)
    body = """
    mov.b32 %r1, 1;
    { .reg .b32 %r1; mov.b32 %r1, 7; LOOP: add.s32 %r1, %r1, 1;
      { .reg .pred p; setp.lt.s32 p, %r1, 9; @p bra LOOP; } st.global.b32 [%d0], %r1; }
    { .reg .v2 .b32 pair; mov.b32 pair.x, 3; mov.b32 pair.y, 4; LOOP: add.s32 %r1, %r1, pair.y; }
    st.global.b32 [%d0+4], %r1;
    """
    run(body, out)
    assert out.tolist() == [9, 5]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction"),
        ("add.cc.s32 %r1, %r2, %r3;", "unknown instruction"),
        ("add.s32 %r1, %r2;", "2 operands instead of 3"),
        ("max.f32 %r1, %r2, %r3, %r4, %r5;", "5 operands"),
        ("add.s32 %r1, %r2, [%r3];", "operand b is a Address"),
        ("ld.shared.v4.b32 {%r1, %r2}, [%s];", "2 destinations"),
        ("st.shared.v2.b32 [%s], {%r1, %r2, %r3};", "3 values"),
        ("mov.b32 %r1, %nosuch;", "unknown register"),
        ("mov.b32 %r1, nosuch;", "unknown name"),
        ("@%p1 bra NOWHERE;", "unknown label"),
        ("add.s64 %d1, %r1, %d2;", "%r1 is too narrow"),
        ("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%d1, {%r1, %r2}], [%s];",
         "2 coordinates"),
    ],
)  # fmt: skip
def test_what_is_unknown_is_refused_by_its_line(line: str, why: str) -> None:
    body = f"mov.b32 %r9, 1;\n{line}"
    with pytest.raises(NotImplementedError, match=why) as error:
        run(body)
    assert f"PTX line {line_of(body, line)}: " in str(error.value)


def test_every_form_names_its_section() -> None:
    assert len(FORMS) > 1000
    assert all(form.section.startswith("9.7.") for form in FORMS.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "grid="),
        ({"parameters": (b"1234",)}, "parameters of"),
        ({"dynamic_shared_bytes": 1 << 20}, "dynamic_shared_bytes="),
        ({"block": (0, 1, 1)}, "block="),
        ({"entry": "other"}, "entry='other'"),
    ],
)
def test_a_launch_that_contradicts_itself_is_refused(change: dict, message: str) -> None:
    plain = launch("", ())
    with pytest.raises(ValueError, match=message):
        execute(Launch(**{**vars(plain), **change}), GlobalMemory())
