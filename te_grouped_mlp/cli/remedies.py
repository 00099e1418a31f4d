# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What to do about each reason for which a path is not taken."""

from __future__ import annotations

from te_grouped_mlp.op.plan import Reason

REMEDIES: dict[Reason, str] = {
    Reason.SWITCH_OFF: "set NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 before the first call",
    Reason.FORK_OFF: "unset NVTE_GROUPED_MLP_FORK, and start a new process",
    Reason.HOST_VERSION: "install Transformer Engine 2.19.0 or 2.20.x",
    Reason.PATTERN: "put GroupedLinear, a scaled activation and GroupedLinear next to each other "
    "in one te.ops.Sequential",
    Reason.GROUPS: "give FC1 and FC2 the same num_groups",
    Reason.FEATURES: "make all in and out features multiples of 64, and FC1's out features twice "
    "FC2's in features for a gated activation",
    Reason.INTERLEAVE: "build the activation with glu_interleave_size=32, and bring FC1's weights "
    "into that order: te-grouped-mlp convert",
    Reason.RECIPE: "run the step under te.autocast with the recipe MXFP8BlockScaling()",
    Reason.GRADIENT_FORMAT: "use fp8_format=Format.E4M3 in the recipe",
    Reason.DTYPE: "use bfloat16, float16 or float32 for tensors and probabilities",
    Reason.DEVICE: "put parameters and tensors on a device of the path",
    Reason.ARCHITECTURE: "what the cause allows; else nothing on this GPU, and another path is "
    "taken",
    Reason.PACKAGE: "install or repair the package that is named",
    Reason.EXTENSION: "build it, as the cause says",
    Reason.WRAPPER: "install another release of nvidia-cudnn-frontend; "
    "`doctor --assume frontend=...` shows what a release offers",
    Reason.NOT_NAMED: "name it: NVTE_GROUPED_MLP_BACKEND=<name>",
    Reason.NOT_DETERMINISTIC: "change what the cause names, do without the gradient of the "
    "probabilities, or take back the request for determinism",
    Reason.INPUT_KIND: "hand in a plain tensor, or run the step under a block-scaled recipe",
    Reason.ALIGNMENT: "pad each expert's rows to a multiple of 128, and of 256 for the kernels of "
    "the cuDNN frontend: te_grouped_mlp.row_multiple and row_padding",
    Reason.OPTION: "change the option that is named",
    Reason.SPLITS: "pad each expert's rows to the multiple that the cause names; "
    "NVTE_GROUPED_MLP_CHECK=1 raises before the step",
    Reason.WGRAD_SWITCH: "unset NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP",
    Reason.PROBE: "put the module's own function back",
    Reason.UPSTREAM_FAULT: "do without what the cause names; where it is padding, promise full "
    "rows with NVTE_GROUPED_MLP_FULL_ROWS=1. NVTE_GROUPED_MLP_BACKEND=upstream takes the op as it "
    "is",
    Reason.PATCHED: "take the patch out: te-grouped-mlp patch revert",
}
"""One sentence for every reason; the refusal's own detail holds the offending value."""
