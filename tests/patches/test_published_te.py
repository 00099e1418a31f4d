# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The TE patches on the published wheels: what is written, and that each edit is in place."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_grouped_mlp.patches import all_patches, engine
from te_grouped_mlp.patches.base import Mismatch, State, Target
from te_grouped_mlp.patches.examine import compose
from tests.patches import trees
from tests.patches.conftest import Wheels
from tests.patches.test_te_models import questions
from tests.patches.test_trees import snapshot

pytestmark = pytest.mark.slow

TE = [patch for patch in all_patches() if patch.target is Target.TE]
CLAIMS = {
    version: [patch for patch in TE if version in patch.versions]
    for version in ("2.19.0", "2.20.2")
}
DENSE = "use_dense_single_group"
TOLD = (
    "_group_quantize_for_grouped_mlp",
    "_group_quantize_with_amax_for_grouped_mlp",
    "_compute_grad_params",
)


@pytest.mark.parametrize("version", CLAIMS)
def test_check_apply_diff_revert(version: str, unpacked: Wheels, tmp_path: Path) -> None:
    tree = unpacked("transformer-engine", version)
    before = snapshot(tree)
    names = {patch.name for patch in CLAIMS[version]}
    found = {f.patch: f for f in engine.check(tree)}
    assert {n for n, f in found.items() if f.state is State.APPLICABLE} == names
    assert {f.state for n, f in found.items() if n not in names} == {State.ABSENT}
    assert {found[name].reason for name in names} == {f"proven for {version}"}
    clean = shutil.copytree(tree, tmp_path / "clean")
    text = engine.diff(tree)
    engine.apply(tree)
    patched = snapshot(tree)
    engine.apply(tree)
    assert snapshot(tree) == patched
    file = trees.te_file(tree)
    compile(file.read_bytes(), "grouped_mlp.py", "exec")
    git = shutil.which("git")
    assert git is not None
    subprocess.run([git, "apply", "-p1", "-"], input=text, text=True, cwd=clean, check=True)
    assert trees.te_file(clean).read_bytes() == file.read_bytes()
    engine.revert(tree)
    assert snapshot(tree) == before


@pytest.mark.parametrize("version", ["2.14.1", "2.17.0", "2.17.1", "2.18.0"])
def test_older_versions_have_nothing_to_repair(version: str, unpacked: Wheels) -> None:
    tree = unpacked("transformer-engine", version)
    for finding in engine.check(tree, [patch.name for patch in TE]):
        assert finding.state is State.ABSENT, finding
        assert finding.reason
    if version < "2.17":
        return
    # A dense shortcut for MXFP8 would be something to repair, in a way that nobody knows.
    file = trees.te_file(tree)
    for record in tree.glob("*.dist-info/RECORD"):
        record.unlink()
    for old in ("isinstance(quantizer, NVFP4Quantizer)", "if use_nvfp4:"):
        source = file.read_text()
        assert old in source
        file.write_text(source.replace(old, "more_than_nvfp4"))
        found = {f.patch: f.state for f in engine.check(tree)}
        assert found["te_one_decision"] is found["te_full_rows"] is State.UNKNOWN
        file.write_text(source)


def faults(source: bytes) -> Iterator[str]:
    """Yield what a reader of the patched file would miss, from Python's own syntax tree."""
    module = ast.parse(source)
    functions = {n.name: n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)}
    forward, backward = functions["fuser_forward"], functions["fuser_backward"]
    used = {n.id for n in ast.walk(module) if isinstance(n, ast.Name) and "tegm" in n.id}
    bound = {n.id for n in ast.walk(module) if isinstance(n, ast.Name) and _stores(n)}
    yield from sorted(used - bound - set(functions))
    attributes = {ast.unparse(n) for n in ast.walk(backward) if isinstance(n, ast.Attribute)}
    stored = {ast.unparse(n) for n in ast.walk(forward) if _stores(n)}
    yield from sorted(a for a in attributes if "tegm" in a and a not in stored)
    for name in TOLD:
        if DENSE not in {a.arg for a in functions[name].args.kwonlyargs}:
            yield f"{name} is not told"
        for call in _calls(module, name):
            if DENSE not in {k.arg for k in call.keywords}:
                yield f"line {call.lineno} does not tell {name}"
    yield from _decision_faults(forward, backward)


def _stores(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]


def _decision_faults(forward: ast.FunctionDef, backward: ast.FunctionDef) -> Iterator[str]:
    if sum(_stores(n) and ast.unparse(n) == DENSE for n in ast.walk(forward)) != 2:
        yield "the forward does not decide and then look at the rows"
    checks = _calls(forward, "_tegm_rows_are_full")
    if len(checks) != 1:
        yield "the rows are not checked"
    saved = [
        n
        for n in ast.walk(forward)
        if _stores(n) and ast.unparse(n).endswith(".tegm_dense_single_group")
    ]
    if len(saved) != 1:
        yield "the decision is not saved"
    decided = [
        ast.unparse(n.value)
        for n in ast.walk(backward)
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == DENSE
    ]
    if decided != ["fc1_ctx.tegm_dense_single_group"][: len(decided)] or not decided:
        yield f"the backward decides by itself: {decided}"


def _own_faults(version: str, source: bytes) -> list[str]:
    expected = 1 if version == "2.19.0" else 2  # the reset of the unit scale; 2.20.2's decision
    found = list(faults(source))
    if len(questions(source)) != expected:
        found.append(f"the group count is compared with one in lines {questions(source)}")
    text = source.decode()
    wanted = ["not _tegm_fork_in_use and GroupedMLP_CuTeGEMMGLU"]
    wanted.append("not _tegm_fork_in_use and GroupedMLP_CuTeGEMMUnary")
    if version == "2.20.2":
        wanted += [
            "(is_glu_activation(activation_op) and fc1_op.has_bias)",
            "RuntimeError(_tegm_nondeterministic(",
            "_tegm_kernel_takes_deterministic(cls.",
            ") and tegm_scales_need_grad",
            "if tegm_dprob_buffer else None",
            "update(_tegm_determinism_without_dprob(",
            "unit_activation_scale or not tegm_scales_need_grad",
        ]
    return found + [f"missing: {part}" for part in wanted if part not in text]


@pytest.mark.parametrize("version", CLAIMS)
def test_result_is_whole(version: str, unpacked: Wheels) -> None:
    tree = unpacked("transformer-engine", version)
    engine.apply(tree)
    assert _own_faults(version, trees.te_file(tree).read_bytes()) == []


@pytest.mark.parametrize("version", CLAIMS)
def test_every_edit_counts(version: str, unpacked: Wheels) -> None:
    source = trees.te_file(unpacked("transformer-engine", version)).read_bytes()
    for patch in CLAIMS[version]:
        for place in patch.places:
            try:
                mutant = compose(source, CLAIMS[version], frozenset({(patch.name, place)}))
            except Mismatch:
                continue
            assert _own_faults(version, mutant), (patch.name, place)
