# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of the overlay and of what stands in for TE's extension."""

from __future__ import annotations

from tests.mutation.mutations import Mutation

_INTEGRATION = "te_grouped_mlp/integration"
_STANDALONE = f"{_INTEGRATION}/standalone"
_TEX = f"{_STANDALONE}/tex"
_OVERLAY_TESTS = "tests/integration/overlay"
_TESTS = "tests/integration/standalone"

_OVERLAY = (
    Mutation(
        "version of TE not checked", f"{_INTEGRATION}/overlay.py", "_fork_spec",
        "_NO_FORK_FILE if file is None else version_refusal()",
        "_NO_FORK_FILE if file is None else None",
        f"{_OVERLAY_TESTS}/test_overlay.py"
        "::test_other_version_that_lacks_something_keeps_upstream_and_warns_once",
    ),
    Mutation(
        "name that TE lacks not missed", f"{_INTEGRATION}/installed_te.py", "version_refusal",
        "if not missing:", "if True:",
        f"{_OVERLAY_TESTS}/test_overlay.py"
        "::test_other_version_that_lacks_something_keeps_upstream_and_warns_once",
    ),
    Mutation(
        "keyword that TE lacks not missed", f"{_INTEGRATION}/installed_te.py",
        "_missing_keywords",
        "if name not in parameters", "if False",
        f"{_OVERLAY_TESTS}/test_host_names.py::test_a_wrong_keyword_is_found",
    ),
    Mutation(
        "old torch taken", f"{_INTEGRATION}/installed_te.py", "version_refusal",
        "if old is not None:", "if False:",
        f"{_OVERLAY_TESTS}/test_host_names.py"
        "::test_a_torch_that_te_cannot_be_imported_with_is_refused",
    ),
    Mutation(
        "activation after the import silent", f"{_INTEGRATION}/overlay.py", "activate",
        "if loaded is not None and not is_fork(loaded)", "if False and not is_fork(loaded)",
        f"{_OVERLAY_TESTS}/test_overlay.py::test_activate_after_the_import_raises",
    ),
    Mutation(
        "patched file taken for upstream's code", f"{_INTEGRATION}/overlay.py",
        "_upstream_spec",
        "if carries_patch(Path(found.origin)):", "if False:",
        f"{_OVERLAY_TESTS}/test_overlay.py"
        "::test_a_file_with_the_use_the_fork_patch_is_not_upstream",
    ),
    Mutation(
        "fusions of upstream's file left registered", f"{_INTEGRATION}/overlay.py",
        "load_upstream",
        "fusions[:] = before", "pass",
        f"{_OVERLAY_TESTS}/test_overlay.py::test_load_upstream",
    ),
    Mutation(
        "switch that keeps upstream's module ignored", "te_grouped_mlp/_bootstrap.py",
        "fork_enabled",
        'return value != "0"', "return True",
        f"{_OVERLAY_TESTS}/test_overlay.py::test_switch_keeps_upstream",
    ),
    Mutation(
        "any value of that switch taken", "te_grouped_mlp/_bootstrap.py", "fork_enabled",
        'if value not in ("", "0", "1"):', "if False:",
        f"{_OVERLAY_TESTS}/test_overlay.py::test_switch_with_another_value_raises",
    ),
    Mutation(
        "replaced class method not seen", f"{_INTEGRATION}/upstream_api.py", "is_replaced",
        ") is not vars(", ") is vars(",
        "tests/op/test_upstream_api.py::test_a_class_that_says_it_is_not_supported_is_not_built",
    ),
)  # fmt: skip

