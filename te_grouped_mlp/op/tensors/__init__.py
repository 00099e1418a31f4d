# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands and what they are made of: tensors of tokens, weights and scales, and checks of them."""
