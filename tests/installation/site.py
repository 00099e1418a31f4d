# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Empty environments, stand-in wheels, and the wheel under test."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]

# A TE whose import loads nothing, so that the place of its fused module can be asked for.
TE_FILES = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine/pytorch/ops/__init__.py": "",
    "transformer_engine/pytorch/ops/fused/__init__.py": "",
    "transformer_engine/pytorch/ops/fused/grouped_mlp.py": "WHO = 'upstream'\n",
}

ASK = """
import importlib.util, json, sys
from te_grouped_mlp.integration import overlay
if "activate" in sys.argv:
    overlay.activate()
state = overlay.status()
try:
    overlay.assert_active()
    asserted = True
except RuntimeError as error:
    asserted = False
print(json.dumps({
    "active": state.active,
    "asserted": asserted,
    "reason": state.reason,
    "package": overlay.__file__,
    "origin": importlib.util.find_spec(overlay.TARGET).origin,
}))
"""


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str] | None = None) -> Path:
    """Write a wheel by hand: some files, and the metadata that pip needs."""
    plain = re.sub(r"[-.]+", "_", name)
    info = f"{plain}-{version}.dist-info"
    texts = dict(files if files is not None else {f"{plain}/__init__.py": ""})
    texts[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    texts[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for path, text in texts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    texts[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return wheel


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the process environment without anything that could bring the checkout in."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NVTE_", "PYTHON", "PIP_"))}
    return {**kept, "NVTE_GROUPED_MLP_STANDALONE": "0", **extra}


class Site:
    """A virtual environment of its own, without pip inside.

    Args:
        root: Where it is made; must not exist.
    """

    def __init__(self, root: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
        self.root = root
        self.python = root / "bin" / "python"
        self.purelib = next((root / "lib").glob("python*")) / "site-packages"

    def pip(self, *arguments: str) -> None:
        """Run pip on this environment; takes nothing from an index or a user's configuration."""
        command = [sys.executable, "-m", "pip", "--isolated", "--python", str(self.python)]
        done = subprocess.run(
            [*command, *arguments], env=clean_environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def ask(self, *arguments: str, **environment: str) -> dict[str, object]:
        """Ask the installed overlay whether it is active, in a new interpreter."""
        done = subprocess.run(
            [str(self.python), "-c", ASK, *arguments],
            cwd=self.root,
            env=clean_environment(**environment),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        assert answer["active"] == answer["asserted"], answer
        return answer

    def files(self) -> dict[str, str]:
        """Return every file of site-packages with its hash; byte code aside."""
        return {
            path.relative_to(self.purelib).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.purelib.rglob("*"))
            if path.is_file() and path.suffix != ".pyc"
        }
