# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One compiled kernel with everything that a call need not compute again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch

from te_grouped_mlp.op import emulated
from te_grouped_mlp.op.backends.cutedsl import compile as kernels
from te_grouped_mlp.op.backends.cutedsl import keys
from te_grouped_mlp.op.backends.cutedsl.config import Op
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.problem import Problem
from te_grouped_mlp.op.tensors import memory

EPILOGUES = {
    Op.FC1_ACT: ("activated", "bias", "prob"),
    Op.FC2_FORWARD: ("bias", "bias_scale"),
    Op.FC1_DGRAD: ("bias", "bias_scale"),
    Op.DACT_DGRAD: ("prob", "row_partials", "activated"),
    Op.FC1_WGRAD: ("unused",),
    Op.FC2_WGRAD: ("unused",),
}
"""Tensors of each kernel's epilogue, in the order of its `Arguments`.

Kernels take plain tuples. So a kernel that comes from disk is launched without importing the
packages that compile it, which takes longer than everything else before a first step.
"""

_SWIZZLE = 8
_LAUNCHERS_KEPT = 1024

_prepared: dict[int, Problem] = {}
_by_problem: dict[tuple[Hashable, ...], tuple[Problem, Launcher]] = {}


class Launcher:
    """Launches one kernel on one device, on torch's current stream; never synchronises.

    Attributes:
        key, tile: Of the kernel.
    """

    def __init__(self, key: KernelKey, device: int) -> None:
        assert key.tile is not None
        self.key, self.tile = key, key.tile
        self._function = kernels.kernel(key)
        clusters = _active_clusters(key.tile.cluster_m * key.tile.cluster_n, device)
        self._scheduler = (clusters, None, _SWIZZLE, None, None, None)
        self._over_k = key.op in (Op.FC1_WGRAD, Op.FC2_WGRAD)
        self._names = EPILOGUES[key.op]
        self._allowed = frozenset(self._names)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor | None,
        c: torch.Tensor | None,
        group_offsets_int32: torch.Tensor,
        **epilogue: torch.Tensor | None,
    ) -> None:
        """Launch.

        Args:
            a, b, d, c: Operands, as the kernel's module says.
            group_offsets_int32: int32 (G + 1,) row offsets.
            **epilogue: Tensors of the epilogue, exactly those that the key announces.

        Raises:
            TypeError: A name is none of the kernel's, or a tensor is not what it was compiled for.
            ValueError: A tensor has another dtype, rank, alignment or device; from the kernel.
        """
        if not self._allowed.issuperset(epilogue):
            unknown = sorted(epilogue.keys() - self._allowed)
            raise TypeError(f"{self.key.op.value} got {unknown}; allowed: {self._names}")
        lengths = (
            (None, group_offsets_int32, None, None)
            if self._over_k
            else (group_offsets_int32, None, None, None)
        )
        arguments = tuple(map(epilogue.get, self._names))
        self._function(a, b, d, c, arguments, self._scheduler, lengths, None, None)


@functools.cache
def launcher(key: KernelKey, device: int) -> Launcher:
    """Return the launcher of a kernel; made once per device."""
    return Launcher(key, device)


def launcher_of(
    problem: Problem, device: int, make: Callable[..., KernelKey], *what: Hashable
) -> Launcher:
    """Return ``launcher(make(problem, *what), device)``, looked up by the problem's identity.

    Keys are large; making and hashing one for every launch would cost more than the launch.
    """
    short = (id(problem), device, make, *what)
    entry = _by_problem.get(short)
    if entry is None:
        if len(_by_problem) > _LAUNCHERS_KEPT:
            _by_problem.clear()
        # The problem is kept, so that nothing else can get its identity.
        entry = _by_problem[short] = (problem, launcher(make(problem, *what), device))
    return entry[1]


def prepare(problem: Problem, prob: DType | None, reversed_experts: bool = False) -> None:
    """Compile, side by side, what a training step of `problem` will need; once per problem.

    The types of weight gradients are a guess (fp32 where there is a `main_grad`, for both ways to
    write it), and so is that all weights and gradients lie in the order of FC1's weights; a kernel
    that was not foreseen is compiled when it is first launched.
    """
    if id(problem) in _prepared:
        return
    if len(_prepared) > _LAUNCHERS_KEPT:
        _prepared.clear()
    _prepared[id(problem)] = problem
    main_grad = problem.fc1.main_grad
    grad = DType.FLOAT32 if main_grad else DType.BFLOAT16
    arch = kernels.target_arch()
    wanted = [
        key
        for accumulate in ((True, False) if main_grad else (False,))
        for key in keys.of_problem(
            problem,
            arch,
            prob=prob,
            grad=grad,
            accumulate=accumulate,
            reversed_experts=reversed_experts,
        )
    ]
    kernels.compile_ahead(wanted)


def reduce_row_partials(
    row_partials: torch.Tensor, group_end_offsets: torch.Tensor
) -> torch.Tensor:
    """Add the partial sums of every row in order.

    Args:
        row_partials: (rows, n_partials) fp32, strides (1, rows).
        group_end_offsets: int32 (G,), inclusive prefix sums of the experts' rows.

    Returns:
        fp32 (rows,), new; zero past the valid rows.
    """
    out = memory.empty((row_partials.shape[0],), torch.float32, row_partials.device)
    _row_kernel(Op.REDUCE_ROW_PARTIALS)(row_partials, group_end_offsets, out)
    return out


def zero_tail(out: torch.Tensor, group_end_offsets: torch.Tensor) -> None:
    """Write zeros to the rows of `out` (rows, N) bf16, row-major, N even, past the valid ones."""
    _row_kernel(Op.ZERO_TAIL)(out, group_end_offsets)


@functools.cache
def _row_kernel(op: Op) -> Callable[..., None]:
    return kernels.kernel(KernelKey(op, kernels.target_arch()))


@functools.cache
def _active_clusters(size: int, device: int) -> int:
    """How many clusters run at a time; a persistent kernel launches that many.

    CuTe DSL would compile a kernel to ask the driver. Processors come in pairs, so clusters of two
    fill the GPU; a number that is too high for larger ones would only make some wait.
    """
    gpu = emulated.device()
    if gpu is not None:
        return gpu.active_clusters(size)
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // size
