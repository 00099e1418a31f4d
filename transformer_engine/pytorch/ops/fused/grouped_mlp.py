# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The fused grouped MLP: GroupedLinear, scaled activation, GroupedLinear as one op.

This file takes the place of Transformer Engine's module of the same name. For rows of expert g::

    h     = x W1_g^T + b1_g                     y  = (act(h) * p) W2_g^T + b2_g (* p)
    dh    = act'(h) * p * (dy W2_g)             dx = dh W1_g
    dp    = sum(act(h) * (dy W2_g)) (+ dy b2_g)
    dW2_g = dy^T (act(h) * p)                   dW1_g = dh^T x

Which rows a product touches is decided once, in `te_grouped_mlp.op.layout`; what runs is a plan,
made by the forward and read by the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.cpu_offload import (
    is_cpu_offload_enabled,
    mark_activation_offload,
    mark_not_offload,
    start_offload,
)
from transformer_engine.pytorch.ops.fuser import register_forward_backward_fusion
from transformer_engine.pytorch.ops.op import FusedOperation
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

from te_grouped_mlp.integration import upstream_api
from te_grouped_mlp.op import decisions, environment, execution, fusion, selection
from te_grouped_mlp.op.backends.base import Fc1Epilogue, GemmEpilogue
from te_grouped_mlp.op.fusion import is_glu_activation as is_glu_activation
from te_grouped_mlp.op.fusion import validate_grouped_mlp_dims as validate_grouped_mlp_dims
from te_grouped_mlp.op.layout import Kernel, Output
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Problem
from te_grouped_mlp.op.step import (
    bias_gradient,
    data_gradient,
    intact,
    saved,
    split_guard,
    unfused,
    weight_gradient,
)
from te_grouped_mlp.op.step.inputs import Inputs, output_buffer, read_call, read_inputs
from te_grouped_mlp.op.te import adapter, probes, quantizers
from te_grouped_mlp.op.tensors import quantize, weights
from te_grouped_mlp.op.tensors.memory import on_device_of_tensor
from te_grouped_mlp.op.tensors.operands import Splits, torch_dtype

DETERMINISTIC_DPROB = True
"""For clients that rewrite the op to get a deterministic probability gradient: they need not, since
this fused op gives one or raises RuntimeError, and so does upstream's behind it. Unfused, the GPU
kernel for a scaled bias asks Transformer Engine's environment variable alone."""


