# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every name that standalone replaces in a Transformer Engine (TE) module, with its reason.

A row is applied right after the module's body ran, before another module can do
`from x import name`. Nothing outside TE's own modules is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from te_grouped_mlp.integration.standalone import (
    availability,
    grouped_gemm_call,
    loader,
    replacements,
    upstream_fused,
)
from te_grouped_mlp.integration.standalone.replacements import constant, view

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


_PYTORCH = "transformer_engine.pytorch"
_CURRENT_DEVICE = "asks torch.cuda for the current device or its properties"
_CAPABILITY_ALONE = "answers by the device's capability, whatever tex implements"
_AUTOCAST = "asks for the autocast state of CUDA, which a CPU machine never sets"

TABLE: tuple[Override, ...] = (
    Override(f"{_PYTORCH}.utils", "torch", _CURRENT_DEVICE, view),
    Override(
        f"{_PYTORCH}.utils",
        "canonicalize_device",
        "None means the current CUDA device; torch's default device where there is none",
        replacements.canonicalize_device,
    ),
    Override(
        f"{_PYTORCH}.utils",
        "_empty_tensor",
        "moves an empty tensor to CUDA",
        constant(replacements.no_elements),
    ),
    Override(
        f"{_PYTORCH}.utils",
        "clear_tensor_data",
        "assigns a CUDA tensor to the data of a CPU tensor",
        constant(replacements.clear_tensor_data),
    ),
    Override(
        f"{_PYTORCH}.quantization",
        "torch",
        "asks whether the current stream is capturing, which raises without CUDA",
        view,
    ),
    Override(
        f"{_PYTORCH}.quantization",
        "check_fp8_support",
        _CAPABILITY_ALONE,
        availability.lacking("FP8 with a scale for each tensor"),
    ),
    Override(
        f"{_PYTORCH}.quantization",
        "check_fp8_block_scaling_support",
        _CAPABILITY_ALONE,
        availability.lacking("FP8 block scaling"),
    ),
    Override(
        f"{_PYTORCH}.quantization",
        "check_nvfp4_support",
        _CAPABILITY_ALONE,
        availability.lacking("NVFP4"),
    ),
    Override(
        f"{_PYTORCH}.quantization",
        "check_recipe_support",
        "leaves NVFP4 to an assertion that comes after a region has been entered",
        availability.check_recipe_support,
    ),
    Override(
        f"{_PYTORCH}.quantization",
        "FP8GlobalStateManager.is_fp8_available",
        "is asked for every recipe, MXFP8 too",
        availability.is_fp8_available,
    ),
    Override(f"{_PYTORCH}.quantized_tensor", "torch", _CURRENT_DEVICE, view),
    Override(
        f"{_PYTORCH}.quantized_tensor",
        "Quantizer.make_empty",
        "no device means CUDA",
        replacements.make_empty,
    ),
    Override(
        f"{_PYTORCH}.quantized_tensor",
        "Quantizer.alloc_tensors",
        "no device means CUDA",
        replacements.alloc_tensors,
    ),
    Override(
        f"{_PYTORCH}.tensor.nvfp4_tensor",
        "torch",
        "NVFP4Quantizer's constructor asks for the current CUDA device",
        view,
    ),
    Override(
        f"{_PYTORCH}.tensor.storage.grouped_tensor_storage",
        "torch",
        _CURRENT_DEVICE,
        view,
    ),
    Override(
        f"{_PYTORCH}.tensor.storage.mxfp8_tensor_storage",
        "_FromMXFP8Func.forward",
        "copies a CPU tensor to CUDA first",
        replacements.from_mxfp8,
    ),
    Override(
        f"{_PYTORCH}.tensor.storage.mxfp8_tensor_storage",
        "MXFP8TensorStorage.clear",
        "assigns a CUDA tensor to the data of a CPU tensor",
        constant(replacements.clear_mxfp8),
    ),
    Override(f"{_PYTORCH}.cpp_extensions.gemm", "torch", _CURRENT_DEVICE, view),
    Override(
        f"{_PYTORCH}.cpp_extensions.gemm",
        "get_cublas_workspace",
        "32 MiB that nothing here reads",
        constant(replacements.cublas_workspace),
    ),
    Override(
        f"{_PYTORCH}.cpp_extensions.gemm",
        "general_grouped_gemm_for_grouped_tensor",
        "refuses an alpha that does not lie on a CUDA device",
        grouped_gemm_call.make,
    ),
    Override(
        f"{_PYTORCH}.module.base",
        "get_dummy_wgrad",
        "makes the placeholder gradient on CUDA",
        constant(replacements.get_dummy_wgrad),
    ),
    Override(f"{_PYTORCH}.ops._common", "torch", _AUTOCAST, view),
    Override(
        f"{_PYTORCH}.ops._common",
        "get_dummy_wgrads_for_params",
        "puts the placeholder gradient on CUDA, not where the parameter is",
        constant(replacements.dummy_wgrads_for_params),
    ),
    Override(f"{_PYTORCH}.ops.op", "torch", "synchronizes the CUDA device", view),
    *(
        Override(f"{_PYTORCH}.ops.{name}", "torch", _AUTOCAST, view)
        for name in (
            "basic.activation",
            "basic.basic_linear",
            "basic.grouped_linear",
            "basic.swiglu",
            "fused.forward_linear_bias_activation",
            "fused.forward_linear_bias_add",
            "fused.forward_linear_scale_add",
            "fused.userbuffers_forward_linear",
        )
    ),
    Override(
        GROUPED_MLP,
        "torch",
        "asks for the current CUDA stream and autocast state",
        view,
    ),
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
