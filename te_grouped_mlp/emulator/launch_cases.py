# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every launch that the backends for Blackwell can make, as values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.layout import Kernel

ROWS, H, FFN, GROUPS = 1024, 512, 320, 3
SPLITS = (256, 0, 512)
GATED = tuple(kind for kind in Activation if kind.is_gated)
UNARY = tuple(kind for kind in Activation if not kind.is_gated)


@dataclass(frozen=True)
class LaunchCase:
    """One launch.

    Attributes:
        kernel: Which operation.
        kind: The activation.
        stacked: Weights, or weight gradients, lie in one buffer; else behind tables.
        full: One expert that fills its buffer.
        bias: FC1's or FC2's bias.
        scaled: FC2's bias is scaled.
        prob: Dtype of the probabilities, or None for a unit scale.
        bias_grad, dprob, deterministic, activated: Of the launch through the derivative.
        dtype, accumulate: Of a weight gradient.
        descending: The experts' matrices lie in memory with the last one first.
        backend: Whose launch it is.
    """

    kernel: Kernel
    kind: Activation = Activation.SWIGLU
    stacked: bool = True
    full: bool = False
    bias: bool = False
    scaled: bool = False
    prob: torch.dtype | None = torch.float32
    dprob: bool = True
    bias_grad: bool = False
    deterministic: bool = False
    activated: bool = False
    dtype: torch.dtype = torch.float32
    accumulate: bool = False
    descending: bool = False
    backend: str = "cudnn"

    @property
    def name(self) -> str:
        """Its name among the launches of all backends."""
        return f"{self.backend}/{self.id}"

    @property
    def id(self) -> str:
        """A name for people: what differs from the defaults."""
        parts = [self.kernel.value]
        for each in dataclasses.fields(self)[1:-1]:
            value = getattr(self, each.name)
            if value == each.default:
                continue
            if isinstance(value, bool):
                parts.append(each.name if value else f"no_{each.name}")
            elif isinstance(value, Activation):
                parts.append(value.name.lower())
            else:
                parts.append(f"{each.name}_{str(value).removeprefix('torch.')}")
        return "-".join(parts)


def every_case() -> dict[str, LaunchCase]:
    """Return the launches of both backends by name."""
    return {case.name: case for case in (*cases(), *native_cases())}


def cases() -> list[LaunchCase]:
    """Return those of the cuDNN frontend's wrappers."""
    return [*_forward(), *_products(), *_derivatives(), *_weight_gradients()]


def _forward() -> Iterator[LaunchCase]:
    kernel = Kernel.FC1_ACT
    for kind, stacked, bias in itertools.product(Activation, (True, False), (False, True)):
        yield LaunchCase(kernel, kind, stacked, bias=bias)
    for kind in GATED:
        yield LaunchCase(kernel, kind, full=True)
    for stacked, prob in itertools.product((True, False), (torch.bfloat16, None)):
        yield LaunchCase(kernel, stacked=stacked, prob=prob)
    yield LaunchCase(kernel, Activation.SRELU, prob=torch.bfloat16)


def _products() -> Iterator[LaunchCase]:
    for stacked in (True, False):
        yield LaunchCase(Kernel.FC1_DGRAD, stacked=stacked)
        for bias, scaled in ((False, False), (True, False), (True, True)):
            yield LaunchCase(Kernel.FC2_FORWARD, stacked=stacked, bias=bias, scaled=scaled)


def _derivatives() -> Iterator[LaunchCase]:
    kernel = Kernel.DACT_DGRAD
    for kind, stacked in itertools.product(Activation, (True, False)):
        for bias_grad, deterministic in itertools.product((False, True), (False, True)):
            if not (kind.is_gated and bias_grad and deterministic):
                yield LaunchCase(
                    kernel, kind, stacked, bias_grad=bias_grad, deterministic=deterministic
                )
    for kind in GATED:
        yield LaunchCase(kernel, kind, full=True, deterministic=True)
    yield LaunchCase(kernel, dprob=False)
    yield LaunchCase(kernel, prob=None, dprob=False)
    yield LaunchCase(kernel, Activation.SRELU, activated=True, deterministic=True)


def _weight_gradients() -> Iterator[LaunchCase]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, stacked, accumulate in itertools.product(dtypes, (True, False), (False, True)):
        yield LaunchCase(Kernel.FC2_WGRAD, stacked=stacked, dtype=dtype, accumulate=accumulate)


def native_cases() -> list[LaunchCase]:
    """Return those of our own kernels, in bf16."""
    return [
        dataclasses.replace(case, backend="cutedsl")
        for case in (*_native_rows(), *_native_weight_gradients())
    ]


def _native_rows() -> Iterator[LaunchCase]:
    for kind, bias in itertools.product(Activation, (False, True)):
        yield LaunchCase(Kernel.FC1_ACT, kind, bias=bias)
        yield LaunchCase(Kernel.DACT_DGRAD, kind, bias_grad=bias, deterministic=True)
    for kind in (Activation.SWIGLU, Activation.SRELU):
        for order in ({"descending": True}, {"stacked": False}):
            yield LaunchCase(Kernel.FC1_ACT, kind, **order)
            yield LaunchCase(Kernel.FC1_DGRAD, kind, **order)
            yield LaunchCase(Kernel.DACT_DGRAD, kind, deterministic=True, **order)
        for prob in (torch.bfloat16, None):
            dprob = prob is not None
            yield LaunchCase(Kernel.FC1_ACT, kind, prob=prob)
            yield LaunchCase(Kernel.DACT_DGRAD, kind, prob=prob, dprob=dprob, deterministic=True)
        yield LaunchCase(Kernel.FC1_DGRAD, kind)
    yield LaunchCase(Kernel.DACT_DGRAD, Activation.SRELU, activated=True, deterministic=True)
    for bias, scaled in ((False, False), (True, False), (True, True)):
        yield LaunchCase(Kernel.FC2_FORWARD, bias=bias, scaled=scaled)
    yield LaunchCase(Kernel.FC2_FORWARD, descending=True)
    yield LaunchCase(Kernel.FC2_FORWARD, stacked=False)


def _native_weight_gradients() -> Iterator[LaunchCase]:
    dtypes = (torch.float32, torch.bfloat16)
    kinds = (
        (Kernel.FC2_WGRAD, Activation.SWIGLU),
        *((Kernel.FC1_WGRAD, k) for k in (Activation.SWIGLU, Activation.SRELU)),
    )
    for (kernel, kind), dtype, accumulate in itertools.product(kinds, dtypes, (False, True)):
        yield LaunchCase(kernel, kind, dtype=dtype, accumulate=accumulate)
    yield LaunchCase(Kernel.FC2_WGRAD, descending=True)
    yield LaunchCase(Kernel.FC2_WGRAD, stacked=False, accumulate=True)
