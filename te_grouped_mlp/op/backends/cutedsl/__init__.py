# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Native kernels in CuTe DSL for Hopper: bf16 without a recipe. Needs the extra `kernels`."""
