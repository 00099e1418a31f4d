# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The C++ extension `te_grouped_mlp._C`, which an installation without a compiler lacks.

Whoever calls it takes `_C` from here, the one place that imports it. Where it is absent, `_C` is
false and keeps the cause. CUDA tensors need none of its kernels; what the host asks of all experts
in one call of it is then asked of each in Python, which is slower (`SLOWER`). CPU tensors do need
it: to ask for a kernel raises ImportError with the cause and the remedy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NoReturn

from te_grouped_mlp.op.packages import Absent

REQUIRE = "TE_GROUPED_MLP_REQUIRE_EXTENSION"
"""Set to 1, it makes an installation fail where the extension cannot be built."""
REMEDY = f"build it: {REQUIRE}=1 pip install . in a checkout, with a C++17 compiler"
SLOWER = (
    "steps on a GPU give the same results, and their host time grows: the tensors of all experts "
    "are looked at one by one in Python"
)


class MissingExtension:
    """Stands for an extension that cannot be imported.

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
        raise ImportError(f"{name} on CPU tensors needs {absence(self)}; {REMEDY}") from self.error


def load() -> Any:
    """Return the extension, or a `MissingExtension` with the error of its import."""
    try:
        return importlib.import_module("te_grouped_mlp._C")
    except ImportError as error:
        return MissingExtension(error)


def absence(extension: Any) -> Absent | None:
    """Return why what `load` returned is no extension, or None."""
    if isinstance(extension, MissingExtension):
        return Absent(
            f"the C++ extension te_grouped_mlp._C, which cannot be imported ({extension.error})"
        )
    return None


if TYPE_CHECKING:
    from te_grouped_mlp import _C as _C
else:
    _C = load()
