# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The device code, one kernel each. Only `quack_base` knows QuACK."""
