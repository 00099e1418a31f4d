# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of the step itself: the fork, and the parts that it calls."""

from __future__ import annotations

from tests.mutation.mutations import Mutation

_FORK = "transformer_engine/pytorch/ops/fused/grouped_mlp.py"
_BASE = "_GroupedMLP_CuTeGEMMBase"
_STEP = "te_grouped_mlp/op/step"
_TESTS = "tests/op"

_FORWARD = (
    Mutation(
        "tail of the output not zeroed", _FORK, "_forward",
        "zero_tail=inputs.output is None", "zero_tail=False",
        f"{_TESTS}/backends/cudnn/test_backend.py::test_tails_of_the_ops_own_tensors_are_zero",
    ),
    Mutation(
        "tail of the caller's output overwritten", _FORK, "_forward",
        "zero_tail=inputs.output is None", "zero_tail=True",
        f"{_TESTS}/test_inputs_and_buffers.py::test_the_caller_owns_output_and_grad_input",
    ),
    Mutation(
        "bias of FC2 not scaled", _FORK, "_forward",
        "GemmEpilogue(bias2, inputs.bias_scale,", "GemmEpilogue(bias2, None,",
        f"{_TESTS}/test_surface.py::test_biases_and_activations",
    ),
    Mutation(
        "bias of FC1 dropped", _FORK, "_forward",
        "Fc1Epilogue(bias1,", "Fc1Epilogue(None,",
        f"{_TESTS}/test_surface.py::test_biases_and_activations",
    ),
    Mutation(
        "probabilities not saved", _FORK, "_forward",
        "prob=inputs.prob,", "prob=None,",
        f"{_TESTS}/test_surface.py::test_biases_and_activations",
    ),
    Mutation(
        "recipe asked for outside autocast", _FORK, f"{_BASE}._problem",
        "manager.get_fp8_recipe() if manager.is_fp8_enabled() else None",
        "manager.get_fp8_recipe()",
        f"{_TESTS}/test_changes_between_steps.py::test_autocast_in_between",
    ),
    Mutation(
        "call that no backend computes not left to the unfused ops", _FORK,
        f"{_BASE}.fuser_forward",
        "not (problem.recipe_detail and unfused.takes(problem, env))", "True",
        f"{_TESTS}/te/test_quantizers.py::test_a_live_layer_under_hybrid",
    ),
    Mutation(
        "main_grad not looked at by the forward", _FORK, f"{_BASE}.fuser_forward",
        "weight_gradient.main_grad_targets(plan, inputs.weights, writes=False)", "pass",
        f"{_TESTS}/test_bad_input.py::test_bad_input_is_named_before_any_work",
    ),
    Mutation(
        "faulty splits not reported by the next forward", _FORK, f"{_BASE}.fuser_forward",
        "split_guard.require_none_reported()", "pass",
        f"{_TESTS}/step/test_split_guard.py"
        "::test_the_next_forward_names_them_where_no_backward_follows",
    ),
    Mutation(
        "copies of weights offered for offload", _FORK, f"{_BASE}.fuser_forward",
        "mark_not_offload(*saved.weight_copies(state))", "pass",
        f"{_TESTS}/test_inputs_and_buffers.py::test_cpu_offload_is_told_of_the_saved_activations",
    ),
    Mutation(
        "class that says it is not supported built", _FORK, "fuse_grouped_mlp_ops",
        "not fused_op_cls.is_supported()", "False",
        f"{_TESTS}/test_upstream_api.py::test_a_class_that_says_it_is_not_supported_is_not_built",
    ),
)  # fmt: skip

