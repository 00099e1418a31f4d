# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m te_grouped_mlp.cli`, where no console script is installed."""

import sys

from te_grouped_mlp._command import main

if __name__ == "__main__":
    sys.exit(main())
