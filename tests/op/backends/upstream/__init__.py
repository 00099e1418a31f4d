# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the step of the order that is Transformer Engine's own fused op."""
