# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A site folder with a few-line TE and this package's overlay, and a Python that runs in it.

The real TE needs seconds to import and cannot be asked to be version 2.99 or to lack a name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import te_grouped_mlp
from te_grouped_mlp.integration import installed_te

PACKAGE = Path(te_grouped_mlp.__file__).resolve().parent
FORK_TEXT = """
DETERMINISTIC_DPROB = True
WHO = "fork"
from ..fuser import register_forward_backward_fusion
def fork_fusion(ops): return ops
register_forward_backward_fusion(fork_fusion, prepend=True)
"""
UPSTREAM_TEXT = """
WHO = "upstream"
from ..fuser import register_forward_backward_fusion
def upstream_fusion(ops): return ops
register_forward_backward_fusion(upstream_fusion, prepend=True)
"""
FUSER_TEXT = """
class OperationFuser:
    forward_backward_fusion_functions = []
def register_forward_backward_fusion(function, prepend=False):
    OperationFuser.forward_backward_fusion_functions.insert(0, function)
"""


class FakeInstall:
    """One folder for PYTHONPATH.

    Args:
        root: An empty folder; everything is written below it.
        version: What TE's metadata says; None leaves the metadata out.
        upstream: Text of TE's own fused module; None leaves the file out (TE before 2.17).
        lacking: `module.name` entries of HOST_NAMES that this TE does not define.
        te: False leaves TE out altogether.
    """

    def __init__(
        self,
        root: Path,
        *,
        version: str | None = "2.20.2",
        upstream: str | None = UPSTREAM_TEXT,
        lacking: tuple[str, ...] = (),
        te: bool = True,
    ) -> None:
        self.root = root
        self._copy_package()
        if te:
            self._write_te(upstream, lacking)
            if version is not None:
                info = root / f"transformer_engine-{version}.dist-info"
                info.mkdir()
                text = f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n"
                (info / "METADATA").write_text(text)

    def _copy_package(self) -> None:
        package = self.root / "te_grouped_mlp"
        package.mkdir(parents=True)
        for file in PACKAGE.glob("*.py"):
            shutil.copy(file, package)
        shutil.copytree(PACKAGE / "integration", package / "integration")
        (package / "op").mkdir()
        for name in ("__init__.py", "emulated.py", "environment.py", "extension.py", "packages.py"):
            shutil.copy(PACKAGE / "op" / name, package / "op")
        (package / "_fork").mkdir()
        self.fork_file = package / "_fork" / "grouped_mlp.py"
        self.fork_file.write_text(FORK_TEXT)

    def _write_te(self, upstream: str | None, lacking: tuple[str, ...]) -> None:
        texts: dict[str, str] = {
            "transformer_engine": "from transformer_engine import pytorch\n",
            "transformer_engine.pytorch": "from transformer_engine.pytorch import ops\n",
            "transformer_engine.pytorch.ops": "from transformer_engine.pytorch.ops import fused\n",
            installed_te.PACKAGE: "from . import grouped_mlp\n" if upstream is not None else "",
        }
        for module, names in installed_te.HOST_NAMES.items():
            body = FUSER_TEXT if module.endswith(".fuser") else ""
            for name, keywords in names.items():
                if (
                    f"{module}.{name}" not in lacking
                    and "." not in name
                    and f"def {name}(" not in body
                ):
                    arguments = "".join(f"{keyword}=None, " for keyword in keywords)
                    body += f"def {name}({arguments}): pass\n"
            # Names first: TE defines what the fused module needs before it imports that.
            texts[module] = body + texts.get(module, "")
        if upstream is not None:
            texts[installed_te.TARGET] = upstream
        packages = {name.rpartition(".")[0] for name in texts} | {"transformer_engine"}
        for name in sorted({*texts, *(package for package in packages if package)}):
            path = self.root.joinpath(*name.split("."))
            is_package = any(other.startswith(f"{name}.") for other in texts)
            file = path / "__init__.py" if is_package else path.with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(texts.get(name, ""))

    def run(self, code: str, *options: str, **environment: str) -> dict[str, object]:
        """Run statements in a new interpreter; return the dictionary that they call `answer`.

        Python's own `site-packages` stays out, so that no installed copy can answer instead.
        """
        program = f"import json\nanswer = {{}}\n{code}\nprint(json.dumps(answer))"
        base = {k: v for k, v in os.environ.items() if not k.startswith(("NVTE_", "PYTHON"))}
        done = subprocess.run(
            [sys.executable, "-S", *options, "-c", program],
            cwd=self.root,
            env={
                **base,
                "PYTHONPATH": str(self.root),
                "NVTE_GROUPED_MLP_STANDALONE": "0",
                "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1], "stderr": done.stderr}
        return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}
