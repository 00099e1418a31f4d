# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every name that standalone replaces in a Transformer Engine (TE) module, with its reason.

A row is applied right after the module's body ran, before another module can do
`from x import name`. Nothing outside TE's own modules is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from te_grouped_mlp.op import memory
from te_grouped_mlp.standalone import grouped_gemm_call, loader, upstream_fused
from te_grouped_mlp.standalone.torch_view import VIEW, default_device

GROUPED_MLP = "transformer_engine.pytorch.ops.fused.grouped_mlp"


@dataclass(frozen=True)
class Override:
    """One replaced name.

    Attributes:
        module: Full name of the TE module.
        name: A global of that module, or `Class.method`.
        reason: Why TE's own object cannot serve.
        make: `make(module, original)` returns the object to put there.
        optional: The name may be absent: a TE tree patched to use our fork has it not.
    """

    module: str
    name: str
    reason: str
    make: Callable[[ModuleType, Any], Any]
    optional: bool = False


def _view(module: ModuleType, original: Any) -> Any:
    del module, original
    return VIEW


def _constant(value: Any) -> Callable[[ModuleType, Any], Any]:
    def make(module: ModuleType, original: Any) -> Any:
        del module, original
        return value

    return make


def _canonicalize_device(module: ModuleType, original: Any) -> Any:
    del module

    def canonicalize_device(device: torch.device | str | None) -> torch.device:
        if device is not None:
            return original(device)
        chosen = torch.get_default_device()
        return default_device() if chosen.type == "cpu" else original(chosen)

    return canonicalize_device


def _release(tensor: torch.Tensor) -> None:
    """Drop a tensor's memory; what is left is float32 of shape (0,), as on the GPU."""
    tensor.data = torch.empty(0, device=tensor.device)


def _clear_tensor_data(*tensors: Any) -> None:
    for tensor in tensors:
        if tensor is None or hasattr(tensor, "_do_not_clear"):
            continue
        inner = tensor.get_data_tensors() if hasattr(tensor, "get_data_tensors") else ()
        if any(hasattr(part, "_do_not_clear") for part in inner):
            continue
        if hasattr(tensor, "clear"):
            tensor.clear()
        else:
            _release(tensor)


def _clear_mxfp8(self: Any) -> None:
    for name in (
        "_rowwise_data",
        "_columnwise_data",
        "_rowwise_scale_inv",
        "_columnwise_scale_inv",
    ):
        part = getattr(self, name)
        if part is not None:
            _release(part)


@functools.cache
def _no_elements() -> torch.Tensor:
    return torch.empty(0)


def _make_empty(module: ModuleType, original: Any) -> Any:
    del module

    @functools.wraps(original)
    def make_empty(self: Any, shape: Any, *, device: Any = None, **options: Any) -> Any:
        device = default_device() if device is None else device
        return original(self, shape, device=device, **options)

    return make_empty


def _alloc_tensors(module: ModuleType, original: Any) -> Any:
    del module

    @functools.wraps(original)
    def alloc_tensors(self: Any, shape: Any, *, device: Any = None) -> Any:
        return original(self, shape, device=default_device() if device is None else device)

    return alloc_tensors


@functools.cache
def _cublas_workspace(device: int | None, ub: bool, grouped_gemm: bool) -> Any:
    del device, ub
    byte = torch.empty(1, dtype=torch.uint8)
    return [byte] if grouped_gemm else byte


def _from_mxfp8(module: ModuleType, original: Any) -> Any:
    del original

    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        del ctx
        data = tensor._rowwise_data if tensor._rowwise_data is not None else tensor._columnwise_data
        if data is None:
            raise ValueError("MXFP8 tensor has neither row-wise nor column-wise data")
        if data.numel() == 0:
            return memory.empty(tensor.size(), dtype, data.device)
        return module.tex.dequantize(tensor, module.torch_to_transformer_engine_dtype[dtype])

    return staticmethod(forward)


