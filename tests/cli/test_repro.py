# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`repro` passes on the sound decision and fails on the old one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from te_grouped_mlp.cli import repro
from te_grouped_mlp.integration import installed_te
from te_grouped_mlp.op.activations import Activation
from tests.cli.conftest import Shell, python

SMALL = ("--hidden", "256", "--ffn", "128", "--live", "128", "--padding", "128")
KEYS = {"activation", "extent", "fill", "rel_err", "non_finite", "bitwise_equal"}
OUTPUTS = {"y", "dx", "dprob", "dW1", "dW2"}
FILLS = ["exact size", "0", "3", "nan", "inf", "1e+30"]


def test_every_case_is_equal(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert shell("repro", *SMALL, "--activation", "all", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert found["ok"] is True
    assert set(found) == {"cases", "ok"}
    combinations = [(case["activation"], case["extent"], case["fill"]) for case in found["cases"]]
    assert combinations == [
        (kind.value, extent, fill)
        for kind in Activation
        for extent in ("packed-only", "newest", "buffer")
        for fill in FILLS
    ]
    for case in found["cases"]:
        assert set(case) == KEYS
        assert case["bitwise_equal"] is True
        assert case["rel_err"] == dict.fromkeys(OUTPUTS, 0.0)
        assert case["non_finite"] == dict.fromkeys(OUTPUTS, 0.0)
    assert "90 of 90 cases are bitwise equal" in shell.out


def test_old_decision_shows_the_fault(shell: Shell) -> None:
    argv = ("--activation", "srelu", "--extent", "packed-only", "--old-decision", "--json")
    assert shell("repro", *SMALL, *argv) == 1
    found = shell.json()
    assert found["ok"] is False
    exact, *padded = found["cases"]
    assert exact["bitwise_equal"] is True
    for case in padded:
        assert case["bitwise_equal"] is False
        # Unwritten column scales are NaN, and every weight gradient reads one.
        assert case["non_finite"]["dW1"] == 1.0
        assert case["rel_err"]["dW1"] is None


def test_old_decision_multiplies_the_tail_where_buffers_are_written(shell: Shell) -> None:
    argv = ("--activation", "ScaledSwiGLU", "--extent", "newest", "--old-decision")
    assert shell("repro", *SMALL, *argv, "--json") == 1
    by_fill = {case["fill"]: case for case in shell.json()["cases"]}
    # Zero rows add nothing to a product; rows of 3 do.
    assert by_fill["0"]["bitwise_equal"] is True
    assert by_fill["3"]["rel_err"]["dW2"] > 1
    assert by_fill["3"]["non_finite"]["dW2"] == 0
    assert shell("repro", *SMALL, *argv) == 1
    assert "DIFFERS" in shell.out or "tail is not 0" in shell.out


ROWED = ("y", "dx", "dprob")


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "live") for name in sorted(OUTPUTS)), *((name, "tail") for name in ROWED)],
)
def test_one_wrong_value_is_seen(name: str, where: str) -> None:
    import torch

    exact = {key: torch.ones(4, dtype=torch.bfloat16) for key in OUTPUTS}
    tail = torch.zeros(2, dtype=torch.bfloat16)
    found = {
        key: torch.cat([value, tail]) if key in ROWED else value.clone()
        for key, value in exact.items()
    }
    case = repro.compare(Activation.SRELU, "newest", "0", found, exact)
    assert case.bitwise_equal
    # A negative zero differs from zero in its bits alone.
    found[name][-1 if where == "tail" else 0] = -0.0 if where == "tail" else 0.5
    case = repro.compare(Activation.SRELU, "newest", "0", found, exact)
    assert not case.bitwise_equal
    assert case.clean_tail == (where == "live")
    assert case.rel_err[name] == (0.5 if where == "live" else 0.0)


def test_without_te_the_message_says_so(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_te, "te_root", lambda: None)
    assert shell("repro") == 1
    assert shell.err.startswith("te-grouped-mlp repro: Transformer Engine is not installed")
    assert len(shell.err.splitlines()) == 1


def test_with_the_fork_switched_off_the_reason_is_given() -> None:
    code = "from te_grouped_mlp.cli import main; raise SystemExit(main(['repro']))"
    done = python(code, NVTE_GROUPED_MLP_FORK="0")
    assert done.returncode == 1
    assert "NVTE_GROUPED_MLP_FORK=0" in done.stderr
