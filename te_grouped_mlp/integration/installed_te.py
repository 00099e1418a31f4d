# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The installed Transformer Engine as the overlay sees it: where, which version, which names.

Also which file is ours. Apart from `missing_host_names`, nothing here imports TE.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "transformer_engine.pytorch.ops.fused"
TARGET = f"{PACKAGE}.grouped_mlp"
# The text by which our "use the fork" patch marks a TE file that it changed.
PATCH_MARKER = "te-grouped-mlp: use the fork"

MIN_TORCH = (2, 6)
"""The first torch that has what TE's MXFP8 tensors import."""
SUPPORTED = "2.19.0 or 2.20.x"
_SUPPORTED_PATTERN = re.compile(r"2\.(19\.0|20\.\d+)(\+.*)?")

STANDALONE_IMPORTS = ("pydantic", "numpy", "onnxscript", "einops")
"""What the extra `standalone` names."""
STANDALONE_REMEDY = "pip install 'te-grouped-mlp[standalone]'"

# Module of TE -> name -> the keywords with which we call it. A version outside SUPPORTED is taken
# if all of these exist. A dotted name is looked up attribute by attribute; keywords are compared
# with the signature, where Python can tell it (compiled functions: the name alone).
HOST_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "transformer_engine.common.recipe": {"MXFP8BlockScaling": (), "NVFP4BlockScaling": ()},
    "transformer_engine.pytorch.ops.op": {
        "FusedOperation": (),
        "FusibleOperation": (),
        "OperationContext": (),
    },
    "transformer_engine.pytorch.ops.fuser": {
        "register_forward_backward_fusion": ("prepend",),
        "OperationFuser.forward_backward_fusion_functions": (),
    },
    "transformer_engine.pytorch.ops": {"basic": ()},
    "transformer_engine.pytorch.ops.basic": {"GroupedLinear": (), "ScaledSwiGLU": ()},
    "transformer_engine.pytorch.ops.basic.grouped_linear": {
        "GRAD_INPUT_BUFFER_KEY": (),
        "OUTPUT_BUFFER_KEY": (),
    },
    "transformer_engine.pytorch.ops._common": {
        "get_dummy_wgrads_for_params": (),
        "maybe_dequantize": ("dtype",),
    },
    "transformer_engine.pytorch.constants": {"DType": (), "TE_DType": ()},
    "transformer_engine.pytorch.cpu_offload": {
        "is_cpu_offload_enabled": (),
        "mark_activation_offload": (),
        "mark_not_offload": (),
        "start_offload": (),
    },
    "transformer_engine.pytorch.distributed_weight": {
        "finalize_weight_grads": (),
        "is_distributed_weight": (),
        "materialize_weight_for_backward": (),
        "materialize_weight_for_forward": (),
    },
    "transformer_engine.pytorch.quantization": {
        "FP8GlobalStateManager": (),
        "Recipe": (),
        "get_fp8_torch_dtype": ("fprop_tensor",),
    },
    "transformer_engine.pytorch.quantized_tensor": {"QuantizedTensorStorage": ()},
    "transformer_engine.pytorch.tensor.grouped_tensor": {"GroupedTensor": ()},
    "transformer_engine.pytorch.tensor.mxfp8_tensor": {"MXFP8Quantizer": (), "MXFP8Tensor": ()},
    "transformer_engine.pytorch.utils": {"clear_tensor_data": ()},
    "transformer_engine_torch": {
        "group_dequantize": ("input", "otype"),
        "group_quantize": ("tensor", "quantizer", "num_tensors", "first_dims", "tensor_offsets"),
        "group_requantize_inplace": (
            "grouped_x",
            "quantizer",
            "num_tensors",
            "first_dims",
            "otype",
            "tensor_offsets",
            "return_dequantized",
        ),
        "quantize": ("tensor", "quantizer"),
        "splits_to_offsets_multi": ("strides", "include_leading_zero", "dtypes", "bulk_allocate"),
    },
}


def te_version() -> str | None:
    """Return the installed TE's version from its metadata, or None if there is none."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def is_supported(version: str | None) -> bool:
    """Say whether a version string of TE is one that this package was tested with."""
    return version is not None and _SUPPORTED_PATTERN.fullmatch(version) is not None


def version_refusal() -> str | None:
    """Say why the fork cannot be used here, or None if it can. May import TE's modules."""
    version = te_version()
    old = _old_torch(version)
    if old is not None:
        return old
    if is_supported(version):
        return None
    missing = list(missing_host_names())
    if not missing:
        return None
    shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return f"TE {version or 'of unknown version'} is not {SUPPORTED}, and it lacks {shown}"


def _old_torch(te: str | None) -> str | None:
    """Say that the installed torch is too old, or None. Does not import it."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    if numbers is None or tuple(map(int, numbers.groups())) >= MIN_TORCH:
        return None
    needed = ".".join(map(str, MIN_TORCH))
    return f"torch {torch}, installed with TE {te}, is older than {needed}, which is needed"


def missing_host_names() -> Iterator[str]:
    """Yield every entry of HOST_NAMES that the installed TE lacks. Imports TE's modules."""
    for module_name, names in HOST_NAMES.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            yield module_name
            continue
        for name, keywords in names.items():
            found: Any = module
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                yield f"{module_name}.{name}"
            else:
                for keyword in _missing_keywords(found, keywords):
                    yield f"{module_name}.{name}({keyword}=)"


def _missing_keywords(function: Any, keywords: Sequence[str]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in keywords if name not in parameters]


def te_root() -> Path | None:
    """Return the folder of the installed TE, without importing it; None if there is none.

    A checkout's own `transformer_engine/` folder is no package: its spec has no origin.
    """
    try:
        spec = importlib.util.find_spec("transformer_engine")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def standalone_lacks() -> list[str]:
    """Name the modules that TE's pure-Python wheel imports and that are not installed.

    It declares none of them; the extra `standalone` does.
    """
    return [name for name in STANDALONE_IMPORTS if importlib.util.find_spec(name) is None]


def fork_file() -> Path | None:
    """Return the forked file: the installed copy, or the checkout's; None if neither exists."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_fork" / "grouped_mlp.py"
    if installed.is_file():
        return installed
    root = package.parent
    # Without these checks the path below, seen from site-packages, would be upstream's own file.
    is_checkout = (root / "pyproject.toml").is_file() and (root / "te_grouped_mlp.pth").is_file()
    if not is_checkout or (root / "transformer_engine" / "__init__.py").is_file():
        return None
    checkout = root.joinpath(*TARGET.split(".")).with_suffix(".py")
    return checkout if checkout.is_file() else None


def is_fork(module: ModuleType) -> bool:
    """Say whether a loaded module is the forked file, or a TE file patched to use it."""
    file = fork_file()
    origin = getattr(module, "__file__", None)
    if origin is None:
        return False
    if file is not None and Path(origin).resolve() == file:
        return True
    # Other patches of ours promise determinism too; only this one brings the fork in.
    return getattr(module, "DETERMINISTIC_DPROB", False) is True and carries_patch(Path(origin))


def carries_patch(file: Path) -> bool:
    """Say whether a file of TE was changed by our "use the fork" patch."""
    return PATCH_MARKER in file.read_text(encoding="utf-8")
