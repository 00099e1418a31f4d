# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice of the SIMD level."""

import pytest

from te_grouped_mlp import _C


def test_the_best_level_is_used_and_can_be_changed():
    levels = _C.available_simd_levels()
    assert levels[0] == "baseline"
    assert levels == [name for name in ("baseline", "avx2", "avx512") if name in levels]
    assert _C.simd_level() == levels[-1]
    try:
        for level in levels:
            _C.set_simd_level(level)
            assert _C.simd_level() == level
    finally:
        _C.set_simd_level(levels[-1])


def test_an_unknown_level_is_refused():
    before = _C.simd_level()
    with pytest.raises(ValueError, match=r"name is 'avx1024', allowed on this CPU: baseline"):
        _C.set_simd_level("avx1024")
    assert _C.simd_level() == before
