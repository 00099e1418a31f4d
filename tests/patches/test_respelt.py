# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A place that did not change is a refusal: every edit, with its place respelt, gone or moved.

Each file is either refused or comes out whole: no question about the group count is left that is
not known, and the model's step behaves. The default suite takes each edit and each spelling once;
the slow tests take every pair, and the published files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import libcst.matchers as m
import pytest

from te_grouped_mlp.patches import all_patches, engine
from te_grouped_mlp.patches.base import Edit, Mismatch, Patch, PatchError, Target
from te_grouped_mlp.patches.examine import compose
from te_grouped_mlp.patches.structure import assigns, parse
from te_grouped_mlp.patches.te_sites import BACKWARD, FORWARD, unknown_questions
from tests.patches import respell, trees
from tests.patches.conftest import Wheels
from tests.patches.test_te_models import odd_events
from tests.patches.test_trees import snapshot

PATCHES = {patch.name: patch for patch in all_patches()}
ONE_DECISION = PATCHES["te_one_decision"]
FULL_ROWS = PATCHES["te_full_rows"]
OLD, NEW = trees.te_source("2.19.0"), trees.te_source("2.20.2")
DENSE = m.Name("use_dense_single_group")
SPELLINGS = list(respell.SPELLINGS)

EDITS = [(patch, edit) for patch in PATCHES.values() for edit in patch.edits if edit.count]
# Where 2.19.0 compares the group count; of these, where 2.20.2 reads its decision instead.
QUESTIONS = [
    edit
    for edit in ONE_DECISION.edits
    if respell.matches_at(OLD, edit, respell.ONE_GROUP) and edit.rewrite is not None
]
READERS = [edit for edit in QUESTIONS if respell.matches_at(NEW, edit, DENSE)]


def pairs(first: Sequence[Any], second: Sequence[Any], each: bool = True) -> list[Any]:
    """Every pair as a parameter; slow, but for enough of them to have each value once.

    Without `each`, for enough to have each value of the shorter list once.
    """
    count = (max if each else min)(len(first), len(second))
    chosen = {(i % len(first), i % len(second)) for i in range(count)}
    params = []
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            values = (*one, other) if isinstance(one, tuple) else (one, other)
            names = "-".join(v if isinstance(v, str) else _name(v) for v in values)
            marks = () if (i, j) in chosen else (pytest.mark.slow,)
            params.append(pytest.param(*values, id=names, marks=marks))
    return params


def _name(value: Patch | Edit) -> str:
    return value.place if isinstance(value, Edit) else value.name


def model(patch: Patch) -> str:
    """The file on which a patch is tried alone."""
    if patch.name == "megatron_skip_when_active":
        return trees.megatron_source(own_rewrite=True)
    if patch.target is Target.MEGATRON:
        return trees.megatron_source()
    return OLD if patch is ONE_DECISION else NEW


@pytest.mark.parametrize(("patch", "edit", "change"), pairs(EDITS, respell.CHANGES))
def test_place_is_gone_doubled_or_moved(patch: Patch, edit: Edit, change: str) -> None:
    source = respell.changed(model(patch), edit, change)
    with pytest.raises(Mismatch, match=r"\[.*\].*expected exactly one place, found [02]"):
        compose(source.encode(), [patch])


def whole(source: str, patches: Iterable[Patch], folder: Path) -> bool:
    """Whether a file is patched, and then without a question left and with the right step."""
    try:
        result = compose(source.encode(), list(patches))
    except Mismatch as error:
        if not error.places and "found 0" not in str(error):
            raise
        return False
    assert unknown_questions(parse(result)) == []
    assert list(odd_events(trees.load(result, folder), full_rows=True)) == []
    return True


@pytest.mark.parametrize(("edit", "spelling"), pairs(QUESTIONS, SPELLINGS))
def test_shortcut_spelt_otherwise(edit: Edit, spelling: str, tmp_path: Path) -> None:
    source = respell.respelt(OLD, edit, spelling, respell.ONE_GROUP)
    # Inside `bool(...)` the comparison itself is as it was, so it is found and replaced.
    assert whole(source, [ONE_DECISION, FULL_ROWS], tmp_path) == (spelling == "bool")


@pytest.mark.parametrize(("edit", "spelling"), pairs(READERS, SPELLINGS, each=False))
def test_shortcut_that_asks_beside_the_decision(edit: Edit, spelling: str, tmp_path: Path) -> None:
    source = respell.respelt(NEW, edit, spelling, DENSE)
    assert not whole(source, [FULL_ROWS], tmp_path)
    reason = "asked for at a further place"
    with pytest.raises(Mismatch, match=reason):
        ONE_DECISION.not_needed(parse(source.encode()))


