# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every launch that the backend can make, by the real frontend and without a GPU.

*Record*: the wrapper runs to its end, with its own checks. *Check*: its kernel is built for
sm_100a and called with tensors that claim to be CUDA's; it complains of the driver only after every
shape, stride, dtype and divisibility has passed. Needs nvidia-cudnn-frontend and CuTe DSL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_grouped_mlp.emulator.launch_cases import GROUPS, ROWS, LaunchCase, cases
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.layout import Kernel
from tests.op.backends.cudnn import fake_cuda, ptx
from tests.op.backends.cudnn.fake_cuda import Result
from tests.op.backends.cudnn.faults import FAULTS
from tests.op.backends.cudnn.launcher import launch, require_frontend

CASES = {case.id: case for case in cases()}
DERIVATIVES = {
    name: case for name, case in CASES.items() if case.kernel is Kernel.DACT_DGRAD and case.dprob
}
IN_ORDER = {name: case for name, case in DERIVATIVES.items() if case.deterministic}
SLOTS = 2
"""Partial sums of a row: 320 columns are two tiles of a cluster of two."""
PASSED = "cudaErrorInsufficientDriver"


@pytest.fixture(scope="module", autouse=True)
def _frontend() -> None:
    require_frontend()


def all_of(level: str, folder: Path, faults: dict[str, LaunchCase]) -> dict[str, Result]:
    """Make every launch, and then the faulty ones, in one process; results by case and fault."""
    jobs = [(case, "") for case in CASES.values()]
    report = launch(level, jobs + [(case, fault) for fault, case in faults.items()], folder)
    seconds = sum(result.seconds for result in report.results)
    print(f"{len(CASES)} launches, {level}: {seconds:.1f} s, {report.megabytes:.0f} MB")  # noqa: T201
    return dict(zip([*CASES, *faults], report.results, strict=True))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return all_of(fake_cuda.RECORD, tmp_path_factory.mktemp("record"), SEEN_BY_THE_WRAPPER)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return all_of(fake_cuda.CHECK, tmp_path_factory.mktemp("check"), SEEN_BY_THE_KERNEL)


def test_there_are_enough_of_them() -> None:
    assert len(CASES) == len(cases()) >= 60


# Record ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_wrapper_runs_to_its_end(recorded: dict[str, Result], name: str) -> None:
    assert recorded[name].error == ""
    assert len(recorded[name].launches) == 1


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_deterministic_launch_has_a_slot_for_every_partial_sum(
    recorded: dict[str, Result], name: str
) -> None:
    (made,) = recorded[name].launches
    slots = ((ROWS, SLOTS, 1), "torch.float32")
    assert (slots in made.tensors) is DERIVATIVES[name].deterministic


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
def test_weight_gradients_go_where_they_lie(recorded: dict[str, Result], stacked: bool) -> None:
    case = LaunchCase(Kernel.FC2_WGRAD, stacked=stacked)
    (made,) = recorded[case.id].launches
    shapes = [shape for shape, _ in made.tensors]
    assert ((GROUPS, 512, 320) in shapes) is stacked


DACT, FORWARD = LaunchCase(Kernel.DACT_DGRAD), LaunchCase(Kernel.FC1_ACT)
GEMM, WGRAD = LaunchCase(Kernel.FC2_FORWARD), LaunchCase(Kernel.FC2_WGRAD)
SEEN_BY_THE_WRAPPER: dict[str, LaunchCase] = {
    "block of 16": FORWARD,
    "narrow tile": DACT,
    "bf16 prob": DACT,
    "no norm": FORWARD,
    "wrong activation": DACT,
    "tall weights": GEMM,
    "column-major output": GEMM,
    "misaligned descriptors": WGRAD,
    "int64 ends": WGRAD,
}
SEEN_BY_THE_KERNEL: dict[str, LaunchCase] = {
    "int64 offsets": GEMM,
    "no beta": DACT,
    "rows with gaps": FORWARD,
    "fewer probs": FORWARD,
    "fewer pre-activations": DACT,
    # What the stand-in refuses too, and the backend copies.
    "misaligned prob": FORWARD,
    "misaligned pre-activations": DACT,
    "misaligned scales": GEMM,
    "misaligned offsets": GEMM,
    "misaligned bias": LaunchCase(Kernel.FC1_ACT, bias=True),
}


