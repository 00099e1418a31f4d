# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""TE's own fused module as the oracle, run on a CPU over stand-ins of the frontend's kernels."""