_BACKWARD = (
    Mutation(
        "weights of FC1 read again by the backward", _FORK, "_backward",
        "fc1, owners[0], plan, run, Kernel.FC1_WGRAD",
        "fc1, adapter.parameters(fc1), plan, run, Kernel.FC1_WGRAD",
        f"{_TESTS}/test_changes_between_passes.py::test_one_change",
    ),
    Mutation(
        "gradient of the bias scale left out", _FORK, "_backward",
        "dprob = dprob + dscale", "dprob = dprob + 0",
        f"{_TESTS}/test_latent_issues.py::test_4_a_bias_scale_gets_its_whole_gradient",
    ),
    Mutation(
        "bias gradient of faulty splits not poisoned", _FORK, "_backward",
        "split_guard.poison(splits.fault, db2, dscale)", "pass",
        f"{_TESTS}/step/test_split_guard.py::test_every_result_is_nan",
    ),
    Mutation(
        "weights written since the forward used", f"{_STEP}/intact.py", "require",
        "_require_unwritten(state, owners)", "pass",
        f"{_TESTS}/test_changes_between_passes.py::test_one_change",
    ),
    Mutation(
        "saved tensors not checked", _FORK, f"{_BASE}.fuser_backward",
        "intact.require(state, ctx.owners, grad_output, ctx.grad_input)", "pass",
        f"{_TESTS}/tensors/test_memory.py::test_a_saved_tensor_that_comes_back_shorter_is_refused",
    ),
    Mutation(
        "demand for determinism after the forward ignored", _FORK, f"{_BASE}.fuser_backward",
        "selection.require_no_stronger_demand(plan, deterministic=demanded)", "pass",
        f"{_TESTS}/test_determinism.py"
        "::test_a_demand_that_became_stronger_raises_in_the_backward",
    ),
    Mutation(
        "announced gradient read as bf16", _FORK, f"{_BASE}.fuser_backward",
        "quantizers.refuse_carriers(None, ops[2])", "pass",
        f"{_TESTS}/test_inputs_and_buffers.py"
        "::test_a_carrier_announced_after_the_forward_is_refused_by_the_backward",
    ),
    Mutation(
        "gradient in another format read as E4M3", _FORK, f"{_BASE}.fuser_backward",
        'quantizers.require_readable("grad_output", grad_output, block_scaled=scaled)', "pass",
        f"{_TESTS}/te/test_quantizers.py::test_tokens_in_e5m2_are_refused",
    ),
    Mutation(
        "gradient of the probabilities rounded to bf16", _FORK, f"{_BASE}.fuser_backward",
        "dprob.to(ctx.prob_dtype).view(ctx.prob_shape)",
        "dprob.to(torch.bfloat16).view(ctx.prob_shape)",
        f"{_TESTS}/test_fault_kinds.py::test_dprob_is_rounded_once",
    ),
)  # fmt: skip

