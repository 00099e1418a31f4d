# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's layer as Transformer Engine's users build it: three ops in a Sequential.

It has the passes that the backend's own operations lack: what turns x, dy and the weights into
operands. Transformer Engine is imported by the functions, after `start`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_grouped_mlp.cli import output
from te_grouped_mlp.integration import standalone
from te_grouped_mlp.measure import step
from te_grouped_mlp.measure.bench.interleaved import NotThere, Results
from te_grouped_mlp.measure.bench.shapes import Inputs
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.explain import explain


@dataclass(frozen=True)
class Mode:
    """How a layer runs.

    Attributes:
        mxfp8: Under the MXFP8 recipe; else without a recipe.
        backend: The fused op's backend by name; None for Transformer Engine's unfused ops.
        keep_weights: Weight copies are made once per version of a weight, not in every step.
    """

    mxfp8: bool
    backend: str | None
    keep_weights: bool = False


def start() -> None:
    """Put the overlay in place and import Transformer Engine.

    Raises:
        NotThere: It is absent, or cannot be used here.
    """
    if reason := _failure():
        raise NotThere(reason)


@functools.cache
def _failure() -> str | None:
    try:
        step.start()
    except output.CommandError as error:
        return str(error)
    except Exception as error:  # a broken installation may raise anything
        return f"Transformer Engine cannot be imported: {error!r}"[:300]
    return None


def require_upstream() -> None:
    """Raise unless Transformer Engine's own kernels can run in this process.

    Raises:
        NotThere: With the reason.
    """
    start()
    if standalone.is_active():
        raise NotThere("Transformer Engine's compiled extension is not in this process")


def require_own_quantizers() -> None:
    """Raise unless MXFP8 tensors can be made on a GPU that has no such products.

    Raises:
        NotThere: With the reason.
    """
    start()
    if not standalone.is_active():
        raise NotThere(
            "Transformer Engine's extension serves MXFP8 on Blackwell alone; without it, "
            "NVTE_GROUPED_MLP_STANDALONE=1 serves it on Hopper"
        )


class Layer:
    """FC1, SwiGLU and FC2 over the storage of the inputs, whose experts lie in a row.

    Weight gradients are new tensors in the weights' dtype in each step, and nothing is added to.
    """

    def __init__(self, given: Inputs, mode: Mode) -> None:
        from transformer_engine.pytorch import ops

        self.given, self.mode = given, mode
        self._switches = _switches(mode)
        self.fc1, self.fc2 = _linear(given.w1), _linear(given.w2)
        self.sequential = ops.Sequential(
            self.fc1, ops.ScaledSwiGLU(glu_interleave_size=32), self.fc2
        )
        assert given.prob is not None
        self.x = given.x.detach().requires_grad_()
        self.prob = given.prob.detach().requires_grad_()

    def forward(self) -> torch.Tensor:
        """Return y, with its graph."""
        from transformer_engine.common.recipe import MXFP8BlockScaling
        from transformer_engine.pytorch import autocast

        counts = self.given.counts
        with self._running(), autocast(enabled=self.mode.mxfp8, recipe=MXFP8BlockScaling()):
            return self.sequential(self.x, counts, self.prob, counts)

    def backward(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return dx, dprob, and every expert's gradient of FC1's, then of FC2's weight."""
        leaves = (self.x, self.prob, *self.fc1.parameters(), *self.fc2.parameters())
        with self._running():
            return tuple(torch.autograd.grad(y, leaves, self.given.dy))

    def step(self) -> Results:
        """Forward and backward; weight gradients are computed, but not joined or returned."""
        y = self.forward()
        dx, dprob, *_ = self.backward(y)
        return {"y": y.detach(), "dx": dx, "dprob": dprob}

    def results(self) -> Results:
        """Forward and backward; weight gradients are joined, expert by expert."""
        y = self.forward()
        dx, dprob, *grads = self.backward(y)
        experts = self.given.shape.experts
        dw1, dw2 = torch.stack(grads[:experts]), torch.stack(grads[experts:])
        return {"y": y.detach(), "dx": dx, "dprob": dprob, "dw1": dw1, "dw2": dw2}

    def require_path(self) -> None:
        """Raise unless the last step ran fused or unfused as the mode says.

        Raises:
            RuntimeError: With the ops that ran, and the reasons.
        """

        groups = self.sequential._module_groups
        path = [type(op).__name__ for fuser in groups for op, _ in fuser._forward_ops]
        fused = [name for name in path if name.startswith("GroupedMLP_")]
        if bool(fused) != (self.mode.backend is not None):
            reasons = "; ".join(map(str, explain()))
            raise RuntimeError(f"the step ran as {', '.join(path)}; {reasons}")

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with environment.override(switches=self._switches):
            yield


def _switches(mode: Mode) -> environment.Switches:
    found = replace(
        environment.read_switches(),
        fused=mode.backend is not None,
        full_rows=False,
        reuse_weights=mode.keep_weights,
    )
    return found if mode.backend is None else replace(found, backend=mode.backend)


def _linear(values: torch.Tensor) -> Any:
    """Return a GroupedLinear whose weights are the members of `values`, not copies."""
    from transformer_engine.pytorch import ops

    experts, out_features, in_features = values.shape
    op = ops.GroupedLinear(
        experts, in_features, out_features, bias=False, dtype=values.dtype, device=values.device
    )
    for index, member in enumerate(values.unbind(0)):
        getattr(op, f"weight{index}").data = member
    return op
