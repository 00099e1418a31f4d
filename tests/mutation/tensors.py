# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of what becomes of tensors on their way to an operand, and of how TE is read."""

from __future__ import annotations

from tests.mutation.mutations import Mutation

_TENSORS = "te_grouped_mlp/op/tensors"
_TE = "te_grouped_mlp/op/te"
_TESTS = "tests/op"
_BAD_INPUT = f"{_TESTS}/test_bad_input.py::test_bad_input_is_named_before_any_work"

_CHECKS = (
    Mutation(
        "probabilities of another number accepted", f"{_TENSORS}/checks.py", "probabilities",
        "if prob.numel() != row_count:", "if False:",
        f"{_BAD_INPUT}[too few probabilities-False]",
    ),
    Mutation(
        "fp32 probabilities rounded to bf16", f"{_TENSORS}/checks.py", "probabilities",
        "flat.float() if flat.dtype == torch.float64 else flat", "flat.bfloat16()",
        f"{_TESTS}/test_fault_kinds.py::test_fp32_probabilities_are_not_rounded",
    ),
    Mutation(
        "split sizes of two tensors accepted", f"{_TENSORS}/checks.py", "split_sizes",
        "first.size() != second.size() or first.data_ptr() != second.data_ptr()",
        "first.size() != second.size()",
        f"{_BAD_INPUT}[equal splits in two tensors-False]",
    ),
    Mutation(
        "sum of the split sizes not compared with the buffer", f"{_TENSORS}/checks.py",
        "split_values",
        "if sum(values) > buffer_rows:", "if False:",
        f"{_BAD_INPUT}[splits past the buffer-False]",
    ),
    Mutation(
        "buffer that shares memory with the input accepted", f"{_TENSORS}/checks.py", "buffer",
        "if _overlap(tensor, other):", "if False:",
        f"{_TESTS}/test_inputs_and_buffers.py::test_bad_buffers_are_refused_before_any_work",
    ),
    Mutation(
        "overlap seen by the elements, not by the strides", f"{_TENSORS}/capacity.py", "extent",
        "size and not tensor.is_contiguous()", "False",
        f"{_TESTS}/tensors/test_checks.py"
        "::test_a_buffer_within_the_span_of_a_strided_tensor_is_refused",
    ),
    Mutation(
        "storage that was made shorter not seen", f"{_TENSORS}/capacity.py", "require_memory",
        "if tensor.untyped_storage().nbytes() >= end:", "if end >= 0:",
        f"{_TESTS}/tensors/test_memory.py::test_a_forward_refuses_it",
    ),
    Mutation(
        "offset into a storage not counted", f"{_TENSORS}/capacity.py", "held",
        " - tensor.storage_offset() * tensor.element_size()", "",
        f"{_TESTS}/tensors/test_capacity.py::test_memory_counts_from_the_tensors_first_element",
    ),
    Mutation(
        "poisoned memory not filled", f"{_TENSORS}/memory.py", "empty",
        "if _fill_byte is not None and out.numel():", "if False:",
        f"{_TESTS}/tensors/test_operands.py::test_poisoned_memory_is_filled",
    ),
)  # fmt: skip

_GRADIENTS = (
    Mutation(
        "main_grad overwritten", f"{_TENSORS}/gradients.py", "main_grad_target",
        'accumulate = not getattr(parameters[0], "overwrite_main_grad", False)',
        "accumulate = False",
        f"{_TESTS}/test_surface.py::test_main_grad_accumulates",
    ),
    Mutation(
        "request to overwrite main_grad ignored", f"{_TENSORS}/gradients.py", "main_grad_target",
        'accumulate = not getattr(parameters[0], "overwrite_main_grad", False)',
        "accumulate = True",
        f"{_TESTS}/test_surface.py::test_main_grad_is_overwritten_when_asked",
    ),
    Mutation(
        "stale memory added to a fresh gradient", f"{_TENSORS}/gradients.py", "fresh_target",
        "accumulate=False", "accumulate=True",
        f"{_TESTS}/test_fault_kinds.py::test_stale_memory_is_no_gradient",
    ),
    Mutation(
        "biases before weights", f"{_TENSORS}/gradients.py", "in_registration_order",
        "if spec.single_grouped_weight else [*weights, *biases]",
        "if not spec.single_grouped_weight else [*weights, *biases]",
        f"{_TESTS}/test_surface.py::test_gradients_leave_in_registration_order",
    ),
    Mutation(
        "main_grad of FSDP not refreshed", f"{_TENSORS}/gradients.py", "main_grad_of",
        'None if "__fsdp_param__" in own else own.get("main_grad")', 'own.get("main_grad")',
        f"{_TESTS}/test_surface.py::test_fsdp_provides_main_grad_in_the_backward",
    ),
)  # fmt: skip

