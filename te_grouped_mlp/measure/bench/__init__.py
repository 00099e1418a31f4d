# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What `te-grouped-mlp bench` and the scripts in `benchmarks/` measure with."""
