# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What users of upstream's module ask it before they call an op: Megatron, and TE's own tests.

Every answer has the ``cache_clear`` of upstream's cached functions. None is cached: the switch may
be set after import.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from te_grouped_mlp.op import environment, fusion
from te_grouped_mlp.op.environment import RUNTIME_OFFSETS, WRAPPERS, Absent
from te_grouped_mlp.op.te_adapter import ACTIVATION_TYPES


def _clear() -> None:
    """Do nothing; there is no cache."""


def uncached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function the ``cache_clear`` of upstream's."""
    function.cache_clear = _clear  # type: ignore[attr-defined]
    return function


class uncached_classmethod:  # noqa: N801  (used as a decorator, like classmethod)
    """A class method with the ``cache_clear`` of upstream's."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, _instance: object, owner: type) -> Any:
        bound = functools.partial(self._function, owner)
        bound.cache_clear = _clear  # type: ignore[attr-defined]
        return bound


def frontend_kernel(wrapper: str) -> Any:
    """Return a wrapper of the installed cuDNN frontend by its short name.

    Raises:
        ImportError: There is none.
    """
    env = environment.current()
    if isinstance(env.wrappers, Absent):
        raise ImportError(env.wrappers.cause)
    return getattr(importlib.import_module("cudnn"), WRAPPERS[wrapper])


@uncached
def supports_srelu() -> bool:
    """Whether the frontend has the kernels of the unary activations."""
    wrappers = environment.current().wrappers
    return bool(wrappers) and {"srelu", "dsrelu"} <= set(wrappers)  # type: ignore[arg-type]


@uncached
def supports_situglu() -> bool:
    """Whether the frontend's gated kernels take SiTU's parameters."""
    env = environment.current()
    return all(
        env.wrapper_takes(wrapper, name)
        for wrapper in ("glu", "dglu")
        for name in ("situ_beta1", "situ_beta2")
    )


@uncached
def frontend_is_usable() -> bool:
    """Whether there is a frontend with the grouped-GEMM wrappers."""
    return bool(environment.current().wrappers)


@uncached
def supports_single_group_runtime_offsets(activation: type) -> bool:
    """Whether the kernels of an activation's type can be told to compute all rows."""
    kind = next((ACTIVATION_TYPES[c] for c in activation.__mro__ if c in ACTIVATION_TYPES), None)
    wrappers = ("glu", "dglu") if kind is not None and kind.is_gated else ("srelu", "dsrelu")
    env = environment.current()
    return all(env.wrapper_takes(wrapper, RUNTIME_OFFSETS) for wrapper in wrappers)


class UpstreamSeams:
    """The class methods of upstream's fused ops.

    Attributes:
        is_gated: Whether the class fuses gated activations.
    """

    is_gated: bool

    @uncached_classmethod
    def is_supported(cls) -> bool:
        """Whether the switch is on and a usual grouped MLP is fused on this machine."""
        return fusion.is_supported(gated=cls.is_gated)

    @uncached_classmethod
    def grouped_gemm_activation_kernel(cls) -> Any:
        """Return the frontend's kernel of the forward activation."""
        return frontend_kernel("glu" if cls.is_gated else "srelu")

    @uncached_classmethod
    def grouped_gemm_dactivation_kernel(cls) -> Any:
        """Return the frontend's kernel of the backward activation."""
        return frontend_kernel("dglu" if cls.is_gated else "dsrelu")

    @uncached_classmethod
    def grouped_gemm_quant_kernel(cls) -> Any:
        """Return the frontend's kernel of FC2 and FC1's dgrad."""
        return frontend_kernel("quant")

    @uncached_classmethod
    def grouped_gemm_wgrad_kernel(cls) -> Any:
        """Return the frontend's kernel of the weight gradients."""
        return frontend_kernel("wgrad")

    @uncached_classmethod
    def grouped_gemm_act_hadamard_kernel(cls) -> Any:
        """Return None: the NVFP4 kernel is upstream's own op's."""
        return None

    @uncached_classmethod
    def grouped_gemm_dactivation_is_deterministic(cls) -> bool:
        """Whether a deterministic dprob can be had: yes, or the step raises before any kernel."""
        return True
