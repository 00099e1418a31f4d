# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles every kind of launch for one architecture, without a GPU.

    python -m tests.op.backends.cutedsl.compile_all sm_90a FOLDER [launches|activations]

A process compiles for one architecture, so there is one process each. FOLDER gets NAME.ptx and
NAME.cubin, or NAME.txt with the error of a kernel that does not compile; then the exit code is 1.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import traceback
from pathlib import Path

from te_grouped_mlp.op.backends.cutedsl import keys
from te_grouped_mlp.op.backends.cutedsl.config import Op
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.problem import LinearSpec, RecipeKind
from tests.op.backends.cutedsl.problems import ACTIVATIONS, problem_of

ARCHITECTURES = {"sm_90a": 9, "sm_100a": 10}


def wanted(arch: int) -> dict[str, KernelKey]:
    """Each kind of launch once, in the tile that a layer of the benchmark takes, by name."""
    swiglu = problem_of(
        ACTIVATIONS["swiglu"], fc1=LinearSpec(2048, 1536), fc2=LinearSpec(768, 2048)
    )
    srelu = problem_of(dataclasses.replace(ACTIVATIONS["srelu"], recompute=True))
    found = {key.op.value: key for key in keys.of_problem(swiglu, arch)}
    bias = keys.of_problem(problem_of(ACTIVATIONS["swiglu"], bias=True), arch)
    mxfp8 = dataclasses.replace(swiglu, recipe=RecipeKind.MXFP8)
    quantized = keys.of_problem(mxfp8, arch)
    long = dataclasses.replace(swiglu, fc1=LinearSpec(7168, 1536), fc2=LinearSpec(768, 7168))
    reversed_experts = {
        f"{key.op.value} descending": dataclasses.replace(key, reversed_experts=True)
        for key in found.values()
        if key.tile is not None
    }
    return {
        **found,
        **reversed_experts,
        "fc1_act long": keys.of_problem(long, arch)[0],
        "fc1_act bias": bias[0],
        "fc2_forward scaled bias": bias[1],
        "dact_dgrad recompute": keys.of_problem(srelu, arch)[2],
        "fc1_act mxfp8": quantized[0],
        "dact_dgrad mxfp8": quantized[2],
        "dact_dgrad recompute mxfp8": keys.of_problem(
            dataclasses.replace(srelu, recipe=RecipeKind.MXFP8), arch
        )[2],
        "fc2_wgrad bf16": keys.wgrad(swiglu, arch, Op.FC2_WGRAD, DType.BFLOAT16, False),
    }


def of_every_activation(arch: int) -> dict[str, KernelKey]:
    """The launches with an activation, for each activation under MXFP8, with biases and without."""
    found = {}
    for name, spec in ACTIVATIONS.items():
        for bias in (False, True):
            problem = problem_of(spec, bias=bias, recipe=RecipeKind.MXFP8)
            for key in keys.of_problem(problem, arch):
                if key.op in (Op.FC1_ACT, Op.DACT_DGRAD):
                    found[f"{key.op.value} {name} {'bias' if bias else 'plain'}"] = key
    return found


SETS = {"launches": wanted, "activations": of_every_activation}


def main(target: str, folder: Path, which: str = "launches") -> int:
    """Compile the set `which` for `target` into `folder`."""
    os.environ["CUTE_DSL_ARCH"] = target
    os.environ["CUTE_DSL_KEEP"] = "ptx,cubin"
    os.environ["CUTE_DSL_DUMP_DIR"] = str(folder)
    # A tenth of the time goes into looking for garbage, of which a short process has little.
    gc.disable()
    from te_grouped_mlp.op.backends.cutedsl import library

    failed = 0
    with library.deprecations_ignored():
        from te_grouped_mlp.op.backends.cutedsl.kernels.build import build

        for name, key in SETS[which](ARCHITECTURES[target]).items():
            try:
                compiled = build(key)
            except Exception:
                failed += 1
                (folder / f"{name}.txt").write_text(traceback.format_exc())
                traceback.print_exc()
                continue
            cubin = compiled.__cubin__
            binary = cubin if isinstance(cubin, bytes) else Path(cubin).read_bytes()
            (folder / f"{name}.ptx").write_text(compiled.__ptx__)
            (folder / f"{name}.cubin").write_bytes(binary)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
