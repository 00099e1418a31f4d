# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Without the C++ extension: the op on a GPU is the same, and a CPU is told what to build."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_engine.pytorch  # noqa: F401  # over the extension, before a test takes it away

from te_grouped_mlp.integration.standalone import loader
from te_grouped_mlp.integration.standalone.tex import mxfp8
from te_grouped_mlp.op import decisions, environment, explain, extension
from te_grouped_mlp.op.kernels import group_reductions
from tests.support import step
from tests.support.step import StepCase

ROOT = Path(__file__).parents[2]
TOLD = (
    r"te-grouped-mlp's C\+\+ extension cannot be imported \(no such file\); build it: "
    r"TE_GROUPED_MLP_REQUIRE_EXTENSION=1 pip install \."
)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> extension.MissingExtension:
    """Take the extension away from every module that has it."""
    missing, real = extension.MissingExtension(ImportError("no such file")), extension._C
    for name, module in list(sys.modules.items()):
        if name.startswith("te_grouped_mlp.") and vars(module).get("_C") is real:
            monkeypatch.setattr(module, "_C", missing)
    assert mxfp8._C is extension._C is missing
    return missing


def test_with_it() -> None:
    assert extension.status() is True
    extension.require("nothing")
    assert extension._C
    assert environment.current().extension is True


def test_what_cannot_be_imported_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "te_grouped_mlp._C", None)
    missing = extension._load()
    assert not missing
    assert isinstance(missing.error, ModuleNotFoundError)
    assert not hasattr(missing, "__file__")
    with pytest.raises(ImportError, match="row_dots on CPU tensors: te-grouped-mlp's") as raised:
        missing.row_dots()
    assert raised.value.__cause__ is missing.error


def test_sums_on_a_cpu_name_it(absent: Any) -> None:
    with pytest.raises(ImportError, match=rf"^column_sums on CPU tensors: {TOLD}"):
        group_reductions.column_sums(torch.ones(2, 2))


def test_standalone_on_a_cpu_names_it_before_anything_is_imported(
    absent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_active", False)
    monkeypatch.setattr(loader, "cuda_device_visible", lambda: False)
    monkeypatch.delitem(sys.modules, loader.TEX)
    common: Any = SimpleNamespace(load_framework_extension=None)
    loader._start(common)
    with pytest.raises(ImportError, match=rf"cannot run standalone on a CPU: {TOLD}"):
        common.load_framework_extension("torch")
    assert loader.TEX not in sys.modules


@pytest.mark.usefixtures("fused_switch")
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_step_on_a_cpu_names_it(
    absent: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.BACKEND_SWITCH, backend)
    # A backend that is named runs or raises; else the ops are left unfused.
    kind, step_of = (ValueError, "not reference: ") if backend == "reference" else (ImportError, "")
    with (
        environment.override(extension=extension.status()),
        pytest.raises(kind, match=rf"{step_of}.*{TOLD}"),
    ):
        step.run_step(StepCase(splits=(128, 128)), fused=None)


def test_what_is_slower_is_said_once(absent: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(decisions, "_steps", Counter())
    caplog.set_level(logging.WARNING, "te_grouped_mlp")
    for _ in range(3):
        decisions.count_step("cutedsl")
    assert len(caplog.messages) == 1
    assert extension.SLOWER in caplog.text
    assert sum(extension.SLOWER in str(each) for each in explain.explain()) == 1
    assert extension.REMEDY in str(explain.explain())


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the tests lie outside a checkout")
def test_the_op_on_a_gpu_is_the_same_without_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.op.without_extension"], cwd=ROOT, capture_output=True,
        text=True, check=False, env={**os.environ, "NVTE_GROUPED_MLP_STANDALONE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["imported"] > 100
    assert told["on a CPU"].startswith("mxfp8_quantize on CPU tensors: ")
    assert told["looks in C++"] is hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert told["without"] == told["with"]
    assert {"fc1_act", "dact_dgrad", "fc1_wgrad"} <= {operation for operation, *_ in told["with"]}
