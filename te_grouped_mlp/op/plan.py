# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The outcome of planning: a Plan, or a Reject with a cause from a closed list. Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum

from te_grouped_mlp.op.layout import GroupLayout, Kernel, Launch, Output
from te_grouped_mlp.op.problem import Call, Problem


class Reason(Enum):
    """Why a step of the fallback order was not taken. The value is the sentence for people."""

    SWITCH_OFF = "NVTE_CUTEDSL_FUSED_GROUPED_MLP is not 1"
    FORK_OFF = "the fork is not in place in this process"
    HOST_VERSION = "this Transformer Engine version is not supported"
    PATTERN = "the ops are not GroupedLinear, scaled activation, GroupedLinear"
    GROUPS = "FC1 and FC2 have different numbers of groups"
    FEATURES = "the features do not fit the kernels"
    INTERLEAVE = "the gate and linear features are not interleaved by 32"
    RECIPE = "the recipe is not one that the kernels compute"
    GRADIENT_FORMAT = "the recipe quantizes gradients to another format than E4M3"
    DTYPE = "the dtype is not one that the kernels compute"
    DEVICE = "the tensors are on a device that the backend does not run on"
    ARCHITECTURE = "the GPU's compute capability is not one that the backend runs on"
    PACKAGE = "a package that the backend needs is absent, broken or too old"
    EXTENSION = "this package's C++ extension, which CPU tensors need, is absent"
    WRAPPER = "the installed kernel wrapper lacks an argument that the call needs"
    NOT_NAMED = "the backend runs only when it is named"
    NOT_DETERMINISTIC = "a deterministic result is asked for and one launch cannot give it"
    INPUT_KIND = "the token tensor arrives in a form that cannot be read"
    ALIGNMENT = "the row counts do not fit the kernels"
    OPTION = "an option of the ops is not one that the backend computes"
    SPLITS = "split sizes that only the device holds did not fit"
    WGRAD_SWITCH = (
        "NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP asks for weight gradients by cuBLAS, which "
        "only Transformer Engine's own op computes"
    )
    PROBE = "a probe of the module was replaced, and its answer is no"
    UPSTREAM_FAULT = "Transformer Engine's own fused op is known to be wrong there"
    PATCHED = "upstream's file is patched to use this package, so it is no fallback"


@dataclass(frozen=True)
class Reject:
    """A refusal.

    Attributes:
        reason: The cause.
        detail: The offending value and what is allowed.
        varying: The outputs that would differ from run to run, where that is the cause.
    """

    reason: Reason
    detail: str
    varying: tuple[Output, ...] = ()

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


@dataclass(frozen=True)
class Plan:
    """What one call will run. Saved by the forward and read by the backward.

    Attributes:
        backend: Name of the backend.
        problem, call: What the plan was made for.
        layout: The row layout of every token buffer.
        launches: Every launch, forward and backward, in order.
        reads_values: Products read bf16 values on the grid of the call's block-scaled format,
            instead of bytes and scales.
        reuses_weights: Such values of the weights are kept while the weights count no change.
        split_multiple: What every split must be a multiple of, or a tile runs into the next expert.
    """

    backend: str
    problem: Problem
    call: Call
    layout: GroupLayout
    launches: tuple[Launch, ...]
    reads_values: bool = False
    reuses_weights: bool = False
    split_multiple: int = 1

    @functools.cached_property
    def recomputes_activated(self) -> bool:
        """Whether FC2's input is made anew by the backward, on its way through the activation."""
        return self.problem.activation.recomputes_input and self.call.needs_dact

    def launch(self, kernel: Kernel) -> Launch:
        """Return the launch of `kernel`.

        Raises:
            KeyError: The plan has no such launch.
        """
        for launch in self.launches:
            if launch.kernel is kernel:
                return launch
        raise KeyError(f"the plan has no launch {kernel.value}")

    def not_deterministic(self) -> dict[Output, Launch]:
        """Return the wanted outputs that are not bit-identical from run to run, with the launch."""
        return {
            output: launch
            for launch in self.launches
            for output in sorted(launch.outputs - launch.deterministic, key=lambda out: out.value)
            if output in self.call.wanted
        }


def planned(
    name: str,
    problem: Problem,
    call: Call,
    launches: tuple[Launch, ...] | Reject,
    *,
    single_group_is_always_dense: bool = False,
    reads_values: bool = False,
    reuses_weights: bool = False,
    split_multiple: int | None = None,
) -> Plan | Reject:
    """Make a backend's plan of what it found: a refusal, or launches to lay out.

    Args:
        name: Of the backend.
        problem, call: What is asked for.
        launches: Every launch of the call, or why there is none.
        single_group_is_always_dense: As of `Environment`.
        reads_values, reuses_weights, split_multiple: As of `Plan`; a `split_multiple` of None is
            the format's.
    """
    if isinstance(launches, Reject):
        return launches
    layout = GroupLayout.decide(
        num_groups=problem.num_groups,
        buffer_rows=call.rows,
        rows_are_full=call.rows_are_full,
        launches=launches,
        single_group_is_always_dense=single_group_is_always_dense,
    )
    multiple = call.format.rows_multiple if split_multiple is None else split_multiple
    return Plan(name, problem, call, layout, launches, reads_values, reuses_weights, multiple)
