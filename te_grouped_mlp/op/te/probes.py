# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What upstream's module says of the machine, by upstream's names, and what a caller says instead.

Tests and tools clear the caches of these functions, or put functions of their own into the module
of the fused op. Nothing is cached here but what `environment` learned of the packages; a function
that took the place of ours is obeyed where it says no. Imports neither torch nor TE.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from te_grouped_mlp.integration.installed_te import TARGET
from te_grouped_mlp.integration.overlay import UPSTREAM_NAME
from te_grouped_mlp.op import environment, packages
from te_grouped_mlp.op.activations import Activation, wrappers
from te_grouped_mlp.op.environment import Environment, Switches, current_switches
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Reason, Reject

_HADAMARD = "grouped_gemm_glu_hadamard_wrapper_sm100"
"""The wrapper that only upstream's own op launches, under NVFP4."""

PROBES: dict[str, Callable[..., Any]] = {}
"""Our functions by their names in upstream's module."""


def clear(*names: str) -> None:
    """Forget what is known of the installed packages, here and in upstream's own module.

    Args:
        *names: Of the cached function in upstream's module; a class and its method are two.
    """
    packages.forget()
    function: Any = sys.modules.get(UPSTREAM_NAME)
    for name in names:
        function = getattr(function, name, None)
    forget = getattr(function, "cache_clear", None)
    if forget is not None:
        forget()


def probe(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under upstream's name, with the ``cache_clear`` of upstream's."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        function.cache_clear = lambda: clear(name)  # type: ignore[attr-defined]
        PROBES[name] = function
        return function

    return register


def _takes(argument: str, *wrappers: str) -> bool:
    env = environment.current()
    return all(env.wrapper_takes(wrapper, argument) for wrapper in wrappers)


@probe("_cudnn_frontend_version_at_least")
def version_at_least(min_version: str) -> bool:
    """Whether the installed frontend is of that release or a later one."""
    version = environment.current().versions["cudnn_frontend"]
    return not isinstance(version, Absent) and _numbers(version) >= _numbers(min_version)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


@probe("_cudnn_frontend_version_supported")
def frontend_is_usable() -> bool:
    """Whether there is a frontend with the grouped-GEMM wrappers."""
    return bool(environment.current().wrappers)


@probe("_cudnn_frontend_geglu_runtime_params")
def takes_geglu_parameters() -> bool:
    """Whether the gated kernels take the parameters of the clamped GeGLU."""
    return _takes("geglu_alpha", "glu", "dglu") and _takes("linear_offset", "glu", "dglu")


@probe("_cudnn_frontend_supports_grouped_gemm_srelu")
def supports_srelu() -> bool:
    """Whether the frontend has the kernels of the unary activations."""
    wrappers = environment.current().wrappers
    return bool(wrappers) and {"srelu", "dsrelu"} <= set(wrappers)  # type: ignore[arg-type]


@probe("_cudnn_frontend_supports_grouped_gemm_srelu_tanh")
def supports_tanh_srelu() -> bool:
    """Whether the kernels of the unary activations take the clamp, in both passes."""
    return _takes("tanh_clamp_scale", "srelu", "dsrelu")


@probe("_cudnn_frontend_supports_grouped_gemm_situglu")
def supports_situglu() -> bool:
    """Whether every gated kernel, that of NVFP4 too, takes SiTU's parameters."""
    betas = ("situ_beta1", "situ_beta2")
    known = all(_takes(beta, "glu", "dglu") for beta in betas)
    return known and hadamard_arguments().issuperset(betas)


def hadamard_kernel() -> Any:
    """Return the frontend's kernel of NVFP4's first product, or None."""
    try:
        return getattr(importlib.import_module("cudnn"), _HADAMARD, None)
    except ImportError:
        return None


def hadamard_arguments() -> frozenset[str]:
    """Return the names of that kernel's arguments; none where it is absent."""
    try:
        return frozenset(inspect.signature(hadamard_kernel()).parameters)
    except (TypeError, ValueError):
        return frozenset()


@probe("_cudnn_frontend_supports_grouped_gemm_srelu_hadamard")
def supports_srelu_hadamard() -> bool:
    """Whether the kernel of NVFP4's first product computes the unary activation, as since 1.26."""
    return hadamard_kernel() is not None and version_at_least("1.26.0")


@probe("_nvidia_cudnn_frontend_supports_wgrad")
def supports_wgrad() -> bool:
    """Whether the frontend has a kernel of the weight gradients."""
    wrappers = environment.current().wrappers
    return bool(wrappers) and "wgrad" in wrappers  # type: ignore[operator]


@probe("_cudnn_frontend_supports_single_group_runtime_offsets")
def supports_single_group_runtime_offsets(activation: type) -> bool:
    """Whether the kernels of an activation's type can be told to compute all rows."""
    kinds = {kind.value: kind for kind in Activation}
    kind = next((kinds[c.__name__] for c in activation.__mro__ if c.__name__ in kinds), None)
    return _takes(RUNTIME_OFFSETS, *wrappers(kind is not None and kind.is_gated))


@probe("_grouped_gemm_dsrelu_backward_supported")
def supports_dsrelu_backward() -> bool:
    """Whether the frontend's kernel of the unary derivative runs here, and the switch is on."""
    env = environment.current()
    blackwell = bool(env.sm) and env.sm[0] == 10  # type: ignore[index]
    return env.switches.fused and blackwell and supports_srelu()


@probe("_deterministic_algorithms_required")
def deterministic_algorithms_required() -> bool:
    """Whether results must be bit-identical from run to run."""
    return environment.determinism_requested(current_switches())


# What took the place of ours ----------------------------------------------------------------------


def replaced(name: str) -> Callable[..., Any] | None:
    """Return what stands in the fused op's module in the place of a probe, or None for ours."""
    module = sys.modules.get(TARGET)
    function = None if module is None else vars(module).get(name)
    return None if function is PROBES[name] else function


def refusal(kind: Activation | None) -> Reject | None:
    """Say which replaced probe forbids to fuse an activation, or None."""
    of_kind = () if kind is None else kind.row.probes
    for name in ("_cudnn_frontend_version_supported", *of_kind):
        other = replaced(name)
        if other is not None and not other():
            return Reject(Reason.PROBE, f"{name}() is False")
    return None


def obeyed(env: Environment, activation: type) -> Environment:
    """Return the machine as replaced probes describe it; `env` itself where all are ours."""
    offsets = replaced("_cudnn_frontend_supports_single_group_runtime_offsets")
    if offsets is not None and not offsets(activation):
        env = dataclasses.replace(env, treat_rows_as_full=False)
    return env


def determinism_requested(switches: Switches) -> bool:
    """Whether results must be bit-identical: by the replaced probe, the flag, or the switch."""
    other = replaced("_deterministic_algorithms_required")
    return environment.determinism_requested(switches) if other is None else bool(other())
