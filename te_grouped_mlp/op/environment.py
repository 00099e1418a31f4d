# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The facts of the machine and of the process, as one frozen record.

Nothing is read at import. `current()` probes packages and the GPU once per process and the switches
at every call; `override()` replaces fields for tests. An absence is a value that keeps its cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_grouped_mlp.op import emulated, extension
from te_grouped_mlp.op.packages import Absent, frontend_wrappers, package_versions

FUSED_SWITCH = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
BACKEND_SWITCH = "NVTE_GROUPED_MLP_BACKEND"
FULL_ROWS_SWITCH = "NVTE_GROUPED_MLP_FULL_ROWS"
CHECK_SWITCH = "NVTE_GROUPED_MLP_CHECK"
REUSE_WEIGHTS_SWITCH = "NVTE_GROUPED_MLP_REUSE_WEIGHTS"
DETERMINISM_SWITCH = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
WGRAD_SWITCH = "NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP"
FORK_SWITCH = "NVTE_GROUPED_MLP_FORK"
STANDALONE_SWITCH = "NVTE_GROUPED_MLP_STANDALONE"
EMULATE_SWITCH = "NVTE_GROUPED_MLP_EMULATE"

STANDALONE_MARK = "__te_grouped_mlp_standalone__"
"""Attribute of the `transformer_engine_torch` that stands in for Transformer Engine's extension."""


@dataclass(frozen=True)
class Switches:
    """The environment variables that govern the op; see `Environment` for where they act.

    Attributes:
        fused: Fuse at all.
        backend: A backend by name, or "auto".
        full_rows: The promise that a routed single group fills its buffer.
        check: Read values on the device to check them; this synchronises.
        allow_nondeterministic: Results may differ from run to run.
        reuse_weights: The promise that PyTorch counts every change of a weight.
        no_frontend_wgrad: Weight gradients by cuBLAS, as TE's own op computes them then.
    """

    fused: bool = False
    backend: str = "auto"
    full_rows: bool = False
    check: bool = False
    allow_nondeterministic: bool = True
    reuse_weights: bool = False
    no_frontend_wgrad: bool = False


@dataclass(frozen=True)
class Environment:
    """What the machine and the process offer.

    Attributes:
        sm: Compute capability of the current GPU by the real torch, or Absent.
        versions: Package name to version or Absent.
        wrappers: Short name of a frontend wrapper to its argument names, or Absent as a whole when
            no frontend can be used.
        switches: The environment variables.
        standalone: Whether our replacement for Transformer Engine's extension is in use.
        emulated: Whether an emulated GPU stands for one, so that GPU kernels take CPU tensors.
        single_group_is_always_dense: Reproduce the faulty layout decision. Honoured by the
            reference backend alone, and only `override` can set it.
        treat_rows_as_full: What to take for known instead of looking at the splits: False makes an
            exact-size call PACKED, to compare it with a padded one. Only `override` can set it.
        extension: Whether this package's C++ extension can be imported; what runs on the host
            needs it.
    """

    sm: tuple[int, int] | Absent
    versions: Mapping[str, str | Absent]
    wrappers: Mapping[str, frozenset[str]] | Absent
    switches: Switches
    standalone: bool
    emulated: bool = False
    single_group_is_always_dense: bool = False
    treat_rows_as_full: bool | None = None
    extension: bool | Absent = True

    def wrapper_takes(self, wrapper: str, argument: str) -> bool:
        """Whether the installed frontend's `wrapper` (a short name) has `argument`."""
        return bool(self.wrappers) and argument in self.wrappers.get(wrapper, ())  # type: ignore[union-attr]


_overrides: list[dict[str, Any]] = []
_latest: tuple[tuple[Any, ...], Environment] | None = None
"""The facts of the latest `current`, and their record."""


def current() -> Environment:
    """Return the record for this moment. Never synchronises with a GPU."""
    global _latest
    packages = package_versions(), frontend_wrappers()
    gpu = emulated.device()
    sm = _probe_sm() if gpu is None else gpu.sm
    facts = (sm, *packages, read_switches(), _standalone_active(), gpu is not None)
    latest = _latest
    if latest is None or latest[0] != facts:
        _latest = latest = (facts, Environment(*facts, extension=extension.status()))
    env = latest[1]
    for changes in _overrides:
        env = dataclasses.replace(env, **changes)
    return env


def current_switches() -> Switches:
    """Return the switches for this moment, without probing the machine."""
    for changes in reversed(_overrides):
        if "switches" in changes:
            switches = changes["switches"]
            assert isinstance(switches, Switches)
            return switches
    return read_switches()


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[None]:
    """Replace fields of the record while the block runs; for tests and demonstrations.

    Args:
        **changes: Field names of `Environment` and their values.

    Raises:
        TypeError: A name is not a field.
    """
    fields = {field.name for field in dataclasses.fields(Environment)}
    if unknown := sorted(changes.keys() - fields):
        raise TypeError(f"override got {unknown}; allowed: {sorted(fields)}")
    _overrides.append(changes)
    try:
        yield
    finally:
        # By identity: an equal one may lie further out, below one that it would uncover.
        _overrides[:] = [other for other in _overrides if other is not changes]


