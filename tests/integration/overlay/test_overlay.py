# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which module TE gets, in every situation that a user can bring about, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_grouped_mlp.integration import installed_te
from tests.integration.overlay.fake_install import UPSTREAM_TEXT, FakeInstall

BOOT = "import te_grouped_mlp._bootstrap as b; b.install()\n"
ASK = """
from te_grouped_mlp.integration import overlay
def ask(when):
    state = overlay.status()
    try:
        overlay.assert_active()
        asserted = True
    except RuntimeError as error:
        asserted = False
        assert state.reason in str(error) and state.remedy and state.remedy in str(error)
    assert asserted == state.active, state
    answer[when] = state.active
    answer[when + "_reason"] = state.reason
"""
IMPORT = "import transformer_engine.pytorch.ops.fused.grouped_mlp as m; answer['who'] = m.WHO\n"
BOTH = f"{ASK}\nask('before')\n{IMPORT}\nask('after')\n"


def test_fork_replaces_upstream_under_upstreams_name(tmp_path: Path) -> None:
    install = FakeInstall(tmp_path)
    code = f"{BOOT}{BOTH}answer['name'] = m.__name__; answer['file'] = m.__file__\n"
    answer = install.run(code)
    assert answer["who"] == "fork"
    assert answer["name"] == installed_te.TARGET
    assert answer["file"] == str(install.fork_file)
    assert answer["before"] is True
    assert answer["after"] is True


def test_without_bootstrap_upstream_runs_and_status_says_so(tmp_path: Path) -> None:
    answer = FakeInstall(tmp_path).run(BOTH)
    assert answer["who"] == "upstream"
    assert answer["before"] is False
    assert answer["after"] is False
    assert ".pth" in str(answer["before_reason"])


def test_activate_replaces_the_pth_file(tmp_path: Path) -> None:
    code = f"import te_grouped_mlp as t, sys; t.activate(); t.activate()\n{BOTH}"
    code += "answer['finders'] = sum('Overlay' in str(f) for f in sys.meta_path); t.activate()\n"
    answer = FakeInstall(tmp_path).run(code)
    assert answer["who"] == "fork"
    assert answer["before"] is True
    assert answer["after"] is True
    assert answer["finders"] == 1


def test_activate_after_the_import_raises(tmp_path: Path) -> None:
    answer = FakeInstall(tmp_path).run(f"{IMPORT}import te_grouped_mlp as t; t.activate()")
    assert str(answer["error"]).startswith("RuntimeError")
    assert "before the first import of transformer_engine" in str(answer["error"])


def test_status_changes_nothing(tmp_path: Path) -> None:
    code = f"{ASK}import sys\nbefore = list(sys.meta_path)\nask('before')\n"
    code += "answer['same'] = sys.meta_path == before\n"
    code += "answer['te'] = [n for n in sys.modules if n.startswith('transformer_engine')]\n"
    code += "answer['torch'] = 'torch' in sys.modules\n"
    answer = FakeInstall(tmp_path).run(code)
    assert answer["same"] is True
    assert answer["te"] == []
    assert answer["torch"] is False


def test_switch_keeps_upstream(tmp_path: Path) -> None:
    answer = FakeInstall(tmp_path).run(BOOT + BOTH, NVTE_GROUPED_MLP_FORK="0")
    assert answer["who"] == "upstream"
    assert answer["before"] is False
    assert answer["after"] is False
    assert "NVTE_GROUPED_MLP_FORK=0" in str(answer["before_reason"])
    assert "NVTE_GROUPED_MLP_FORK=0" in str(answer["after_reason"])
    assert "Warning" not in str(answer["stderr"])


def test_switch_with_another_value_raises(tmp_path: Path) -> None:
    answer = FakeInstall(tmp_path).run(BOOT + IMPORT, NVTE_GROUPED_MLP_FORK="off")
    error = str(answer["error"])
    assert error.startswith("ValueError")
    assert "NVTE_GROUPED_MLP_FORK is 'off'" in error
    assert "allowed" in error


@pytest.mark.parametrize("version", ["2.19.0", "2.20.0", "2.20.2", "2.20.7+abc123"])
def test_supported_versions_are_taken_without_a_look_at_names(tmp_path: Path, version: str) -> None:
    module = "transformer_engine.pytorch.quantization"
    install = FakeInstall(tmp_path, version=version, lacking=(f"{module}.FP8GlobalStateManager",))
    answer = install.run(BOOT + BOTH)
    assert answer["who"] == "fork"
    assert answer["before"] is True


