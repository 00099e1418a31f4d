# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One expert, 512 live rows in a buffer of 768: FC1's weight gradient with and without padding.

The shapes are those of the public report of the fault: hidden and FFN 1024, SReLU, MXFP8, fp32
`main_grad`s, probabilities of one, padding of zeros or of threes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from te_grouped_mlp.op import environment
from te_grouped_mlp.op.tensors import memory
from tests.op.gpu import recorded
from tests.support import forced, step
from tests.support.step import StepCase

# Read when Transformer Engine is first imported; where its extension is there it has no effect.
os.environ.setdefault("NVTE_GROUPED_MLP_STANDALONE", "1")

GPU = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.standalone]
EXACT = StepCase(
    activation="srelu", splits=(512,), hidden=1024, ffn=1024, grad="main_grad",
    frozen=frozenset({"prob"}), split_dtype=torch.int32,
)  # fmt: skip
FILLS = (0.0, 3.0)
# A relative error of this size is a wrong gradient, whatever the format rounds.
WRONG = 0.3


@pytest.fixture(autouse=True)
def _switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[0xFF, 0x00], ids=["poisoned", "zeroed"])
def fresh_memory(request: pytest.FixtureRequest) -> Iterator[int]:
    """What a buffer holds that nobody wrote."""
    with memory.poisoned(request.param):
        yield request.param


def gradient(case: StepCase, backend: str) -> torch.Tensor:
    """Run a step of the fused op on a backend; FC1's weight gradient in float64."""
    model, inputs = step.make_model(case), step.make_inputs(case)
    with torch.no_grad():
        inputs.prob.fill_(1.0)
    with step.switches(NVTE_GROUPED_MLP_BACKEND=backend), recorded.backends_used() as used:
        y = step.run_model(model, case, inputs)
    assert used == {backend}
    assert type(step.fused_op(model)).__name__ == "GroupedMLP_CuTeGEMMUnary"
    return step.collect(case, model, inputs, y)["dW1"].double()


@functools.cache
def exact_gradient(device: str, backend: str) -> torch.Tensor:
    """The gradient of the live rows alone."""
    return gradient(EXACT.but(device=device), backend)


def error(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, int]:
    """Return the relative error in the norm, NaN if anything is, and how much is not finite."""
    relative = float((found - wanted).norm() / wanted.norm())
    return relative, int((~found.isfinite()).sum())


@pytest.mark.parametrize("fill", FILLS)
def test_padding_does_not_reach_the_gradient(
    te: ModuleType, fill: float, device: str, fresh_memory: int
) -> None:
    backend, case = recorded.BACKENDS[device], EXACT.but(device=device)
    exact = exact_gradient(device, backend)
    padded = gradient(case.but(buffer_rows=768, fill=fill), backend)
    assert error(padded, exact) == (0.0, 0)
    assert exact.isfinite().all()
    # And a gradient of order one: 512 rows of unit variance.
    assert 1 < float(exact.square().mean().sqrt()) < 100


@pytest.mark.parametrize("fill", FILLS)
def test_the_old_decision_gives_a_wrong_gradient(
    te: ModuleType, fill: float, device: str, fresh_memory: int
) -> None:
    """NaN where the memory holds some, else an error of order one."""
    case = EXACT.but(device=device)
    exact = exact_gradient(device, "reference")
    with environment.override(single_group_is_always_dense=True):
        found = gradient(case.but(buffer_rows=768, fill=fill), "reference")
    relative, non_finite = error(found, exact)
    assert non_finite or relative > WRONG
    assert bool(non_finite) == (fresh_memory == 0xFF)


# The wrapper that runs a script so ---------------------------------------------------------------

SCRIPT = """
import os, sys
os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
import beside
import torch
import transformer_engine.pytorch as te
from te_grouped_mlp.op import environment
from transformer_engine.common.recipe import MXFP8BlockScaling

def gradient(rows):
    torch.manual_seed(0)
    fc1, fc2 = (te.ops.GroupedLinear(1, 256, 256, bias=False, dtype=torch.bfloat16,
                                     device=beside.DEVICE) for _ in range(2))
    model = te.ops.Sequential(fc1, te.ops.ScaledSReLU(), fc2)
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    x[:256] = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    x = x.to(beside.DEVICE)
    splits = torch.tensor([256], device=beside.DEVICE)
    with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
        y = model(x.requires_grad_(), splits, torch.ones(rows, device=beside.DEVICE), splits)
    y.backward(x.detach())
    return fc1.weight0.grad.double()

exact, padded = gradient(256), gradient(512)
print("error", float((padded - exact).norm() / exact.norm()), sys.argv[1:], __name__)
print("backend", environment.current_switches().backend)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """A script that knows nothing of this project's tests, with a module beside it."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text('DEVICE = "cpu"\n', encoding="utf-8")
    yield path
    sys.modules.pop("beside", None)


def _said(capsys: pytest.CaptureFixture[str]) -> tuple[float, str]:
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    relative, rest = lines["error"].split(" ", 1)
    assert lines["backend"] == "reference"
    return float(relative), rest


def test_a_script_runs_with_the_old_decision(
    te: ModuleType, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forced.main([str(script), "--like", "this"]) == 0
    relative, rest = _said(capsys)
    assert not relative <= WRONG
    assert rest == "['--like', 'this'] __main__"
    assert not environment.current().single_group_is_always_dense


def test_the_same_script_runs_with_ours(
    te: ModuleType, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forced.main(["--decision", "own", "--poisoned", str(script)]) == 0
    assert _said(capsys) == (0.0, "[] __main__")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere.py"], "script is 'nowhere.py'; allowed: a file"),
        (["--backend", "cutedsl", __file__], "--backend is 'cutedsl' with --decision old"),
        (["--decision", "new", __file__], "choose from"),
    ],
)
def test_arguments_that_make_no_sense(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        forced.main(argv)
    assert says in capsys.readouterr().err
