# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What `torch.save` writes: a state dict, or dictionaries and lists that hold one.

The source is mapped into memory, not read; what is reordered lies in a scratch file until the
result is written. The marker is a record of the archive, which `torch.load` does not look at, so
that a state dict keeps exactly its keys.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from te_grouped_mlp.checkpoint import names, order
from te_grouped_mlp.checkpoint.names import Output, Refused, Step

_RECORD = f"{names.MARKER}.json"
_STATES, _GROUPS = "state", "param_groups"


class Source:
    """The tensors of a file by dotted path."""

    def __init__(self, path: Path, *, trusted: bool) -> None:
        if not zipfile.is_zipfile(path):
            raise Refused(f"{path} is no archive of torch.save (of torch 1.6 or newer)")
        self.path = path
        try:
            self._root = torch.load(path, map_location="cpu", mmap=True, weights_only=not trusted)
        except Exception as error:
            if trusted:
                raise
            raise Refused(
                f"{path} holds more than tensors and plain values ({error}); --trust-pickle loads "
                "it, and runs what code it names"
            ) from error
        # Path of names -> the container and the key in it.
        self._places: dict[str, tuple[Any, Any]] = {}
        self._collect(self._root, "")
        self._name_states()

    def _collect(self, value: Any, path: str) -> None:
        pairs: Iterator[tuple[Any, Any]]
        if isinstance(value, Mapping):
            pairs = iter(value.items())
        elif isinstance(value, list):
            pairs = iter(enumerate(value))
        else:
            return
        for key, each in pairs:
            name = f"{path}.{key}" if path else str(key)
            if isinstance(each, torch.Tensor):
                if name in self._places:
                    raise Refused(f"{self.path} has two tensors of the path {name}")
                self._places[name] = (value, key)
            else:
                self._collect(each, name)

    def _name_states(self) -> None:
        """Give an optimizer's states, which have numbers, the names of their parameters."""
        numbered = [name for name in self._places if _is_numbered(name)]
        for name in numbered:
            head, _, tail = name.rpartition(f"{_STATES}.")
            number, _, state = tail.partition(".")
            parameter = self._parameter_names(head).get(int(number))
            if parameter is not None:
                self._places[f"{head}{_STATES}.{parameter}.{state}"] = self._places.pop(name)

    def _parameter_names(self, head: str) -> dict[int, str]:
        """Return number -> name for the optimizer whose path is `head`.

        A torch optimizer that was made of `named_parameters()` writes the names down. Without them
        the numbers count a model's parameters only if there is one group and nothing else.
        """
        optimizer = self._root
        for key in filter(None, head.split(".")):
            optimizer = optimizer[int(key) if isinstance(optimizer, list) else key]
        groups = optimizer.get(_GROUPS, [])
        named: dict[int, str] = {}
        for group in groups:
            named |= dict(zip(group["params"], group.get("param_names", ()), strict=False))
        try:
            (group,) = groups
        except ValueError:
            return named
        held = f"{head}{_STATES}."
        model = [name for name in self._places if not name.startswith(held)]
        numbers = group["params"]
        if named or len(numbers) != len(model):
            return named
        return dict(zip(numbers, model, strict=True))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tuple(self._tensor(name).shape) for name in self._places}

    def _tensor(self, name: str) -> torch.Tensor:
        container, key = self._places[name]
        found: torch.Tensor = container[key]
        return found

    def marker(self) -> str | None:
        """Return the marker."""
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if name.rpartition("/")[2] == _RECORD:
                    return archive.read(name).decode()
        return None

    def write(
        self,
        outputs: Sequence[Output],
        marker: str | None,
        target: Path,
        advance: Callable[[str], None],
    ) -> None:
        """Write the result; a folder beside `target` is the scratch, for whoever called to drop."""
        changed = [out for out in outputs if out.step is not Step.COPY]
        self._require_named(changed)
        scratch = target.with_name(f"{target.name}.scratch")
        scratch.mkdir()
        ready = []
        for index, out in enumerate(changed):
            advance(out.name)
            sources = [self._tensor(name) for name in out.sources]
            if len({each.dtype for each in sources}) != 1:
                raise Refused(f"{out.name} would be of several dtypes")
            ready.append(_in_file(order.made(out, sources), scratch / str(index)))
        for out, tensor in zip(changed, ready, strict=True):
            self._put(out, tensor)
        for name in {name for out in changed for name in out.sources} - {o.name for o in changed}:
            container, key = self._places[name]
            container.pop(key, None)
        torch.save(self._root, target)
        if marker is not None:
            _add_record(target, marker)

    def _require_named(self, changed: Sequence[Output]) -> None:
        """Refuse states whose parameter is not known, and could be an FC1.

        Raises:
            Refused: There are such states, or states of parameters that get other names.
        """
        for name in filter(_is_numbered, self._places):
            if self._tensor(name).dim():
                raise Refused(
                    f"{name} belongs to a parameter that is not named; allowed: states of an "
                    "optimizer that was made of model.named_parameters()"
                )
        renamed = [out for out in changed if out.sources != (out.name,)]
        if renamed and any(f".{_STATES}." in f".{name}" for name in self._places):
            raise Refused(
                f"{renamed[0].name} gets another name, which the optimizer's states do not; "
                "allowed: a checkpoint without an optimizer"
            )

    def _put(self, out: Output, tensor: torch.Tensor) -> None:
        container, key = self._places[out.sources[0]]
        if out.sources == (out.name,):
            container[key] = tensor
            return
        prefix = out.sources[0].removesuffix(str(key))
        container[out.name.removeprefix(prefix)] = tensor


def _is_numbered(name: str) -> bool:
    head, found, tail = name.rpartition(f"{_STATES}.")
    whole = not head or head.endswith(".")
    return bool(found) and whole and tail.partition(".")[0].isdigit()


def _in_file(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Return the same elements in a file that is mapped, so that they need no memory."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    stored = torch.from_file(str(path), shared=True, size=flat.numel(), dtype=torch.uint8)
    stored.copy_(flat)
    return stored.view(tensor.dtype).view(tensor.shape)


def _add_record(path: Path, marker: str) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{_RECORD}", marker)
