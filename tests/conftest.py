# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What pytest has to know about these tests when they are copied away from pyproject.toml too."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is no failure of the code. In CI hypothesis also draws the same examples each time.
settings.register_profile(
    "suite", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# Marker -> what it says, and the compute capability that a device must have for it.
_DEVICE_MARKERS = {
    "gpu": ("needs any CUDA device", None),
    "sm90": ("needs a Hopper device", 9),
    "sm100": ("needs a Blackwell device (SM 10x)", 10),
}

# Marker -> what it says of Transformer Engine on a CUDA device.
_TE_MARKERS = {
    "mxfp8": "needs MXFP8 on the device: SM 10x, or Transformer Engine without its extension",
    "standalone": "needs Transformer Engine without its extension on the device",
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and leave slow tests out unless `-m` says something."""
    for name, (text, _) in _DEVICE_MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    for name, text in _TE_MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    config.addinivalue_line("markers", "slow: longer than a few seconds; run with -m slow")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


def _device_major() -> int | None:
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a device test, with the reason, where that device is not there."""
    wanted = [name for name in _DEVICE_MARKERS if item.get_closest_marker(name) is not None]
    if not wanted:
        return
    major = _device_major()
    for name in wanted:
        text, needed = _DEVICE_MARKERS[name]
        if major is None or (needed is not None and major != needed):
            pytest.skip(text)
    _skip_beside_the_extension(item, major)


def _skip_beside_the_extension(item: pytest.Item, major: int | None) -> None:
    """Skip what Transformer Engine refuses, or replaces, where its extension is installed."""
    from te_grouped_mlp.integration.standalone import loader

    if loader.should_start(True)[0]:
        return
    if item.get_closest_marker("standalone") is not None:
        pytest.skip(_TE_MARKERS["standalone"])
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = any(isinstance(value, str) and value.startswith("mxfp8") for value in values)
    if major == 9 and (named or item.get_closest_marker("mxfp8") is not None):
        pytest.skip(_TE_MARKERS["mxfp8"])
