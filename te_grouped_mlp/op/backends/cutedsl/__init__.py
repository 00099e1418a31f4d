# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Native kernels in CuTe DSL: bf16, and MXFP8 by its bf16 values. Needs the extra `kernels`."""
