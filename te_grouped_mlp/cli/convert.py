# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`te-grouped-mlp convert`: FC1's gate and linear features into blocks of 32, and back."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from te_grouped_mlp.checkpoint import names
from te_grouped_mlp.checkpoint.names import Family, Output, Refused, Step
from te_grouped_mlp.cli import output
from te_grouped_mlp.cli.output import BadArgument, CommandError

INTERLEAVED, CONTIGUOUS = "interleaved", "contiguous"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "convert",
        help="a checkpoint's FC1 into blocks of 32, and back",
        description="Reorders the output features of the experts' FC1 (weights, biases, optimizer "
        "states) between gate and linear halves and the alternating blocks of 32 that "
        "glu_interleave_size=32 means. Reads safetensors (a file, or a folder of shards), files of "
        "torch.save and folders of torch.distributed.checkpoint; names of Megatron, Mixtral, Qwen, "
        "DeepSeek and GPT-OSS. The result has a marker, since nothing else shows the order. All "
        "other tensors, shared experts and FC2 among them, are copied as they are.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a file or a folder; only read")
    parser.add_argument(
        "destination", type=Path, metavar="DESTINATION", help="must not exist; appears when whole"
    )
    parser.add_argument(
        "--to",
        choices=(INTERLEAVED, CONTIGUOUS),
        default=INTERLEAVED,
        help="the order to write; contiguous is the one, with the names, that SOURCE was converted "
        "from; default: %(default)s",
    )
    parser.add_argument(
        "--fc1",
        action="append",
        default=[],
        metavar="PATTERN",
        help="also these names (with * and ?) are FC1's; may be repeated. A name with `bias` in it "
        "is a bias",
    )
    parser.add_argument(
        "--unmarked",
        choices=[family.value for family in Family],
        metavar="FAMILY",
        help="with --to contiguous: SOURCE is in blocks though no marker says so, as what a "
        "training run saves, and gets the names of megatron, mixtral, qwen or gpt-oss",
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="load a file of torch.save that holds more than tensors and plain values",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Decide about every tensor, then convert."""
    if args.unmarked and args.to != CONTIGUOUS:
        raise BadArgument(f"--unmarked {args.unmarked} goes with --to {CONTIGUOUS} alone")
    if not args.source.exists():
        raise BadArgument(f"there is no {args.source}")
    if args.destination.exists():
        raise BadArgument(f"{args.destination} exists; allowed: a name that is free")
    if not args.destination.absolute().parent.is_dir():
        raise BadArgument(f"there is no folder {args.destination.absolute().parent}")
    try:
        source = _open(args)
        family, outputs = _plan(args, source.marker(), source.shapes())
        if not args.dry_run:
            marker = names.marker_text(family, args.fc1) if args.to == INTERLEAVED else None
            _write(source, outputs, marker, args.destination)
    except Refused as refusal:
        raise CommandError(f"{args.source}: {refusal}") from refusal
    steps = Counter(out.step for out in outputs)
    if output.shows_text(args.json):
        did = "would be" if args.dry_run else "were"
        counts = "; ".join(f"{count} {step.value}" for step, count in steps.items())
        output.show_text(f"{family.value}: {len(outputs)} tensors {did} written: {counts}.")
    report = {
        "family": family.value,
        "to": args.to,
        "written": not args.dry_run,
        "tensors": {
            out.name: {"step": out.step.name.lower(), "from": list(out.sources)}
            for out in outputs
            if out.step is not Step.COPY
        },
        "copied": steps[Step.COPY],
    }
    output.write_json(args.json, report)
    return 0


def _open(args: argparse.Namespace) -> Any:
    """Return the module's `Source` for a kind of file, by its content's names."""
    path: Path = args.source
    if path.is_dir() and (path / ".metadata").is_file():
        from te_grouped_mlp.checkpoint import dist_folder

        return dist_folder.Source(path)
    if path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors"))):
        left = [file for end in ("bin", "pt", "pth") for file in path.glob(f"*.{end}")]
        if path.is_dir() and left:
            raise Refused(f"{left[0].name} lies beside the safetensors, in the order of before")
        from te_grouped_mlp.checkpoint import safetensors_files

        return safetensors_files.Source(path)
    if path.is_dir():
        raise Refused("a folder without *.safetensors and without .metadata")
    from te_grouped_mlp.checkpoint import torch_file

    return torch_file.Source(path, trusted=args.trust_pickle)


def _plan(
    args: argparse.Namespace, marker: str | None, shapes: dict[str, tuple[int, ...]]
) -> tuple[Family, list[Output]]:
    """Decide about every tensor.

    Raises:
        Refused: The marker says that it is done, or there is none to undo.
    """
    if args.to == INTERLEAVED:
        if marker is not None:
            raise Refused(f"the marker says that FC1 is in blocks already: {marker}")
        return names.plan_interleaved(shapes, args.fc1)
    if marker is None and args.unmarked is None:
        raise Refused(
            "no marker says that FC1 is in blocks; --unmarked FAMILY says so, for a checkpoint "
            "that a training run saved"
        )
    if marker is None:
        family, extra = Family(args.unmarked), args.fc1
    else:
        family, extra = names.read_marker(marker)
    return family, names.plan_contiguous(shapes, family, extra)


def _write(source: Any, outputs: list[Output], marker: str | None, destination: Path) -> None:
    with _whole(destination) as target, output.progress(len(outputs), "convert") as advance:
        source.write(outputs, marker, target, advance)


@contextlib.contextmanager
def _whole(destination: Path) -> Iterator[Path]:
    """Give a name to write to, which becomes `destination` only if the block ends well."""
    destination = destination.absolute()
    draft = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    target = draft / destination.name
    draft.mkdir()
    try:
        yield target
        for file in [target, *target.rglob("*")] if target.is_dir() else [target]:
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        if destination.exists():
            raise CommandError(f"{destination} came into being meanwhile")
        target.rename(destination)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
