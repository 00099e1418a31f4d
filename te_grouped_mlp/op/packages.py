# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which packages are installed, and what the cuDNN frontend's wrappers take."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

WRAPPERS = {
    "glu": "grouped_gemm_glu_wrapper_sm100",
    "dglu": "grouped_gemm_dglu_wrapper_sm100",
    "srelu": "grouped_gemm_srelu_wrapper_sm100",
    "dsrelu": "grouped_gemm_dsrelu_wrapper_sm100",
    "quant": "grouped_gemm_quant_wrapper_sm100",
    "wgrad": "grouped_gemm_wgrad_wrapper_sm100",
}
"""Short names of the cuDNN frontend's grouped-GEMM wrappers that we launch."""

RUNTIME_OFFSETS = "use_single_group_runtime_offsets"
"""The wrapper argument by which a kernel computes every row of the buffer."""

Probe = TypeVar("Probe", bound=Callable[..., Any])

DISTRIBUTIONS = {
    "torch": "torch",
    "transformer_engine": "transformer-engine",
    "cudnn_frontend": "nvidia-cudnn-frontend",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "quack": "quack-kernels",
    "triton": "triton",
}
"""Names of packages in `Environment.versions`, and of their distributions."""


@dataclass(frozen=True)
class Absent:
    """Something that is not there, with the cause."""

    cause: str

    def __bool__(self) -> bool:
        return False


_remembered: list[Any] = []


def remembered(probe: Probe) -> Probe:
    """Cache what a function learns of the installed packages, until `forget`."""
    _remembered.append(functools.cache(probe))
    return cast("Probe", _remembered[-1])


def forget() -> None:
    """Look at the installed packages anew, as after a test has replaced the frontend."""
    for probe in _remembered:
        probe.cache_clear()


@remembered
def package_versions() -> Mapping[str, str | Absent]:
    """Return the version or the absence of each of DISTRIBUTIONS; imports none of them."""
    versions: dict[str, str | Absent] = {}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = Absent(f"{distribution} is not installed")
    if versions["torch"]:
        versions["torch"] = _torch_build() or versions["torch"]
    return versions


@contextlib.contextmanager
def triton_needed(what: str) -> Iterator[None]:
    """Name the remedy where the block imports our Triton kernels and there is no Triton.

    Args:
        what: Needs it; begins a sentence.

    Raises:
        ImportError: Triton is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(
            f"{what} need Triton, which is not installed; torch's CUDA builds bring it, else: "
            "pip install triton"
        ) from error


def _torch_build() -> str | None:
    """Return torch's own version, such as 2.14.1+cu130: the metadata need not name the build."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            file = Path(spec.origin).with_name("version.py")
            return str(runpy.run_path(str(file))["__version__"])
    return None


Wrappers = Mapping[str, frozenset[str]]


def frontend_wrappers() -> Wrappers | Absent:
    """Return the arguments of each wrapper of WRAPPERS that the frontend has; imports it once."""
    # A `cudnn` that is imported is what a launch would find, whatever is installed.
    return _wrappers_of(sys.modules.get("cudnn"))


@remembered
def _wrappers_of(module: ModuleType | None) -> Wrappers | Absent:
    version = package_versions()["cudnn_frontend"]
    if module is None:
        if isinstance(version, Absent):
            return version
        try:
            # One record for the module, since equal ones take longer to compare.
            return _wrappers_of(importlib.import_module("cudnn"))
        except Exception as error:  # a broken package may raise anything; the cause is kept
            return Absent(f"nvidia-cudnn-frontend {version} cannot be imported: {error}")
    signatures: dict[str, frozenset[str]] = {}
    for short, name in WRAPPERS.items():
        try:
            signatures[short] = frozenset(inspect.signature(getattr(module, name)).parameters)
        except Exception as error:
            # The attribute itself imports CuTe DSL; without it the whole frontend is of no use.
            if isinstance(error, ImportError):
                return Absent(f"nvidia-cudnn-frontend {version} lacks a dependency: {error}")
    return signatures
