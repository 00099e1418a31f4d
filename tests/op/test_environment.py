# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of the machine: switches, overrides, probes, and imports without torch or TE."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch

from te_grouped_mlp.op import environment, packages
from te_grouped_mlp.op.environment import Switches, current, override, read_switches
from te_grouped_mlp.op.packages import Absent

SWITCHES = {
    environment.FUSED_SWITCH: "fused",
    environment.FULL_ROWS_SWITCH: "full_rows",
    environment.CHECK_SWITCH: "check",
    environment.DETERMINISM_SWITCH: "allow_nondeterministic",
    environment.REUSE_WEIGHTS_SWITCH: "reuse_weights",
    environment.WGRAD_SWITCH: "no_frontend_wgrad",
}
NO_TORCH = ("torch", "transformer_engine", "transformer_engine_torch", "cudnn")
NO_TE = NO_TORCH[1:]


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    for name in (*SWITCHES, environment.BACKEND_SWITCH):
        monkeypatch.delenv(name, raising=False)


def test_defaults():
    assert read_switches() == Switches()
    assert Switches() == Switches(False, "auto", False, False, True)


@pytest.mark.parametrize(("name", "field"), SWITCHES.items())
def test_switches_are_read_at_every_call(monkeypatch, name, field):
    for text, value in (("1", True), ("0", False), ("1", True)):
        monkeypatch.setenv(name, text)
        assert getattr(current().switches, field) is value
    monkeypatch.setenv(name, "")
    assert read_switches() == Switches()


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("text", ["yes", "1.0", "on"])
def test_bad_switch_value_is_named(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name} is '{text}'; allowed: an integer"):
        current()


def test_backend_switch(monkeypatch):
    monkeypatch.setenv(environment.BACKEND_SWITCH, "cutedsl")
    assert current().switches.backend == "cutedsl"
    monkeypatch.setenv(environment.BACKEND_SWITCH, "")
    assert current().switches.backend == "auto"


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_follow_an_environ_that_was_replaced_or_patched(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    before = read_switches()
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {name: "1"})
        assert getattr(read_switches(), SWITCHES[name]) is True
    assert read_switches() == before
    with mock.patch.dict(os.environ, {name: "1"}):
        assert getattr(read_switches(), SWITCHES[name]) is True
    assert read_switches() == before
    with mock.patch.dict(os.environb, {name.encode(): b"1"}):
        assert getattr(read_switches(), SWITCHES[name]) is True


def test_override_replaces_and_restores():
    before = current()
    with override(sm=(10, 0), single_group_is_always_dense=True):
        assert current().sm == (10, 0)
        with override(sm=(9, 0)):
            assert current().sm == (9, 0)
            assert current().single_group_is_always_dense
        assert current().sm == (10, 0)
    assert current() == before
    assert not before.single_group_is_always_dense


def test_leaving_an_inner_override_uncovers_the_next_one():
    with override(sm=(9, 0)), override(sm=(10, 0)):
        with override(sm=(9, 0)):
            assert current().sm == (9, 0)
        assert current().sm == (10, 0)
    with override(sm=(9, 0)):
        with override(sm=(9, 0)):
            assert current().sm == (9, 0)
        assert current().sm == (9, 0)


def test_override_restores_after_an_error():
    before = current()
    with pytest.raises(RuntimeError, match="inside"), override(standalone=not before.standalone):
        raise RuntimeError("inside")
    assert current() == before


def test_override_refuses_unknown_names():
    with pytest.raises(TypeError, match=r"override got \['capability'\]; allowed: \["):
        override(sm=(9, 0), capability=1).__enter__()
    assert current().sm != (9, 0)


def test_the_record_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        current().standalone = True


def test_absence_is_false_and_keeps_its_cause():
    assert not Absent("not installed")
    assert Absent("not installed").cause == "not installed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_no_gpu_is_an_absence_with_a_cause():
    sm = current().sm
    assert isinstance(sm, Absent)
    assert "CUDA" in sm.cause


def test_versions():
    versions = current().versions
    assert versions["torch"] == torch.__version__
    assert set(versions) >= {"transformer_engine", "cudnn_frontend", "quack", "cutlass_dsl"}
    assert all(isinstance(version, (str, Absent)) for version in versions.values())


def test_torch_names_its_build_where_its_metadata_does_not(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    versions = packages.package_versions.__wrapped__()
    assert versions.pop("torch") == torch.__version__
    assert set(versions.values()) == {"1.0"}
    # One that is not installed as a package, or keeps its version elsewhere.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert packages.package_versions.__wrapped__()["torch"] == "1.0"


@pytest.fixture
def frontend(monkeypatch):
    """Install a stand-in for the frontend's module, and forget what was probed."""

    def install(module, version="1.31.0"):
        for asked in (environment, packages):
            monkeypatch.setattr(asked, "package_versions", lambda: {"cudnn_frontend": version})
        monkeypatch.setitem(sys.modules, "cudnn", module)

    packages.forget()
    yield install
    packages.forget()


def test_wrappers_are_known_by_their_arguments(frontend):
    def glu(a, use_single_group_runtime_offsets=False):
        """Stand-in."""

    def srelu(a, b):
        """Stand-in."""

    module = types.ModuleType("cudnn")
    module.grouped_gemm_glu_wrapper_sm100 = glu
    module.grouped_gemm_srelu_wrapper_sm100 = srelu
    frontend(module)
    env = current()
    assert env.wrapper_takes("glu", packages.RUNTIME_OFFSETS)
    assert not env.wrapper_takes("srelu", packages.RUNTIME_OFFSETS)
    assert env.wrapper_takes("srelu", "b")
    assert not env.wrapper_takes("dglu", packages.RUNTIME_OFFSETS)
    assert set(env.wrappers) == {"glu", "srelu"}


def test_a_frontend_without_its_dsl_is_absent_with_the_cause(frontend):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise ImportError("No module named 'cutlass'")

    frontend(Lazy("cudnn"))
    wrappers = current().wrappers
    assert isinstance(wrappers, Absent)
    assert "1.31.0 lacks a dependency: No module named 'cutlass'" in wrappers.cause
    assert not current().wrapper_takes("glu", "a")


def test_a_broken_frontend_is_absent_with_the_cause(frontend):
    frontend(None)  # the import machinery refuses a None entry
    wrappers = current().wrappers
    assert isinstance(wrappers, Absent)
    assert "nvidia-cudnn-frontend 1.31.0 cannot be imported" in wrappers.cause


def test_determinism_is_asked_for_in_two_ways(monkeypatch):
    assert not environment.determinism_requested(Switches())
    assert environment.determinism_requested(Switches(allow_nondeterministic=False))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert environment.determinism_requested(Switches())


@pytest.mark.parametrize(("rank", "first"), [(None, True), ("0", True), ("3", False)])
def test_first_rank(monkeypatch, rank, first):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert environment.is_first_rank() is first


def import_blocked(modules: str, blocked: tuple[str, ...]) -> None:
    names = ", ".join(f"te_grouped_mlp.op.{module}" for module in modules.split())
    code = f"import sys\nfor name in {blocked!r}:\n    sys.modules[name] = None\nimport {names}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_leaves_import_neither_torch_nor_te():
    import_blocked("layout environment formats tensors.scale_layout problem plan", NO_TORCH)


def test_operands_and_the_reference_import_no_te():
    import_blocked(
        "tensors.operands tensors.memory backends.base backends.reference.backend", NO_TE
    )


def test_the_process_knows_that_it_runs_standalone() -> None:
    import transformer_engine.pytorch  # noqa: F401

    assert environment.current().standalone
