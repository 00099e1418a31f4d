# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The overlay over the TE that is installed here, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from te_grouped_mlp.integration import installed_te

CODE = f"""
import json, sys
import te_grouped_mlp
from te_grouped_mlp.integration import installed_te as host
from te_grouped_mlp.integration import overlay
te_grouped_mlp.activate()
answer = {{"before": overlay.status().active, "torch": "torch" in sys.modules}}
import transformer_engine.pytorch
from transformer_engine.pytorch.ops.fuser import OperationFuser
module = sys.modules[{installed_te.TARGET!r}]
answer["after"] = overlay.status().active
answer["is_fork"] = overlay.is_fork(module)
answer["missing"] = list(host.missing_host_names())
before = list(OperationFuser.forward_backward_fusion_functions)
upstream = overlay.load_upstream()
answer["upstream"] = [upstream.__name__, upstream.__file__]
answer["same_fusions"] = OperationFuser.forward_backward_fusion_functions == before
answer["te"] = transformer_engine.__file__
print(json.dumps(answer))
"""


def _run(**environment: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("switch", ["1", "0"])
def test_overlay_over_the_installed_te(switch: str) -> None:
    answer = _run(NVTE_GROUPED_MLP_FORK=switch)
    active = switch == "1"
    assert answer["torch"] is False
    assert answer["before"] is active
    assert answer["after"] is active
    assert answer["is_fork"] is active
    assert answer["missing"] == []
    assert answer["same_fusions"] is True
    te_folder = str(answer["te"]).removesuffix("__init__.py")
    name, file = answer["upstream"]  # type: ignore[misc]
    assert name == (
        f"{installed_te.PACKAGE}._te_grouped_mlp_upstream" if active else installed_te.TARGET
    )
    assert file == f"{te_folder}pytorch/ops/fused/grouped_mlp.py"
