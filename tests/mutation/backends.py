# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of the backends, and of the checks that stand before them."""

from __future__ import annotations

from tests.mutation.mutations import Mutation

_BACKENDS = "te_grouped_mlp/op/backends"
_CUDNN = f"{_BACKENDS}/cudnn"
_CUTEDSL = f"{_BACKENDS}/cutedsl"
_REFERENCE = f"{_BACKENDS}/reference"
_UPSTREAM = f"{_BACKENDS}/upstream"
_TESTS = "tests/op/backends"

_CHECKED = (
    Mutation(
        "operand of another layout launched", f"{_BACKENDS}/checked.py", "CheckedBackend._rows",
        "layout.require(operand.layout, name)", "pass",
        f"{_TESTS}/test_checked.py::test_tokens_that_the_plan_would_misread",
    ),
    Mutation(
        "weight of the wrong axis launched", f"{_BACKENDS}/checked.py",
        "CheckedBackend._weights",
        "if weight.axis is not axis and weight.format.is_block_scaled:", "if False:",
        f"{_TESTS}/test_checked.py::test_a_weight_of_the_other_axis",
    ),
    Mutation(
        "data gradient with row-wise weights", f"{_BACKENDS}/checked.py",
        "CheckedBackend.dact_dgrad",
        'self._weights("w", w, Axis.COLUMN)', 'self._weights("w", w, Axis.ROW)',
        f"{_TESTS}/test_checked.py::test_what_fits_reaches_the_backend_as_it_is",
    ),
    Mutation(
        "too few scales launched", f"{_BACKENDS}/checked.py", "_require_elements",
        "if copy.scale.numel() < count:", "if False:",
        f"{_TESTS}/test_checked.py::test_tokens_that_the_plan_would_misread",
    ),
    Mutation(
        "output of faulty splits not poisoned", f"{_BACKENDS}/checked.py",
        "CheckedBackend.gemm",
        "split_guard.poison(a.splits.fault, out)", "pass",
        "tests/op/step/test_split_guard.py::test_every_result_is_nan",
    ),
    Mutation(
        "weight gradient of faulty splits not poisoned", f"{_BACKENDS}/checked.py",
        "CheckedBackend.wgrad",
        "split_guard.poison(dy.splits.fault, *target.pieces())", "pass",
        "tests/op/step/test_split_guard.py::test_every_result_is_nan",
    ),
    Mutation(
        "dprob of faulty splits not poisoned", f"{_BACKENDS}/checked.py",
        "CheckedBackend.dact_dgrad",
        "split_guard.poison(dy.splits.fault, result.dprob, result.bias_grad)", "pass",
        "tests/op/step/test_split_guard.py::test_every_result_is_nan",
    ),
)  # fmt: skip

_REFERENCE_BACKEND = (
    Mutation(
        "column scales of a group read where its rows begin", f"{_REFERENCE}/arguments.py",
        "_spans",
        "column_group_offset(start, cols, fmt)", "start * cols // fmt.block",
        f"{_TESTS}/reference/test_backend.py"
        "::test_features_that_are_no_multiple_of_a_scale_tile",
    ),
    Mutation(
        "split off the row multiple accepted", f"{_REFERENCE}/arguments.py", "segments",
        "if size < 0 or size % fmt.rows_multiple:", "if size < 0:",
        f"{_TESTS}/reference/test_extents.py::test_bad_splits_are_named",
    ),
    Mutation(
        "reference taken on a GPU that nobody named it for", f"{_REFERENCE}/capability.py",
        "_device_refusals",
        'if problem.device == "cuda" and not named:', "if False:",
        f"{_TESTS}/reference/test_capability.py::test_cuda_tensors_only_when_named",
    ),
    Mutation(
        "kernel without the argument told to write all rows", f"{_REFERENCE}/capability.py",
        "_extents",
        "return _EITHER if env.wrapper_takes(wrapper, RUNTIME_OFFSETS) else _PACKED",
        "return _EITHER",
        f"{_TESTS}/reference/test_capability.py::test_extents_follow_the_wrappers",
    ),
    Mutation(
        "scale of a bias without its gradient", f"{_REFERENCE}/capability.py", "_launches",
        "scales = (Output.DPROB,) if scaled_bias else ()", "scales = ()",
        f"{_TESTS}/reference/test_capability.py::test_the_scale_of_a_bias_is_a_probability",
    ),
)  # fmt: skip

