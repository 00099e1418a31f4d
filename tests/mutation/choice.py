# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of the choice: layout, formats, environment, plans, fusion and what is said of them."""

from __future__ import annotations

from tests.mutation.mutations import Mutation

_OP = "te_grouped_mlp/op"
_TESTS = "tests/op"

_LAYOUT = (
    Mutation(
        "one group always dense", f"{_OP}/layout.py", "GroupLayout.decide",
        "rows_are_full and _all_can_use(RowExtent.BUFFER, launches)", "True",
        f"{_TESTS}/test_layout.py::test_truth_table",
    ),
    Mutation(
        "a launch that cannot write all rows asked to", f"{_OP}/layout.py", "GroupLayout.decide",
        "rows_are_full and _all_can_use(RowExtent.BUFFER, launches)", "rows_are_full",
        f"{_TESTS}/test_layout.py::test_one_launch_that_knows_packed_alone_decides_for_all",
    ),
    Mutation(
        "wrong extent said to be written", f"{_OP}/layout.py", "GroupLayout.extent_written",
        "self.extent if self.extent in launch.extents else RowExtent.PACKED", "self.extent",
        f"{_TESTS}/test_layout.py"
        "::test_extent_written_differs_from_the_layout_under_the_old_decision_alone",
    ),
    Mutation(
        "operand of another layout accepted", f"{_OP}/layout.py", "GroupLayout.require",
        "other is not self and other != self", "False",
        f"{_TESTS}/test_layout.py::test_another_layout_is_a_mismatch",
    ),
)  # fmt: skip

_ENVIRONMENT = (
    Mutation(
        "switch of full rows ignored", f"{_OP}/environment.py", "_switches",
        "full_rows=_integer(FULL_ROWS_SWITCH, full_rows, 0) > 0", "full_rows=False",
        f"{_TESTS}/test_environment.py::test_switches_are_read_at_every_call",
    ),
    Mutation(
        "switch of checks ignored", f"{_OP}/environment.py", "_switches",
        "check=_integer(CHECK_SWITCH, check, 0) > 0", "check=False",
        f"{_TESTS}/test_environment.py::test_switches_are_read_at_every_call",
    ),
    Mutation(
        "switch of reused weights ignored", f"{_OP}/environment.py", "_switches",
        "reuse_weights=_integer(REUSE_WEIGHTS_SWITCH, reuse_weights, 0) > 0",
        "reuse_weights=False",
        f"{_TESTS}/test_environment.py::test_switches_are_read_at_every_call",
    ),
    Mutation(
        "TE's switch of determinism ignored", f"{_OP}/environment.py", "determinism_requested",
        "if not switches.allow_nondeterministic:", "if False:",
        f"{_TESTS}/test_environment.py::test_determinism_is_asked_for_in_two_ways",
    ),
    Mutation(
        "torch's flag of determinism ignored", f"{_OP}/environment.py", "determinism_requested",
        "torch is not None and bool(torch.are_deterministic_algorithms_enabled())", "False",
        f"{_TESTS}/test_environment.py::test_determinism_is_asked_for_in_two_ways",
    ),
    Mutation(
        "switches of a process read once", f"{_OP}/environment.py", "current",
        "latest is None or latest[0] != facts", "latest is None",
        f"{_TESTS}/test_environment.py::test_switches_are_read_at_every_call",
    ),
    Mutation(
        "equal overrides taken off together", f"{_OP}/environment.py", "override",
        "other is not changes", "other != changes",
        f"{_TESTS}/test_environment.py::test_leaving_an_inner_override_uncovers_the_next_one",
    ),
)  # fmt: skip

