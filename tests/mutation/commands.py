# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of the commands and of what they measure by, where a wrong answer would be silent."""

from __future__ import annotations

from tests.mutation.mutations import Mutation

_CLI = "te_grouped_mlp/cli"
_MEASURE = "te_grouped_mlp/measure"
_TESTS = "tests/cli"

MUTATIONS = (
    Mutation(
        "NaN equals every number", f"{_CLI}/repro.py", "compare",
        "if not torch.equal(_bits(live), _bits(wanted)):",
        "if not torch.allclose(live.nan_to_num(), wanted.nan_to_num(), atol=1.0):",
        f"{_TESTS}/test_repro.py::test_one_wrong_value_is_seen",
    ),
    Mutation(
        "tail of the outputs not looked at", f"{_CLI}/repro.py", "compare",
        "clean_tail &= not _bits(tail).any()", "clean_tail &= True",
        f"{_TESTS}/test_repro.py::test_one_wrong_value_is_seen",
    ),
    Mutation(
        "repro succeeds whatever differs", f"{_CLI}/repro.py", "run",
        "return 0 if good else 1", "return 0",
        f"{_TESTS}/test_repro.py::test_old_decision_shows_the_fault",
    ),
    Mutation(
        "hash that does not see the content", "te_grouped_mlp/op/tensors/digest.py", "_of_one",
        "torch.frombuffer(data, dtype=torch.uint8).copy_(flat)", "pass",
        f"{_TESTS}/test_replay.py::test_one_changed_bit_is_found",
    ),
    Mutation(
        "replay succeeds whatever varies", f"{_CLI}/replay.py", "run",
        "return 0 if good else 1", "return 0",
        f"{_TESTS}/test_replay.py::test_one_changed_bit_is_found",
    ),
    Mutation(
        "upstream's path foretold where it is wrong", f"{_CLI}/paths.py", "_upstream_answer",
        "if refusal is not None:", "if False:",
        f"{_TESTS}/test_doctor.py::test_one_expert_that_upstream_reads_densely_runs_unfused",
    ),
    Mutation(
        "path of a demand foretold without the demand", f"{_CLI}/paths.py", "call_of",
        "deterministic=question.deterministic", "deterministic=False",
        f"{_TESTS}/test_doctor.py::test_without_the_native_kernels_the_demand_raises",
    ),
    Mutation(
        "outputs of the selftest not compared with float64", f"{_MEASURE}/selftest/checks.py",
        "_note",
        "if limit is not None and error > limit:", "if False:",
        f"{_TESTS}/test_selftest.py::test_wrong_backend_is_found_and_its_output_named",
    ),
    Mutation(
        "outputs that vary pass the selftest", f"{_MEASURE}/selftest/checks.py",
        "_judge_replays",
        "if count > 1 and name not in out.varying:", "if False:",
        f"{_TESTS}/test_selftest.py"
        "::test_output_that_depends_on_the_padding_or_on_the_run_is_found",
    ),
    Mutation(
        "outputs that depend on the padding pass the selftest",
        f"{_MEASURE}/selftest/checks.py", "_judge_padding",
        "same = digest(value) == digest(expected[name])", "same = True",
        f"{_TESTS}/test_selftest.py"
        "::test_output_that_depends_on_the_padding_or_on_the_run_is_found",
    ),
    Mutation(
        "bound of a stripe diluted over all columns", f"{_MEASURE}/selftest/exact.py",
        "_stripes",
        "part.split(_STRIPE, dim=-1)", "(part,)",
        f"{_TESTS}/test_selftest.py::test_bound_of_a_stripe_is_not_diluted",
    ),
    Mutation(
        "scaled bias left out of the float64 step", f"{_MEASURE}/selftest/exact.py", "step",
        'leaves["db2"][index] * scale', 'leaves["db2"][index]',
        f"{_TESTS}/test_selftest.py::test_float64_step_is_the_formula",
    ),
    Mutation(
        "padding of a batch holds zeros", f"{_MEASURE}/step.py", "Batch.padded",
        "tensor.new_full((rows, *tensor.shape[1:]), fill)",
        "tensor.new_zeros((rows, *tensor.shape[1:]))",
        f"{_TESTS}/test_repro.py"
        "::test_old_decision_multiplies_the_tail_where_buffers_are_written",
    ),
    Mutation(
        "step that was not fused measured", f"{_MEASURE}/step.py", "Model.require_fused",
        "if not any(isinstance(op, ours) for op in ops):", "if False:",
        f"{_TESTS}/test_bench_parts.py::test_a_step_that_ran_unfused_is_not_measured",
    ),
)  # fmt: skip
