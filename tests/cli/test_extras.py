# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands without the packages of the extra `cli`, and away from a terminal."""

from __future__ import annotations

import sys

import pytest

from te_grouped_mlp.cli import output
from tests.cli.conftest import Shell

DOCTOR = ("doctor", "--assume", "sm=100,frontend=1.32.0,te=2.20.2")
REPRO = (
    "repro", "--hidden", "128", "--live", "128", "--padding", "128",
    "--activation", "srelu", "--extent", "newest",
)  # fmt: skip


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rich nor LibCST can be imported, though they may have been."""
    for package, parts in {"rich": ("box", "console", "progress", "table"), "libcst": ()}.items():
        for name in (package, *(f"{package}.{part}" for part in parts)):
            monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("argv", [DOCTOR, REPRO], ids=["doctor", "repro"])
def test_tables_are_the_same_without_rich(
    shell: Shell, request: pytest.FixtureRequest, argv: tuple[str, ...]
) -> None:
    assert shell(*argv) == 0
    with_rich = shell.out
    request.getfixturevalue("bare")
    assert shell(*argv) == 0
    assert shell.out == with_rich


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("argv", [("list",), ("check", "--tree", "no such tree")])
def test_patch_without_libcst_names_the_extra(shell: Shell, argv: tuple[str, ...]) -> None:
    assert shell("patch", *argv) == 1
    assert shell.err.startswith("te-grouped-mlp patch: libcst cannot be imported")
    assert shell.err.endswith(f"; {output.EXTRA_REMEDY}\n")
    assert shell.out == ""


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize(
    ("total", "said"), [(0, []), (1, [1]), (3, [1, 2, 3]), (38, [*range(1, 39, 4)])]
)
def test_a_pipe_is_told_how_far_the_work_is(
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    total: int,
    said: list[int],
    rich: bool,
) -> None:
    if not rich:
        request.getfixturevalue("bare")
    seen = []
    with output.progress(total, "repro") as advance:
        for step in range(1, total + 1):
            advance(f"case {step}")
            # Written before the step that it names.
            seen += capsys.readouterr().err.splitlines()
    assert seen == [f"repro: {step} of {total}, case {step}" for step in said]