_INPUTS = (
    Mutation(
        "delayed gradients of tied linears not refused", f"{_STEP}/inputs.py", "read_inputs",
        "_check_tied_linears(problem, *weights)", "pass",
        f"{_TESTS}/test_fault_kinds.py::test_delayed_gradients_of_tied_linears",
    ),
    Mutation(
        "buffer of the wrong op accepted", f"{_STEP}/inputs.py", "read_inputs",
        "_check_buffer_owner(kwargs)", "pass",
        f"{_TESTS}/test_inputs_and_buffers.py::test_buffers_of_the_wrong_op_are_refused",
    ),
    Mutation(
        "second tensor of probabilities accepted", f"{_STEP}/inputs.py", "read_inputs",
        "checks.same_values(extra[1][0], extra[2][1])", "pass",
        f"{_TESTS}/test_bad_input.py::test_bad_input_is_named_before_any_work",
    ),
    Mutation(
        "row multiple of the format not checked", f"{_STEP}/inputs.py", "read_inputs",
        'checks.rows("input", x.shape[0], problem.format.rows_multiple)', "pass",
        f"{_TESTS}/test_bad_input.py::test_bad_input_is_named_before_any_work",
    ),
    Mutation(
        "announced input read as bf16", f"{_STEP}/inputs.py", "read_inputs",
        "quantizers.refuse_carriers(ops[0], ops[2])", "pass",
        f"{_TESTS}/test_inputs_and_buffers.py::test_carriers_are_refused_before_any_work",
    ),
    Mutation(
        "padded rows taken for full", f"{_STEP}/inputs.py", "_rows_are_full",
        "return sum(sizes_on_host) == rows", "return True",
        f"{_TESTS}/test_padding.py::test_padding_is_invisible",
    ),
    Mutation(
        "rows that nobody read taken for full", f"{_STEP}/inputs.py", "_rows_are_full",
        "return unit or switches.full_rows", "return True",
        f"{_TESTS}/test_bad_input.py::test_unread_splits_are_full_by_promise_alone",
    ),
    Mutation(
        "promise of full rows not compared with the splits", f"{_STEP}/inputs.py",
        "_rows_are_full",
        "if switches.full_rows and is_single_group(len(sizes_on_host)):", "if False:",
        f"{_TESTS}/test_bad_input.py::test_splits_that_were_read_are_checked",
    ),
    Mutation(
        "bias gradient of a frozen linear computed", f"{_STEP}/inputs.py", "_outputs",
        "Output.DB1: dw1 and bias1", "Output.DB1: bias1",
        f"{_TESTS}/step/test_inputs.py::test_a_bias_is_trained_with_its_weight",
    ),
    Mutation(
        "dprob computed for nobody", f"{_STEP}/inputs.py", "_wanted",
        "contexts[1].requires_grad and prob.requires_grad and", "contexts[1].requires_grad and",
        f"{_TESTS}/test_determinism.py::test_without_dprob_nothing_raises",
    ),
    Mutation(
        "common multiple of the splits made up", f"{_STEP}/inputs.py", "read_call",
        "math.gcd(*sizes_on_host, _LARGEST_TILE)", "_LARGEST_TILE",
        f"{_TESTS}/test_bad_input.py::test_planning_knows_what_divides_all_splits",
    ),
    Mutation(
        "values of the splits not checked", f"{_STEP}/inputs.py", "read_call",
        "checks.split_values(sizes_on_host, rows, problem.format.rows_multiple)", "pass",
        f"{_TESTS}/test_bad_input.py::test_bad_input_is_named_before_any_work",
    ),
    Mutation(
        "determinism not asked for", f"{_STEP}/inputs.py", "read_call",
        "deterministic=determinism_requested(env.switches)", "deterministic=False",
        f"{_TESTS}/test_determinism.py"
        "::test_a_demand_that_a_launch_cannot_meet_raises_before_any_kernel",
    ),
    Mutation(
        "one buffer for output and input gradient accepted", f"{_STEP}/inputs.py",
        "output_buffer",
        "others = [*read, *(buffer for buffer in (inputs.output,) if buffer is not None)]",
        "others = [*read]",
        f"{_TESTS}/test_inputs_and_buffers.py::test_one_buffer_for_both_is_refused",
    ),
)  # fmt: skip