_CUDNN_BACKEND = (
    Mutation(
        "tiles that run into the next expert", f"{_CUDNN}/checks.py", "split_sizes",
        "if size < 0 or size % ROWS_MULTIPLE:", "if size < 0:",
        f"{_TESTS}/cudnn/test_guards.py::test_splits_off_the_tile",
    ),
    Mutation(
        "rows off the tile planned", f"{_CUDNN}/capability.py", "_call_refusals",
        "if call.rows % ROWS_MULTIPLE:", "if False:",
        f"{_TESTS}/cudnn/test_capability.py::test_refused_calls",
    ),
    Mutation(
        "row multiple of the plan left at the format's", f"{_CUDNN}/capability.py", "plan",
        ", split_multiple=ROWS_MULTIPLE", "",
        "tests/op/step/test_split_guard.py"
        "::test_odd_multiples_of_128_do_not_fit_the_tiles_of_the_frontend",
    ),
    Mutation(
        "bf16 atomics of FC1's bias gradient called deterministic", f"{_CUDNN}/capability.py",
        "_determinism_gap",
        'wrapper == "dglu" and', "False and",
        f"{_TESTS}/cudnn/test_capability.py::test_who_keeps_the_order_of_its_sums",
    ),
    Mutation(
        "wrapper without the argument called deterministic", f"{_CUDNN}/capability.py",
        "_determinism_gap",
        "if not env.wrapper_takes(wrapper, DETERMINISTIC):", "if False:",
        f"{_TESTS}/cudnn/test_capability.py::test_who_keeps_the_order_of_its_sums",
    ),
    Mutation(
        "old frontend taken", f"{_CUDNN}/capability.py", "_frontend_refusals",
        "for argument in _NEEDED[wrapper]:", "for argument in ():",
        f"{_TESTS}/cudnn/test_capability.py::test_which_frontend_takes_which_activation",
    ),
    Mutation(
        "kernels of Rubin taken for Blackwell's", f"{_CUDNN}/capability.py",
        "_architecture_refusals",
        "if major == 10 and minor >= 7:", "if False:",
        f"{_TESTS}/cudnn/test_capability.py::test_rubin_is_refused_by_name",
    ),
    Mutation(
        "parameter that a kernel divides by not looked at", f"{_CUDNN}/capability.py",
        "_parameter_refusals",
        "parameter.is_divisor and not value > 0", "False",
        f"{_TESTS}/cudnn/test_capability.py::test_refused_problems",
    ),
    Mutation(
        "offsets ignored by the kernel", f"{_CUDNN}/arguments.py", "glu",
        "{RUNTIME_OFFSETS: (shared.all_rows, False)}", "{RUNTIME_OFFSETS: (True, False)}",
        f"{_TESTS}/cudnn/test_backend.py::test_choices",
    ),
    Mutation(
        "bias scale without a bias scales the product", f"{_CUDNN}/arguments.py", "quant",
        "if bias_scale is not None and bias is None:", "if False:",
        f"{_TESTS}/cudnn/test_guards.py"
        "::test_a_bias_scale_without_a_bias_would_scale_the_product",
    ),
    Mutation(
        "accumulation not asked of the kernel", f"{_CUDNN}/arguments.py", "wgrad",
        '"accumulate_on_output": accumulate', '"accumulate_on_output": False',
        f"{_TESTS}/cudnn/test_backend.py::test_main_grad_accumulates",
    ),
    Mutation(
        "demand for determinism not passed on", f"{_CUDNN}/arguments.py", "dglu",
        '"deterministic": (d.deterministic, False)', '"deterministic": (False, False)',
        f"{_TESTS}/cudnn/test_backend.py::test_the_wrapper_is_told_the_plans_determinism",
    ),
    Mutation(
        "argument that the wrapper lacks dropped", f"{_CUDNN}/signatures.py", "fitting",
        "if lacking:", "if False:",
        f"{_TESTS}/cudnn/test_arguments.py"
        "::test_determinism_that_the_wrapper_lacks_is_never_dropped",
    ),
    Mutation(
        "dprob begins with stale memory", f"{_CUDNN}/backend.py", "CudnnBackend.dact_dgrad",
        "dprob = torch.zeros(rows,", "dprob = torch.ones(rows,",
        f"{_TESTS}/cudnn/test_backend.py::test_tails_of_the_ops_own_tensors_are_zero",
    ),
    Mutation(
        "tail of a product left unwritten", f"{_CUDNN}/backend.py", "CudnnBackend.gemm",
        "if epilogue.zero_tail and not plan.call.rows_are_full:", "if False:",
        f"{_TESTS}/cudnn/test_backend.py::test_tails_of_the_ops_own_tensors_are_zero",
    ),
    Mutation(
        "result not copied back from aligned memory", f"{_CUDNN}/backend.py",
        "CudnnBackend.wgrad",
        "member.copy_(result)", "pass",
        f"{_TESTS}/cudnn/test_guards.py"
        "::test_an_unaligned_weight_gradient_is_written_through_a_copy",
    ),
    Mutation(
        "memory between multiples of 16 bytes called aligned", f"{_CUDNN}/alignment.py",
        "is_aligned",
        "tensor.data_ptr() % BYTES == 0", "tensor.data_ptr() % 1 == 0",
        f"{_TESTS}/cudnn/test_guards.py::test_memory_that_begins_anywhere_gives_the_same",
    ),
    Mutation(
        "row scales that no kernel writes left as they are", f"{_CUDNN}/views.py",
        "quantized_copy",
        "if axis is Axis.ROW and blocks % 4 and matrix.shape[0]:", "if False:",
        f"{_TESTS}/cudnn/test_arguments.py::test_row_scales_that_no_kernel_writes_become_zero",
    ),
    Mutation(
        "compact scales of tokens launched", f"{_CUDNN}/checks.py", "packed_scales",
        "if not copy.swizzled:", "if False:",
        f"{_TESTS}/cudnn/test_guards.py::test_compact_scales_of_tokens",
    ),
    Mutation(
        "launch that shares memory does not wait", f"{_CUDNN}/streams.py", "take_turn",
        "at.stream.wait_stream(before)", "pass",
        f"{_TESTS}/cudnn/test_guards.py"
        "::test_a_launch_on_another_stream_waits_for_the_one_before",
    ),
    Mutation(
        "both weight gradients share their descriptors", f"{_CUDNN}/streams.py",
        "wgrad_workspace",
        "key = (kernel, device,", "key = (device,",
        f"{_TESTS}/cudnn/test_guards.py"
        "::test_both_weight_gradients_of_a_step_pass_their_own_memory",
    ),
    Mutation(
        "tail zeroed from the wrong row", f"{_CUDNN}/outputs.py", "zero_tail",
        "[-1])", "[0])",
        f"{_TESTS}/cudnn/test_backend.py::test_activations_and_biases",
    ),
)  # fmt: skip