DECISIONS = [
    Edit("forward", FORWARD, assigns("use_dense_single_group")),
    Edit("backward", BACKWARD, assigns("use_dense_single_group")),
]


@pytest.mark.parametrize(("decision", "spelling"), pairs(DECISIONS, SPELLINGS, each=False))
def test_decision_spelt_otherwise(decision: Edit, spelling: str, tmp_path: Path) -> None:
    """The forward's is kept, so it must be known; the backward's is replaced as a whole."""
    source = respell.respelt(NEW, decision, spelling, respell.ONE_GROUP)
    still_asks = decision.place == "forward" or spelling in ("alias of the answer", "match")
    assert whole(source, [FULL_ROWS], tmp_path) != still_asks


def test_refusal_lists_every_line(tmp_path: Path) -> None:
    """The lines are those of the file as it is, and nothing is written."""
    end = "        fc1_ctx.saved = "
    more = "        one = len(split_sizes) < 2\n        two = (1 == num_groups)\n"
    source = OLD.replace(end, more + end)
    tree = trees.write_tree(tmp_path / "site", source, "2.19.0", trees.megatron_source())
    before = snapshot(tree)
    first = next(i for i, x in enumerate(source.splitlines(), 1) if "one = len" in x)
    with pytest.raises(
        PatchError,
        match=rf"grouped_mlp.py:{first}: te_one_decision \(unknown\): .*: "
        rf"line {first}: one = len\(split_sizes\) < 2; line {first + 1}: two = 1 == num_groups\n",
    ):
        engine.apply(tree)
    assert snapshot(tree) == before


def test_handing_the_count_on_is_no_question() -> None:
    source = "def f(x, num_groups):\n" + "".join(
        f"    {line}\n"
        for line in (
            "a = [None] * num_groups",
            "b = x.view(num_groups, -1)",
            "for i in range(num_groups): pass",
            "c = x[:num_groups], f'{num_groups}'",
            "d = g(x, num_tensors=num_groups)",
            "e = len(x), x.numel()",
        )
    )
    assert unknown_questions(parse(source.encode())) == []


# ------------------------------------------------------------------------- the published files

PUBLISHED = [
    ("te_one_decision", "2.19.0"),
    ("te_full_rows", "2.20.2"),
    ("te_deterministic_dglu", "2.20.2"),
    ("te_no_dprob", "2.20.2"),
    ("te_use_fork", "2.20.2"),
    ("megatron_deterministic", "0.18.2"),
    ("megatron_deterministic", "0.19.2"),
]


def _published(name: str, version: str, unpacked: Wheels) -> tuple[Path, Path]:
    megatron = PATCHES[name].target is Target.MEGATRON
    tree = unpacked("megatron-core" if megatron else "transformer-engine", version)
    return tree, (trees.megatron_file if megatron else trees.te_file)(tree)


def _refused(tree: Path, file: Path, source: str, name: str) -> bool:
    """Whether apply refuses the text and leaves it as it is."""
    for record in tree.glob("*.dist-info/RECORD"):
        record.unlink()
    file.write_text(source)
    before = file.read_bytes()
    refusal = ""
    try:
        engine.apply(tree, [name])
    except PatchError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(f"{file}:")
        assert file.read_bytes() == before
        assert not list(tree.rglob(".te-grouped-mlp"))
    return bool(refusal)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), PUBLISHED)
def test_published_place_is_gone_doubled_or_moved(
    name: str, version: str, unpacked: Wheels
) -> None:
    """Each edit with one of the changes; whether the tree stays as it is, for the last edit."""
    tree, file = _published(name, version, unpacked)
    source, patch = file.read_text(), PATCHES[name]
    for index, edit in enumerate(patch.edits):
        respelt = respell.changed(source, edit, respell.CHANGES[index % len(respell.CHANGES)])
        with pytest.raises(Mismatch, match=r"\[.*\].*expected exactly one place, found [02]"):
            compose(respelt.encode(), [patch])
    assert _refused(tree, file, respelt, name)


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("name", "version"), PUBLISHED[:2])
def test_published_shortcut_spelt_otherwise(
    name: str, version: str, spelling: str, unpacked: Wheels
) -> None:
    """Each spelling at one of the places."""
    tree, file = _published(name, version, unpacked)
    source = file.read_text()
    pattern = respell.ONE_GROUP if name == "te_one_decision" else DENSE
    edits = [edit for edit in QUESTIONS if respell.matches_at(source, edit, pattern)]
    assert len(edits) >= 8
    edit = edits[SPELLINGS.index(spelling) % len(edits)]
    respelt = respell.respelt(source, edit, spelling, pattern)
    replaced = name == "te_one_decision" and spelling == "bool"
    assert _refused(tree, file, respelt, name) != replaced
    assert not replaced or unknown_questions(parse(file.read_bytes())) == []
