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


@pytest.mark.parametrize("zero_copy", [True, False])
def test_rewrite(zero_copy: bool, tmp_path: Path) -> None:
    source = trees.megatron_source(zero_copy=zero_copy)
    before = drive.rewrite_faults(load(tmp_path, source))
    assert any("unit probabilities" in fault for fault in before)
    assert any("moe_ncclep_zero_copy" in fault for fault in before) == zero_copy
    module = load(tmp_path, source, REWRITE)
    assert drive.rewrite_faults(module) == []
    assert drive.untouched_faults(module) == []
    module = load(tmp_path, source, REWRITE, SKIP)
    with drive.op_declares(True):
        assert drive.skip_faults(module) == []


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("output_buffer", "zero_copy_out", "parameter zero_copy_out, which the guards do not know"),
        ("grad_input_buffer=None,", "**options", "parameter options, which the guards do not know"),
        ("output_buffer=None,", "", "has no parameter output_buffer, but a buffer"),
    ],
)
def test_another_way_out_is_refused(old: str, new: str, text: str) -> None:
    """What the guards cannot look at may not be there."""
    source = trees.megatron_source()
    assert old in source
    with pytest.raises(Mismatch, match=text):
        compose(source.replace(old, new).encode(), [REWRITE])


@pytest.mark.parametrize(
    "more",
    [
        "        also = ops(permuted_local_hidden_states)\n",
        "        also = self._fused_ops[0](permuted_local_hidden_states)\n",
        "        run = ops\n",
    ],
)
def test_further_use_of_the_ops_is_refused(more: str) -> None:
    source = trees.megatron_source()
    end = "        return output\n"
    with pytest.raises(Mismatch, match="the ops are used at a further place"):
        compose(source.replace(end, more + end).encode(), [REWRITE])


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
    source = trees.megatron_source()
    makes = source[source.index("        if None is self._fused_ops") :].split("        ops = ")[0]
    early = source.replace(makes, "").replace(
        "        return output\n", f"{makes}        return output\n"
    )
    assert early != source
    with pytest.raises(Mismatch, match="runs the ops before the guards"):
        compose(early.encode(), [REWRITE])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nullcontext()", "nullcontext(self.config.deterministic_mode)"),
        ("        return output\n", "        return vars(self)['deterministic_mode']\n"),
        ("        return output\n", "        wants = torch.are_deterministic_algorithms_enabled\n"),
        ("class TE", "def wants(c):\n    return c.deterministic_mode\n\nclass TE"),
    ],
)
def test_request_in_an_odd_place_is_refused(old: str, new: str) -> None:
    source = trees.megatron_source(own_rewrite=True)
    assert old in source
    with pytest.raises(Mismatch, match="asked for at a further place") as caught:
        compose(source.replace(old, new).encode(), [SKIP])
    assert len(caught.value.places) == 1
