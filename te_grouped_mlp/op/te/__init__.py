# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's ops, recipes, quantizers and tensors as this package reads them."""