class _GroupedMLP_CuTeGEMMBase(upstream_api.UpstreamSeams, FusedOperation):  # noqa: N801  (upstream's name)
    """One step of a grouped MLP; see the module's formulas."""

    def __init__(self, *, fc1: Any, activation: Any, fc2: Any) -> None:
        """Fuse three ops.

        Raises:
            TypeError: `activation` is no scaled activation.
            ValueError, RuntimeError: The fused op cannot run with them here.
        """
        fusion.require_fitting(fc1, activation, fc2)
        super().__init__((fc1, activation, fc2))
        fusion.require_supported(self._problem(tuple(self.basic_ops)))

    def _problem(self, ops: tuple[Any, ...]) -> Problem:
        """Read the ops anew: TE fuses once, but options and the recipe's content may change."""
        manager = FP8GlobalStateManager
        recipe = manager.get_fp8_recipe() if manager.is_fp8_enabled() else None
        return adapter.problem_of(*ops, recipe)

    # A compiler would trace the host code launch by launch, and anew for each saved state.
    @torch.compiler.disable
    @on_device_of_tensor
    def fuser_forward(
        self,
        basic_op_ctxs: list[Any],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[Sequence[torch.Tensor]],
        basic_op_kwargs: list[dict[str, Any]],
        **neighbours: Any,
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]]]:
        """Run the forward; the contract is `FusibleOperation.fuser_forward`.

        Extra inputs are FC1's split sizes, the probabilities, FC2's split sizes (the same tensor)
        and, with ``scale_bias``, the probabilities again. ``output`` (FC2) and ``grad_input`` (FC1)
        may be given as keywords; their rows past the valid ones keep their content.

        Raises:
            ValueError, TypeError, RuntimeError: Before any kernel; the message names the argument.
        """
        split_guard.require_none_reported()
        fc1, activation, fc2 = self.basic_ops
        ops, env = (fc1, activation, fc2), probes.obeyed(environment.current(), type(activation))
        problem, ctx = self._problem(ops), basic_op_ctxs[0]
        ctx.fused = not (problem.recipe_detail and unfused.takes(problem, env))
        if not ctx.fused:
            arguments = basic_op_ctxs, input_, basic_op_extra_inputs, basic_op_kwargs
            return unfused.forward(ops, *arguments, **neighbours)
        inputs = read_inputs(ops, problem, input_, basic_op_extra_inputs, basic_op_kwargs)
        prob = basic_op_extra_inputs[1][0]
        sizes_on_host = adapter.sizes_on_host(inputs.split_sizes, env.switches)
        call = read_call(basic_op_ctxs, problem, inputs, prob, sizes_on_host, env)
        plan = selection.make_plan(problem, call, env)
        weight_gradient.main_grad_targets(plan, inputs.weights, writes=False)
        decisions.count_step(plan.backend)
        out = output_buffer(plan, inputs)
        splits = adapter.read_splits(inputs.split_sizes, sizes_on_host, plan, inputs.x.device)
        state = _forward(ops, plan, inputs, splits, out)
        ctx.skeleton = None
        if plan.call.needs_backward:
            ctx.skeleton, tensors = saved.flatten(state)
            if is_cpu_offload_enabled():
                start_offload(*saved.activations(state))
                mark_activation_offload(*saved.activations(state))
                mark_not_offload(*saved.weight_copies(state))
            ctx.save_for_backward(*tensors)
            ctx.input_shape, ctx.grad_input = inputs.shape, inputs.grad_input
            ctx.owners = inputs.weights
            ctx.prob_shape, ctx.prob_dtype = prob.shape, prob.dtype
        if len(inputs.shape) != 2 or inputs.output is not None:
            out = out.view(*inputs.shape[:-1], problem.fc2.out_features)
        return out, [(), (), ()]

    @torch.compiler.disable
    @on_device_of_tensor
    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: torch.Tensor, **_unused: Any
    ) -> tuple[Any, list[Any], list[Any]]:
        """Run the backward; the contract is `FusibleOperation.fuser_backward`.

        Raises:
            RuntimeError, ValueError, TypeError: Before any kernel. Determinism is demanded now and
                was not when the plan was made; FC2 announces a gradient that only claims to be
                bf16; the gradient cannot be read; a weight that the forward saved was written
                since; a ``main_grad`` is missing or does not fit.
        """
        ctx, ops = basic_op_ctxs[0], tuple(self.basic_ops)
        if not ctx.fused:
            return unfused.backward(ops, basic_op_ctxs, grad_output)
        if ctx.skeleton is None:
            # Only an input that the step does not use needs a gradient.
            return None, [None, (), None], [(None,) * op.num_extra_inputs for op in ops]
        split_guard.require_none_reported()
        state = saved.restore(ctx.skeleton, ctx.saved_tensors)
        plan = state.plan
        demanded = probes.determinism_requested(environment.current_switches())
        selection.require_no_stronger_demand(plan, deterministic=demanded)
        quantizers.refuse_carriers(None, ops[2])
        scaled = plan.call.format.is_block_scaled
        quantizers.require_readable("grad_output", grad_output, block_scaled=scaled)
        intact.require(state, ctx.owners, grad_output, ctx.grad_input)
        dx, grads1, grads2, dprob = _backward(ops, state, ctx.owners, grad_output, ctx.grad_input)
        # The caller's buffer goes back as a view, which autograd keeps without a copy.
        if dx is not None and (ctx.grad_input is not None or dx.shape != ctx.input_shape):
            dx = dx.view(ctx.input_shape)
        if dprob is not None and (dprob.dtype, dprob.shape) != (ctx.prob_dtype, ctx.prob_shape):
            dprob = dprob.to(ctx.prob_dtype).view(ctx.prob_shape)
        extra2 = (None, None) if plan.problem.fc2.scale_bias else (None,)
        return dx, [grads1, (), grads2], [(None,), (dprob,), extra2]


