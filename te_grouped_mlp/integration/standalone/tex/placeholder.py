# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for names that Transformer Engine mentions but that standalone does not implement."""

from __future__ import annotations

from typing import Any


class _Placeholder(type):
    """Metaclass: calling raises NotImplementedError, an attribute is another placeholder.

    A class and not an instance, because Transformer Engine uses such names in type hints, as
    default values and in isinstance checks while it is imported.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise NotImplementedError(
            f"{cls.__qualname__} is not implemented in standalone, which runs Transformer Engine "
            "without its compiled extension; install the extension to use it"
        )

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        placeholder = make_placeholder(f"{cls.__qualname__}.{name}")
        setattr(cls, name, placeholder)
        return placeholder

    def __repr__(cls) -> str:
        return f"<placeholder for {cls.__qualname__}>"


def make_placeholder(full_name: str) -> type:
    """Return a placeholder that raises NotImplementedError naming `full_name` when called."""
    return _Placeholder(
        full_name.rpartition(".")[2],
        (),
        {"__qualname__": full_name, "__module__": full_name.partition(".")[0]},
    )