_CUTEDSL_BACKEND = (
    Mutation(
        "kernel of another bias reused", f"{_CUTEDSL}/keys.py", "fc1_act",
        "bias=bias, scale=scale, pre_activation", "bias=False, scale=scale, pre_activation",
        "tests/cli/test_compile.py::test_every_activation_and_bias_is_prepared",
    ),
    Mutation(
        "kernel of another parameter reused", f"{_CUTEDSL}/keys.py", "_reduced",
        "return ActivationSpec(spec.kind, spec.interleave, **values)",
        "return ActivationSpec(spec.kind, spec.interleave)",
        f"{_TESTS}/cutedsl/test_config.py"
        "::test_each_parameter_that_a_kind_uses_makes_another_kernel",
    ),
    Mutation(
        "kernel for descending weights reused", f"{_CUTEDSL}/keys.py", "dact_dgrad",
        "reversed_experts=reversed_experts", "reversed_experts=False",
        f"{_TESTS}/cutedsl/test_config.py"
        "::test_the_order_in_memory_changes_nothing_else_of_a_kernel",
    ),
    Mutation(
        "what is quantized next not rounded to odd", f"{_CUTEDSL}/keys.py", "_requantizes",
        "problem.recipe is not RecipeKind.NONE", "False",
        "tests/cli/test_compile.py"
        "::test_mxfp8_has_kernels_of_its_own_before_what_is_quantized_next",
    ),
    Mutation(
        "tile whose boxes hold wrong rows allowed", f"{_CUTEDSL}/config.py", "refusal",
        "if op in _VIEW_ON_TILE_N and tile.n_slice % PERIOD:", "if False:",
        f"{_TESTS}/cutedsl/test_config.py"
        "::test_a_tile_is_allowed_where_its_boxes_hold_whole_periods",
    ),
    Mutation(
        "fp16 parameters planned", f"{_CUTEDSL}/capability.py", "_problem_refusals",
        "if problem.dtype is not DType.BFLOAT16:", "if False:",
        f"{_TESTS}/cutedsl/test_capability.py::test_problems_that_are_refused",
    ),
    Mutation(
        "another QuACK taken", f"{_CUTEDSL}/capability.py", "_package_refusals",
        'name == "quack" and version != _QUACK', "False",
        f"{_TESTS}/cutedsl/test_capability.py::test_packages",
    ),
    Mutation(
        "native kernels taken on Blackwell unasked", f"{_CUTEDSL}/capability.py",
        "_architecture_refusals",
        "if not on_blackwell:", "if False:",
        f"{_TESTS}/cutedsl/test_capability.py"
        "::test_unnamed_on_blackwell_only_determinism_under_mxfp8_is_taken",
    ),
    Mutation(
        "splits that the host knows not compared", f"{_CUTEDSL}/capability.py", "_row_refusals",
        "if known is not None and known % multiple:", "if False:",
        f"{_TESTS}/cutedsl/test_capability.py::test_calls_under_mxfp8",
    ),
    Mutation(
        "bf16 gradients added to after two roundings", f"{_CUTEDSL}/arguments.py",
        "kernel_adds",
        "return target.accumulate and not fp32", "return False",
        f"{_TESTS}/cutedsl/test_arguments.py"
        "::test_a_target_without_a_view_gets_its_result_afterwards",
    ),
    Mutation(
        "gate and linear not paired", f"{_CUTEDSL}/arguments.py", "in_pairs",
        "cols // 2 if width is None else width", "cols // 2",
        f"{_TESTS}/cutedsl/test_arguments.py::test_pairs",
    ),
    Mutation(
        "strides that TMA cannot address passed", f"{_CUTEDSL}/arguments.py", "is_addressable",
        "if stride <= 0 or stride * size % _ALIGN:", "if stride <= 0:",
        f"{_TESTS}/cutedsl/test_arguments.py::test_addressable",
    ),
    Mutation(
        "folder that others may write to trusted", f"{_CUTEDSL}/disk.py", "_require_trust",
        "if by_group or mode & stat.S_IWOTH:", "if False:",
        f"{_TESTS}/cutedsl/test_disk.py::test_a_folder_that_others_may_write_to_is_not_used",
    ),
    Mutation(
        "changed byte of a kernel on disk not noticed", f"{_CUTEDSL}/disk.py", "entry",
        "hashlib.sha256(_read(folder / file)).hexdigest() == digest for",
        "bool(_read(folder / file)) for",
        f"{_TESTS}/cutedsl/test_disk.py::test_a_changed_byte_is_noticed",
    ),
    Mutation(
        "link in the cache followed", f"{_CUTEDSL}/disk.py", "_read",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK", "os.O_RDONLY | os.O_NONBLOCK",
        f"{_TESTS}/cutedsl/test_disk.py::test_a_link_is_not_followed",
    ),
)  # fmt: skip

_UPSTREAM_BACKEND = (
    Mutation(
        "padded single group handed to upstream", f"{_UPSTREAM}/capability.py", "faults",
        "if dense and not full_rows and not step.is_unit_group:", "if False:",
        "tests/op/test_fusion.py::test_a_path_known_to_be_wrong_is_not_taken",
    ),
    Mutation(
        "upstream without a check trusted with a demand", f"{_UPSTREAM}/capability.py",
        "determinism_refusal",
        "if requested and not has_own_check:", "if False:",
        "tests/op/test_fusion.py"
        "::test_an_upstream_without_a_check_is_skipped_when_determinism_is_asked",
    ),
    Mutation(
        "scaled bias of FC1 handed to upstream", f"{_UPSTREAM}/capability.py", "faults",
        "if step.fc1.scale_bias:", "if False:",
        "tests/op/test_fusion.py::test_a_path_known_to_be_wrong_is_not_taken",
    ),
)  # fmt: skip

MUTATIONS = (
    *_CHECKED, *_REFERENCE_BACKEND, *_CUDNN_BACKEND, *_CUTEDSL_BACKEND, *_UPSTREAM_BACKEND,
)  # fmt: skip
