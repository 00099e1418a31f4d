# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""An operator's gate: the script of docs/doctor.md in processes of their own, and its types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import te_grouped_mlp

ROOT = Path(te_grouped_mlp.__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "doctor.md"

# What stands before the gate: a small model, and a step of it.
STEP = """
import os, sys
sys.path.insert(0, os.environ["ROOT"])
import te_grouped_mlp
te_grouped_mlp.__path__.append(os.environ["ROOT"])
te_grouped_mlp.activate()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import MXFP8BlockScaling

options = dict(bias=False, device="cpu", dtype=torch.bfloat16)
model = te.ops.Sequential(
    te.ops.GroupedLinear(2, 128, 256, **options),
    te.ops.ScaledSwiGLU(glu_interleave_size=int(os.environ.get("INTERLEAVE", "32")) or None),
    te.ops.GroupedLinear(2, 128, 128, **options),
)

def train_step():
    x, sizes = torch.randn(256, 128, dtype=torch.bfloat16), torch.tensor([128, 128])
    with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
        y = model(x, sizes, torch.rand(256), sizes)
    y.backward(torch.ones_like(y))
"""


def gate() -> str:
    """Return the script of the page, which a user puts round a step."""
    if not PAGE.is_file():
        pytest.skip("no docs beside an installed package")
    (text,) = re.findall(r"```python\n# gate\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(text.strip().splitlines()) == 5
    return text


def run(**environment: str | None) -> subprocess.CompletedProcess[str]:
    variables = {
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
        "BACKEND": "reference",
        "ROOT": str(ROOT),
        **environment,
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}
    return subprocess.run(
        [sys.executable, "-c", STEP + gate()],
        env={**inherited, **{k: v for k, v in variables.items() if v is not None}},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_gate_lets_a_fused_step_pass() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 x 128 x 128 ScaledSwiGLU, mxfp8, bfloat16 on cpu: reference\n"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NVTE_CUTEDSL_FUSED_GROUPED_MLP": None}, "set NVTE_CUTEDSL_FUSED_GROUPED_MLP=1"),
        ({"NVTE_GROUPED_MLP_FORK": "0"}, "unset NVTE_GROUPED_MLP_FORK"),
        ({"INTERLEAVE": "0"}, "not every grouped MLP ran fused: .*interleave"),
        ({"BACKEND": "cutedsl"}, "not every forward pass ran on backend cutedsl: 1 on reference"),
        ({"BACKEND": "magic"}, "backend is 'magic'; allowed: None, cudnn, cutedsl, reference"),
    ],
    ids=["switch-off", "fork-off", "unfused", "another-backend", "no-such-backend"],
)
def test_the_gate_stops_every_other(environment: dict[str, str | None], words: str) -> None:
    done = run(**environment)
    assert done.returncode == 1
    assert re.search(words, done.stderr.splitlines()[-1]), done.stderr


def test_a_process_without_a_grouped_mlp_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_grouped_mlp.op import decisions

    monkeypatch.setattr(decisions, "_steps", type(decisions._steps)())
    monkeypatch.setattr(decisions, "_not_ours", [])
    with pytest.raises(RuntimeError, match="no grouped MLP ran fused in this process"):
        te_grouped_mlp.assert_fused()
    decisions.count_step("cudnn")
    te_grouped_mlp.assert_fused()
    te_grouped_mlp.assert_fused(backend="cudnn")
    decisions.count_step("cutedsl")
    with pytest.raises(RuntimeError, match="on backend cudnn: 1 on cudnn, 1 on cutedsl"):
        te_grouped_mlp.assert_fused(backend="cudnn")


USER = """
from typing import reveal_type

import te_grouped_mlp

te_grouped_mlp.activate()
te_grouped_mlp.assert_active()
te_grouped_mlp.assert_fused()
te_grouped_mlp.assert_fused(backend="cutedsl")
for decision in te_grouped_mlp.explain():
    path: str = decision.path
text: str = str(te_grouped_mlp.explain(object(), recipe=None))
version: str = te_grouped_mlp.__version__
"""


@pytest.mark.slow
def test_mypy_knows_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "user.py"
    names = te_grouped_mlp.__all__
    script.write_text(USER + "".join(f"reveal_type(te_grouped_mlp.{name})\n" for name in names))
    done = mypy(script)
    assert done.returncode == 0, done.stdout
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(revealed) == len(names)
    assert not {"Any", "builtins.object"} & set(revealed)
    script.write_text("import te_grouped_mlp\nte_grouped_mlp.assert_activ()\n")
    assert "has no attribute" in mypy(script).stdout


def mypy(script: Path) -> subprocess.CompletedProcess[str]:
    options = ("--strict", "--ignore-missing-imports", "--follow-imports=silent")
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(script)],
        env={**os.environ, "MYPYPATH": str(ROOT)},
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_package_that_is_removed_in_part_says_one_line(tmp_path: Path) -> None:
    """At every start of Python: the folder is gone, the `.pth` file is not."""
    source = ROOT / "te_grouped_mlp.pth"
    if not source.is_file():
        pytest.skip("no source tree")
    (tmp_path / source.name).write_text(source.read_text())
    code = f"import site; site.addsitedir({str(tmp_path)!r}); print('started')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "started\n"
    (line,) = done.stderr.splitlines()
    assert "te_grouped_mlp.pth" in line
