# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a tex function takes and refuses, stated once and checked before any work.

The Python signature gives the names, their order, what is positional or keyword only, and the
defaults of the binding; its annotations say what the binding converts. `CONTRACTS` is the table of
all functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from te_grouped_mlp.integration.installed_te import te_version
from te_grouped_mlp.op.tensors import capacity, stacking

Size: TypeAlias = int
"""C++'s size_t: not negative."""
TeDType: TypeAlias = Any
"""A dtype of Transformer Engine, or its integer."""

Arguments = Mapping[str, Any]
Rule = Callable[[Arguments], "str | None"]
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Refusal:
    """One kind of call that a tex function refuses.

    Attributes:
        name: Of the kind, unique for a function.
        source: File and line of upstream's check in 2.20.2, relative to the extension's `csrc` or,
            with `common/` in front, to the core library. Empty where upstream goes on with the
            call: it would read other memory, give a result that depends on the order of threads,
            stop in a kernel, or compute what standalone has not.
        rule: From the arguments by name: what is wrong with them and what is allowed, or None.
        error: What is raised: RuntimeError where upstream raises it.
        not_in: A release (2.19) whose extension takes such calls; it is not refused beside that TE.
    """

    name: str
    source: str
    rule: Rule
    error: type[Exception] = RuntimeError
    not_in: str = ""

    @property
    def applies(self) -> bool:
        """Whether the installed Transformer Engine is one whose extension refuses."""
        return not self.not_in or not (te_version() or "").startswith(f"{self.not_in}.")


@dataclass(frozen=True)
class Contract:
    """A tex function as it is declared.

    Attributes:
        signature: Of the function.
        devices: Types of the devices that its tensors may lie on.
        refusals: In the order in which they are checked.
    """

    signature: inspect.Signature
    devices: tuple[str, ...]
    refusals: tuple[Refusal, ...]


CONTRACTS: dict[str, Contract] = {}


def own(name: str, rule: Rule, error: type[Exception] = ValueError) -> Refusal:
    """Return a refusal that upstream has not."""
    return Refusal(name, "", rule, error)


def tex_function(*refusals: Refusal, gpu: bool = True) -> Callable[[_Function], _Function]:
    """Declare a tex function.

    Args:
        refusals: In the order in which they are checked, after the types of the arguments
            (TypeError), the devices of their tensors (NotImplementedError) and the memory of these
            (ValueError).
        gpu: Whether it takes CUDA tensors too.
    """
    devices = ("cpu", "cuda") if gpu else ("cpu",)

    def declare(function: _Function) -> _Function:
        signature = inspect.signature(function)
        CONTRACTS[function.__name__] = Contract(signature, devices, refusals)
        return _checked(function, signature, devices, refusals)

    return declare


def on_any_device(function: _Function) -> _Function:
    """Check the types and devices of a function that stands in for another module's."""
    return _checked(function, inspect.signature(function), ("cpu", "cuda"), ())


def _checked(
    function: _Function,
    signature: inspect.Signature,
    devices: tuple[str, ...],
    refusals: tuple[Refusal, ...],
) -> _Function:
    parameters = signature.parameters
    positional = tuple(n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY)
    by_name = {n for n, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY}
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    converts = {n: _converter(str(p.annotation)) for n, p in parameters.items()}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(positional, args, strict=False))
        if len(args) > len(positional) or not by_name.issuperset(kwargs) or given.keys() & kwargs:
            signature.bind(*args, **kwargs)
        given.update(kwargs)
        for name, value in given.items():
            if not converts[name](value):
                raise TypeError(
                    f"{function.__name__}: {name} is a {type(value).__name__}; allowed: "
                    f"{parameters[name].annotation}"
                )
        _check_tensors(function.__name__, given, devices)
        arguments = {**defaults, **given}
        if len(arguments) < len(parameters):
            signature.bind(*args, **kwargs)
        for refusal in _applying(refusals):
            words = refusal.rule(arguments)
            if words is not None:
                raise refusal.error(f"{function.__name__}: {words}")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