def read_switches() -> Switches:
    """Read the environment variables.

    Raises:
        ValueError: A variable has a value that is not allowed; the message names both.
    """
    # CPython keeps the encoded pairs in a dictionary; its mapping takes microseconds for each name.
    encoded = getattr(os.environ, "_data", None)
    if encoded is None:
        return _switches(*map(os.environ.get, _SWITCHES))
    return _switches_of(*map(encoded.get, _ENCODED_SWITCHES))


_SWITCHES = (
    FUSED_SWITCH,
    BACKEND_SWITCH,
    FULL_ROWS_SWITCH,
    CHECK_SWITCH,
    DETERMINISM_SWITCH,
    REUSE_WEIGHTS_SWITCH,
    WGRAD_SWITCH,
)
_ENCODED_SWITCHES = tuple(map(getattr(os.environ, "encodekey", str), _SWITCHES))


@functools.lru_cache(maxsize=16)
def _switches_of(*encoded: Any) -> Switches:
    decode = os.environ.decodevalue
    return _switches(*(None if value is None else decode(value) for value in encoded))


@functools.lru_cache(maxsize=16)
def _switches(
    fused: str | None,
    backend: str | None,
    full_rows: str | None,
    check: str | None,
    allow_nondeterministic: str | None,
    reuse_weights: str | None,
    no_frontend_wgrad: str | None,
) -> Switches:
    return Switches(
        fused=_integer(FUSED_SWITCH, fused, 0) > 0,
        backend=backend or "auto",
        full_rows=_integer(FULL_ROWS_SWITCH, full_rows, 0) > 0,
        check=_integer(CHECK_SWITCH, check, 0) > 0,
        allow_nondeterministic=_integer(DETERMINISM_SWITCH, allow_nondeterministic, 1) != 0,
        reuse_weights=_integer(REUSE_WEIGHTS_SWITCH, reuse_weights, 0) > 0,
        no_frontend_wgrad=_integer(WGRAD_SWITCH, no_frontend_wgrad, 0) > 0,
    )


def _integer(name: str, text: str | None, default: int) -> int:
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; allowed: an integer, 0 or 1") from None


@functools.cache
def _probe_sm() -> tuple[int, int] | Absent:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Absent(f"torch cannot be imported: {error}")
    if not torch.cuda.is_available():
        return Absent("torch sees no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    return int(major), int(minor)


def _standalone_active() -> bool:
    tex = sys.modules.get("transformer_engine_torch")
    return STANDALONE_MARK in vars(tex) if tex is not None else False


def emulation_requested() -> bool:
    """Read `NVTE_GROUPED_MLP_EMULATE`: sm100 executes the kernels for that GPU on the CPU.

    Raises:
        ValueError: Any other value but 0; the message names it.
    """
    value = os.environ.get(EMULATE_SWITCH, "")
    if value not in ("", "0", "sm100"):
        raise ValueError(f"{EMULATE_SWITCH} is {value!r}; allowed: sm100, 0, or unset")
    return value == "sm100"


def set_emulation() -> None:
    """Set `NVTE_GROUPED_MLP_EMULATE` for this process, before Transformer Engine is imported."""
    os.environ[EMULATE_SWITCH] = "sm100"


def child_environment(changes: Mapping[str, str], first: Path | None = None) -> dict[str, str]:
    """Return the variables for a process of ours: this one's without its NVTE_*, and `changes`.

    Args:
        changes: Names and values.
        first: Folder that is searched for packages before all others.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    if first is not None:
        inherited["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(first), inherited.get("PYTHONPATH")))
        )
    return {**inherited, **changes}


def interpret_triton() -> None:
    """Let Triton's kernels run through its interpreter, which takes CPU tensors.

    Raises:
        RuntimeError: Triton is imported already, for a GPU.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before, for a GPU; allowed: TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"


def cache_home() -> Path:
    """Return this package's folder among the user's caches; it need not exist.

    Raises:
        RuntimeError: The user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, by the specification of the variable.
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "te-grouped-mlp"


def is_first_rank() -> bool:
    """Whether this process is rank 0 of its job, by the launcher's variable; True without one."""
    return os.environ.get("RANK", "0") == "0"


def determinism_requested(switches: Switches) -> bool:
    """Whether results must be bit-identical from run to run: torch's flag, or the switch."""
    if not switches.allow_nondeterministic:
        return True
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())
