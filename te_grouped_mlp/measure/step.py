# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One training step of a grouped MLP through Transformer Engine's op fuser, for the commands.

Imports torch and TE; the command modules import it when they run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_grouped_mlp.cli.output import CommandError
from te_grouped_mlp.integration import installed_te, overlay, standalone
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.explain import explain
from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.shape_constraints import INTERLEAVE

_TILE = MXFP8.rows_multiple


@dataclass(frozen=True)
class Shape:
    """The sizes of a step.

    Attributes:
        groups: Number of experts.
        hidden, ffn: In features of FC1 and of FC2.
        rows: Live rows in all; every expert gets an equal share of whole 128-row tiles, the last
            ones may get a tile less.
    """

    groups: int
    hidden: int
    ffn: int
    rows: int

    def splits(self) -> list[int]:
        """Return the rows of every expert."""
        share, rest = divmod(self.rows // _TILE, self.groups)
        return [_TILE * (share + (index < rest)) for index in range(self.groups)]


def start() -> None:
    """Put the overlay in place and import TE.

    Raises:
        CommandError: TE is absent, or its fused module is not ours.
    """
    if installed_te.te_root() is None:
        raise CommandError(
            "Transformer Engine is not installed; it is needed here, and its pure-Python wheel "
            f"will do: pip install --no-deps transformer-engine ({installed_te.SUPPORTED})"
        )
    try:
        overlay.activate()
        overlay.require_in_place()
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        lacking = ", ".join(installed_te.standalone_lacks()) if standalone.is_active() else ""
        remedy = f"; not installed: {lacking}; {installed_te.STANDALONE_REMEDY}" if lacking else ""
        raise CommandError(f"Transformer Engine cannot be imported: {error}{remedy}") from error
    overlay.require_in_place()


def default_device() -> str:
    """Return "cpu" where TE runs without its extension or without a GPU, else "cuda"."""
    return "cuda" if torch.cuda.is_available() and not standalone.is_active() else "cpu"


@contextlib.contextmanager
def switches(backend: str) -> Iterator[None]:
    """Turn the fused op on and name its backend while the block runs, whatever the shell says."""
    current = environment.read_switches()
    wanted = replace(current, fused=True, backend=backend, full_rows=False)
    with environment.override(switches=wanted):
        yield


def available(kinds: Sequence[Activation]) -> list[Activation]:
    """Return the activations that the installed TE has; says on standard error which it lacks.

    Raises:
        CommandError: It has none of them.
    """
    from transformer_engine.pytorch import ops

    absent = [kind.value for kind in kinds if not hasattr(ops, kind.value)]
    if absent:
        text = f"Transformer Engine {installed_te.te_version()} has no {', '.join(absent)}"
        if len(absent) == len(kinds):
            raise CommandError(text)
        sys.stderr.write(f"left out: {text}\n")
    return [kind for kind in kinds if kind.value not in absent]


@dataclass
class Batch:
    """The tensors of one call: x, dy (rows, hidden) bf16, prob fp32 (rows,), split sizes."""

    x: torch.Tensor
    dy: torch.Tensor
    prob: torch.Tensor
    splits: torch.Tensor

    def padded(self, rows: int, fill: float) -> Batch:
        """Return the same live rows in longer buffers, whose further rows hold `fill`."""

        def pad(tensor: torch.Tensor) -> torch.Tensor:
            tail = tensor.new_full((rows, *tensor.shape[1:]), fill)
            return torch.cat([tensor, tail])

        return Batch(pad(self.x), pad(self.dy), pad(self.prob), self.splits)


def batch(shape: Shape, seed: int, device: str) -> Batch:
    """Return random tensors of order one; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, torch.bfloat16)

    return Batch(
        x=normal(shape.rows, shape.hidden),
        dy=normal(shape.rows, shape.hidden),
        prob=torch.rand(shape.rows, generator=generator).to(device),
        splits=torch.tensor(shape.splits(), device=device),
    )


def activation_op(kind: Activation) -> Any:
    """Return TE's scaled activation with its trial parameters; `available` says if it exists."""
    from transformer_engine.pytorch import ops

    options: dict[str, Any] = {each.keyword: each.trial for each in kind.row.parameters}
    if kind.is_gated:
        options["glu_interleave_size"] = INTERLEAVE
    return getattr(ops, kind.value)(**options)


@dataclass
class Model:
    """The three ops, and their weight gradients in fp32 ``main_grad`` buffers.

    Attributes:
        fc1, fc2: TE's GroupedLinear.
        sequential: TE's Sequential of the three.
        path: Names of the op classes that ran; empty before the first run.
    """

    fc1: Any
    fc2: Any
    sequential: Any
    path: str = ""

    @classmethod
    def build(
        cls, kind: Activation, shape: Shape, *, seed: int, device: str, bias: bool = False
    ) -> Model:
        """Build the ops with weights that keep every intermediate of order one."""
        from transformer_engine.pytorch import ops

        options = {
            "bias": bias,
            "dtype": torch.bfloat16,
            "device": device,
            "accumulate_into_main_grad": True,
        }
        wide = shape.ffn * (2 if kind.is_gated else 1)
        activation = activation_op(kind)
        fc1 = ops.GroupedLinear(shape.groups, shape.hidden, wide, **options)
        scale = {"scale_bias": True} if bias else {}
        fc2 = ops.GroupedLinear(shape.groups, shape.ffn, shape.hidden, **options, **scale)
        model = cls(fc1, fc2, ops.Sequential(fc1, activation, fc2))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for op, width in ((fc1, shape.hidden), (fc2, shape.ffn)):
                for name, parameter in op.named_parameters():
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn * (width**-0.5 if "weight" in name else 1.0))
                    if "weight" in name:
                        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        return model

    def run(self, given: Batch, *, mxfp8: bool = True) -> dict[str, torch.Tensor]:
        """Run forward and backward once.

        Args:
            given: The call's tensors; not changed.
            mxfp8: Under the MXFP8 recipe, or without a recipe.

        Returns:
            y, dx, dprob, dW1, dW2, and db1, db2 with a bias: new tensors, groups stacked.
        """
        from transformer_engine.common.recipe import MXFP8BlockScaling
        from transformer_engine.pytorch import autocast

        linears = {"1": self.fc1, "2": self.fc2}
        for op in linears.values():
            for parameter in op.parameters():
                parameter.grad = None
                if hasattr(parameter, "main_grad"):
                    parameter.main_grad.zero_()
        x = given.x.detach().clone().requires_grad_()
        prob = given.prob.detach().clone().requires_grad_()
        # scale_bias: FC2's bias is multiplied by the same probabilities.
        scales = (prob,) if self.fc2._scale_bias else ()
        with autocast(enabled=mxfp8, recipe=MXFP8BlockScaling()):
            y = self.sequential(x, given.splits, prob, given.splits, *scales)
        ops = [op for fuser in self.sequential._module_groups for op, _ in fuser._forward_ops]
        self.path = ", ".join(type(op).__name__ for op in ops)
        y.backward(given.dy)
        out = {"y": y.detach(), "dx": x.grad, "dprob": prob.grad}
        for suffix, op in linears.items():
            weights = [getattr(op, f"weight{i}").main_grad for i in range(op.num_groups)]
            # A copy: the next run starts from zero in the same buffers.
            out[f"dW{suffix}"] = torch.stack(weights)
            if op.has_bias:
                biases = [getattr(op, f"bias{i}").grad for i in range(op.num_groups)]
                out[f"db{suffix}"] = torch.stack(biases)
        return out

    def require_fused(self) -> None:
        """Raise unless our fused op ran in the last step.

        Raises:
            CommandError: The step ran unfused, or in TE's own fused op; with the reasons.
        """
        from transformer_engine.pytorch.ops.fused import grouped_mlp

        ours = (grouped_mlp.GroupedMLP_CuTeGEMMGLU, grouped_mlp.GroupedMLP_CuTeGEMMUnary)
        ops = [op for fuser in self.sequential._module_groups for op, _ in fuser._forward_ops]
        if not any(isinstance(op, ours) for op in ops):
            decisions = "; ".join(map(str, explain())) or "no decision was made"
            raise CommandError(f"the step ran as {self.path}, not in our fused op: {decisions}")
