# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls over an extension that was built with sanitizers; see `test_sanitizers`.

    LD_PRELOAD="<libasan.so> <libstdc++.so>" python -m tests.csrc.sanitized EXTENSION CALLS SEED

A sanitizer ends the process at the first access past a buffer.
"""

from __future__ import annotations

import collections
import importlib.util
import random
import sys
import warnings


def use(path: str) -> None:
    """Take another file as te_grouped_mlp._C; before anything else has imported that."""
    import te_grouped_mlp

    spec = importlib.util.spec_from_file_location("te_grouped_mlp._C", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["te_grouped_mlp._C"] = te_grouped_mlp._C = module


def main(path: str, calls: int, seed: int) -> None:
    """Make random calls of the extension, on every SIMD level, and as many of tex's functions."""
    use(path)
    import te_grouped_mlp
    from te_grouped_mlp import _C

    assert _C.__file__ == path
    te_grouped_mlp.activate()
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    from tests.csrc.random_calls import draw_call
    from tests.integration.standalone.random_calls import run_spoiled

    draw, told = random.Random(seed), collections.Counter[str]()
    levels = _C.available_simd_levels()
    for number in range(calls):
        _C.set_simd_level(levels[number % len(levels)])
        call = draw_call(draw, marked=False)
        told["_C refused" if call.run() else "_C computed"] += 1
    for _ in range(calls):
        error = run_spoiled(tex, draw)[2]
        told["tex refused" if error else "tex computed"] += 1
    sys.stdout.write(f"{dict(told)}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
