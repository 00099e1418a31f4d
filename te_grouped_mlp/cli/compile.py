# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp compile`: fill the kernel cache ahead, on any machine, for a named GPU."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from te_grouped_mlp.cli import arguments, output
from te_grouped_mlp.cli.output import BadArgument, CommandError
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.problem import LinearSpec, Problem, RecipeKind

if TYPE_CHECKING:
    from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey

ARCHITECTURES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
GRADS = {
    "main_grad": ((DType.FLOAT32, True), (DType.FLOAT32, False)),
    "bf16": ((DType.BFLOAT16, False),),
}
"""Weight gradients: their type, and whether they are added to."""

ORDERS = {"ascending": (False,), "descending": (True,), "all": (False, True)}
"""Where the experts' matrices lie in memory, by whether the last one comes first."""

_PROBS = {"fp32": DType.FLOAT32, "bf16": DType.BFLOAT16, "none": None}
_RECIPES = {recipe.value: recipe for recipe in (RecipeKind.NONE, RecipeKind.MXFP8)}
_PACKAGES = ("torch", "quack", "cutlass", "tvm_ffi")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "compile",
        help="fill the cache of native kernels ahead of a job",
        description="Compiles the native kernels that training with a shape needs into the "
        "disk cache, several at a time. Token counts do not matter, and no GPU is needed when "
        "--arch names one. Exit code 1 if a kernel does not compile.",
    )
    parser.add_argument(
        "--shape",
        type=arguments.sizes("EXPERTS", "HIDDEN", "FFN"),
        required=True,
        metavar="E,H,I",
        help="experts, hidden size, FFN size",
    )
    parser.add_argument(
        "--recipe",
        choices=tuple(_RECIPES),
        default=RecipeKind.NONE.value,
        help="the recipe of the training; the passes that round to MXFP8 are Triton's, which has a "
        "cache of its own; default: none",
    )
    parser.add_argument(
        "--activation",
        type=arguments.activations,
        default=(Activation.SWIGLU,),
        metavar="NAMES",
        help="names separated by commas, or all; default: ScaledSwiGLU",
    )
    parser.add_argument(
        "--interleave",
        choices=("32", "none"),
        default="32",
        help="gate and linear rows of FC1 in blocks of 32, or in two halves; default: 32",
    )
    parser.add_argument("--bias", action="store_true", help="biases, FC2's scaled")
    parser.add_argument("--prob", choices=tuple(_PROBS), default="fp32", help="default: fp32")
    parser.add_argument(
        "--grad",
        choices=(*GRADS, "all"),
        default="all",
        help="where weight gradients go; default: all",
    )
    parser.add_argument(
        "--order",
        choices=tuple(ORDERS),
        default="all",
        help="how the experts' weights and gradients follow each other in memory; Megatron's "
        "buffers are descending; default: all",
    )
    parser.add_argument(
        "--arch", choices=tuple(ARCHITECTURES), help="the GPU to compile for; default: this one"
    )
    parser.add_argument(
        "--workers", type=arguments.integer(minimum=1), help="processes; default: the cores"
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compile what is missing and print every kernel."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise CommandError(
            f"not installed: {', '.join(absent)}; pip install 'te-grouped-mlp[kernels]'"
        )
    from te_grouped_mlp.op.backends.cutedsl import compile as kernels

    if args.arch is not None:
        kernels.name_target(args.arch)
    begin = time.perf_counter()
    keys = wanted(args)
    try:
        kernels.usable_folder()
    except (OSError, RuntimeError) as error:
        raise CommandError(f"the kernel cache cannot be used: {error}") from error
    missing = kernels.not_stored(keys)
    _compile(missing, args.workers)
    seconds = time.perf_counter() - begin
    failed = kernels.not_stored(keys)
    if output.shows_text(args.json):
        _print(keys, missing, seconds)
    output.write_json(args.json, _json(keys, missing, seconds))
    if failed:
        # In this process, so that the compiler's error is seen.
        kernels.kernel(failed[0])
        raise CommandError(f"{len(failed)} kernels could not be written to the cache")
    return 0


