# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""FC1's gate and linear features in a checkpoint, reordered tensor by tensor.

`names` decides from names and shapes alone what becomes of each tensor (and imports no torch),
`order` permutes one, and a module for each kind of file reads and writes.
"""
