# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Other backends in the place of ours."""

from __future__ import annotations

from typing import Any

import pytest

from te_grouped_mlp.op import execution, selection


def install(patch: pytest.MonkeyPatch, name: str, backend: Any, capability: Any = None) -> None:
    """Let `backend` run what is planned for `name`, by what `capability` says where one is given.

    Args:
        patch: Takes it back.
        name: Of the backend that makes room.
        backend: Has the four operations.
        capability: Has `refusal` and `plan`.
    """
    ran, said = execution.backend, selection.capability
    patch.setattr(execution, "backend", lambda asked: backend if asked == name else ran(asked))
    if capability is not None:
        patch.setattr(
            selection, "capability", lambda asked: capability if asked == name else said(asked)
        )
