# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Fuses with Transformer Engine's own fused op, from the file that our fork replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from te_grouped_mlp.op.backends.upstream import capability
from te_grouped_mlp.op.environment import Switches, current_switches
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.te import adapter, quantizers
from te_grouped_mlp.op.te.probes import determinism_requested
from te_grouped_mlp.op.tensors import checks

_CLASSES = {True: "GroupedMLP_CuTeGEMMGLU", False: "GroupedMLP_CuTeGEMMUnary"}
_FUSIONS = ("fuse_glu_ops", "fuse_ops", "fuse_unary_activation_ops", "fuse_srelu_ops")
"""The functions that fuse, by the names of the versions that have them."""
_TAKES_OFFSETS = "_cudnn_frontend_supports_single_group_runtime_offsets"


def is_supported(*, gated: bool) -> bool:
    """Whether upstream's own class would run here."""
    module = _load()
    return not isinstance(module, Reject) and bool(getattr(module, _CLASSES[gated]).is_supported())


def fuse(triple: tuple[Any, ...], recipe: Any, switches: Switches) -> Any | Reject:
    """Return upstream's fused op for the three ops, or why there is none.

    Args:
        triple: FC1, activation, FC2; the activation may be one that only upstream knows.
        recipe: The recipe in force.
        switches: Of this moment. An op that is named is taken with its known faults.
    """
    module = _load()
    if isinstance(module, Reject):
        return module
    refusal = _determinism_refusal(triple, module, switches)
    if refusal is not None:
        return refusal
    if not any(getattr(module, name).is_supported() for name in _CLASSES.values()):
        return Reject(Reason.PACKAGE, "upstream's is_supported() is False on this machine")
    named = switches.backend == capability.NAME
    if not named:
        refusal = _fault(triple, recipe, module, switches)
        if refusal is not None:
            return refusal
    for name in _FUSIONS:
        function = getattr(module, name, None)
        fused = list(triple) if function is None else function(list(triple), recipe=recipe)
        if len(fused) < len(triple):
            return _guarded(fused[0], module, named=named)
    return Reject(Reason.OPTION, "upstream's own conditions do not hold")


def _determinism_refusal(
    triple: tuple[Any, ...], module: ModuleType, switches: Switches
) -> Reject | None:
    fc1, activation, _ = triple
    return capability.determinism_refusal(
        type(activation).__name__,
        requested=determinism_requested(switches),
        has_own_check=hasattr(module, capability.OWN_CHECK),
        unchecked=bool(fc1.has_bias) and adapter.has_unit_scale(activation, fc1.num_groups),
    )


def _fault(
    triple: tuple[Any, ...], recipe: Any, module: ModuleType, switches: Switches
) -> Reject | None:
    fc1, activation, fc2 = triple
    kind, detail = quantizers.recipe_facts(fc1, fc2, recipe)
    step = capability.Step(
        kind,
        detail,
        fc1.num_groups,
        adapter.linear_spec(fc1),
        adapter.linear_spec(fc2),
        adapter.activation_kind(activation),
        adapter.has_unit_scale(activation, fc1.num_groups),
    )
    dense = capability.is_laid_out_densely(
        fc1.num_groups,
        takes_offsets=bool(getattr(module, _TAKES_OFFSETS)(type(activation))),
        has_own_check=hasattr(module, capability.OWN_CHECK),
    )
    return next(capability.faults(step, dense=dense, full_rows=switches.full_rows), None)


def _load() -> ModuleType | Reject:
    from te_grouped_mlp.integration.overlay import PATCH_MARKER, load_upstream

    try:
        return load_upstream()
    except Exception as error:  # whatever a broken installation raises, the step goes on unfused
        patched = PATCH_MARKER in str(error)
        text = str(error) if patched else f"{type(error).__name__}: {error}"
        return Reject(Reason.PATCHED if patched else Reason.PACKAGE, text)


def _guarded(op: Any, module: ModuleType, *, named: bool) -> Any:
    """Make an op refuse each call that it is known to get wrong; a named one for determinism."""
    fc1, _, fc2 = op.basic_ops

    def checked(method: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            refusal = _determinism_refusal(op.basic_ops, module, current_switches())
            if refusal is not None:
                raise RuntimeError(str(refusal))
            if not named:
                check(*args, **kwargs)
            return method(*args, **kwargs)

        return call

    def check_forward(*_: Any, basic_op_extra_inputs: Any = (), **__: Any) -> None:
        if basic_op_extra_inputs and getattr(fc2, "_scale_bias", False):
            checks.same_values(basic_op_extra_inputs[1][0], basic_op_extra_inputs[2][1])

    def check_backward(_ctxs: Any = None, grad_output: Any = None, **__: Any) -> None:
        if not fc2.has_bias or not isinstance(grad_output, adapter.GroupedTensor):
            return
        if determinism_requested(current_switches()):
            raise RuntimeError(
                f"{Reason.NOT_DETERMINISTIC.value}: upstream sums the bias gradient of a quantized "
                "output gradient with float atomics; take the bias off FC2"
            )

    op.fuser_forward = checked(op.fuser_forward, check_forward)
    op.fuser_backward = checked(op.fuser_backward, check_backward)
    return op
