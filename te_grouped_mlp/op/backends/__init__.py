# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The backends; one folder each, with a `capability` that plans and a `backend` that runs."""

CLASSES = {
    "cudnn": "CudnnBackend",
    "cutedsl": "CuteDslBackend",
    "reference": "ReferenceBackend",
}
"""Folder of each backend that can be chosen, to its class in ``backend.py``; "auto" asks them in
this order."""

GPU_ONLY = frozenset({"cudnn", "cutedsl"})
"""Those that "auto" does not ask about CPU tensors."""
