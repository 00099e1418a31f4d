# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Execute a launch."""

from __future__ import annotations

from te_grouped_mlp.emulator.launch import Launch
from te_grouped_mlp.emulator.memory import GlobalMemory
from te_grouped_mlp.emulator.options import Options
from te_grouped_mlp.emulator.report import Report


def execute(launch: Launch, memory: GlobalMemory, options: Options = Options()) -> Report:  # noqa: B008
    """Run every CTA of a launch to its end, on the memory as it is.

    Raises:
        NotImplementedError: An instruction, modifier or operand count that is not known; raised
            before anything runs, with the PTX line.
        ValueError: The launch contradicts itself (grid and cluster, parameters and entry).
        EmulationFault: The kernel did something wrong; memory is as the kernel left it.
    """
    raise NotImplementedError