def wanted(args: argparse.Namespace) -> list[KernelKey]:
    """Return the kernels that training needs, each once.

    Raises:
        BadArgument: The native kernels do not take the shape, or no GPU can be asked for its name.
        CommandError: A package of another version is installed.
    """
    from te_grouped_mlp.op.backends.cutedsl import capability, keys
    from te_grouped_mlp.op.backends.cutedsl import compile as kernels
    from te_grouped_mlp.op.environment import Switches, current
    from te_grouped_mlp.op.plan import Reason

    try:
        target = kernels.target()
    except RuntimeError as error:
        allowed = ", ".join(ARCHITECTURES)
        raise BadArgument(f"--arch is not given and {error}; allowed: {allowed}") from error
    sm = ARCHITECTURES.get(target, current().sm)
    # The machine that trains may run Transformer Engine without its extension.
    switches = Switches(backend=capability.NAME)
    env = dataclasses.replace(current(), sm=sm, switches=switches, standalone=True)
    found: dict[KernelKey, None] = {}
    for kind in args.activation:
        problem = problem_of(args, kind)
        refusal = capability.refusal(problem, env)
        if refusal is not None:
            kind_of = CommandError if refusal.reason is Reason.PACKAGE else BadArgument
            raise kind_of(f"the native kernels do not take this: {refusal}")
        for grad, accumulate, reversed_experts in _variants(args):
            found |= dict.fromkeys(
                keys.of_problem(
                    problem,
                    kernels.target_arch(),
                    prob=_PROBS[args.prob],
                    grad=grad,
                    accumulate=accumulate,
                    reversed_experts=reversed_experts,
                )
            )
    return list(found)


def _variants(args: argparse.Namespace) -> Iterator[tuple[DType, bool, bool]]:
    for name, grads in GRADS.items():
        if args.grad in (name, "all"):
            for reversed_experts in ORDERS[args.order]:
                yield from ((grad, accumulate, reversed_experts) for grad, accumulate in grads)


def problem_of(args: argparse.Namespace, kind: Activation) -> Problem:
    """Return the problem that the arguments describe."""
    experts, hidden, ffn = args.shape
    width = int(args.interleave) if kind.is_gated and args.interleave != "none" else None
    spec = ActivationSpec(kind, width)
    scaled = args.bias and args.prob != "none"
    return Problem(
        experts,
        LinearSpec(hidden, ffn * spec.expansion, has_bias=args.bias),
        LinearSpec(ffn, hidden, has_bias=args.bias, scale_bias=scaled),
        spec,
        _RECIPES[args.recipe],
        "",
        "cuda",
        DType.BFLOAT16,
    )


def _compile(missing: list[KernelKey], workers: int | None) -> None:
    from te_grouped_mlp.op.backends.cutedsl import compile as kernels

    if not missing:
        return
    size = workers or min(os.cpu_count() or 1, 16)
    with output.progress(len(missing), "compile") as advance:
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            for key in batch:
                advance(key.op.value)
            kernels.compile_ahead(batch, workers)


def _print(keys: list[KernelKey], missing: list[KernelKey], seconds: float) -> None:
    from te_grouped_mlp.op.backends.cutedsl import compile as kernels

    new = set(missing)
    found = output.table("kernel", "activation", "tile", "state")
    for key in keys:
        kind = "" if key.spec is None else key.spec.kind.value
        found.add_row(key.op.value, kind, _tile(key), "compiled" if key in new else "was there")
    output.show(found)
    print(f"{len(missing)} of {len(keys)} compiled for {kernels.target()} in {seconds:.1f} s.")
    print(f"Cache: {kernels.cache_folder()}")


def _json(keys: list[KernelKey], missing: list[KernelKey], seconds: float) -> dict[str, object]:
    from te_grouped_mlp.op.backends.cutedsl import compile as kernels

    new, left = set(missing), set(kernels.not_stored(keys))
    return {
        "target": kernels.target(),
        "cache": str(kernels.cache_folder()),
        "seconds": seconds,
        "kernels": [
            {
                "kernel": key.op.value,
                "activation": None if key.spec is None else key.spec.kind.value,
                "tile": _tile(key),
                "compiled": key in new,
                "ok": key not in left,
            }
            for key in keys
        ],
        "ok": not left,
    }


def _tile(key: KernelKey) -> str:
    tile = key.tile
    if tile is None:
        return ""
    kind = " pingpong" if tile.pingpong else ""
    return f"{tile.m}x{tile.n}, cluster {tile.cluster_m}x{tile.cluster_n}{kind}"
