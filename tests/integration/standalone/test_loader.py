# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""When standalone starts, and that an import over it leaves torch and the environment as they were.

Each case is a process of its own: an import cannot be undone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from te_grouped_mlp.integration.standalone import loader

FOLDERS = ("", "transformer_engine", "transformer_engine/wheel_lib")


def run(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python code with the overlay in place."""
    env = {**os.environ, **environment}
    env.pop("NVTE_PROJECT_BUILDING", None)
    script = f"import te_grouped_mlp\nte_grouped_mlp.activate()\n{code}"
    return subprocess.run(
        [sys.executable, *options, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def good(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "NVTE_GROUPED_MLP_FORK": "0"}


def test_loader_is_light():
    out = run(
        "import sys\nfrom te_grouped_mlp.integration.standalone import loader\n"
        "loader.StandaloneFinder()\n"
        "print(sorted({'torch', 'transformer_engine'} & set(sys.modules)))"
    )
    assert good(out) == "[]\n"


def _te_warns_by_itself() -> list[str]:
    """Options for a TE that calls what this torch deprecates (2.19 uses torch.jit.script)."""
    from importlib.metadata import version

    return ["-W", "ignore::DeprecationWarning"] if version("transformer-engine") < "2.20" else []


REST = "the rest follows"


@pytest.fixture(scope="module")
def imported() -> subprocess.CompletedProcess:
    """A process that imports TE, says what changed, and then imports every other module of it."""
    return run(
        "import importlib, os, pkgutil, sys, torch, torch._dynamo, warnings\n"
        "before = [dict(m.__dict__) for m in (torch, torch.cuda, torch.version)]\n"
        "environment = dict(os.environ)\n"
        "import transformer_engine.pytorch as te\n"
        "after = [dict(m.__dict__) for m in (torch, torch.cuda, torch.version)]\n"
        "for old, new in zip(before, after):\n"
        "    assert all(new[name] is value for name, value in old.items())\n"
        "    added = {n for n in new.keys() - old.keys() if n not in sys.modules['torch'].__all__\n"
        "             and not hasattr(new[n], '__path__') and not hasattr(new[n], '__file__')}\n"
        "    assert not added, added\n"
        "assert dict(os.environ) == environment\n"
        "assert 'triton' not in sys.modules or sys.modules['triton'].__spec__.origin\n"
        "print(te.__name__, sys.modules['transformer_engine_torch'].__doc__)\n"
        f"print('{REST}', file=sys.stderr)\n"
        "warnings.simplefilter('ignore')\n"
        "for module in pkgutil.walk_packages(te.__path__, te.__name__ + '.'):\n"
        "    try:\n"
        "        importlib.import_module(module.name)\n"
        "        print('imported', module.name)\n"
        "    except BaseException as error:\n"
        "        print('failed', module.name, repr(error))",
        "-W", "error", *_te_warns_by_itself(), **CPU_ONLY,
    )  # fmt: skip


def test_import_is_clean_and_changes_neither_torch_nor_environment(imported):
    assert good(imported).startswith("transformer_engine.pytorch transformer_engine_torch in C++")
    # Torch itself says a word when the rest is imported where nvcc is found and no driver.
    lines = [line for line in imported.stderr.partition(REST)[0].splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("te-grouped-mlp: Transformer Engine runs standalone")


def test_every_module_of_te_can_be_imported(imported):
    lines = good(imported).splitlines()
    failed = [line for line in lines if line.startswith("failed")]
    # What builds the extension is installed with it and needs the rest of its source tree.
    assert [line.split()[1] for line in failed] == ["transformer_engine.pytorch.setup"], failed
    names = {line.split()[1] for line in lines if line.startswith("imported")}
    assert len(names) > 90
    assert "transformer_engine.pytorch.router" in names


def test_the_switch_turns_it_off_and_names_bad_values():
    code = (
        "from te_grouped_mlp.integration.standalone import loader\n"
        "print(*loader.should_start(), sep='|')"
    )
    off = run(code, NVTE_GROUPED_MLP_STANDALONE="0", **CPU_ONLY)
    assert good(off) == "False|NVTE_GROUPED_MLP_STANDALONE=0\n"
    on = run(code, NVTE_GROUPED_MLP_STANDALONE="1", **CPU_ONLY)
    assert good(on).startswith("True|NVTE_GROUPED_MLP_STANDALONE=1 and")
    unset = run(code, NVTE_GROUPED_MLP_STANDALONE="", **CPU_ONLY)
    assert good(unset).startswith("True|Transformer Engine's extension is not installed")
    bad = run(code, NVTE_GROUPED_MLP_STANDALONE="yes", **CPU_ONLY)
    assert bad.returncode != 0
    assert "NVTE_GROUPED_MLP_STANDALONE is 'yes'; allowed: 0, 1, or unset" in bad.stderr


def test_a_visible_device_keeps_it_off_unless_asked(monkeypatch):
    monkeypatch.setattr(loader, "extension_location", lambda: None)
    monkeypatch.setattr(loader, "cuda_device_visible", lambda: True)
    monkeypatch.delenv("NVTE_GROUPED_MLP_STANDALONE", raising=False)
    started, reason = loader.should_start()
    assert not started
    assert "CUDA device" in reason
    monkeypatch.setenv("NVTE_GROUPED_MLP_STANDALONE", "1")
    assert loader.should_start()[0]


def test_cuda_device_visible_agrees_with_torch():
    assert loader.cuda_device_visible() == torch.cuda.is_available()


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("root", ["te", "purelib"])
@pytest.mark.parametrize("switch", ["", "1"])
def test_an_extension_in_any_folder_that_te_searches_keeps_it_off(
    tmp_path, monkeypatch, folder, root, switch
):
    roots = {name: tmp_path / name for name in ("te", "purelib")}
    for path in roots.values():
        (path / "transformer_engine" / "wheel_lib").mkdir(parents=True)
    monkeypatch.setattr(loader, "transformer_engine_root", lambda: roots["te"])
    monkeypatch.setattr(loader.sysconfig, "get_paths", lambda: {"purelib": str(roots["purelib"])})
    monkeypatch.setattr(loader, "cuda_device_visible", lambda: False)
    monkeypatch.setenv("NVTE_GROUPED_MLP_STANDALONE", switch)
    assert loader.extension_location() is None
    assert loader.should_start()[0]
    file = roots[root] / folder / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so"
    file.touch()
    assert loader.extension_location() == file
    started, reason = loader.should_start()
    assert not started
    assert str(file) in reason


def test_other_files_are_no_extension(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "transformer_engine_root", lambda: tmp_path)
    monkeypatch.setattr(loader.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    package = tmp_path / "transformer_engine"
    package.mkdir()
    for name in ("libtransformer_engine.so", "transformer_engine_torch.py", "torch.so"):
        (package / name).touch()
    assert loader.extension_location() is None


def test_an_extension_beside_a_real_te_leaves_te_to_itself(tmp_path):
    """A tree with TE's files and an empty extension: TE's own error stands, without our tex."""
    import importlib.util

    origin = Path(importlib.util.find_spec("transformer_engine").origin).parent
    package = tmp_path / "transformer_engine"
    package.mkdir()
    for entry in origin.iterdir():
        if entry.name != "wheel_lib":
            (package / entry.name).symlink_to(entry)
    (package / "transformer_engine_torch.so").touch()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code = (
        "import sys\ntry:\n    import transformer_engine.pytorch\n"
        "except BaseException as error:\n    print(type(error).__name__)\n"
        "print('transformer_engine_torch' in sys.modules)"
    )
    result = run(code, PYTHONPATH=path, **CPU_ONLY)
    out = good(result)
    assert out.splitlines()[-1] == "False"
    assert len(out.splitlines()) == 2
    assert "standalone" not in result.stderr


def test_te_absent_or_a_bare_folder_is_no_root(tmp_path):
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    code = (
        "import os, sys\n"
        "holds_te = lambda p: os.path.isdir(os.path.join(p, 'transformer_engine'))\n"
        "sys.path[:] = [p for p in sys.path if not holds_te(p)]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from te_grouped_mlp.integration.standalone import loader\n"
        "print(loader.transformer_engine_root(), loader.extension_location())"
    )
    assert good(run(code, **CPU_ONLY)) == "None None\n"


def test_jax_is_left_to_te():
    code = (
        "from transformer_engine import common\n"
        "try:\n    common.load_framework_extension('jax')\n"
        "except FileNotFoundError as error:\n    print('not found')"
    )
    assert good(run(code, **CPU_ONLY)) == "not found\n"
