# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The class methods by which users of upstream's module ask its fused ops: Megatron, TE's tests.

Every answer has the ``cache_clear`` of upstream's cached functions. None is cached: the switch may
be set after import.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from te_grouped_mlp.op import environment, fusion
from te_grouped_mlp.op.activations import wrappers
from te_grouped_mlp.op.packages import WRAPPERS, Absent
from te_grouped_mlp.op.te import probes


class uncached_classmethod:  # noqa: N801  (used as a decorator, like classmethod)
    """A class method with the ``cache_clear`` of upstream's."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, _instance: object, owner: type) -> Any:
        bound = functools.partial(self._function, owner)
        names = owner.__name__, self._function.__name__
        bound.cache_clear = lambda: probes.clear(*names)  # type: ignore[attr-defined]
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


def is_replaced(cls: type[UpstreamSeams], name: str) -> bool:
    """Whether a class method of ours was replaced in a fused op, as tests do."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base)) is not vars(
        UpstreamSeams
    ).get(name)


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
        return frontend_kernel(wrappers(cls.is_gated)[0])

    @uncached_classmethod
    def grouped_gemm_dactivation_kernel(cls) -> Any:
        """Return the frontend's kernel of the backward activation."""
        return frontend_kernel(wrappers(cls.is_gated)[1])

    @uncached_classmethod
    def grouped_gemm_quant_kernel(cls) -> Any:
        """Return the frontend's kernel of FC2 and FC1's dgrad."""
        return frontend_kernel("quant")

    @uncached_classmethod
    def grouped_gemm_wgrad_kernel(cls) -> Any:
        """Return the frontend's kernel of the weight gradients; None where a switch forbids it."""
        if environment.current_switches().no_frontend_wgrad:
            return None
        return frontend_kernel("wgrad")

    @uncached_classmethod
    def grouped_gemm_act_hadamard_kernel(cls) -> Any:
        """Return the frontend's kernel of NVFP4's first product, which upstream's op launches."""
        unary_lacks = not cls.is_gated and not probes.supports_srelu_hadamard()
        return None if unary_lacks else probes.hadamard_kernel()

    @uncached_classmethod
    def grouped_gemm_dactivation_is_deterministic(cls) -> bool:
        """Whether a deterministic dprob can be had: yes, or the step raises before any kernel."""
        return True