_STAND_IN = (
    Mutation(
        "offsets of groups begin one group late", f"{_TEX}/splits.py", "element_offsets",
        "first_dims.numel() + 1)", "first_dims.numel() + 1) + columns",
        f"{_TESTS}/test_offsets.py::test_splits_to_offsets",
    ),
    Mutation(
        "offsets in rows instead of elements", f"{_TEX}/splits.py", "element_offsets",
        "torch.cumsum(first_dims * columns,", "torch.cumsum(first_dims,",
        f"{_TESTS}/test_offsets.py::test_splits_to_offsets",
    ),
    Mutation(
        "row counts past the buffer accepted", f"{_TEX}/splits.py", "counts_problem",
        "if sum(counts) > rows:", "if False:",
        f"{_TESTS}/test_grouped.py::test_bad_splits_are_named",
    ),
    Mutation(
        "leading zero unwritten", f"{_TEX}/offsets.py", "splits_to_offsets_multi",
        "if zero and not bulk_allocate:", "if False:",
        f"{_TESTS}/test_offsets.py::test_splits_to_offsets_multi",
    ),
    Mutation(
        "tables of a bulk allocation unaligned", f"{_TEX}/offsets.py", "_carve",
        "starts.append(-(-end // multiple) * multiple)", "starts.append(end)",
        f"{_TESTS}/test_offsets.py::test_bulk_allocate",
    ),
    Mutation(
        "product read along the wrong direction", f"{_TEX}/gemm.py", "operand_axes",
        "(ROW if transa else COLUMN)", "(COLUMN if transa else ROW)",
        f"{_TESTS}/test_gemm.py::test_mxfp8_product",
    ),
    Mutation(
        "accumulation ignored by the product", f"{_TEX}/gemm.py", "store",
        "if beta != 0.0:", "if False:",
        f"{_TESTS}/test_gemm.py::test_accumulate_rounds_the_sum_once",
    ),
    Mutation(
        "bias added after the rounding", f"{_TEX}/gemm.py", "generic_gemm",
        "product * alpha + bias.double()", "(product * alpha).to(D.dtype) + bias.double()",
        f"{_TESTS}/test_gemm.py::test_bias_is_added_before_rounding_and_its_gradient_summed",
    ),
    Mutation(
        "scaled bias of a grouped product unscaled", f"{_TEX}/grouped_gemm.py", "_into_storage",
        "None if bias_scale is None else bias_scale[start:end]", "None",
        f"{_TESTS}/test_gemm.py::test_grouped_bias_is_a_second_rounding",
    ),
    Mutation(
        "every group's bias that of the first", f"{_TEX}/grouped_gemm.py", "_into_storage",
        "_add_bias(out, rows[index], scale)", "_add_bias(out, rows[0], scale)",
        f"{_TESTS}/test_gemm.py::test_grouped_bias_is_a_second_rounding",
    ),
    Mutation(
        "empty expert's weight gradient left unwritten", f"{_TEX}/grouped_gemm.py",
        "_grouped_gemm",
        "if out.numel() == 0:", "if out.numel() == 0 or 0 in b_groups.matrix(index).shape:",
        f"{_TESTS}/test_gemm.py::test_grouped_weight_gradient",
    ),
    Mutation(
        "products of a list all written to its first rows", f"{_TEX}/list_gemm.py",
        "_outputs",
        'torch.split(a["D"][0][: sum(rows)], rows)',
        'reversed(torch.split(a["D"][0][: sum(rows)], rows))',
        f"{_TESTS}/test_gemm.py::test_legacy_grouped_gemm",
    ),
    Mutation(
        "scales swizzled twice", f"{_TEX}/scales.py", "swizzle_scales_for_gemm_",
        "not is_mxfp8(tensor) or tensor._with_gemm_swizzled_scales", "not is_mxfp8(tensor)",
        f"{_TESTS}/test_quantize.py::test_swizzle_in_place_makes_new_buffers",
    ),
    Mutation(
        "swizzled scales of discrete weights behind wrong addresses", f"{_TEX}/scales.py",
        "swizzle_scales_and_pack_ptrs_for_discrete_weights",
        "swizzled.data_ptr() + index * stride", "swizzled.data_ptr()",
        f"{_TESTS}/test_quantize.py::test_pack_pointers_of_discrete_weights",
    ),
    Mutation(
        "flag that asks to write nothing ignored", f"{_TEX}/grouped.py", "group_quantize",
        "_fill(output, tensor, quantizer, noop_flag)", "_fill(output, tensor, quantizer)",
        f"{_TESTS}/test_grouped.py::test_group_quantize_into_an_output",
    ),
    Mutation(
        "gradient of the scales in the input's dtype", f"{_TEX}/activations.py", "_backward",
        "memory.empty((matrix.shape[0],), scales.dtype, x.device)",
        "memory.empty((matrix.shape[0],), x.dtype, x.device)",
        f"{_TESTS}/test_activations.py::test_scales_of_another_dtype_and_empty_input",
    ),
    Mutation(
        "activation without its scale", f"{_TEX}/activations.py", "_forward",
        "out[piece] = value * column[piece]", "out[piece] = value",
        f"{_TESTS}/test_activations.py::test_every_activation",
    ),
    Mutation(
        "subclass of a quantizer accepted", f"{_TEX}/rules.py", "quantizer",
        "type(found) in _quantizer_classes()",
        "isinstance(found, _quantizer_classes())",
        f"{_TESTS}/test_contract.py::test_a_refused_call_raises_what_upstream_raises",
    ),
    Mutation(
        "strides that the extension misreads accepted", f"{_TEX}/rules.py", "contiguous",
        "if tensor is None or tensor.is_contiguous():", "if True:",
        f"{_TESTS}/test_contract.py::test_a_refused_call_raises_what_upstream_raises",
    ),
    Mutation(
        "NVFP4 announced", f"{_STANDALONE}/availability.py", "lacking",
        "return False, _REASON.format(words)", "return True, _REASON.format(words)",
        f"{_TESTS}/test_availability.py"
        "::test_a_recipe_runs_where_it_is_announced_and_says_why_where_not",
    ),
    Mutation(
        "name that TE has no more replaced in silence", f"{_STANDALONE}/overrides.py",
        "_replace",
        "if original is None and row.optional:", "if original is None:",
        f"{_TESTS}/test_overrides.py::test_a_missing_name_is_an_error_that_says_so",
    ),
    Mutation(
        "rows of TE applied to our fork", f"{_STANDALONE}/overrides.py", "apply",
        "if not _is_upstream(module):", "if False:",
        f"{_TESTS}/test_overrides.py::test_another_file_under_the_same_name_is_left_alone",
    ),
)  # fmt: skip

MUTATIONS = (*_OVERLAY, *_STAND_IN)
