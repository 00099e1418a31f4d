# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp replay`: one training step again and again; every output must repeat bitwise."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from te_grouped_mlp.cli import arguments, output
from te_grouped_mlp.op.activations import Activation

OUTPUTS = ("y", "dx", "dW1", "dW2", "db1", "db2", "dprob")

_LOAD_SIZE = 2048


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        help="one training step repeated, a hash per output",
        description="Repeats one training step on the same input and hashes every output. On a CPU "
        "the number of threads changes from run to run; on a GPU a second stream is kept busy. "
        "Exit code 1 if any output has two values.",
    )
    parser.add_argument(
        "--n", type=arguments.integer(minimum=2), default=50, help="runs; default: %(default)s"
    )
    parser.add_argument(
        "--activation",
        type=arguments.activation,
        default=Activation.SWIGLU,
        metavar="NAME",
        help=f"one of {', '.join(kind.value for kind in Activation)}; default: ScaledSwiGLU",
    )
    parser.add_argument(
        "--groups",
        type=arguments.integer(minimum=1),
        default=4,
        help="experts; default: %(default)s",
    )
    parser.add_argument("--bias", action="store_true", help="biases on both linears")
    parser.add_argument(
        "--shape",
        type=arguments.shape,
        default=(512, 512, 1024),
        metavar="HIDDEN,FFN,ROWS",
        help="multiples of 128; default: 512,512,1024",
    )
    parser.add_argument("--seed", type=arguments.seed, default=0)
    parser.add_argument(
        "--backend",
        type=arguments.backend,
        default=arguments.AUTO,
        metavar="NAME",
        help="the backend; default: %(default)s",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="ask for bit-identical results (torch.use_deterministic_algorithms)",
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the step `args.n` times and print how many values each output had."""
    from te_grouped_mlp.measure import step
    from te_grouped_mlp.op.tensors.digest import digest

    step.start()
    (kind,) = step.available((args.activation,))
    device = step.default_device()
    shape = step.Shape(args.groups, *args.shape)
    model = step.Model.build(kind, shape, seed=args.seed, device=device, bias=args.bias)
    given = step.batch(shape, args.seed + 1, device)
    seen: dict[str, Counter[str]] = {}
    with (
        output.progress(args.n, "replay") as advance,
        step.switches(args.backend),
        _determinism(asked=args.deterministic),
    ):
        for index in range(args.n):
            advance(f"run {index + 1}")
            with disturbance(index, device):
                found = model.run(given)
            for name, value in found.items():
                seen.setdefault(name, Counter())[digest(value)] += 1
    good = all(len(values) == 1 for values in seen.values())
    if output.shows_text(args.json):
        _print(seen, good, args, model.path)
    output.write_json(args.json, _json(seen, good, args, model.path))
    return 0 if good else 1


@contextlib.contextmanager
def _determinism(*, asked: bool) -> Iterator[None]:
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    if asked:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def disturbance(index: int, device: str) -> Iterator[None]:
    """Change what must not matter: the number of threads, or the load on a second stream."""
    import torch

    if device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            load = torch.ones(_LOAD_SIZE, _LOAD_SIZE, device=device)
            for _ in range(index % 4):
                load = load @ load
        yield
        torch.cuda.synchronize()
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1 + index % max(before, 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _print(seen: dict[str, Counter[str]], good: bool, args: argparse.Namespace, path: str) -> None:
    hidden, ffn, rows = args.shape
    print(
        f"{args.activation.value}, {args.groups} groups, hidden {hidden}, ffn {ffn}, {rows} rows, "
        f"{'biases' if args.bias else 'no bias'}, MXFP8, {args.n} runs"
    )
    print(f"Ran as {path}.")
    found = output.table("output", "distinct values", "hash (runs)")
    for name in OUTPUTS:
        if name in seen:
            values = seen[name].most_common(4)
            shown = ", ".join(f"{value} ({count})" for value, count in values)
            more = ", ..." if len(seen[name]) > len(values) else ""
            found.add_row(name, str(len(seen[name])), shown + more)
    output.show(found)
    print("Every output repeats bitwise." if good else "Not every output repeats bitwise.")


def _json(
    seen: dict[str, Counter[str]], good: bool, args: argparse.Namespace, path: str
) -> dict[str, object]:
    outputs = {
        name: {"distinct": len(seen[name]), "hashes": dict(seen[name])}
        for name in OUTPUTS
        if name in seen
    }
    return {
        "activation": args.activation.value,
        "groups": args.groups,
        "bias": args.bias,
        "shape": dict(zip(("hidden", "ffn", "rows"), args.shape, strict=True)),
        "runs": args.n,
        "path": path,
        "outputs": outputs,
        "ok": good,
    }