def _forward(
    ops: Any, plan: Plan, inputs: Inputs, splits: Splits, out: torch.Tensor
) -> saved.SavedState:
    """Launch the forward into `out` and return what the backward needs."""
    fc1, _, fc2 = ops
    problem, call, run = plan.problem, plan.call, execution.operations(plan)
    dtype = torch_dtype(call.dtype)
    dw1, dx, needs_dact = Output.DW1 in call.wanted, Output.DX in call.wanted, call.needs_dact
    keeps_activated = Output.DW2 in call.wanted and not plan.recomputes_activated

    (p1, p2), (held1, held2) = inputs.weights, inputs.held
    w1 = weights.for_forward(p1, held1, fc1, problem.fc1, plan, column=dx)
    w2 = weights.for_forward(p2, held2, fc2, problem.fc2, plan, column=needs_dact)
    quantizer = fc1.get_quantizer("forward", 0)
    x = quantize.tokens(
        inputs.x, quantizer, plan, splits, row=True, column=dw1, keep_quantized_for_backward=True
    )
    bias1, bias2 = adapter.packed_bias(fc1, dtype), adapter.packed_bias(fc2, dtype)
    epilogue1 = Fc1Epilogue(bias1, inputs.prob, keeps_activated, needs_dact)
    first = run.fc1_act(x, w1.row, epilogue1)
    epilogue2 = GemmEpilogue(bias2, inputs.bias_scale, zero_tail=inputs.output is None)
    run.gemm(Kernel.FC2_FORWARD, first.activated, w2.row, out, epilogue2)
    return saved.SavedState(
        plan=plan,
        splits=splits,
        prob=inputs.prob,
        x=x.without_row() if dw1 else None,
        pre_activation=first.pre_activation,
        activated=first.activated.without_row() if keeps_activated else None,
        w1=w1.column,
        w2=w2.column,
        owns_x=call.format.is_block_scaled and not adapter.is_gemm_ready(inputs.x),
        bias2=bias_gradient.to_save(bias2, plan),
        ops=intact.read_ops(plan, fc1, fc2, inputs.weights),
    )


def _backward(
    ops: Any,
    state: saved.SavedState,
    owners: saved.Owners,
    grad_output: torch.Tensor,
    grad_input: torch.Tensor | None,
) -> tuple[torch.Tensor | None, Any, Any, torch.Tensor | None]:
    """Launch the backward; returns dx, FC1's and FC2's parameter gradients, and dprob in fp32."""
    fc1, _, fc2 = ops
    plan, splits = state.plan, state.splits
    problem, call, run = plan.problem, plan.call, execution.operations(plan)
    target1, target2 = weight_gradient.main_grad_targets(plan, owners)
    if not isinstance(grad_output, GroupedTensor):
        grad_output = grad_output.reshape(-1, problem.fc2.out_features)
    sums = any(bias_gradient.wanted(problem.fc2, call))
    dy, values = quantize.gradient(
        grad_output, state.ops.grad_quantizer, plan, splits, row=call.needs_dact,
        column=Output.DW2 in call.wanted, keep_quantized_for_backward=problem.fc2.delay_wgrad,
        values=sums,
    )  # fmt: skip
    db2, dscale = bias_gradient.of_fc2(state, values)
    split_guard.poison(splits.fault, db2, dscale)
    del values
    act = data_gradient.through_activation(owners[1], run, state, dy)
    activated = state.activated if act.activated is None else act.activated
    grads2 = weight_gradient.parameter_grads(
        fc2, owners[1], plan, run, Kernel.FC2_WGRAD, activated, dy, db2, target2,
        owns_x=call.format.is_block_scaled,
    )  # fmt: skip
    # Their memory serves dx and FC1's weight gradient.
    del dy, activated
    dx = data_gradient.of_input(owners[0], run, state, act.grad, grad_input)
    grads1 = weight_gradient.parameter_grads(
        fc1, owners[0], plan, run, Kernel.FC1_WGRAD, state.x, act.grad, act.bias_grad, target1,
        owns_x=state.owns_x,
    )  # fmt: skip
    dprob = act.dprob
    if dprob is not None and dscale is not None:
        dprob = dprob + dscale
    return dx, grads1, grads2, dprob


