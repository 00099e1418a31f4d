# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The Megatron patches on models of the experts file, driven like the published file."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from te_grouped_mlp.patches import all_patches
from te_grouped_mlp.patches.base import Mismatch
from te_grouped_mlp.patches.examine import compose
from te_grouped_mlp.patches.structure import parse
from tests.patches import drive_megatron as drive
from tests.patches import trees

PATCHES = {patch.name: patch for patch in all_patches()}
REWRITE = PATCHES["megatron_deterministic"]
SKIP = PATCHES["megatron_skip_when_active"]


def load(folder: Path, source: str, *patches: object, leave_out: object = None) -> ModuleType:
    skip = frozenset() if leave_out is None else frozenset({leave_out})
    return trees.load(compose(source.encode(), patches, skip), folder)


def test_model_has_the_fault(tmp_path: Path) -> None:
    module = load(tmp_path, trees.megatron_source())
    assert any("unit probabilities" in fault for fault in drive.rewrite_faults(module))


def test_rewrite(tmp_path: Path) -> None:
    module = load(tmp_path, trees.megatron_source(), REWRITE)
    assert drive.rewrite_faults(module) == []
    assert drive.untouched_faults(module) == []


@pytest.mark.parametrize("place", REWRITE.places)
def test_every_rewrite_edit_counts(place: str, tmp_path: Path) -> None:
    try:
        module = load(tmp_path, trees.megatron_source(), REWRITE, leave_out=(REWRITE.name, place))
        faults = drive.rewrite_faults(module)
    except (Mismatch, NameError) as error:
        faults = [repr(error)]
    assert faults


@pytest.mark.parametrize("own", [False, True])
def test_skip_where_the_op_is_active(own: bool, tmp_path: Path) -> None:
    source = trees.megatron_source(own_rewrite=own)
    before = [] if own else [REWRITE]
    module = load(tmp_path, source, *before)
    with drive.op_declares(True):
        assert drive.skip_faults(module) != []
    module = load(tmp_path, source, *before, SKIP)
    with drive.op_declares(True):
        assert drive.skip_faults(module) == []
    for declared in (False, None):
        with drive.op_declares(declared):
            if own:
                assert drive.skip_faults(module) != []
            else:
                assert drive.rewrite_faults(module) == []
    assert drive.untouched_faults(module) == []


@pytest.mark.parametrize("place", SKIP.places)
def test_every_skip_edit_counts(place: str, tmp_path: Path) -> None:
    source = trees.megatron_source()
    try:
        module = load(tmp_path, source, REWRITE, SKIP, leave_out=(SKIP.name, place))
        with drive.op_declares(True):
            faults = drive.skip_faults(module)
    except NameError as error:
        faults = [repr(error)]
    assert faults


def test_own_rewrite_needs_no_second_one() -> None:
    module = parse(trees.megatron_source(own_rewrite=True).encode())
    assert "already asks for determinism" in str(REWRITE.not_needed(module))
    assert SKIP.not_needed(module) is None


def test_ops_before_the_guards_are_refused() -> None:
    early = trees.megatron_source().replace(
        '        """Run the ops."""',
        '        """Run the ops."""\n        (ops,) = self._fused_ops\n        ops(1, 2, 3)',
    )
    with pytest.raises(Mismatch, match="runs the ops before the guards"):
        compose(early.encode(), [REWRITE])


def test_request_in_an_odd_place_is_refused() -> None:
    odd = trees.megatron_source(own_rewrite=True).replace(
        "nullcontext()", "nullcontext(self.config.deterministic_mode)"
    )
    with pytest.raises(Mismatch, match="asked for at a further place"):
        compose(odd.encode(), [SKIP])