_SELECTION = (
    Mutation(
        "named backend replaced by another", f"{_OP}/selection.py", "candidates",
        "return () if requested == UPSTREAM else (requested,)", "return NAMES[:-1]",
        f"{_TESTS}/test_selection.py::test_a_named_backend_is_the_only_candidate",
    ),
    Mutation(
        "plan that cannot keep a demand for determinism taken", f"{_OP}/selection.py",
        "first_plan",
        "if weak is None:", "if True:",
        f"{_TESTS}/test_selection.py::test_a_deterministic_call_goes_to_a_backend_that_is",
    ),
    Mutation(
        "plan of another machine reused", f"{_OP}/selection.py", "_plan_of",
        "env.single_group_is_always_dense, wrappers, env.sm)",
        "env.single_group_is_always_dense, wrappers)",
        f"{_TESTS}/test_selection.py::test_another_machine_has_another_plan",
    ),
    Mutation(
        "plan of other switches reused", f"{_OP}/selection.py", "make_plan",
        "facts = (problem, call, env.switches,", "facts = (problem, call,",
        f"{_TESTS}/test_selection.py::test_another_machine_has_another_plan",
    ),
    Mutation(
        "plan of another call reused", f"{_OP}/selection.py", "_plan_of",
        "key = (problem, call,", "key = (problem, call.rows,",
        f"{_TESTS}/test_selection.py::test_another_call_has_another_plan",
    ),
    Mutation(
        "plans kept without bound", f"{_OP}/selection.py", "_plan_of",
        "if len(_plans) > _PLANS_KEPT:", "if False:",
        f"{_TESTS}/test_selection.py::test_the_number_of_plans_is_bounded",
    ),
    Mutation(
        "demand for determinism not compared with the plan", f"{_OP}/selection.py",
        "require_no_stronger_demand",
        "if weak:", "if False:",
        f"{_TESTS}/test_determinism.py"
        "::test_a_demand_that_became_stronger_raises_in_the_backward",
    ),
    Mutation(
        "output that varies left out", f"{_OP}/plan.py", "Plan.not_deterministic",
        "launch.outputs - launch.deterministic", "launch.deterministic - launch.outputs",
        f"{_TESTS}/test_determinism.py::test_every_output_that_varies_is_named",
    ),
    Mutation(
        "activation recomputed for nobody", f"{_OP}/plan.py", "Plan.recomputes_activated",
        "self.problem.activation.recomputes_input and self.call.needs_dact",
        "self.problem.activation.recomputes_input",
        f"{_TESTS}/test_gradients_wanted.py::test_what_is_wanted_equals_the_full_step",
    ),
    Mutation(
        "width that does not fit accepted", f"{_OP}/shape_constraints.py", "feature_refusals",
        "if width <= 0 or width % multiple:", "if width <= 0:",
        f"{_TESTS}/test_bad_input.py::test_what_does_not_fit_is_declined_with_one_line",
    ),
    Mutation(
        "another order of gate and linear accepted", f"{_OP}/shape_constraints.py",
        "feature_refusals",
        "if act.is_gated and act.interleave not in interleaves:", "if False:",
        f"{_TESTS}/test_bad_input.py::test_what_does_not_fit_is_declined_with_one_line",
    ),
)  # fmt: skip

_FUSION = (
    Mutation(
        "named backend that does not run passed over in silence", f"{_OP}/fusion.py",
        "_fuse_triple",
        "_require_requested(decision)", "pass",
        f"{_TESTS}/test_fusion.py::test_a_named_backend_that_cannot_run_raises",
    ),
    Mutation(
        "switch of the fused op ignored", f"{_OP}/fusion.py", "_decide",
        "if not switches.fused:", "if False:",
        f"{_TESTS}/test_fusion.py::test_the_switch_off",
    ),
    Mutation(
        "replaced probe that says no ignored", f"{_OP}/fusion.py", "_decide",
        "if forbidden is not None:", "if False:",
        f"{_TESTS}/test_upstream_api.py::test_a_replaced_probe_that_says_no_is_obeyed",
    ),
    Mutation(
        "linears of different numbers of experts fused", f"{_OP}/fusion.py",
        "dimension_mismatch",
        "if fc1.num_groups != fc2.num_groups:", "if False:",
        f"{_TESTS}/test_bad_input.py::test_linears_that_do_not_fit_together_are_declined",
    ),
    Mutation(
        "decision not said", f"{_OP}/decisions.py", "add",
        "if switched_off or not is_first_rank():", "if True:",
        f"{_TESTS}/test_fusion.py::test_the_first_rank_speaks_once",
    ),
    Mutation(
        "step that was not fused not counted", f"{_OP}/decisions.py", "add",
        "decision.path not in CLASSES and", "False and",
        "tests/test_gate.py::test_the_gate_stops_every_other[unfused]",
    ),
    Mutation(
        "launches not checked against the plan", f"{_OP}/execution.py", "operations",
        "return CheckedBackend(backend(plan.backend), plan)",
        "return backend(plan.backend)",
        f"{_TESTS}/backends/test_checked.py::test_a_plan_runs_through_the_checks",
    ),
)  # fmt: skip

MUTATIONS = (*_LAYOUT, *_ENVIRONMENT, *_SELECTION, *_FUSION)