class GroupedMLP_CuTeGEMMGLU(_GroupedMLP_CuTeGEMMBase):  # noqa: N801  (upstream's name)
    """The fused op with a gated activation."""

    is_gated = True


class GroupedMLP_CuTeGEMMUnary(_GroupedMLP_CuTeGEMMBase):  # noqa: N801  (upstream's name)
    """The fused op with a unary activation."""

    is_gated = False


def fuse_grouped_mlp_ops(
    ops: list[Any],
    *,
    recipe: Any,
    fused_op_cls: type[_GroupedMLP_CuTeGEMMBase],
    activation_op_types: Any = None,
) -> list[Any]:
    """Replace every triple whose activation fits `fused_op_cls` (and is of the given types)."""
    if upstream_api.is_replaced(fused_op_cls, "is_supported") and not fused_op_cls.is_supported():
        return ops

    def build(fc1: Any, activation: Any, fc2: Any) -> Any:
        return fused_op_cls(fc1=fc1, activation=activation, fc2=fc2)

    return fusion.fuse(ops, recipe, fused_op_cls.is_gated, build, activation_op_types)


def fuse_glu_ops(ops: list[Any], *, recipe: Any = None, **_unused: Any) -> list[Any]:
    """Fuse the triples with a gated activation."""
    return fuse_grouped_mlp_ops(ops, recipe=recipe, fused_op_cls=GroupedMLP_CuTeGEMMGLU)


def fuse_unary_activation_ops(ops: list[Any], *, recipe: Any = None, **_unused: Any) -> list[Any]:
    """Fuse the triples with a unary activation."""
    return fuse_grouped_mlp_ops(ops, recipe=recipe, fused_op_cls=GroupedMLP_CuTeGEMMUnary)


# The names of both functions in Transformer Engine 2.19.
fuse_ops, fuse_srelu_ops = fuse_glu_ops, fuse_unary_activation_ops

# What Transformer Engine's tests ask the module; a function put in the place of one is obeyed.
_cudnn_frontend_geglu_runtime_params = probes.takes_geglu_parameters
_cudnn_frontend_supports_grouped_gemm_situglu = probes.supports_situglu
_cudnn_frontend_supports_grouped_gemm_srelu = probes.supports_srelu
_cudnn_frontend_supports_grouped_gemm_srelu_hadamard = probes.supports_srelu_hadamard
_cudnn_frontend_supports_grouped_gemm_srelu_tanh = probes.supports_tanh_srelu
_cudnn_frontend_supports_single_group_runtime_offsets = probes.supports_single_group_runtime_offsets
_cudnn_frontend_version_at_least = probes.version_at_least
_cudnn_frontend_version_supported = probes.frontend_is_usable
_deterministic_algorithms_required = probes.deterministic_algorithms_required
_grouped_gemm_dsrelu_backward_supported = probes.supports_dsrelu_backward
_nvidia_cudnn_frontend_supports_wgrad = probes.supports_wgrad

# Always registered: the switch is read when a fuser first fuses, so it may be set after import.
register_forward_backward_fusion(fuse_glu_ops, prepend=True)
register_forward_backward_fusion(fuse_unary_activation_ops, prepend=True)
