# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The checks behind `te-grouped-mlp selftest`: the op on the machine at hand, case by case."""
