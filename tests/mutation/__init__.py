# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults put into a copy of the source, one at a time, each with a test that must fail then.

`make mutation` runs them. The lists are data (`step`, `tensors`, ...); the default suite checks
that each fault can still be put in.
"""
