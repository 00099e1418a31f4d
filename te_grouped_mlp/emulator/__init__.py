# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Execute the PTX of sm_100a kernels on a CPU, with every access checked.

What it shows is that code is right under the rules of PTX as written down here; PTX is not the
machine code, and nothing of speed is said. Needs numpy only; the op imports nothing of it.
"""

from te_grouped_mlp.emulator.faults import EmulationFault
from te_grouped_mlp.emulator.launch import Launch, parameter_sizes
from te_grouped_mlp.emulator.machine import execute
from te_grouped_mlp.emulator.memory import GlobalMemory
from te_grouped_mlp.emulator.options import Options
from te_grouped_mlp.emulator.report import Report

__all__ = [
    "EmulationFault",
    "GlobalMemory",
    "Launch",
    "Options",
    "Report",
    "execute",
    "parameter_sizes",
]