_WEIGHTS = (
    Mutation(
        "weights in descending order read ascending", f"{_TENSORS}/stacking.py",
        "Stacked.__getitem__",
        "-1 - expert if self.reversed_experts else expert", "expert",
        f"{_TESTS}/tensors/test_stacking.py"
        "::test_a_buffer_that_was_filled_from_its_end_is_read_so",
    ),
    Mutation(
        "descending weights not marked as such", f"{_TENSORS}/stacking.py", "as_stacked_view",
        "return Stacked(view, stride < 0)", "return Stacked(view, False)",
        f"{_TESTS}/tensors/test_stacking.py"
        "::test_a_buffer_that_was_filled_from_its_end_is_read_so",
    ),
    Mutation(
        "tensors of several storages taken for one", f"{_TENSORS}/stacking.py",
        "as_stacked_view",
        "if end > lowest.untyped_storage().nbytes():", "if False:",
        f"{_TESTS}/tensors/test_stacking.py"
        "::test_tensors_at_even_distances_in_storages_of_their_own_are_not_one",
    ),
    Mutation(
        "quantized weight that lacks a copy used", f"{_TENSORS}/weights.py", "_require_copies",
        "if wanted and copy is None:", "if False:",
        f"{_TESTS}/tensors/test_weights.py::test_a_quantized_weight_without_a_copy_is_named",
    ),
    Mutation(
        "compact scales of weights said to be in tile order", f"{_TENSORS}/experts.py",
        "of_storages",
        "swizzled = bool(storages[0]._with_gemm_swizzled_scales)", "swizzled = True",
        f"{_TESTS}/test_padding.py::test_step_is_close_to_float64",
    ),
    Mutation(
        "bytes along the wrong axis", f"{_TENSORS}/experts.py", "of_storages",
        "WeightOperand(MXFP8, shape, Axis.COLUMN, data, scale, swizzled)",
        "WeightOperand(MXFP8, shape, Axis.ROW, data, scale, swizzled)",
        f"{_TESTS}/test_padding.py::test_step_is_close_to_float64",
    ),
    Mutation(
        "biases not checked", f"{_TENSORS}/experts.py", "require_biases",
        "if not spec.has_bias:", "if True:",
        f"{_TESTS}/tensors/test_memory.py::test_a_forward_refuses_it",
    ),
    Mutation(
        "kept weights not named by how often they were written",
        f"{_TENSORS}/dequantized_weights.py", "content_name",
        "return addresses, versions, two_d,", "return addresses, two_d,",
        f"{_TESTS}/tensors/test_dequantized_weights.py"
        "::test_kept_weights_follow_what_pytorch_counts",
    ),
    Mutation(
        "kept weights not named by the shape of their blocks",
        f"{_TENSORS}/dequantized_weights.py", "content_name",
        "return addresses, versions, two_d,", "return addresses, versions,",
        f"{_TESTS}/tensors/test_dequantized_weights.py"
        "::test_another_shape_of_the_blocks_is_seen",
    ),
    Mutation(
        "kept weights not named by their stream", f"{_TENSORS}/dequantized_weights.py",
        "content_name",
        "two_d, _stream(weights[0].device)", "two_d, 0",
        f"{_TESTS}/tensors/test_dequantized_weights.py"
        "::test_a_copy_serves_the_stream_that_made_it",
    ),
    Mutation(
        "kept weights outlive their storage", f"{_TENSORS}/dequantized_weights.py", "reusable",
        "if lives and covers", "if covers",
        f"{_TESTS}/tensors/test_dequantized_weights.py"
        "::test_new_storage_at_an_old_address_is_seen",
    ),
    Mutation(
        "weights kept without the promise", f"{_TENSORS}/weights.py", "_rounded",
        "reuses = plan.reuses_weights and not spec.distributed", "reuses = True",
        f"{_TESTS}/tensors/test_dequantized_weights.py"
        "::test_without_the_promise_weights_are_made_in_every_step",
    ),
)  # fmt: skip

