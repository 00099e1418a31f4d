# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Installing beside TE changes nothing that was there, and the overlay knows where it is active."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.installation.site import TE_FILES, Site, clean_environment, write_wheel

pytestmark = pytest.mark.slow

TORCH = "2.9.0a0+x"
# Everything that the base and the light extras may pull in, in a version no index has.
DEPENDENCIES = ("packaging", "rich", "libcst", "pydantic", "numpy", "onnxscript", "einops")


def _site(root: Path, te_version: str = "2.19.0") -> tuple[Site, Path]:
    """Make an environment that has stand-ins of torch and TE, and a folder with all others."""
    site = Site(root / "site")
    links = root / "links"
    torch = write_wheel(links, "torch", TORCH)
    te = write_wheel(links, "transformer-engine", te_version, TE_FILES)
    # Newer ones, which an upgrade would take.
    write_wheel(links, "torch", "99.0")
    write_wheel(links, "transformer-engine", "99.0", TE_FILES)
    for name in DEPENDENCIES:
        write_wheel(links, name, "99.0")
    site.pip("install", "--no-index", "--no-deps", str(torch), str(te))
    return site, links


@pytest.mark.parametrize("te_version", ["2.19.0", "2.21.0.dev0+x"])
def test_install_and_uninstall_leave_torch_and_te_alone(
    wheel: Path, tmp_path: Path, te_version: str
) -> None:
    site, links = _site(tmp_path, te_version)
    before = site.files()
    links_option = ("--no-index", "--find-links", str(links))
    site.pip("install", *links_option, f"{wheel}[standalone,cli]")
    during = site.files()
    assert "te_grouped_mlp.pth" in during
    assert {name: during.get(name) for name in before} == before
    # Runs once, so that byte code is there to be left behind.
    site.ask()
    site.pip("uninstall", "--yes", "te-grouped-mlp", *DEPENDENCIES)
    assert site.files() == before
    assert not list(site.purelib.glob("te_grouped_mlp*"))


def test_active_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    site, _ = _site(tmp_path)
    site.pip("install", "--no-deps", str(wheel))
    answer = site.ask()
    assert answer["active"] is True
    assert answer["origin"] == str(site.purelib / "te_grouped_mlp/_fork/grouped_mlp.py")
    switched_off = site.ask(NVTE_GROUPED_MLP_FORK="0")
    assert switched_off["active"] is False
    upstream = site.purelib / "transformer_engine/pytorch/ops/fused/grouped_mlp.py"
    assert switched_off["origin"] == str(upstream)


def test_active_from_a_target_folder_only_when_activated(wheel: Path, tmp_path: Path) -> None:
    """Python reads `.pth` files in site folders, not in those of PYTHONPATH."""
    site, _ = _site(tmp_path)
    target = tmp_path / "target"
    site.pip("install", "--no-deps", "--target", str(target), str(wheel))
    silent = site.ask(PYTHONPATH=str(target))
    assert silent["active"] is False
    assert ".pth" in str(silent["reason"])
    assert str(silent["origin"]).startswith(str(site.purelib))
    activated = site.ask("activate", PYTHONPATH=str(target))
    assert activated["active"] is True
    assert activated["origin"] == str(target / "te_grouped_mlp/_fork/grouped_mlp.py")


def test_active_from_the_development_install(source_tree: Path, tmp_path: Path) -> None:
    site, _ = _site(tmp_path)
    # Built with the tools of this environment, installed into the other.
    wheels = tmp_path / "editable"
    wheels.mkdir()
    code = f"import setuptools.build_meta as b; print(b.build_editable({str(wheels)!r}))"
    built = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source_tree,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    site.pip("install", "--no-deps", str(next(wheels.glob("*.whl"))))
    answer = site.ask()
    assert answer["active"] is True
    assert answer["package"] == str(source_tree / "te_grouped_mlp/integration/overlay.py")
    fork = source_tree / "transformer_engine/pytorch/ops/fused/grouped_mlp.py"
    assert answer["origin"] == str(fork)
    # From inside the checkout, where a folder `transformer_engine` lies on sys.path.
    inside = site.ask(PYTHONPATH=str(source_tree))
    assert inside["active"] is True
    assert inside["origin"] == str(fork)
    site.pip("uninstall", "--yes", "te-grouped-mlp")
    assert not list(site.purelib.glob("*te_grouped_mlp*"))
