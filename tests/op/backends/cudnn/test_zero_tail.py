# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernel that zeroes tails, in Triton's interpreter; it needs Triton, and no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.op.backends.cudnn.launcher import REQUIRE, ROOT

_RUN = """
import torch
from te_grouped_mlp.op.backends.cudnn.kernels.zero_tail import zero_tail
for rows, cols, ends in (
    (512, 64, [256, 256]), (512, 1500, [0, 0]), (256, 96, [256]), (40, 1024, [8, 13]), (0, 64, [0]),
):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        wide = torch.full((rows, cols + 8), 7.0, dtype=dtype)
        out = wide[:, :cols]
        zero_tail(out, torch.tensor(ends, dtype=torch.int32))
        expected = torch.full((rows, cols + 8), 7.0, dtype=dtype)
        expected[ends[-1] :, :cols] = 0
        assert torch.equal(wide, expected), (rows, cols, ends, dtype)
"""


def test_rows_past_the_live_ones_become_zero_and_no_other() -> None:
    if importlib.util.find_spec("triton") is None and os.environ.get(REQUIRE) != "1":
        pytest.skip(f"triton not installed ({REQUIRE}=1 makes that an error)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [sys.executable, "-c", _RUN], env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
