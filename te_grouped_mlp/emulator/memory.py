# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Global memory: the process's own, as far as it was registered."""

from __future__ import annotations


class GlobalMemory:
    """The allocations that a kernel may touch.

    They are real memory of this process, owned by the caller, who keeps it alive until `forget`.
    What is known of each byte (whether something wrote it) is kept from launch to launch.
    """

    def register(self, address: int, nbytes: int, *, name: str = "", written: bool = True) -> None:
        """Make `nbytes` from `address` known; the address of a whole allocation, not of a view.

        Args:
            address: Of the first byte.
            nbytes: Size; zero registers nothing.
            name: For faults and reports.
            written: Whether the bytes have values. If not, reading one before it is written is a
                fault.

        Raises:
            ValueError: It overlaps a registered allocation; both are named.
        """
        raise NotImplementedError

    def forget(self, address: int) -> None:
        """Forget the allocation that starts at `address`.

        Raises:
            KeyError: None does.
        """
        raise NotImplementedError
