# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of CUDA tensors, and the C++ functions that do the same for CPU tensors."""