@pytest.mark.parametrize("version", ["2.18.0", "2.19.1", "2.20.0.dev0", "2.21.0.dev0+x", None])
def test_other_version_with_every_name_is_taken(tmp_path: Path, version: str | None) -> None:
    answer = FakeInstall(tmp_path, version=version).run(BOOT + BOTH)
    assert answer["who"] == "fork"
    # Only the import can tell, and "perhaps" is not "yes".
    assert answer["before"] is False
    assert answer["after"] is True
    assert "Warning" not in str(answer["stderr"])


QUANTIZATION = "transformer_engine.pytorch.quantization"
FUSER = "transformer_engine.pytorch.ops.fuser"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("name", f"{QUANTIZATION}.FP8GlobalStateManager"),
        ("module", QUANTIZATION),
        ("keyword", f"{FUSER}.register_forward_backward_fusion(prepend=)"),
        ("attribute", f"{FUSER}.OperationFuser.forward_backward_fusion_functions"),
    ],
)
def test_other_version_that_lacks_something_keeps_upstream_and_warns_once(
    tmp_path: Path, change: str, shown: str
) -> None:
    upstream = "WHO = 'upstream'\n"
    install = FakeInstall(
        tmp_path,
        version="2.21.0",
        upstream=upstream,
        lacking=(f"{QUANTIZATION}.FP8GlobalStateManager",) if change == "name" else (),
    )
    fuser = tmp_path / "transformer_engine/pytorch/ops/fuser.py"
    if change == "module":
        (tmp_path / "transformer_engine/pytorch/quantization.py").unlink()
    elif change == "keyword":
        fuser.write_text(fuser.read_text().replace("prepend=", "first="))
    elif change == "attribute":
        fuser.write_text(
            fuser.read_text() + "\ndel OperationFuser.forward_backward_fusion_functions"
        )
    answer = install.run(BOOT + BOTH)
    assert answer["who"] == "upstream"
    assert answer["before"] is False
    assert answer["after"] is False
    assert shown in str(answer["after_reason"])
    assert "2.21.0" in str(answer["after_reason"])
    assert str(answer["stderr"]).count("RuntimeWarning") == 1
    assert shown in str(answer["stderr"])


def test_no_te(tmp_path: Path) -> None:
    install = FakeInstall(tmp_path, te=False)
    answer = install.run(f"{BOOT}{ASK}ask('before')")
    assert answer["before"] is False
    assert "not installed" in str(answer["before_reason"])


def test_namespace_folder_is_no_te(tmp_path: Path) -> None:
    install = FakeInstall(tmp_path, te=False)
    folder = tmp_path / "transformer_engine/pytorch/ops/fused"
    folder.mkdir(parents=True)
    (folder / "grouped_mlp.py").write_text(UPSTREAM_TEXT)
    answer = install.run(
        f"{BOOT}{ASK}import transformer_engine as t\nanswer['file'] = t.__file__\nask('before')"
    )
    assert answer["file"] is None
    assert answer["before"] is False
    assert "not installed" in str(answer["before_reason"])


def test_te_without_a_fused_module(tmp_path: Path) -> None:
    install = FakeInstall(tmp_path, version="2.16.1", upstream=None)
    answer = install.run(f"{BOOT}{ASK}import transformer_engine\nask('after')")
    assert answer["after"] is False
    assert "2.16.1 has no fused grouped MLP" in str(answer["after_reason"])


def test_missing_forked_file_is_said(tmp_path: Path) -> None:
    install = FakeInstall(tmp_path)
    install.fork_file.unlink()
    answer = install.run(BOOT + BOTH)
    assert answer["who"] == "upstream"
    assert answer["before"] is False
    assert answer["after"] is False
    assert "lacks its forked file" in str(answer["after_reason"])


def test_upstream_beside_the_package_is_never_taken_for_the_fork(tmp_path: Path) -> None:
    """In site-packages, TE's own file lies where a checkout has its fork."""
    install = FakeInstall(tmp_path)
    install.fork_file.unlink()
    for name in ("pyproject.toml", "te_grouped_mlp.pth"):
        (tmp_path / name).write_text("")
    asked = "from te_grouped_mlp.integration import installed_te as te"
    answer = install.run(f"{asked}\nanswer['f'] = str(te.fork_file())")
    assert answer["f"] == "None"


def test_checkout_file_is_the_fork_and_its_folder_shadows_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    checkout = tmp_path / "checkout"
    FakeInstall(site)
    runner = FakeInstall(checkout, te=False)
    runner.fork_file.unlink()
    for name in ("pyproject.toml", "te_grouped_mlp.pth"):
        (checkout / name).write_text("")
    fork = checkout / "transformer_engine/pytorch/ops/fused/grouped_mlp.py"
    fork.parent.mkdir(parents=True)
    fork.write_text("WHO = 'checkout'\n")
    answer = runner.run(BOOT + BOTH, PYTHONPATH=f"{checkout}:{site}")
    assert answer["who"] == "checkout"
    assert answer["before"] is True
    assert answer["after"] is True


