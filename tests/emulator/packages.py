# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests need that emulate compiled kernels."""

from __future__ import annotations

import importlib.util
import os

import pytest

REQUIRE = "TE_GROUPED_MLP_REQUIRE_KERNELS"
NAMES = ("cudnn", "cutlass", "quack", "triton", "numpy", "transformer_engine")


def require_packages() -> None:
    """Skip where a package is not installed, unless it has to be; and where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("the emulator stands for a GPU only where there is none")
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    if missing and os.environ.get(REQUIRE) != "1":
        pytest.skip(f"{', '.join(missing)} not installed ({REQUIRE}=1 makes that an error)")
    assert not missing, f"{missing} not installed"
