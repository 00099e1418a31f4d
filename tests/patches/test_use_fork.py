# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A TE file with the patch "use the fork": it hands over to our op where our package is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import te_grouped_mlp
from te_grouped_mlp.integration import overlay
from te_grouped_mlp.patches import engine
from tests.patches import trees

_FORK = """
DETERMINISTIC_DPROB = True
GroupedMLP_CuTeGEMMGLU = "ours"
assert __name__ == "transformer_engine.pytorch.ops.fused.grouped_mlp"
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An importable TE package around the patched model file."""
    root = trees.write_tree(tmp_path / "site", trees.te_source("2.20.2"))
    folder = trees.te_file(root).parent
    while folder != root:
        (folder / "__init__.py").touch()
        folder = folder.parent
    (trees.te_file(root).parent / "__init__.py").write_text(
        "from .grouped_mlp import GroupedMLP_CuTeGEMMGLU\n"
    )
    (root / "transformer_engine-2.20.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n"
    )
    engine.apply(root, ["te_use_fork"])
    return root


# In a checkout the package finds its patches through the editable install, which -S leaves out.
PATCHES_PARENT = str(Path(te_grouped_mlp.patches.__file__).parents[1])


def look(site: Path, prelude: str = "", **environment: str) -> str:
    """Import TE in a process of its own and say what it uses."""
    code = f"""
import sys
import te_grouped_mlp
te_grouped_mlp.__path__.append({PATCHES_PARENT!r})
{prelude}
from transformer_engine.pytorch.ops import fused
module = sys.modules["transformer_engine.pytorch.ops.fused.grouped_mlp"]
print(fused.GroupedMLP_CuTeGEMMGLU == "ours", fused.grouped_mlp is module,
      getattr(module, "DETERMINISTIC_DPROB", None), getattr(module, "REGISTERED", None))
"""
    paths = [str(site), *sys.path]
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def with_fork(folder: Path, text: str = _FORK) -> str:
    """Make a stand-in for the forked file the one that the overlay gives."""
    file = folder / "fork.py"
    file.write_text(text)
    return (
        "from pathlib import Path\n"
        "from te_grouped_mlp import _bootstrap; from te_grouped_mlp.integration import overlay\n"
        "_bootstrap.OverlayFinder.find_spec = staticmethod(lambda *_: None)\n"
        f"overlay.fork_file = lambda: Path({str(file)!r})\n"
        "overlay._standalone_spec = lambda *_: None"
    )


UPSTREAM = "False True None [('glu', True), ('unary', True)]"
OURS = "True True True None"


def test_fork_is_used(site: Path, tmp_path: Path) -> None:
    assert look(site, with_fork(tmp_path)) == OURS


def test_switch_keeps_upstream(site: Path, tmp_path: Path) -> None:
    assert look(site, with_fork(tmp_path), NVTE_GROUPED_MLP_FORK="0") == UPSTREAM


def test_without_our_package(site: Path) -> None:
    without = """
class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "te_grouped_mlp":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker)
for name in [name for name in sys.modules if name.split(".")[0] == "te_grouped_mlp"]:
    del sys.modules[name]
"""
    assert look(site, without) == UPSTREAM


def test_a_broken_fork_is_an_error(site: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        look(site, with_fork(tmp_path, "1 / 0"))


def test_private_copy_stays_upstream(site: Path, tmp_path: Path) -> None:
    file = str(trees.te_file(site))
    code = with_fork(tmp_path) + (
        "\nimport importlib.util"
        f"\nspec = importlib.util.spec_from_file_location('private_copy', {file!r})"
        "\nmodule = importlib.util.module_from_spec(spec)"
        "\nspec.loader.exec_module(module)"
        "\nassert module.REGISTERED and not module._tegm_fork_in_use"
    )
    assert look(site, code) == OURS


@pytest.mark.parametrize("place", ["hand over", "GLU registration", "unary registration"])
def test_every_edit_counts(place: str, site: Path, tmp_path: Path) -> None:
    from te_grouped_mlp.patches.examine import compose
    from te_grouped_mlp.patches.te_use_fork import PATCH

    skip = frozenset({(PATCH.name, place)})
    source = compose(trees.te_source("2.20.2").encode(), [PATCH], skip)
    # The fork keeps what the patched file registered, to show what would reach TE's fuser.
    text = _FORK + "\nREGISTERED = None"
    trees.te_file(site).write_bytes(
        source.replace(
            b"    REGISTERED.append((func, prepend))",
            b"    raise RuntimeError('registered beside the fork')",
        )
    )
    with pytest.raises(AssertionError, match="registered beside the fork|NameError"):
        assert look(site, with_fork(tmp_path, text)) == OURS


def test_the_mark_is_the_one_that_the_overlay_refuses(site: Path) -> None:
    assert overlay.PATCH_MARKER in trees.te_file(site).read_text()
