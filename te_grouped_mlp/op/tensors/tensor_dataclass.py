# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Dataclasses that a step makes by the dozen: tensors and what belongs to them.

Nobody changes one: the type checker takes it for frozen, and the rules for the source find an
assignment to its fields. At run time it is a plain dataclass, because a frozen one sets each field
through ``object.__setattr__`` and takes four times as long to make. What decisions rest on
(problems, calls, plans, layouts) is frozen at run time too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    _T = TypeVar("_T")

    @dataclass_transform(frozen_default=True, eq_default=False)
    def tensor_dataclass(cls: type[_T]) -> type[_T]:
        """Make a class a dataclass that equals itself alone: tensors compare by element."""

else:
    tensor_dataclass = dataclass(slots=True, eq=False)
