# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`compile` needs no GPU, does nothing twice, and says what the kernels do not take."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from te_grouped_mlp.cli import compile as command
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.backends.cutedsl import compile as kernels
from te_grouped_mlp.op.backends.cutedsl.config import Op
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.packages import Absent
from tests.cli.conftest import ROOT, Shell

ABSENT = [name for name in command._PACKAGES if importlib.util.find_spec(name) is None]
REQUIRED = os.environ.get("TE_GROUPED_MLP_REQUIRE_KERNELS") == "1"
needs_kernels = pytest.mark.skipif(
    bool(ABSENT) and not REQUIRED, reason=f"not installed: {', '.join(ABSENT)}"
)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch):
    """Parsed arguments of a call that names its GPU, on a machine with the kernel packages."""
    from te_grouped_mlp.op import environment

    versions = {"quack": "0.6.5", "cutlass_dsl": "4.8.1", "triton": "3.6.0"}
    monkeypatch.setattr(kernels, "target", lambda: "sm_90a")
    monkeypatch.setattr(kernels, "target_arch", lambda: 9)

    def parse(*argv: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        return parser.parse_args(["compile", "--shape", "8,2048,4096", *argv])

    with environment.override(sm=Absent("no GPU"), versions=versions):
        yield parse


def test_every_weight_gradient_is_prepared_once(arguments) -> None:
    found = command.wanted(arguments())
    assert len(found) == len(set(found))
    grads = {(key.out, key.accumulate) for key in found if key.op is Op.FC1_WGRAD}
    wanted = {(DType.FLOAT32, True), (DType.FLOAT32, False), (DType.BFLOAT16, False)}
    assert grads == wanted
    single = command.wanted(arguments("--grad", "bf16"))
    assert [key.out for key in single if key.op is Op.FC1_WGRAD] == [DType.BFLOAT16] * 2
    assert set(single) < set(found)


def test_both_orders_in_memory_are_prepared(arguments) -> None:
    found = command.wanted(arguments())
    for op in (Op.FC1_ACT, Op.FC2_FORWARD, Op.DACT_DGRAD, Op.FC1_DGRAD, Op.FC2_WGRAD, Op.FC1_WGRAD):
        assert [key.reversed_experts for key in found if key.op is op].count(True) > 0
    single = {order: command.wanted(arguments("--order", order)) for order in command.ORDERS}
    assert set(single["all"]) == set(found) == set(single["ascending"] + single["descending"])
    assert {key.reversed_experts for key in single["ascending"]} == {False}
    assert {key.reversed_experts for key in single["descending"] if key.tile} == {True}


def test_mxfp8_has_kernels_of_its_own_before_what_is_quantized_next(arguments) -> None:
    plain, mxfp8 = (command.wanted(arguments("--recipe", name)) for name in ("none", "mxfp8"))
    assert not [key for key in plain if key.round_to_odd]
    assert {key.op for key in mxfp8 if key.round_to_odd} == {Op.FC1_ACT, Op.DACT_DGRAD}
    assert {key for key in mxfp8 if not key.round_to_odd} < set(plain)
    with pytest.raises(command.BadArgument, match="interleave"):
        command.wanted(arguments("--recipe", "mxfp8", "--interleave", "none"))


def test_every_activation_and_bias_is_prepared(arguments) -> None:
    found = command.wanted(arguments("--activation", "all", "--bias", "--prob", "bf16"))
    kinds = {key.spec.kind for key in found if key.op is Op.FC1_ACT}
    assert kinds == set(Activation)
    assert all(key.bias for key in found if key.op is Op.FC1_ACT)
    forward = [key for key in found if key.op is Op.FC2_FORWARD]
    assert {key.scale for key in forward} == {DType.BFLOAT16}
    plain = command.wanted(arguments("--prob", "none", "--bias"))
    assert {key.scale for key in plain} == {None}


def test_tokens_and_experts_change_no_kernel(arguments) -> None:
    one = command.wanted(arguments())
    again = arguments()
    again.shape = (64, 2048, 4096)
    assert command.wanted(again) == one


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["--shape"]),
        (["--shape", "8,2048"], ["8,2048", "EXPERTS,HIDDEN,FFN"]),
        (["--shape", "8,2048,x"], ["'x'", "at least 1"]),
        (["--shape", "8,128,128", "--arch", "sm_80"], ["sm_80", "sm_90a"]),
        (["--shape", "8,128,128", "--activation", "relu"], ["relu", "ScaledSwiGLU"]),
    ],
)
def test_bad_arguments_are_named(shell: Shell, argv: list[str], parts: list[str]) -> None:
    assert shell("compile", *argv) == 2
    for part in parts:
        assert part in shell.err


def test_features_that_no_kernel_takes_are_refused(arguments) -> None:
    given = arguments()
    given.shape = (8, 2048, 4097)
    with pytest.raises(command.BadArgument, match=r"8194; allowed: positive multiples of 64"):
        command.wanted(given)


def test_absent_packages_are_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_PACKAGES", ("torch", "no_such_package"))
    assert shell("compile", "--shape", "8,128,128", "--arch", "sm_90a") == 1
    assert "not installed: no_such_package" in shell.err


def test_a_cache_that_cannot_be_filled_is_told_before_anything_is_compiled(
    arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(kernels.CACHE_SWITCH, "~/file")
    monkeypatch.setattr(kernels, "_fingerprint", lambda: "v1")
    monkeypatch.setattr(command, "_PACKAGES", ())
    with pytest.raises(command.CommandError, match=r"cannot be used: .*/file is no folder"):
        command.run(arguments("--json"))


@needs_kernels
def test_the_cache_is_filled_without_a_gpu_and_once(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        kernels.CACHE_SWITCH: str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    call = ["-m", "te_grouped_mlp.cli", "compile", "--shape", "4,256,128", "--arch", "sm_90a"]
    for compiled in (True, False):
        done = subprocess.run(
            [sys.executable, *call, "--activation", "srelu", "--grad", "bf16",
             "--order", "ascending", "--json"],
            cwd=ROOT, env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        assert found["ok"] is True
        assert found["target"] == "sm_90a"
        assert {kernel["compiled"] for kernel in found["kernels"]} == {compiled}
        objects = list(Path(found["cache"]).glob("*.o"))
        assert len(objects) == len(found["kernels"]) == 8