_LAYOUTS = (
    Mutation(
        "row scales of quantized tokens made dense in every layout", f"{_TENSORS}/quantize.py",
        "tokens",
        "if layout.use_dense_single_group:", "if True:",
        f"{_TESTS}/test_padding.py::test_padding_is_invisible",
    ),
    Mutation(
        "row counts of a caller's tensor without offsets", f"{_TENSORS}/quantize.py", "_regrouped",
        "grouped.tensor_offsets = splits.element_offsets[int(tensor.shape[1])]", "pass",
        f"{_TESTS}/test_inputs_and_buffers.py"
        "::test_bias_gradients_whatever_a_quantized_gradient_says_of_its_groups",
    ),
    Mutation(
        "order of scales of a caller's tensor forgotten", f"{_TENSORS}/quantize.py",
        "_values_of_ready",
        "compact._with_gemm_swizzled_scales = False", "pass",
        f"{_TESTS}/test_inputs_and_buffers.py::test_bias_gradients_of_a_gemm_ready_gradient",
    ),
    Mutation(
        "padding of row scales not zeroed", f"{_TENSORS}/scale_layout.py", "tiled_rows",
        "if blocks % SCALE_TILE_INNER:", "if False:",
        f"{_TESTS}/tensors/test_scale_layout.py"
        "::test_tiled_rows_have_zeros_where_there_is_no_block",
    ),
    Mutation(
        "row scales padded like column scales", f"{_TENSORS}/scale_layout.py",
        "row_scale_shape",
        "round_up(rows, SCALE_TILE_OUTER)", "round_up(rows, SCALE_TILE_INNER)",
        f"{_TESTS}/tensors/test_scale_layout.py"
        "::test_compact_shapes_for_all_sizes_modulo_a_tile",
    ),
    Mutation(
        "column scales of a group begin without padding", f"{_TENSORS}/scale_layout.py",
        "column_group_offset",
        "round_up(cols, SCALE_TILE_OUTER)", "cols",
        f"{_TESTS}/tensors/test_scale_layout.py"
        "::test_column_scales_of_packed_groups_follow_each_other",
    ),
)  # fmt: skip

_READ = (
    Mutation(
        "quantizer of an op changed", f"{_TE}/quantizers.py", "own",
        "copy = quantizer.copy()", "copy = quantizer",
        f"{_TESTS}/test_latent_issues.py::test_7_and_8_quantizers_stay_as_they_were",
    ),
    Mutation(
        "unknown subclass of a recipe taken for its base", f"{_TE}/quantizers.py", "read_recipe",
        "known = KNOWN_FIELDS.get(cls)",
        "known = next((v for k, v in KNOWN_FIELDS.items() if issubclass(cls, k)), None)",
        f"{_TESTS}/te/test_recipes.py::test_what_is_not_known_is_no_recipe_of_ours",
    ),
    Mutation(
        "unknown field of a recipe ignored", f"{_TE}/quantizers.py", "read_recipe",
        "if changed:", "if False:",
        f"{_TESTS}/te/test_recipes.py::test_an_unknown_field_counts_unless_it_is_off",
    ),
    Mutation(
        "gradients in E5M2 read as E4M3", f"{_TE}/quantizers.py", "read_recipe",
        '"" if grad_dtype == torch.float8_e4m3fn else HYBRID', '""',
        f"{_TESTS}/te/test_recipes.py::test_content_that_fusion_depends_on",
    ),
    Mutation(
        "quantizers of the ops not asked", f"{_TE}/quantizers.py", "recipe_facts",
        "if _make_e4m3(fc1) and _make_e4m3(fc2):", "if True:",
        f"{_TESTS}/te/test_quantizers.py::test_an_e5m2_quantizer_under_an_e4m3_recipe",
    ),
    Mutation(
        "autocast ignored", f"{_TE}/adapter.py", "compute_dtype",
        "if torch.is_autocast_enabled(device):", "if False:",
        f"{_TESTS}/test_surface.py::test_autocast_decides_the_compute_dtype",
    ),
    Mutation(
        "unit scale of several experts taken for one", f"{_TE}/adapter.py", "has_unit_scale",
        "is_single_group(num_groups)", "True",
        f"{_TESTS}/test_surface.py::test_unit_activation_scale_of_several_experts_is_not_one",
    ),
    Mutation(
        "recomputation of the activation not read", f"{_TE}/adapter.py", "_activation_facts",
        'flag(op, "activation_recompute_in_mlp")', "False",
        f"{_TESTS}/test_surface.py::test_activation_recompute",
    ),
    Mutation(
        "replaced probe ignored", f"{_TE}/probes.py", "obeyed",
        "if offsets is not None and not offsets(activation):", "if False:",
        f"{_TESTS}/test_upstream_api.py::test_a_replaced_probe_decides_about_all_rows",
    ),
    Mutation(
        "replaced demand for determinism ignored", f"{_TE}/probes.py", "determinism_requested",
        "other is None", "True",
        f"{_TESTS}/test_upstream_api.py::test_a_replaced_demand_for_determinism_is_obeyed",
    ),
    Mutation(
        "versions compared as text", f"{_TE}/probes.py", "version_at_least",
        "_numbers(version) >= _numbers(min_version)", "version >= min_version",
        f"{_TESTS}/test_upstream_api.py::test_versions_are_compared_as_numbers",
    ),
)  # fmt: skip

MUTATIONS = (*_CHECKS, *_GRADIENTS, *_WEIGHTS, *_LAYOUTS, *_READ)