@functools.cache
def _dummy_wgrad(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return memory.empty(shape, dtype, device)


def _dummy_wgrads_for_params(weight_params: list[Any]) -> list[torch.Tensor | None]:
    dummies: list[torch.Tensor | None] = []
    for param in weight_params:
        if not hasattr(param, "grad_added_to_main_grad"):
            dummies.append(None)
            continue
        param.grad_added_to_main_grad = True
        dummy = _dummy_wgrad(tuple(param.size()), param.dtype, param.device)
        if getattr(param, "zero_out_wgrad", False):
            dummy.zero_()
        dummies.append(dummy.detach())
    return dummies


_PYTORCH = "transformer_engine.pytorch"
_CURRENT_DEVICE = "asks torch.cuda for the current device or its properties"
_AUTOCAST = "asks for the autocast state of CUDA, which a CPU machine never sets"

TABLE: tuple[Override, ...] = (
    Override(f"{_PYTORCH}.utils", "torch", _CURRENT_DEVICE, _view),
    Override(
        f"{_PYTORCH}.utils",
        "canonicalize_device",
        "None means the current CUDA device; torch's default device where there is none",
        _canonicalize_device,
    ),
    Override(
        f"{_PYTORCH}.utils",
        "_empty_tensor",
        "moves an empty tensor to CUDA",
        _constant(_no_elements),
    ),
    Override(
        f"{_PYTORCH}.utils",
        "clear_tensor_data",
        "assigns a CUDA tensor to the data of a CPU tensor",
        _constant(_clear_tensor_data),
    ),
    Override(
        f"{_PYTORCH}.quantization",
        "torch",
        "asks whether the current stream is capturing, which raises without CUDA",
        _view,
    ),
    Override(f"{_PYTORCH}.quantized_tensor", "torch", _CURRENT_DEVICE, _view),
    Override(
        f"{_PYTORCH}.quantized_tensor",
        "Quantizer.make_empty",
        "no device means CUDA",
        _make_empty,
    ),
    Override(
        f"{_PYTORCH}.quantized_tensor",
        "Quantizer.alloc_tensors",
        "no device means CUDA",
        _alloc_tensors,
    ),
    Override(
        f"{_PYTORCH}.tensor.nvfp4_tensor",
        "torch",
        "NVFP4Quantizer's constructor asks for the current CUDA device",
        _view,
    ),
    Override(f"{_PYTORCH}.tensor.storage.grouped_tensor_storage", "torch", _CURRENT_DEVICE, _view),
    Override(
        f"{_PYTORCH}.tensor.storage.mxfp8_tensor_storage",
        "_FromMXFP8Func.forward",
        "copies a CPU tensor to CUDA first",
        _from_mxfp8,
    ),
    Override(
        f"{_PYTORCH}.tensor.storage.mxfp8_tensor_storage",
        "MXFP8TensorStorage.clear",
        "assigns a CUDA tensor to the data of a CPU tensor",
        _constant(_clear_mxfp8),
    ),
    Override(f"{_PYTORCH}.cpp_extensions.gemm", "torch", _CURRENT_DEVICE, _view),
    Override(
        f"{_PYTORCH}.cpp_extensions.gemm",
        "get_cublas_workspace",
        "32 MiB that nothing here reads",
        _constant(_cublas_workspace),
    ),
    Override(
        f"{_PYTORCH}.cpp_extensions.gemm",
        "general_grouped_gemm_for_grouped_tensor",
        "refuses an alpha that does not lie on a CUDA device",
        grouped_gemm_call.make,
    ),
    Override(f"{_PYTORCH}.ops._common", "torch", _AUTOCAST, _view),
    Override(
        f"{_PYTORCH}.ops._common",
        "get_dummy_wgrads_for_params",
        "puts the placeholder gradient on CUDA, not where the parameter is",
        _constant(_dummy_wgrads_for_params),
    ),
    Override(f"{_PYTORCH}.ops.op", "torch", "synchronizes the CUDA device", _view),
    Override(f"{_PYTORCH}.ops.basic.grouped_linear", "torch", _AUTOCAST, _view),
    Override(f"{_PYTORCH}.ops.basic.swiglu", "torch", _AUTOCAST, _view),
    Override(f"{_PYTORCH}.ops.basic.activation", "torch", _AUTOCAST, _view),
    Override(GROUPED_MLP, "torch", "asks for the current CUDA stream and autocast state", _view),
    Override(
        GROUPED_MLP,
        "_GroupedMLP_CuTeGEMMBase.is_supported",
        "the view answers 10.0, but the frontend's kernels are absent unless a test stands in",
        upstream_fused.guarded_is_supported,
        optional=True,
    ),
    Override(
        GROUPED_MLP,
        "GroupedMLP_CuTeGEMMUnary.is_supported",
        "the view answers 10.0, but the frontend's kernels are absent unless a test stands in",
        upstream_fused.guarded_is_supported,
        optional=True,
    ),
)

MODULES: frozenset[str] = frozenset(row.module for row in TABLE)


def _is_upstream(module: ModuleType) -> bool:
    root = loader.transformer_engine_root()
    file = getattr(module, "__file__", None)
    return (
        root is not None and file is not None and Path(file).is_relative_to(root / _TE_PYTORCH_DIR)
    )


_TE_PYTORCH_DIR = Path("transformer_engine") / "pytorch"


def apply(name: str, module: ModuleType) -> None:
    """Apply the rows of one TE module to a module object whose body has just run.

    Args:
        name: TE's name of the module. It may differ from `module.__name__`: an overlay that loads
            upstream's file under a private name passes upstream's.
        module: The module. A file that is not TE's own (our fork under upstream's name) is left
            alone.

    Raises:
        RuntimeError: TE has no such name any more, so the row cannot do what it is for.
    """
    if not _is_upstream(module):
        return
    for row in TABLE:
        if row.module == name:
            _replace(row, module)
    if name == GROUPED_MLP:
        upstream_fused.remember(module)


def _replace(row: Override, module: ModuleType) -> None:
    owner_path, _, attribute = row.name.rpartition(".")
    owner: Any = module
    if owner_path:
        owner = getattr(module, owner_path, None)
    original = None if owner is None else vars(owner).get(attribute)
    if original is None and row.optional:
        return
    if original is None:
        raise RuntimeError(
            f"{row.module} has no {row.name}, which standalone replaces because it {row.reason}; "
            "this Transformer Engine version is not supported in standalone"
        )
    setattr(owner, attribute, row.make(module, original))