@pytest.mark.parametrize("switch", ["0", "1"])
def test_load_upstream(tmp_path: Path, switch: str) -> None:
    code = f"""{BOOT}{IMPORT}
from te_grouped_mlp.integration import overlay
from transformer_engine.pytorch.ops.fuser import OperationFuser
names = [f.__name__ for f in OperationFuser.forward_backward_fusion_functions]
upstream = overlay.load_upstream()
answer['upstream'] = upstream.WHO
answer['name'] = upstream.__name__
answer['once'] = overlay.load_upstream() is upstream
answer['still'] = m.WHO
answer['fusions'] = [names, [f.__name__ for f in OperationFuser.forward_backward_fusion_functions]]
"""
    answer = FakeInstall(tmp_path).run(code, NVTE_GROUPED_MLP_FORK=switch)
    assert answer["upstream"] == "upstream"
    assert answer["once"] is True
    if switch == "1":
        assert answer["still"] == "fork"
        assert answer["name"] == f"{installed_te.PACKAGE}._te_grouped_mlp_upstream"
        assert answer["fusions"] == [["fork_fusion"], ["fork_fusion"]]
    else:
        assert answer["name"] == installed_te.TARGET
        assert answer["fusions"] == [["upstream_fusion"], ["upstream_fusion"]]


def test_a_failing_upstream_leaves_no_trace(tmp_path: Path) -> None:
    code = f"""{BOOT}{IMPORT}
import sys
from te_grouped_mlp.integration import overlay
from transformer_engine.pytorch.ops.fuser import OperationFuser
for _ in range(2):
    try:
        overlay.load_upstream()
    except ZeroDivisionError:
        answer['raised'] = answer.get('raised', 0) + 1
answer['left'] = overlay.UPSTREAM_NAME in sys.modules
answer['fusions'] = len(OperationFuser.forward_backward_fusion_functions)
"""
    answer = FakeInstall(tmp_path, upstream=UPSTREAM_TEXT + "1 / 0\n").run(code)
    assert answer["raised"] == 2
    assert answer["left"] is False
    assert answer["fusions"] == 1


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_file_with_the_use_the_fork_patch_is_not_upstream(tmp_path: Path, switch: str) -> None:
    text = f"# {installed_te.PATCH_MARKER}\nDETERMINISTIC_DPROB = True\nWHO = 'patched'\n"
    code = f"""{BOOT}{IMPORT}{ASK}
ask('after')
try:
    overlay.load_upstream()
except RuntimeError as error:
    answer['refused'] = str(error)
"""
    answer = FakeInstall(tmp_path, upstream=text).run(code, NVTE_GROUPED_MLP_FORK=switch)
    assert answer["who"] == ("fork" if switch == "1" else "patched")
    # The patched file brings the fork in by itself.
    assert answer["after"] is True
    assert installed_te.PATCH_MARKER in str(answer["refused"])
    assert "patch revert" in str(answer["refused"])


def test_other_repairs_do_not_make_a_file_the_fork(tmp_path: Path) -> None:
    text = "DETERMINISTIC_DPROB = True\nWHO = 'repaired'\n"
    answer = FakeInstall(tmp_path, upstream=text).run(f"{IMPORT}{ASK}ask('after')")
    assert answer["after"] is False


def test_bootstrap_imports_nothing_new(tmp_path: Path) -> None:
    code = """
import os, sys
before = set(sys.modules)
import te_grouped_mlp._bootstrap as b; b.install()
answer['new'] = sorted(set(sys.modules) - before)
"""
    answer = FakeInstall(tmp_path).run(code)
    assert answer["new"] == ["te_grouped_mlp", "te_grouped_mlp._bootstrap"]


def test_public_names_are_lazy_and_unknown_ones_are_errors(tmp_path: Path) -> None:
    code = """
import te_grouped_mlp
answer['activate'] = te_grouped_mlp.activate.__module__
answer['version'] = te_grouped_mlp.__version__
try:
    te_grouped_mlp.nothing
except AttributeError as error:
    answer['unknown'] = str(error)
"""
    answer = FakeInstall(tmp_path).run(code)
    assert answer["activate"] == "te_grouped_mlp.integration.overlay"
    assert answer["version"]
    assert "nothing" in str(answer["unknown"])
