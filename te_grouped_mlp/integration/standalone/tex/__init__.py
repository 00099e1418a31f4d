# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Our implementation of `transformer_engine_torch` ("tex") for CPU tensors.

`module.build()` assembles the module object; each function has the signature of the binding it
replaces.
"""
