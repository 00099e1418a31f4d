# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows of a buffer every kernel of one call touches.

This is the only module that asks whether there is one group. The answer is made once per call, is
a value, and travels with the operands and with the saved state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class RowExtent(Enum):
    """The rows of a token buffer that a kernel reads or writes."""

    PACKED = "packed"
    """The first ``sum(split_sizes)`` rows; the number is known on the device only."""
    BUFFER = "buffer"
    """All ``tensor.shape[0]`` rows; the number is known on the host."""


class Output(Enum):
    """A tensor that a step hands to its caller."""

    # Members are singletons; Enum's own hash is a Python call, made many times in every step.
    __hash__ = object.__hash__

    Y = "y"
    DX = "dx"
    DW1 = "dW1"
    DW2 = "dW2"
    DB1 = "db1"
    DB2 = "db2"
    DPROB = "dprob"


class Kernel(Enum):
    """One launch of the step, in the order in which they run."""

    __hash__ = object.__hash__  # as for Output

    QUANTIZE_INPUT = "quantize_input"
    FC1_ACT = "fc1_act"
    FC2_FORWARD = "fc2_forward"
    QUANTIZE_GRAD = "quantize_grad"
    FC2_BIAS_GRAD = "fc2_bias_grad"
    DACT_DGRAD = "dact_dgrad"
    FC2_WGRAD = "fc2_wgrad"
    FC1_DGRAD = "fc1_dgrad"
    FC1_WGRAD = "fc1_wgrad"


@dataclass(frozen=True)
class Launch:
    """What a backend says about one kernel launch of a plan.

    Attributes:
        kernel: Which launch of the step this is.
        extents: The row extents that the kernel can be told to use. Never empty.
        outputs: The returned tensors that it computes, in whole or in part.
        deterministic: Those of `outputs` that are bit-identical from run to run.
        cause: Why the others are not, and what to change; empty when all of them are.
    """

    kernel: Kernel
    extents: frozenset[RowExtent]
    outputs: frozenset[Output] = frozenset()
    deterministic: frozenset[Output] = frozenset()
    cause: str = ""

    def __post_init__(self) -> None:
        if not self.extents:
            raise ValueError(f"extents of {self.kernel.value} is empty; at least one is needed")
        if not self.deterministic <= self.outputs:
            extra = sorted(output.value for output in self.deterministic - self.outputs)
            raise ValueError(f"deterministic of {self.kernel.value} names {extra}, not in outputs")
        if self.deterministic != self.outputs and not self.cause:
            raise ValueError(f"cause of {self.kernel.value} is empty although not all outputs hold")


class LayoutMismatchError(ValueError):
    """An operand was made for another row layout than the plan's."""


@dataclass(frozen=True)
class GroupLayout:
    """The answer: how the rows of this call's token buffers are laid out.

    Attributes:
        num_groups: Number of experts, at least 1.
        buffer_rows: ``shape[0]`` of the token buffers.
        extent: The rows that every kernel of the call touches.
    """

    num_groups: int
    buffer_rows: int
    extent: RowExtent

    @classmethod
    def decide(
        cls,
        *,
        num_groups: int,
        buffer_rows: int,
        rows_are_full: bool,
        launches: Sequence[Launch],
        single_group_is_always_dense: bool = False,
    ) -> GroupLayout:
        """Decide the layout of one call from host integers; never synchronises.

        Args:
            num_groups: Number of experts.
            buffer_rows: Rows of the token buffer.
            rows_are_full: Whether ``sum(split_sizes) == buffer_rows`` is known on the host.
            launches: Every launch of the plan, forward and backward.
            single_group_is_always_dense: Reproduce the faulty decision (the group count alone), for
                tests and demonstrations.

        Returns:
            BUFFER iff there is one group, its rows are full and every launch can use BUFFER; else
            PACKED.

        Raises:
            ValueError: A count is out of range, or a launch cannot use the extent that is needed.
        """
        if num_groups < 1:
            raise ValueError(f"num_groups is {num_groups}; at least 1 is allowed")
        if buffer_rows < 0:
            raise ValueError(f"buffer_rows is {buffer_rows}; at least 0 is allowed")
        extent = RowExtent.PACKED
        if num_groups == 1 and (
            single_group_is_always_dense
            or (rows_are_full and _all_can_use(RowExtent.BUFFER, launches))
        ):
            extent = RowExtent.BUFFER
        if not single_group_is_always_dense and not _all_can_use(extent, launches):
            stuck = [launch.kernel.value for launch in launches if extent not in launch.extents]
            raise ValueError(
                f"launches {stuck} cannot use {extent.value} rows, which the call needs"
            )
        return cls(num_groups, buffer_rows, extent)

    @property
    def use_dense_single_group(self) -> bool:
        """Whether the buffer may be handled as one dense matrix of all its rows."""
        return self.extent is RowExtent.BUFFER

    def extent_written(self, launch: Launch) -> RowExtent:
        """Return the extent that `launch` really writes under this layout.

        It is `extent` for every sound layout. It differs only under the forced faulty decision,
        where a launch that knows PACKED alone writes fewer rows than its readers believe.
        """
        return self.extent if self.extent in launch.extents else RowExtent.PACKED

    def require(self, other: GroupLayout, name: str) -> None:
        """Raise unless an operand made for `other` may be used under this layout.

        Raises:
            LayoutMismatchError: Naming the operand and both layouts.
        """
        if other is not self and other != self:
            raise LayoutMismatchError(f"{name} was made for {other}, but the plan has {self}")


def is_single_group(num_groups: int) -> bool:
    """Whether there is one group; for facts other than row extents (a unit activation scale)."""
    return num_groups == 1


def _all_can_use(extent: RowExtent, launches: Iterable[Launch]) -> bool:
    return all(extent in launch.extents for launch in launches)
