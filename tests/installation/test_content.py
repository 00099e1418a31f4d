# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the wheel holds and asks for."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.installation.site import clean_environment

PYTHON_FOLDERS = {
    "te_grouped_mlp": "te_grouped_mlp",
    "patches": "te_grouped_mlp/patches",
    "transformer_engine/pytorch/ops/fused": "te_grouped_mlp/_fork",
}


def _expected(source: Path) -> set[str]:
    """Name every Python file of the tree by the path it must get."""
    return {
        f"{installed}/{file.relative_to(source / folder).as_posix()}"
        for folder, installed in PYTHON_FOLDERS.items()
        for file in (source / folder).rglob("*.py")
    }


def _check_names(names: set[str], source: Path) -> None:
    python = {name for name in names if name.endswith(".py")}
    assert python == _expected(source)
    assert "te_grouped_mlp/_fork/grouped_mlp.py" in python
    assert "te_grouped_mlp/patches/__init__.py" in python
    assert "te_grouped_mlp.pth" in names
    assert "te_grouped_mlp/py.typed" in names
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"te_grouped_mlp", "te_grouped_mlp.pth"}


def test_build_places_every_file_once(source_tree: Path, tmp_path: Path) -> None:
    """The part of the build that needs no compiler."""
    commands = ["build_py", "-d", str(tmp_path), "build_pth", "-d", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *commands],
        cwd=source_tree,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = {f.relative_to(tmp_path).as_posix() for f in tmp_path.rglob("*") if f.is_file()}
    _check_names(names, source_tree)


def test_pth_is_one_line_and_starts_with_import(source_tree: Path) -> None:
    """`site` executes only lines that start with import; any other is taken for a folder."""
    lines = (source_tree / "te_grouped_mlp.pth").read_text().splitlines()
    (line,) = lines
    assert line.startswith("import ")
    assert "te_grouped_mlp._bootstrap" in line


@pytest.mark.slow
def test_wheel_holds_every_file_and_the_extension(wheel: Path, source_tree: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    _check_names(names, source_tree)
    extensions = [name for name in names if name.endswith(".so")]
    assert len(extensions) == 1
    assert extensions[0].startswith("te_grouped_mlp/_C.")


@pytest.mark.slow
@pytest.mark.parametrize("required", ["0", "1"])
def test_without_a_compiler(source_tree: Path, tmp_path: Path, required: str) -> None:
    """The package is built without its extension, unless that is required; each says so."""
    variables = {"CXX": "/no/compiler", "TE_GROUPED_MLP_REQUIRE_EXTENSION": required}
    command = [sys.executable, "-m", "pip", "--isolated", "-v", "wheel", "--no-deps"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source_tree)],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert "most often there is no C++17 compiler" in said
    if required == "1":
        assert done.returncode != 0
        assert "te_grouped_mlp._C cannot be built" in said
        return
    assert done.returncode == 0, said
    assert "WITHOUT its C++ extension" in said
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    _check_names(names, source_tree)
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.slow
def test_wheel_asks_for_torch_without_bound_and_never_for_te(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(archive.read(name).decode())
    requirements = metadata.get_all("Requires-Dist") or []
    plain = {r for r in requirements if ";" not in r}
    assert plain == {"torch", "packaging"}
    named = {re.split(r"[ \[<>=!~;]", r)[0].lower().replace("_", "-") for r in requirements}
    assert not {n for n in named if n.startswith("transformer-engine")}
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras == {
        "standalone", "cli", "kernels", "kernels-cu13", "kernels-dev", "plot", "dev"
    }  # fmt: skip
    of_cli = {r.split(";")[0] for r in requirements if 'extra == "cli"' in r}
    assert of_cli == {"rich", "libcst"}
    assert 'te-grouped-mlp[cli]; extra == "dev"' in requirements
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
