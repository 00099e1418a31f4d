# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""FC1 into blocks of 32 and back, in every kind of file and every family of names."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformer_engine.pytorch import utils as te_utils

from te_grouped_mlp.checkpoint import names, order, torch_file
from tests.checkpoint import files
from tests.cli.conftest import Shell, shell  # noqa: F401

COMBINATIONS = [
    (kind, family)
    for kind, family in itertools.product(files.FORMATS, files.FAMILIES)
    if kind != "dist" or family == "megatron"
]


def listing(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


@pytest.mark.skipif(not hasattr(te_utils, "interleave_glu_tensor"), reason="a TE before 2.18")
@pytest.mark.parametrize("shape", [(64,), (192, 3)])
def test_the_order_is_transformer_engines(shape: tuple[int, ...]) -> None:
    x = files.drawn(*shape, seed=1)
    blocks = order.interleave(x, 0)
    assert torch.equal(blocks, te_utils.interleave_glu_tensor(x, 32))
    assert torch.equal(blocks, files.blocks(x))
    assert torch.equal(order.contiguous(blocks, 0), x)
    assert torch.equal(order.contiguous(blocks, 0), te_utils.deinterleave_glu_tensor(blocks, 32))


@pytest.mark.parametrize(("kind", "family"), COMBINATIONS)
def test_there_and_back(shell: Shell, tmp_path: Path, kind: str, family: str) -> None:  # noqa: F811
    write, read, name = files.FORMATS[kind]
    before, after = files.FAMILIES[family]()
    source, there, back = (tmp_path / f"{n}{name}" for n in ("a", "b", "c"))
    write(source, before)
    assert shell("convert", str(source), str(there), "--json") == 0, shell.err
    assert shell.json()["family"] == family
    files.assert_same(read(there), after)
    files.assert_same(read(source), before)
    # The marker says that it is done.
    assert shell("convert", str(there), str(back)) == 1
    assert "in blocks already" in shell.err
    assert shell("convert", str(there), str(back), "--to", "contiguous") == 0, shell.err
    files.assert_same(read(back), before)
    # The way back takes the marker away.
    assert shell("convert", str(back), str(tmp_path / "d"), "--to", "contiguous") == 1
    assert "no marker" in shell.err
    assert listing(tmp_path) == {source.name, there.name, back.name}


def test_the_package_safetensors_reads_the_result(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    package = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    before, after = files.megatron()
    package.save_file(before, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert shell("convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")) == 0
    files.assert_same(package.load_file(tmp_path / "b.safetensors"), after)


def test_shards_and_what_lies_beside_them(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    """A pair may be parted by two shards; the index and its neighbours come along."""
    before, after = files.paired("w1", "w3")
    source, there = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    shards: dict[str, files.Tensors] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for index, (name, tensor) in enumerate(before.items()):
        shards[f"model-{1 + index % 2}.safetensors"][name] = tensor
    for file, tensors in shards.items():
        files.write_safetensors(source / file, tensors, {"format": "pt"})
    mapped = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": mapped}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text("{}")
    assert shell("convert", str(source), str(there)) == 0, shell.err
    found = {name: files.read_safetensors(there / name) for name in shards}
    files.assert_same({k: v for each in found.values() for k, v in each.items()}, after)
    made = json.loads((there / "model.safetensors.index.json").read_text())
    assert made["weight_map"] == {name: file for file, each in found.items() for name in each}
    assert made["metadata"] == index["metadata"]
    assert listing(there) == listing(source)
    (source / "model.bin").write_bytes(b"")
    assert shell("convert", str(source), str(tmp_path / "c")) == 1
    assert "model.bin lies beside" in shell.err


class Experts(torch.nn.Module):
    """A model with Megatron's names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        self.experts.linear_fc1 = torch.nn.Module()
        for expert in range(files.EXPERTS):
            weight = torch.nn.Parameter(files.halves(expert, "weight", torch.float32))
            setattr(self.experts.linear_fc1, f"weight{expert}", weight)
        self.head = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("named", [True, False, "groups"])
def test_a_torch_optimizer(shell: Shell, tmp_path: Path, named: Any) -> None:  # noqa: F811
    """Its states have numbers: names are needed, or one group beside a model alone."""
    model = Experts()
    given: Any = model.named_parameters() if named is True else model.parameters()
    if named == "groups":
        given = [{"params": [each], "lr": 0.1} for each in model.parameters()]
    optimizer = torch.optim.Adam(given)
    sum((p * (1 + torch.arange(p.numel()).view_as(p))).sum() for p in model.parameters()).backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(saved, tmp_path / "a.pt")
    code = shell("convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    if named == "groups":
        assert code == 1
        assert "model.named_parameters()" in shell.err
        assert listing(tmp_path) == {"a.pt"}
        return
    assert code == 0, shell.err
    found = torch.load(tmp_path / "b.pt")
    assert found["step"] == 3
    for number, (name, parameter) in enumerate(model.named_parameters()):
        wanted = files.blocks if "fc1" in name else torch.Tensor.clone
        assert torch.equal(found["model"][name], wanted(parameter.detach()))
        state = optimizer.state_dict()["state"][number]
        made = found["optimizer"]["state"][number]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(made[key], wanted(state[key]))
        assert made["step"] == 1
    # A state dict keeps its keys, so that strict loading takes it.
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


@pytest.mark.parametrize("axis", [0, 1])
def test_chunks_of_a_dist_checkpoint(shell: Shell, tmp_path: Path, axis: int) -> None:  # noqa: F811
    """Chunks stay, also where one holds a part of the output features; objects and further files
    come along without being read."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    name = "layers.mlp.experts.experts.linear_fc1.weight"
    whole = torch.stack([files.halves(expert, "weight") for expert in range(2)])
    files.write_dist(tmp_path / "a", {name: whole, "object": {"steps": 3}})
    _chunked(tmp_path / "a", tmp_path / "b", name, axis)
    (tmp_path / "b" / "common.pt").write_bytes(b"any")
    assert shell("convert", str(tmp_path / "b"), str(tmp_path / "c")) == 0, shell.err
    stored = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata[name]
    assert len(stored.chunks) == 2
    assert isinstance(stored.chunks[0], ChunkStorageMetadata)
    assert stored.chunks[0].sizes[axis] == whole.shape[axis] // 2
    found = {name: torch.empty_like(whole), "object": {"steps": 0}}
    files.load_dist(tmp_path / "c", found)
    assert torch.equal(found[name], torch.stack([*map(files.blocks, whole)]))
    assert found["object"] == {"steps": 3}
    assert (tmp_path / "c" / "common.pt").read_bytes() == b"any"


def _chunked(source: Path, target: Path, name: str, axis: int) -> None:
    """Write a checkpoint again with each tensor in two chunks, as two ranks do."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    from te_grouped_mlp.checkpoint import dist_folder

    opened = dist_folder.Source(source)
    stored = opened.metadata.state_dict_metadata[name]
    half = list(stored.size)
    half[axis] //= 2
    second = [0] * len(half)
    second[axis] = half[axis]
    stored.chunks = [
        ChunkStorageMetadata(torch.Size(at), torch.Size(half)) for at in ([0] * len(half), second)
    ]
    copy = names.Output(name, tuple(stored.size), names.Step.COPY, (name,))
    # Reads go by what is stored, one chunk.
    whole = dist_folder.Source(source)
    opened.tensor = whole.tensor  # type: ignore[method-assign]
    opened.write([copy], None, target, lambda _: None)


BAD: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "no experts": ({"layers.0.mlp.gate_proj.weight": (128, 8)}, "no FC1 of experts was found"),
    "two families": (
        {"experts.0.w1.weight": (64, 8), "experts.linear_fc1.weight0": (128, 8)},
        "several families",
    ),
    "half of a pair": ({"experts.0.w1.weight": (64, 8)}, "no experts.0.w3.weight beside it"),
    "uneven pair": (
        {"experts.0.up_proj.weight": (64, 8), "experts.0.gate_proj.weight": (32, 8)},
        r"gate_proj.weight is \(32, 8\), experts.0.up_proj",
    ),
    "features": ({"experts.linear_fc1.weight0": (96, 8)}, "96 output features .* multiples of 64"),
    "no features": ({"experts.linear_fc1.bias": (2, 0)}, "0 output features"),
    "flat": ({"experts.linear_fc1.weight": (128,)}, "at least two axes"),
    "flat state": ({"experts.linear_fc1.weight0.exp_avg": (1024,)}, "at least two axes"),
    "scales": (
        {
            f"experts.0.{part}_proj.{kind}": (128, 128)
            for part in ("gate", "up")
            for kind in ("weight", "weight_scale_inv")
        },
        "weight_scale_inv is not known",
    ),
    "mxfp4": (
        {"experts.gate_up_proj_blocks": (2, 128, 4, 16), "experts.gate_up_proj_bias": (2, 128)},
        "gate_up_proj_blocks is not known",
    ),
    "stacked halves": ({"experts.gate_up_proj": (2, 8, 128)}, "without gate_up_proj_bias"),
    "unknown state": ({"experts.linear_fc1.weight0.momentum": (128, 8)}, "momentum is not known"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    shapes, named = BAD[case]
    with pytest.raises(names.Refused, match=named):
        names.plan_interleaved(shapes)


def test_further_names(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    """Those of a te.ops.Sequential say nothing; the marker keeps the pattern for the way back."""
    before = {"0.weight0": files.halves(0, "weight"), "0.bias0": files.halves(0, "bias")}
    before["2.weight0"] = files.drawn(files.HIDDEN, files.FFN, seed=3)
    source, there, back = (str(tmp_path / f"{n}.safetensors") for n in "abc")
    files.write_safetensors(Path(source), before)
    assert shell("convert", source, there) == 1
    assert "--fc1" in shell.err
    assert shell("convert", source, there, "--fc1", "0.*") == 0
    after = {name: files.blocks(t) if name[0] == "0" else t for name, t in before.items()}
    files.assert_same(files.read_safetensors(Path(there)), after)
    assert shell("convert", there, back, "--to", "contiguous") == 0
    files.assert_same(files.read_safetensors(Path(back)), before)


def test_what_training_saved_has_no_marker(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    before, after = files.paired("w1", "w3")
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    files.write_safetensors(source, after)
    argv = ("convert", str(source), str(target), "--to", "contiguous", "--unmarked", "mixtral")
    assert shell(*argv) == 0, shell.err
    files.assert_same(files.read_safetensors(target), before)


@pytest.mark.parametrize("kind", files.FORMATS)
def test_nothing_is_half_written(
    shell: Shell,  # noqa: F811
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, _, name = files.FORMATS[kind]
    source, target = tmp_path / f"a{name}", tmp_path / f"b{name}"
    write(source, files.megatron()[0])
    assert shell("convert", str(source), str(target), "--dry-run") == 0
    honest, calls = order.made, []

    def full_disk(out: names.Output, sources: list[torch.Tensor]) -> torch.Tensor:
        calls.append(out)
        if len(calls) == 3:
            raise OSError("no space left on device")
        return honest(out, sources)

    monkeypatch.setattr(order, "made", full_disk)
    assert shell("convert", str(source), str(target)) == 1
    assert "no space left" in shell.err
    assert listing(tmp_path) == {source.name}


def test_bad_files(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    for name, content in (("a.safetensors", b"x" * 20), ("a.pt", b"x"), ("b.safetensors", b"")):
        (tmp_path / name).write_bytes(content)
        assert shell("convert", str(tmp_path / name), str(tmp_path / "to")) == 1
        assert f"{name}: " in shell.err
    (tmp_path / "d").mkdir()
    assert shell("convert", str(tmp_path / "d"), str(tmp_path / "to")) == 1
    assert "without *.safetensors" in shell.err
    assert shell("convert", str(tmp_path / "a.pt"), str(tmp_path / "d")) == 2
    assert "exists" in shell.err
    assert shell("convert", str(tmp_path / "none"), str(tmp_path / "to")) == 2
    torch.save({"x": Path("."), "y": torch.ones(1)}, tmp_path / "c.pt")
    assert shell("convert", str(tmp_path / "c.pt"), str(tmp_path / "to")) == 1
    assert "--trust-pickle" in shell.err
    assert torch_file.Source(tmp_path / "c.pt", trusted=True).shapes() == {"y": (1,)}


_MIB = 1 << 20
_MEASURED = """
import resource, sys
from te_grouped_mlp.cli import main
code = main(sys.argv[1:])
status = open("/proc/self/status").read()
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_two_gigabytes_within_one(tmp_path: Path) -> None:
    """There and back; each tensor has 32 MiB."""
    features, hidden, count = 4096, 4096, 64
    header, offset = {}, 0
    for expert in range(count):
        size = features * hidden * 2
        name = f"layers.0.mlp.experts.linear_fc1.weight{expert}"
        spans = [offset, offset + size]
        header[name] = {"dtype": "BF16", "shape": [features, hidden], "data_offsets": spans}
        offset += size
    assert offset == 2048 * _MIB
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    with paths[0].open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        data = bytearray(size)
        piece = torch.frombuffer(data, dtype=torch.int64)
        for _ in range(count):
            piece.random_(generator=generator)
            stream.write(data)
    for one, other, to in ((0, 1, "interleaved"), (1, 2, "contiguous")):
        argv = ["convert", str(paths[one]), str(paths[other]), "--to", to]
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED, *argv], capture_output=True, text=True, check=True
        )
        code, peak = map(int, done.stdout.splitlines()[-1].split())
        assert code == 0
        assert peak < 1024
        if one == 1:
            paths[0].rename(tmp_path / "first")
    with (tmp_path / "first").open("rb") as first, paths[2].open("rb") as last:
        first.seek(8 + len(text))
        last.seek(8 + int.from_bytes(last.read(8), "little"))
        for _ in range(count):
            assert first.read(size) == last.read(size)
        assert not last.read()


_GROWTH = """
import resource, sys, warnings
warnings.simplefilter("ignore")
from te_grouped_mlp.checkpoint import dist_folder
from te_grouped_mlp.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(sys.argv[1:])
print(code, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_a_dist_checkpoint_needs_the_memory_of_few_tensors(tmp_path: Path) -> None:
    """The writer of PyTorch keeps what it has written: 24 tensors of 16 MiB."""
    name = "layers.0.mlp.experts.linear_fc1.weight"
    made = {f"{name}{expert}": files.drawn(4096, 2048, seed=expert) for expert in range(24)}
    files.write_dist(tmp_path / "a", made)
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH, "convert", str(tmp_path / "a"), str(tmp_path / "b")],
        capture_output=True,
        text=True,
        check=True,
    )
    code, growth = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0
    assert growth < 12 * 16
    files.assert_same(
        files.read_dist(tmp_path / "b"), {k: files.blocks(v) for k, v in made.items()}
    )
