# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The C++ extension `te_grouped_mlp._C`, which an installation without a compiler lacks.

Whoever calls it takes `_C` from here, the one place that imports it. Where it cannot be imported,
`_C` is false, and a function of it that is asked for raises ImportError with the cause and the
remedy. CPU tensors need its kernels. CUDA tensors need none: what the host asks of the tensors of
all experts in one call of it is then asked of each in Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NoReturn

from te_grouped_mlp.op.packages import Absent

REQUIRE = "TE_GROUPED_MLP_REQUIRE_EXTENSION"
"""Set to 1, it makes an installation fail where the extension cannot be built."""
REMEDY = f"build it: {REQUIRE}=1 pip install . in a checkout, with a C++17 compiler"
SLOWER = (
    "steps on CUDA tensors give the same results, but take more host time: the tensors of all "
    "experts are looked at one by one in Python"
)


class MissingExtension:
    """Stands for an extension that cannot be imported; false.

    Attributes:
        error: Why.
    """

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise needed(f"{name} on CPU tensors", self.error)


def needed(what: str, error: ImportError) -> ImportError:
    """Return the error that says what cannot go on without the extension, and the remedy."""
    told = ImportError(f"{what}: {_cause(error)}", name="te_grouped_mlp._C")
    told.__cause__ = error
    return told


def status() -> bool | Absent:
    """Return True, or why the extension cannot be imported, with the remedy."""
    return Absent(_cause(_C.error)) if isinstance(_C, MissingExtension) else True


def require(what: str) -> None:
    """Return if the extension is there.

    Args:
        what: Needs it.

    Raises:
        ImportError: It is not; with the cause and the remedy.
    """
    if isinstance(_C, MissingExtension):
        raise needed(what, _C.error)


def _cause(error: ImportError) -> str:
    return f"te-grouped-mlp's C++ extension cannot be imported ({error}); {REMEDY}"


def _load() -> Any:
    try:
        return importlib.import_module("te_grouped_mlp._C")
    except ImportError as error:
        return MissingExtension(error)


if TYPE_CHECKING:
    from te_grouped_mlp import _C as _C
else:
    _C = _load()
