# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of each family, written and read independently of the package."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

Tensors = dict[str, torch.Tensor]

FFN, HIDDEN, EXPERTS = 64, 6, 2
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
BLOCK = 32


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random elements; every one of a small tensor is another."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def halves(expert: int, kind: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return gate, then linear features of an expert's weight or bias."""
    shape = (2 * FFN, HIDDEN) if kind == "weight" else (2 * FFN,)
    return drawn(*shape, seed=2 * expert + (kind == "bias"), dtype=dtype)


def blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Interleave along the first axis, one feature after the other."""
    half = len(tensor) // 2
    order = []
    for begin in range(0, half, BLOCK):
        order += range(begin, begin + BLOCK)
        order += range(half + begin, half + begin + BLOCK)
    return tensor[torch.tensor(order)]


def others() -> Tensors:
    """Return what is to stay as it is, names that look alike included."""
    return {
        "model.embed.weight": drawn(5, HIDDEN, seed=50),
        "layers.0.mlp.shared_experts.linear_fc1.weight": drawn(2 * FFN, HIDDEN, seed=51),
        "layers.0.mlp.shared_experts.gate_proj.weight": drawn(FFN, HIDDEN, seed=52),
        "layers.0.mlp.experts.linear_fc2.weight0": drawn(HIDDEN, FFN, seed=53),
        "layers.0.mlp.gate_proj.weight": drawn(FFN, HIDDEN, seed=54),
        "empty": torch.zeros(0, 3),
    }


def megatron() -> tuple[Tensors, Tensors]:
    """Return a checkpoint and what it becomes: parameters, states, and the experts as one."""
    before, after = others(), others()
    for expert in range(EXPERTS):
        for kind in ("weight", "bias"):
            name = f"layers.0.mlp.experts.linear_fc1.{kind}{expert}"
            before[name] = halves(expert, kind)
            for state in ("exp_avg", "exp_avg_sq", "fp32_param"):
                before[f"{name}.{state}"] = halves(9 + expert, kind, torch.float32)
            before[f"{name}.step"] = torch.tensor(7.0)
            after |= {key: blocks(before[key]) for key in before if key.startswith(name)
                      and before[key].dim()}  # fmt: skip
            after[f"{name}.step"] = before[f"{name}.step"]
    for kind in ("weight", "bias"):
        whole = [torch.stack([halves(e + 20 * layer, kind) for e in range(EXPERTS)])
                 for layer in range(2)]  # fmt: skip
        name = f"optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.{kind}"
        before[name] = torch.stack(whole)
        after[name] = torch.stack([torch.stack([*map(blocks, layer)]) for layer in whole])
    return before, after


def paired(gate: str, linear: str) -> tuple[Tensors, Tensors]:
    """Return a checkpoint with a tensor for gate and one for linear."""
    before, after = others(), others()
    for expert in range(EXPERTS):
        for kind in ("weight", "bias"):
            whole = halves(expert, kind)
            root = f"layers.1.moe.experts.{expert}."
            before[f"{root}{gate}.{kind}"], before[f"{root}{linear}.{kind}"] = whole.chunk(2)
            after[f"{root}linear_fc1.{kind}"] = blocks(whole)
    return before, after


def gpt_oss() -> tuple[Tensors, Tensors]:
    """Return a checkpoint whose features alternate, with transposed weights."""
    before, after = others(), others()
    for kind, name in (("weight", "gate_up_proj"), ("bias", "gate_up_proj_bias")):
        whole = torch.stack([halves(expert, kind) for expert in range(EXPERTS)])
        mixed = torch.empty_like(whole)
        mixed[:, 0::2], mixed[:, 1::2] = whole.chunk(2, 1)
        mixed = mixed.transpose(1, 2).contiguous() if kind == "weight" else mixed
        before[f"layers.2.mlp.experts.{name}"] = mixed
        made = torch.stack([blocks(each) for each in whole])
        after[f"layers.2.mlp.experts.linear_fc1.{kind}"] = made
    return before, after


FAMILIES = {
    "megatron": megatron,
    "mixtral": lambda: paired("w1", "w3"),
    "qwen": lambda: paired("gate_proj", "up_proj"),
    "gpt-oss": gpt_oss,
}


def write_safetensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        span = [len(data), len(data) + len(raw)]
        dtype = _DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_safetensors(path: Path) -> Tensors:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    found, end = {}, 0
    for name, each in header.items():
        begin, stop = each["data_offsets"]
        assert begin == end, "a gap"
        end = stop
        raw = torch.tensor(list(content[start + begin : start + stop]), dtype=torch.uint8)
        found[name] = raw.view(dtypes[each["dtype"]]).view(each["shape"])
    assert start + end == len(content)
    return found


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Let `torch.distributed.checkpoint` work without a process group, in silence."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def load_dist(path: Path, into: dict[str, Any]) -> None:
    with one_process():
        dcp.load(into, checkpoint_id=path, no_dist=True)


def write_dist(path: Path, tensors: dict[str, Any]) -> None:
    with one_process():
        dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)


def read_dist(path: Path) -> Tensors:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in metadata.items()
        if hasattr(each, "size")
    }
    load_dist(path, found)
    return found


FORMATS = {
    "safetensors": (write_safetensors, read_safetensors, "m.safetensors"),
    "torch": (lambda path, tensors: torch.save(tensors, path), torch.load, "m.pt"),
    "dist": (write_dist, read_dist, "m"),
}


def assert_same(found: Tensors, expected: Tensors) -> None:
    """Bit for bit, and the same names."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        same = torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8),
            tensor.contiguous().view(-1).view(torch.uint8),
        )
        assert same, name