@pytest.mark.parametrize("fault", SEEN_BY_THE_WRAPPER)
def test_the_wrapper_sees_a_faulty_builder(recorded: dict[str, Result], fault: str) -> None:
    assert recorded[fault].error


# Check -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_takes_every_argument(checked: dict[str, Result], name: str) -> None:
    result = checked[name]
    assert result.error == ""
    (made,) = result.launches
    assert PASSED in made.error, made.error
    assert f".target {fake_cuda.ARCH}" in made.ptx


@pytest.mark.slow
@pytest.mark.parametrize("fault", SEEN_BY_THE_KERNEL)
def test_the_kernel_sees_a_faulty_builder(checked: dict[str, Result], fault: str) -> None:
    result = checked[fault]
    errors = [result.error, *(made.error for made in result.launches)]
    assert any("Misaligned" in error or "misaligned" not in fault for error in errors)
    assert any(errors)
    assert not any(PASSED in error for error in errors), errors


def parks_its_partial_sums(text: str, plain: str) -> bool:
    """Whether a kernel keeps eight partial sums and adds them in order to a slot of their own.

    Args:
        text: Its PTX.
        plain: That of the same kernel without the demand.
    """
    return (
        len(ptx.float_atomics(text)) == 1
        and ptx.local_bytes(text) == ptx.local_bytes(plain) + 32
        and ptx.added_in_order(text) == 8
        and SLOTS in ptx.address_factors(text)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ORDER)
def test_the_kernel_parks_its_partial_sums(checked: dict[str, Result], name: str) -> None:
    plain_case = LaunchCase(
        Kernel.DACT_DGRAD, IN_ORDER[name].kind, IN_ORDER[name].stacked,
        bias_grad=IN_ORDER[name].bias_grad,
    )  # fmt: skip
    text, plain = (checked[each].launches[0].ptx for each in (name, plain_case.id))
    assert parks_its_partial_sums(text, plain)
    assert not parks_its_partial_sums(plain, plain)
    # Into slots of their own as well, one writer each.
    assert ptx.bf16_atomics(text) == int(IN_ORDER[name].bias_grad)


@pytest.mark.slow
def test_without_the_demand_it_does_not(tmp_path: Path) -> None:
    case = LaunchCase(Kernel.DACT_DGRAD, deterministic=True)
    report = launch(fake_cuda.COMPILE, [(case, "any order"), (case, "")], tmp_path)
    faulty, sound = (result.launches[0].ptx for result in report.results)
    assert parks_its_partial_sums(sound, faulty)
    assert not parks_its_partial_sums(faulty, faulty)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.dprob])
def test_an_unwanted_probability_gradient_needs_no_atomics(
    checked: dict[str, Result], name: str
) -> None:
    assert ptx.float_atomics(checked[name].launches[0].ptx) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.kernel is not Kernel.DACT_DGRAD]
)
def test_nothing_else_adds_floats_one_by_one(checked: dict[str, Result], name: str) -> None:
    text = checked[name].launches[0].ptx
    assert ptx.float_atomics(text) == []
    assert ptx.bf16_atomics(text) == 0


def test_every_fault_is_used() -> None:
    used = {*SEEN_BY_THE_WRAPPER, *SEEN_BY_THE_KERNEL, "any order"}
    assert used == set(FAULTS)
    assert {case.kind for case in CASES.values()} == set(Activation)
    assert {case.dtype for case in CASES.values()} == {
        torch.float32, torch.bfloat16, torch.float16,
    }  # fmt: skip
