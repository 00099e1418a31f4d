# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Split sizes that only the device holds: checked there, never waited for.

A kernel looks at them before any other reads them. Splits that do not fit become zeros, so that no
kernel reads or writes past a buffer, and every result of the step becomes NaN. What was wrong is
written to memory of the host, which the next call looks at without waiting: it raises, once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from enum import IntEnum
from types import ModuleType

import torch

from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors import memory

_SMALLEST, _LARGEST = -(2**40), 2**40 - 1
"""What a report holds of a size; larger ones are told as these."""

PADDING = (
    "Megatron pads with --moe-router-padding-for-quantization, but only to "
    "get_align_size_for_quantization, which is 32 under MXFP8"
)


class Fault(IntEnum):
    """What is wrong with split sizes; the order in which they are looked for."""

    NONE = 0
    SIZE = 1
    """One is negative or no multiple of what is asked for."""
    SUM = 2
    """Together they exceed the buffer."""
    NOT_FULL = 3
    """They do not fill the buffer, though it was promised."""


_reports: dict[torch.device, torch.Tensor] = {}


def checked(split_sizes: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Check split sizes where they lie.

    Args:
        split_sizes: int32 or int64 (G,), contiguous.
        plan: Says how many rows the buffer has, of what every size must be a multiple (a power of
            two), and whether the sizes were promised to fill the buffer.

    Returns:
        int64 (G,), the sizes, or zeros if they do not fit; and int64 (1,), not 0 if so. New; views
        of one buffer. Never synchronises, and may be captured in a graph.
    """
    device = split_sizes.device
    report = _reports.get(device)
    if report is None:
        report = _reports[device] = torch.zeros(
            1, dtype=torch.int64, pin_memory=device.type != "cpu"
        )
    out = memory.empty((split_sizes.numel() + 1,), torch.int64, device)
    check = _check_on_host if device.type == "cpu" else _kernels().check
    check(split_sizes, out, report, plan.call.rows, plan.split_multiple, plan.call.rows_are_full)
    return out[:-1], out[-1:]


def poison(fault: torch.Tensor | None, *tensors: torch.Tensor | None) -> None:
    """Write NaN to every element of floating tensors if splits did not fit.

    Args:
        fault: The second result of `checked`; None where there was nothing to check.
        *tensors: Any number; None is passed over. Never synchronises.
    """
    if fault is None:
        return
    dense = []
    for tensor in tensors:
        if tensor is None or not tensor.numel():
            continue
        if tensor.device.type == "cpu" or not tensor.is_contiguous():
            tensor.masked_fill_((fault != 0).view((1,) * tensor.dim()), math.nan)
        else:
            dense.append(tensor)
    if dense:
        _kernels().poison(fault, dense)


def require_none_reported() -> None:
    """Raise once for splits of an earlier step that did not fit; reads memory of the host only.

    Raises:
        RuntimeError: There were such splits, and their kernel has ended by now.
    """
    for report in _reports.values():
        address = ctypes.c_int64.from_address(report.data_ptr())
        if address.value:
            text = _text(address.value)
            address.value = 0
            raise RuntimeError(text)


def reported() -> list[str]:
    """Return what was wrong with splits since the last error that said so; waits for the device."""
    reports = []
    for device, report in _reports.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        value = int(report)
        reports += [_text(value)] if value else []
    return reports


def forget_reports() -> None:
    """Drop what was reported; for tests, after the device has come to an end."""
    for report in _reports.values():
        report.zero_()


def report_word(fault: Fault, index: int, value: int, multiple: int) -> int:
    """Return the one word by which a device reports: it is written whole or not at all.

    Bits 0-1 are the fault, 2-6 the logarithm of the multiple, 7-22 the index, the rest the size, or
    the sum of all.
    """
    value = max(_SMALLEST, min(value, _LARGEST))
    return value << 23 | index << 7 | (multiple.bit_length() - 1) << 2 | fault


def _text(word: int) -> str:
    fault, multiple = Fault(word & 3), 1 << (word >> 2 & 31)
    index, value = word >> 7 & 0xFFFF, word >> 23
    what = {
        Fault.SIZE: f"split_sizes[{index}] was {value}; allowed: 0 or a positive multiple of "
        f"{multiple} ({PADDING})",
        Fault.SUM: f"split_sizes summed to {value}; allowed: at most the input's rows",
        Fault.NOT_FULL: f"split_sizes summed to {value}, but the caller promised that they fill "
        "the input's rows",
    }[fault]
    return (
        f"in an earlier step {what}. All results of that step are NaN. Sizes that lie on the "
        "device are seen too late to stop it; NVTE_GROUPED_MLP_CHECK=1 waits for them and raises "
        "before the step"
    )


def _check_on_host(
    sizes: torch.Tensor,
    out: torch.Tensor,
    report: torch.Tensor,
    rows: int,
    multiple: int,
    full: bool,
) -> None:
    """Do what the kernel does, for tensors on a CPU."""
    values = sizes.tolist()
    fault, index, value = diagnose(values, rows, multiple, full=full)
    out[:-1] = 0 if fault else sizes
    out[-1] = int(fault)
    if fault and not int(report):
        report[0] = report_word(fault, index, value, multiple)


def diagnose(
    sizes: Sequence[int], rows: int, multiple: int, *, full: bool
) -> tuple[Fault, int, int]:
    """Return the first thing that is wrong with sizes: what, the index, and the size or the sum."""
    for index, size in enumerate(sizes):
        if size < 0 or size % multiple:
            return Fault.SIZE, index, size
    total = sum(sizes)
    if total > rows:
        return Fault.SUM, 0, total
    return (Fault.NOT_FULL if full and total != rows else Fault.NONE), 0, total


def _kernels() -> ModuleType:
    # Imported where it is used: Triton is not there without a GPU.
    from te_grouped_mlp.op.kernels import split_guard_kernels

    return split_guard_kernels
