# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The Megatron patches on the published wheels: the real `_fused_forward`, driven."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_grouped_mlp.patches import all_patches, engine
from te_grouped_mlp.patches.base import State
from te_grouped_mlp.patches.examine import compose
from tests.patches import trees
from tests.patches.conftest import Wheels
from tests.patches.test_trees import snapshot

pytestmark = pytest.mark.slow

VERSIONS = ("0.18.0", "0.18.2", "0.19.0", "0.19.2")
PATCHES = {p.name: p for p in all_patches() if p.name.startswith("megatron")}
DRIVER = Path(__file__).with_name("drive_megatron.py")


def run_driver(tree: Path) -> subprocess.CompletedProcess[str]:
    """Drive a tree's file in a process of its own."""
    return subprocess.run(
        [sys.executable, str(DRIVER), str(tree)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def drive(tree: Path) -> dict[str, Any]:
    """Drive a tree's file and return its report; the keys are what the fused op declares."""
    result = run_driver(tree)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    assert Path(report.pop("file")) == trees.megatron_file(tree)
    return report


@pytest.mark.parametrize("version", VERSIONS)
def test_check_apply_diff_revert(version: str, unpacked: Wheels) -> None:
    tree = unpacked("megatron-core", version)
    before = snapshot(tree)
    found = {f.patch: f for f in engine.check(tree, list(PATCHES))}
    assert {f.state for f in found.values()} == {State.APPLICABLE}
    assert {f.reason for f in found.values()} == {f"proven for {version}"}
    text = engine.diff(tree, list(PATCHES))
    engine.apply(tree)
    compile(trees.megatron_file(tree).read_bytes(), "experts.py", "exec")
    assert engine.diff(tree, list(PATCHES)) == text
    engine.revert(tree)
    assert snapshot(tree) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_fault_before_and_gone_after(version: str, unpacked: Wheels) -> None:
    tree = unpacked("megatron-core", version)
    before = drive(tree)
    assert all("the op did not get unit probabilities" in r["rewrite"] for r in before.values())
    engine.apply(tree, ["megatron_deterministic"])
    for report in drive(tree).values():
        assert report["rewrite"] == []
        assert report["untouched"] == []
        assert report["skip"] != []
    engine.apply(tree)
    after = drive(tree)
    assert after["True"]["skip"] == []
    assert all(report["untouched"] == [] for report in after.values())
    for declared in ("None", "False"):
        assert after[declared]["rewrite"] == []
        assert after[declared]["skip"] != []


@pytest.mark.parametrize(
    ("name", "place"), [(p.name, place) for p in PATCHES.values() for place in p.places]
)
def test_every_edit_counts(name: str, place: str, unpacked: Wheels) -> None:
    tree = unpacked("megatron-core", VERSIONS[-1])
    file = trees.megatron_file(tree)
    source = file.read_bytes()
    patches = list(PATCHES.values())[: 1 + list(PATCHES).index(name)]
    file.write_bytes(compose(source, patches, frozenset({(name, place)})))
    result = run_driver(tree)
    if result.returncode != 0:
        assert "NameError" in result.stderr
        return
    report = json.loads(result.stdout)
    declared, key = ("False", "rewrite") if name == "megatron_deterministic" else ("True", "skip")
    assert report[declared][key] != []
