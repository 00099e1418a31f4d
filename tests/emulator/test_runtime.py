# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The library in the place of CuTe DSL's CUDA runtime, and what is said when it lacks something."""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("numpy")

from te_grouped_mlp.emulator import runtime

NEEDED = (
    "_cudaLaunchKernelEx",
    "_cudaLibraryLoadData",
    "_cudaLibraryGetKernel",
    "_cudaGetDevice",
    "_cudaSetDevice",
    "_cudaDeviceGetAttribute",
    "_cudaFuncSetAttribute",
    "_cudaKernelSetAttributeForDevice",
    "_cuKernelGetAttribute",
    "cuda_dialect_init_library_once",
    "cuda_dialect_unload_library_once",
    "CuteDSLRT_TVMFFISetRaisedCudaError",
)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(runtime.library_path()))


@pytest.mark.parametrize("name", NEEDED)
def test_it_has_what_host_code_calls(library: ctypes.CDLL, name: str) -> None:
    assert hasattr(library, name)


@pytest.mark.parametrize(("attribute", "value"), [(75, 10), (76, 0), (16, 148), (97, 232448)])
def test_it_answers_as_a_b200(library: ctypes.CDLL, attribute: int, value: int) -> None:
    found = ctypes.c_int()
    assert library._cudaDeviceGetAttribute(ctypes.byref(found), attribute, 0) == 0
    assert found.value == value


def test_an_attribute_that_is_not_known_is_an_error(library: ctypes.CDLL) -> None:
    assert library._cudaDeviceGetAttribute(ctypes.byref(ctypes.c_int()), 9999, 0) != 0


def test_a_symbol_that_it_lacks_is_named_with_the_known_releases() -> None:
    def compile_host_code() -> None:
        raise ValueError("JIT session error: Symbols not found: [ _cudaNewCall ]")

    with pytest.raises(RuntimeError, match=r"has no _cudaNewCall, .*allowed: .*4\.8\.1 to 4\.8\.x"):
        runtime.explained(compile_host_code)


def test_other_errors_stay_as_they_are() -> None:
    def compile_host_code() -> None:
        raise ValueError("another")

    with pytest.raises(ValueError, match="another"):
        runtime.explained(compile_host_code)
