# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that cannot import the C++ extension, as if beside a GPU; see `test_extension`.

Imports every module, runs steps of the native backend, and then the same with the extension.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

sys.modules["te_grouped_mlp._C"] = None  # type: ignore[assignment]

from te_grouped_mlp.integration.standalone import loader  # noqa: E402

loader.cuda_device_visible = lambda: True

import torch  # noqa: E402

from benchmarks import native_host  # noqa: E402
from te_grouped_mlp.op import extension  # noqa: E402
from te_grouped_mlp.op.backends.cutedsl import launch  # noqa: E402
from te_grouped_mlp.op.tensors import stacking  # noqa: E402
from tests import source_rules  # noqa: E402
from tests.integration.standalone.test_quantize import make_quantizer  # noqa: E402

# What imports an optional package at its top: device code, and what is for people.
OPTIONAL = ("triton", "cutlass", "quack", "cuda", "rich", "libcst", "matplotlib")
WEIGHTS = [("discrete", True), ("discrete", False), ("grouped", True)]


def imported() -> int:
    """Import every module of the package but device code; returns how many."""
    count = 0
    for path in source_rules.sources():
        name = source_rules.module_name(path)
        if "kernels" in path or name.startswith(("_fork", "cli.__main__")):
            continue
        try:
            importlib.import_module(f"te_grouped_mlp.{name}".rstrip("."))
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in OPTIONAL:
                raise
        count += 1
    return count


def launches() -> list[Any]:
    """Run a step for each way in which weights lie; returns every launch with its operands."""
    seen: list[Any] = []

    def kernel(key: Any) -> Any:
        return lambda *operands: seen.append([key.op.value, *map(described, operands)])

    launch.kernels.kernel = kernel
    launch.launcher.cache_clear()
    launch._by_problem.clear()
    launch._row_kernel.cache_clear()
    for weight, packed in WEIGHTS:
        native_host.Bench(native_host.case_of(5, weight), packed=packed)
    return seen


def described(operand: Any) -> Any:
    if isinstance(operand, torch.Tensor):
        return [str(operand.dtype), list(operand.shape), list(operand.stride())]
    return [described(each) for each in operand] if isinstance(operand, tuple) else operand


def main() -> None:
    """Print what became of each part, as JSON."""
    torch.set_num_threads(1)
    assert not extension._C
    native_host.pretend_gpu()
    told: dict[str, Any] = {"imported": imported()}
    try:
        tex = native_host.host.tex
        tex.quantize(torch.ones(32, 32), make_quantizer(tex))
    except ImportError as error:
        told["on a CPU"] = str(error)
    told["without"] = launches()
    del sys.modules["te_grouped_mlp._C"]
    stacking._C = extension._load()
    stacking._TABLE = stacking._usable(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    told["looks in C++"] = stacking._TABLE is not None
    told["with"] = launches()
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main()