_PARTS = (
    Mutation(
        "named backend left for the unfused ops", f"{_STEP}/unfused.py", "takes",
        "if env.switches.backend != selection.AUTO:", "if False:",
        f"{_TESTS}/te/test_quantizers.py::test_a_named_backend_runs_or_raises",
    ),
    Mutation(
        "writes to quantized weights not counted", f"{_STEP}/intact.py", "_versions",
        "return _written(weights)", "return None",
        f"{_TESTS}/test_changes_between_passes.py::test_one_change",
    ),
    Mutation(
        "weight of another dtype after the forward accepted", f"{_STEP}/intact.py",
        "_require_same_kind",
        "weight.dtype != dtype or weight.shape != shape", "weight.shape != shape",
        f"{_TESTS}/test_changes_between_passes.py::test_memory_of_another_kind_is_refused",
    ),
    Mutation(
        "bias of FC2 saved as a view of its parameter", f"{_STEP}/bias_gradient.py", "to_save",
        "bias2.clone() if spec.single_grouped_bias else bias2", "bias2",
        f"{_TESTS}/step/test_bias_gradient.py"
        "::test_a_bias_that_shares_memory_with_its_parameter_is_copied",
    ),
    Mutation(
        "gradient of a scaled bias summed without the scale", f"{_STEP}/bias_gradient.py",
        "of_fc2",
        "state.prob if plan.problem.fc2.scale_bias else None", "None",
        f"{_TESTS}/test_surface.py::test_biases_and_activations",
    ),
    Mutation(
        "bias gradient of FC1 not asked for", f"{_STEP}/data_gradient.py", "through_activation",
        "want_bias_grad=Output.DB1 in call.wanted", "want_bias_grad=False",
        f"{_TESTS}/test_surface.py::test_biases_and_activations",
    ),
    Mutation(
        "tail of the caller's input gradient overwritten", f"{_STEP}/data_gradient.py",
        "of_input",
        "zero_tail=buffer is None", "zero_tail=True",
        f"{_TESTS}/test_inputs_and_buffers.py::test_the_caller_owns_output_and_grad_input",
    ),
    Mutation(
        "input gradient not written to the caller's buffer", f"{_STEP}/data_gradient.py",
        "of_input",
        "if dx is None:", "if True:",
        f"{_TESTS}/test_inputs_and_buffers.py::test_the_caller_owns_output_and_grad_input",
    ),
    Mutation(
        "saved scales not marked as such", f"{_STEP}/saved.py", "flatten",
        "setattr(tensor, STASH_MARK, is_scale)", "setattr(tensor, STASH_MARK, False)",
        f"{_TESTS}/test_inputs_and_buffers.py::test_marks_are_those_of_upstream",
    ),
    Mutation(
        "saved weights come back in ascending order", f"{_STEP}/saved.py", "_take_experts",
        "return None, experts.reversed_experts", "return None, False",
        f"{_TESTS}/step/test_saved.py::test_every_tensor_comes_back_to_its_place",
    ),
    Mutation(
        "tile order of saved weights forgotten", f"{_STEP}/saved.py", "_take_weight",
        "weight.axis, weight.swizzled,", "weight.axis, False,",
        f"{_TESTS}/step/test_saved.py::test_every_tensor_comes_back_to_its_place",
    ),
    Mutation(
        "memory of a delayed weight gradient not checked", f"{_STEP}/weight_gradient.py",
        "_weight_grads",
        "_require_memory(x, dy, target)", "pass",
        f"{_TESTS}/tensors/test_memory.py"
        "::test_a_delayed_weight_gradient_refuses_what_was_freed_meanwhile",
    ),
    Mutation(
        "weight gradients not delayed", f"{_STEP}/weight_gradient.py", "_weight_grads",
        "delays = spec.delay_wgrad and op.need_backward_dw()", "delays = False",
        f"{_TESTS}/test_surface.py"
        "::test_delayed_weight_gradients_wait_and_then_call_the_hooks",
    ),
    Mutation(
        "main_grad of FSDP read before it is there", f"{_STEP}/weight_gradient.py",
        "main_grad_targets",
        'if here and not hasattr(weights_of[0], "__fsdp_param__"):', "if here:",
        f"{_TESTS}/test_surface.py::test_fsdp_provides_main_grad_in_the_backward",
    ),
    Mutation(
        "splits that do not fit computed", f"{_STEP}/split_guard.py", "_check_on_host",
        "out[:-1] = 0 if fault else sizes", "out[:-1] = sizes",
        f"{_TESTS}/step/test_split_guard.py"
        "::test_splits_that_do_not_fit_give_nan_and_are_named_by_the_next_call",
    ),
    Mutation(
        "splits off the tile not found on the device", f"{_STEP}/split_guard.py", "diagnose",
        "if size < 0 or size % multiple:", "if size < 0:",
        f"{_TESTS}/step/test_split_guard.py"
        "::test_odd_multiples_of_128_do_not_fit_the_tiles_of_the_frontend",
    ),
    Mutation(
        "broken promise of full rows not found on the device", f"{_STEP}/split_guard.py",
        "diagnose",
        "Fault.NOT_FULL if full and total != rows else Fault.NONE", "Fault.NONE",
        f"{_TESTS}/step/test_split_guard.py::test_a_promise_that_is_broken_is_named",
    ),
    Mutation(
        "results of faulty splits zero instead of NaN", f"{_STEP}/split_guard.py", "poison",
        "math.nan)", "0.0)",
        f"{_TESTS}/step/test_split_guard.py::test_every_result_is_nan",
    ),
    Mutation(
        "report of faulty splits never cleared", f"{_STEP}/split_guard.py",
        "require_none_reported",
        "address.value = 0", "pass",
        f"{_TESTS}/step/test_split_guard.py"
        "::test_splits_that_do_not_fit_give_nan_and_are_named_by_the_next_call",
    ),
)  # fmt: skip

MUTATIONS = (*_FORWARD, *_BACKWARD, *_INPUTS, *_PARTS)