@functools.cache
def _applying(refusals: tuple[Refusal, ...]) -> tuple[Refusal, ...]:
    return tuple(refusal for refusal in refusals if refusal.applies)


# The types of arguments ---------------------------------------------------------------------------


def _is_int(value: Any) -> bool:
    return hasattr(type(value), "__index__")


def _is_sequence(value: Any) -> bool:
    return hasattr(type(value), "__getitem__") and not isinstance(value, (str, bytes, dict))


def _is_te_dtype(value: Any) -> bool:
    # One of kByte, ..., kFloat4E2M1, as a number.
    return isinstance(value, int) and 0 <= value <= 10


_CONVERTERS: dict[str, Callable[[Any], bool]] = {
    "Any": lambda value: True,  # noqa: ARG005
    "Size": lambda value: _is_int(value) and int(value) >= 0,
    "TeDType": _is_te_dtype,
    "bool": lambda value: value is None or hasattr(type(value), "__bool__"),
    "float": lambda value: _is_int(value) or hasattr(type(value), "__float__"),
    "int": _is_int,
    "str": lambda value: isinstance(value, str),
    "torch.Tensor": lambda value: isinstance(value, torch.Tensor),
    "torch.device": lambda value: isinstance(value, torch.device),
    "torch.dtype": lambda value: isinstance(value, torch.dtype),
}

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_USUAL: dict[str, frozenset[type]] = {
    "bool": frozenset({bool}),
    "int": frozenset({int}),
    "torch.Tensor": _TENSORS,
    "torch.dtype": frozenset({torch.dtype}),
}
"""Types that the binding converts whatever their values."""


@functools.cache
def _converter(annotation: str) -> Callable[[Any], bool]:
    """Return the question whether the binding converts a value to an argument's type."""
    if annotation.endswith(" | None"):
        inner = _converter(annotation.removesuffix(" | None"))
        return lambda value: value is None or inner(value)
    if annotation == "Sequence[Any]":
        return _is_sequence
    if annotation.startswith("Sequence["):
        of = annotation[len("Sequence[") : -1]
        inner, usual = _converter(of), _USUAL.get(of, frozenset())
        # Lists have hundreds of entries, of one type or two.
        return lambda value: (
            _is_sequence(value) and (usual.issuperset(map(type, value)) or all(map(inner, value)))
        )
    return _CONVERTERS[annotation]


# Devices and memory -------------------------------------------------------------------------------

_NOWHERE = frozenset({int, float, bool, str, bytes, type(None), torch.dtype})


def _parts(value: Any) -> Sequence[Any]:
    """Return the tensors with memory of their own in an argument, or its device."""
    kind = type(value)
    if kind in _NOWHERE:
        return ()
    if kind in _TENSORS or kind is torch.device:
        return (value,)
    if isinstance(value, (list, tuple)):
        # Lists have hundreds of entries, of one kind or two.
        kinds = set(map(type, value))
        if kinds <= _NOWHERE:
            return ()
        return value if kinds <= _TENSORS else [part for item in value for part in _parts(item)]
    return capacity.tensors_in(value)


def _check_tensors(function: str, given: Arguments, allowed: tuple[str, ...]) -> None:
    """Check where every tensor lies, and that its storage covers it."""
    for name, value in given.items():
        parts = _parts(value)
        if not parts:
            continue
        for device in {getattr(part, "device", part) for part in parts}:
            if device.type not in allowed:
                where = " and ".join(map(str.upper, allowed))
                raise NotImplementedError(
                    f"{function} was given a tensor on {device}; standalone implements it for "
                    f"{where} tensors only"
                )
        if not isinstance(value, torch.device):
            stacking.require(f"{function}: {name}[{{}}]", parts, capacity.require_memory, cut=True)
