# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of `torch.distributed.checkpoint`, Megatron's dist checkpoints among them.

A tensor is stored in chunks. The result has the same chunks; each is made of the part of the source
that it depends on, so that memory is that of one chunk over all of its output features. What is no
tensor is copied as bytes, and never unpickled. The marker is a file.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from te_grouped_mlp.checkpoint import names, order
from te_grouped_mlp.checkpoint.names import Output, Refused, Step

METADATA = ".metadata"
_MARKER_FILE = f"{names.MARKER}.json"
_DATA_SUFFIX = ".distcp"


class Source:
    """The tensors of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = dcp.FileSystemReader(path)
        self.metadata: Metadata = self._reader.read_metadata()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {
            name: tuple(each.size)
            for name, each in self.metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def marker(self) -> str | None:
        """Return the marker."""
        file = self.path / _MARKER_FILE
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def tensor(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """Read a part of a tensor."""
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        out = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(name, stored, [chunk])
        # Of a tensor with no element nothing is stored.
        self._read(_Into({name: out}, items))
        return out

    def raw(self, name: str) -> io.BytesIO:
        """Read the bytes of what is no tensor."""
        index = MetadataIndex(name)
        zero = torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
        planner = _Into({}, [item])
        self._read(planner)
        return planner.bytes[name]

    def _read(self, planner: _Into) -> None:
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()

    def write(
        self,
        outputs: Sequence[Output],
        marker: str | None,
        target: Path,
        advance: Callable[[str], None],
    ) -> None:
        """Write the result as a folder."""
        renamed = [out for out in outputs if out.sources != (out.name,)]
        if renamed:
            raise Refused(
                f"{renamed[0].name} gets another name; allowed in a folder of "
                "torch.distributed.checkpoint: Megatron's names, which stay"
            )
        # No copies ahead: one tensor is made, written, and dropped when the next is asked for.
        writer = dcp.FileSystemWriter(
            target, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0
        )
        planner = _Reordered(self, {out.name: out for out in outputs}, advance)
        with warnings.catch_warnings():
            # One process is what is wanted.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
            except CheckpointException as failed:
                # It is no Exception, and has one for each rank.
                raise next(iter(failed.failures.values()))[0] from None
        self._keep_what_megatron_adds(target)
        for file in self.path.iterdir():
            if file.name not in (METADATA, _MARKER_FILE) and file.suffix != _DATA_SUFFIX:
                copy = shutil.copytree if file.is_dir() else shutil.copy2
                copy(file, target / file.name)
        if marker is not None:
            (target / _MARKER_FILE).write_text(marker, encoding="utf-8")

    def _keep_what_megatron_adds(self, target: Path) -> None:
        """Bring attributes that a writer added to its metadata into ours."""
        known = {field.name for field in dataclasses.fields(Metadata)}
        added = {key: value for key, value in vars(self.metadata).items() if key not in known}
        if added:
            file = target / METADATA
            found = pickle.loads(file.read_bytes())
            vars(found).update(added)
            file.write_bytes(pickle.dumps(found))


class _Into(dcp.DefaultLoadPlanner):
    """Reads items into the tensors of `into`, and bytes as they are."""

    def __init__(self, into: dict[str, torch.Tensor], items: list[ReadItem]) -> None:
        super().__init__()
        self._into, self._items = into, items
        self.bytes: dict[str, io.BytesIO] = {}

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.bytes[read_item.dest_index.fqn] = io.BytesIO(value.read())

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        whole = self._into[read_item.dest_index.fqn]
        for axis, (begin, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            whole = whole.narrow(axis, begin, length)
        return whole


class _Reordered(dcp.DefaultSavePlanner):
    """Writes the chunks of a source; each is read and reordered when it is its turn."""

    def __init__(
        self, source: Source, outputs: dict[str, Output], advance: Callable[[str], None]
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._source, self._outputs, self._advance = source, outputs, advance
        self._written = torch.empty(0)

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, stored in self._source.metadata.state_dict_metadata.items():
            if isinstance(stored, BytesStorageMetadata):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            for number, chunk in enumerate(stored.chunks):
                index = MetadataIndex(name, chunk.offsets, number)
                data = TensorWriteData(chunk, stored.properties, stored.size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        planner_data = self._source.metadata.planner_data
        return plans, dataclasses.replace(metadata, planner_data=planner_data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type is WriteItemType.BYTE_IO:
            return self._source.raw(name)
        # The writer keeps every tensor of a file until the file is whole.
        self._written.untyped_storage().resize_(0)
        assert write_item.tensor_data is not None
        self._advance(name)
        self._written = self._chunk(self._outputs[name], write_item.tensor_data.chunk)
        return self._written

    def _chunk(self, out: Output, chunk: ChunkStorageMetadata) -> torch.Tensor:
        name = out.sources[0]
        if out.step is Step.COPY:
            return self._source.tensor(name, chunk)
        # An output feature may come from anywhere along its axis.
        axis = len(chunk.sizes) - (2 if out.is_weight else 1)
        offsets, sizes = list(chunk.offsets), list(chunk.sizes)
        begin, length = offsets[axis], sizes[axis]
        offsets[axis], sizes[axis] = 0, out.shape[axis]
        part = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        made = order.made(out, [self._source.tensor(name, part)])
        # A copy, so that the storage is the chunk's alone.
        return made.narrow(axis, begin, length).clone(memory_format=torch.contiguous_format)
