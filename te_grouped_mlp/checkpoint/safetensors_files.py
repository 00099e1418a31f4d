# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Safetensors: one file, or a folder of shards with an index. Needs no package for it.

A file is the length of its header (8 bytes, little-endian), the header in JSON, and the tensors'
bytes in row-major order at the offsets that the header names.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from te_grouped_mlp.checkpoint import names, order
from te_grouped_mlp.checkpoint.names import Output, Refused, Step

_INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20
_COPY_BYTES = 1 << 24
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Source:
    """The tensors of a file, or of the shards of a folder; reads one at a time."""

    def __init__(self, path: Path) -> None:
        self.is_folder = path.is_dir()
        self.root = path
        self.files = sorted(path.glob("*.safetensors")) if self.is_folder else [path]
        self.entries: dict[str, _Entry] = {}
        self.metadata: dict[Path, dict[str, str]] = {}
        for file in self.files:
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - _LENGTH_BYTES):
                raise Refused(f"{file} is no safetensors file: its header has {length} bytes")
            try:
                header = json.loads(stream.read(length))
                self.metadata[file] = header.pop(_METADATA, {})
                start = _LENGTH_BYTES + length
                for name, each in header.items():
                    begin, end = (start + offset for offset in each["data_offsets"])
                    if not start <= begin <= end <= size:
                        raise ValueError(f"{name} lies outside the file")
                    entry = _Entry(file, each["dtype"], tuple(each["shape"]), begin, end)
                    if name in self.entries:
                        raise ValueError(f"{name} is in {self.entries[name].file} too")
                    self.entries[name] = entry
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Refused(f"{file} is no safetensors file: {error}") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def marker(self) -> str | None:
        """Return the marker, of whichever file has one."""
        found = (each.get(names.MARKER) for each in self.metadata.values())
        return next((each for each in found if each is not None), None)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a tensor's elements as integers of their size: they are only moved."""
        entry = self.entries[name]
        data = bytearray(entry.end - entry.begin)
        with entry.file.open("rb") as stream:
            stream.seek(entry.begin)
            if stream.readinto(data) != len(data):
                raise Refused(f"{entry.file} ends inside {name}")
        dtype = _INTEGERS[self._element_bytes(name)]
        return torch.frombuffer(data, dtype=dtype).view(entry.shape)

    def _element_bytes(self, name: str) -> int:
        entry = self.entries[name]
        size, count = entry.end - entry.begin, math.prod(entry.shape)
        whole = size // count if count and size % count == 0 else 0
        if whole not in _INTEGERS:
            raise Refused(f"{name} has {size} bytes for shape {entry.shape} of {entry.dtype}")
        return whole

    def write(
        self,
        outputs: Sequence[Output],
        marker: str | None,
        target: Path,
        advance: Callable[[str], None],
    ) -> None:
        """Write the result; each tensor to the shard of the first tensor that it is made of."""
        for output in outputs:
            if output.step is not Step.COPY:
                for name in output.sources:
                    self._element_bytes(name)
                kinds = {self.entries[name].dtype for name in output.sources}
                if len(kinds) != 1:
                    raise Refused(f"{output.name} would be of {', '.join(sorted(kinds))}")
        if self.is_folder:
            target.mkdir()
        placed: dict[str, str] = {}
        for file in self.files:
            own = [out for out in outputs if self.entries[out.sources[0]].file == file]
            placed |= {out.name: file.name for out in own}
            to = target / file.name if self.is_folder else target
            self._write_file(own, self._metadata(file, marker), to, advance)
        if self.is_folder:
            self._copy_others(target, placed)

    def _metadata(self, file: Path, marker: str | None) -> dict[str, str]:
        kept = {key: text for key, text in self.metadata[file].items() if key != names.MARKER}
        return kept if marker is None else {**kept, names.MARKER: marker}

    def _write_file(
        self,
        outputs: Sequence[Output],
        metadata: dict[str, str],
        target: Path,
        advance: Callable[[str], None],
    ) -> None:
        header: dict[str, Any] = {_METADATA: metadata} if metadata else {}
        offset = 0
        for out in outputs:
            size = sum(self._bytes(name) for name in out.sources)
            size //= 2 if out.step in (Step.GATE, Step.LINEAR) else 1
            span = [offset, offset + size]
            dtype = self.entries[out.sources[0]].dtype
            header[out.name] = {"dtype": dtype, "shape": list(out.shape), "data_offsets": span}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        # The data begins at a multiple of eight; blanks are JSON's.
        text += b" " * (-len(text) % 8)
        with target.open("xb") as stream:
            stream.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            for out in outputs:
                advance(out.name)
                for piece in self._pieces(out):
                    stream.write(piece)

    def _bytes(self, name: str) -> int:
        return self.entries[name].end - self.entries[name].begin

    def _pieces(self, out: Output) -> Iterator[memoryview | bytes]:
        """Yield the bytes of a result; a tensor that is copied goes in pieces."""
        if out.step is Step.COPY:
            entry = self.entries[out.sources[0]]
            with entry.file.open("rb") as stream:
                stream.seek(entry.begin)
                left = entry.end - entry.begin
                while left:
                    piece = stream.read(min(left, _COPY_BYTES))
                    if not piece:
                        raise Refused(f"{entry.file} ends inside {out.name}")
                    left -= len(piece)
                    yield piece
            return
        made = order.made(out, [self._tensor(name) for name in out.sources])
        flat = made.view(-1).view(torch.uint8)
        # Through a bytearray: numpy need not be installed.
        data = bytearray(flat.numel())
        torch.frombuffer(data, dtype=torch.uint8).copy_(flat)
        yield memoryview(data)

    def _copy_others(self, target: Path, placed: dict[str, str]) -> None:
        """Copy what is no shard, and write the index anew."""
        for file in self.root.iterdir():
            if file.suffix != ".safetensors" and file.name != _INDEX:
                copy = shutil.copytree if file.is_dir() else shutil.copy2
                copy(file, target / file.name)
        index = self.root / _INDEX
        if index.is_file():
            found = json.loads(index.read_text(encoding="utf-8"))
            found["weight_map"] = placed
            text = json.dumps(found, indent=2) + "\n"
            (target / _INDEX).write_text(text, encoding="utf-8")
