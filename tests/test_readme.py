# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The README's training step runs as it stands, and its numbers and names are those of the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import te_grouped_mlp
from te_grouped_mlp.cli import COMMANDS
from tests import source_rules as rules
from tests.cli.conftest import ROOT, python

README = ROOT / "README.md"
# A copy of the tests beside an installed wheel has no README.
TEXT = README.read_text(encoding="utf-8") if README.is_file() else ""
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]) if TEXT else []
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") if TEXT else ""
# Set while TE is imported, and not read.
GIVEN_TO_TE = {"NVTE_PROJECT_BUILDING", "NVTE_RELEASE_BUILD"}
needs_readme = pytest.mark.skipif(not TEXT, reason="no README beside the tests")


def blocks(language: str) -> list[str]:
    """Return the contents of the README's blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@needs_readme
def test_the_training_step_runs_as_it_stands() -> None:
    step = blocks("python")[0]
    assert "optimizer.step()" in step
    assert len([line for line in step.splitlines() if line and "import" not in line]) <= 25
    done = python(step, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (said,) = done.stdout.splitlines()
    line = re.search(r"such as `(.*?)`", TEXT)
    assert line is not None
    assert re.fullmatch(re.escape(line[1]) + " [0-9a-f]{16}", said)


@needs_readme
def test_every_public_name_and_command_is_told() -> None:
    told = REFERENCE.split("## Environment variables")[0]
    names = {each.split("(")[0] for each in re.findall(r"^\| `([^`]*)`", told, flags=re.MULTILINE)}
    # What a function of the table returns stands in its row.
    assert names == set(te_grouped_mlp.__all__) - {"RowPadding"}
    assert "RowPadding" in told
    for name in COMMANDS:
        assert f"te-grouped-mlp {name}" in TEXT or f"`{name}`" in TEXT, name


@needs_readme
def test_every_environment_variable_is_in_the_table() -> None:
    """Each name in the files that may read the environment, and in the build."""
    table = REFERENCE.split("## Environment variables")[1]
    told = re.findall(r"^\| `(\w+)=", table, flags=re.MULTILINE)
    readers = (ROOT / "te_grouped_mlp" / path for path in rules.ALLOWED[rules.ENVIRON])
    sources = [*readers, ROOT / "setup.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in sources)
    literal = r"(?:NVTE_\w+|TE_GROUPED_MLP_\w+|XDG_\w+|RANK)"
    used = set(re.findall(rf'"({literal})"', text)) - GIVEN_TO_TE
    assert set(told) == used
    assert len(told) == len(used)


@needs_readme
def test_the_commands_are_described_as_they_are() -> None:
    path = ROOT / "docs" / "write_commands.py"
    spec = importlib.util.spec_from_file_location("write_commands", path)
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(), "make reference writes it anew"


@needs_readme
def test_the_changelog_knows_this_version() -> None:
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{te_grouped_mlp.__version__}]" in log


@needs_readme
def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


@needs_readme
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), target
        if anchor and other.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{target}#{anchor}"


@needs_readme
def test_what_is_installed_exists() -> None:
    """Extras and make targets that the README names."""
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = metadata.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, flags=re.MULTILINE))
    for named in re.findall(r"\.\[([\w,-]+)\]'", TEXT):
        assert set(named.split(",")) <= extras
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh")), flags=re.MULTILINE):
        assert re.search(rf"^[\w -]*\b{re.escape(target)}\b[\w -]*:", made, flags=re.MULTILINE)
