# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Bad input: an error that names argument, value and what is allowed, before anything changed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import te_grouped_mlp
from te_grouped_mlp import _bootstrap
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.plan import Reason
from tests.op import fixtures
from tests.support import step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SINGLE = StepCase(splits=(256,), hidden=128, ffn=64)
PADDED = SINGLE.but(buffer_rows=512)
SEVERAL = StepCase(splits=(128, 0, 256), buffer_rows=512, hidden=128, ffn=64)
MAIN = SEVERAL.but(grad="main_grad")
SQUARE = SEVERAL.but(activation="srelu", ffn=128)
SCALED = SEVERAL.but(bias=True, scale_bias=True)


@dataclasses.dataclass
class Given:
    """The arguments of one call, to be spoiled; `extra` are those that TE's Sequential takes."""

    case: StepCase
    model: Any
    inputs: step.Inputs
    extra: list[torch.Tensor]
    kwargs: dict[int, dict[str, torch.Tensor]]

    @classmethod
    def of(cls, case: StepCase) -> Given:
        model, inputs = step.make_model(case), step.make_inputs(case)
        extra = [inputs.split_sizes, inputs.prob, inputs.split_sizes]
        return cls(case, model, inputs, extra + [inputs.prob] * case.scale_bias, {})

    def splits(self, *values: int, dtype: torch.dtype = torch.int64) -> None:
        """Give other split sizes to both linears."""
        self.extra[0] = self.extra[2] = torch.tensor(values, dtype=dtype)

    def buffer(self, rows: int | None = None, **options: Any) -> torch.Tensor:
        """Return a buffer for the output or the input's gradient."""
        shape = (self.case.rows if rows is None else rows, self.case.hidden)
        return torch.zeros(shape, **{"dtype": self.case.dtype, **options})

    def forward(self) -> torch.Tensor:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import MXFP8BlockScaling

        with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
            return self.model(self.inputs.x, *self.extra, op_kwargs=self.kwargs)

    def hashes(self) -> dict[str, str]:
        """Hash everything that a call could change."""
        found = {"x": self.inputs.x, "dy": self.inputs.dy}
        found.update((f"extra{index}", tensor) for index, tensor in enumerate(self.extra))
        for index, buffers in self.kwargs.items():
            found.update((f"{index}.{name}", tensor) for name, tensor in buffers.items())
        for name, parameter in self.model.named_parameters():
            found[name] = parameter
            found[f"{name}.grad"] = parameter.grad
            main_grad = getattr(parameter, "main_grad", None)
            found[f"{name}.main_grad"] = main_grad
        # Tensors without storage have nothing that could change.
        return {name: fixtures.digest(t) for name, t in found.items() if t is None or not t.is_meta}


def _set(**values: Any) -> Callable[[Given], None]:
    """Return a function that replaces `x` or `prob`, each by a function of the old one."""

    def spoil(given: Given) -> None:
        for name, change in values.items():
            if name == "x":
                given.inputs.x = change(given.inputs.x.detach())
            elif name == "prob":
                given.extra[1] = change(given.extra[1].detach())

    return spoil


def _weight(op: int, index: int, change: Callable[[torch.Tensor], None]) -> Callable[[Given], None]:
    return lambda given: change(getattr(given.model[op], f"weight{index}"))


def _no_main_grad(parameter: torch.Tensor) -> None:
    del parameter.main_grad


def _main_grad(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def change(parameter: torch.Tensor) -> None:
        parameter.main_grad = make(parameter.main_grad)

    return change


def _second_splits(given: Given) -> None:
    given.extra[2] = given.extra[0].clone()


def _fewer_second_splits(given: Given) -> None:
    given.extra[2] = given.extra[0][:1]


def _meta_splits(given: Given) -> None:
    given.extra[0] = given.extra[2] = given.extra[0].to("meta")


def _matrix_of_splits(given: Given) -> None:
    given.extra[0] = given.extra[2] = given.extra[0][None]


def _second_prob(given: Given) -> None:
    given.extra[3] = given.extra[1].detach().clone()


def _fewer_bias_scales(given: Given) -> None:
    given.extra[3] = given.extra[1].detach()[:128]


def _meta_weight(given: Given) -> None:
    weight = given.model[2].weight0.detach().to("meta")
    given.model[2].weight0 = torch.nn.Parameter(weight, requires_grad=False)


def _tied(op: int) -> Callable[[Given], None]:
    def spoil(given: Given) -> None:
        given.model[op].weight1 = given.model[op].weight0

    return spoil


def _tied_linears(given: Given) -> None:
    given.model[2].weight1 = given.model[0].weight2


def _buffers(**make: Callable[[Given], torch.Tensor]) -> Callable[[Given], None]:
    """Give buffers by "op_key" names, as ``_0_grad_input``."""

    def spoil(given: Given) -> None:
        for name, function in make.items():
            op, key = name[1:].split("_", 1)
            given.kwargs.setdefault(int(op), {})[key] = function(given)

    return spoil


def _one_for_both(given: Given) -> None:
    buffer = given.buffer()
    given.kwargs.update({2: {"output": buffer}, 0: {"grad_input": buffer}})


@dataclasses.dataclass(frozen=True)
class Bad:
    """A bad call.

    Attributes:
        case: A good one.
        spoil: Makes it bad.
        error: What is raised.
        words: What the message has, in this order: the argument, its value, what is allowed.
        env: Environment variables.
        late: Only a later call can be bad so: TE repairs it before the first.
    """

    case: StepCase
    spoil: Callable[[Given], None]
    error: type[Exception]
    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    late: bool = False


_FULL = (("NVTE_GROUPED_MLP_FULL_ROWS", "1"),)
BAD: dict[str, Bad] = {
    # Tokens
    "x of integers": Bad(
        SINGLE, _set(x=torch.Tensor.int), TypeError, ("input", "int32", "floating")
    ),
    "x of complex numbers": Bad(
        SINGLE,
        _set(x=lambda x: x.to(torch.complex64)),
        TypeError,
        ("input", "complex64", "floating"),
    ),
    "x elsewhere": Bad(
        SINGLE, _set(x=lambda x: x.to("meta")), ValueError, ("input", "meta", "cpu")
    ),
    "x too wide": Bad(
        SINGLE, _set(x=lambda x: x.repeat(1, 2)), ValueError, ("input", "(256, 256)", "128")
    ),
    "x a vector": Bad(
        SINGLE, _set(x=lambda x: x[0]), ValueError, ("input", "(128,)", "two dimensions")
    ),
    "x of 200 rows": Bad(SINGLE, _set(x=lambda x: x[:200]), ValueError, ("input", "200", "128")),
    "x of 64 rows": Bad(SEVERAL, _set(x=lambda x: x[:64]), ValueError, ("input", "64", "128")),
    # Splits
    "one split too many": Bad(
        SEVERAL, lambda g: g.splits(128, 0, 128, 128), ValueError, ("split_sizes", "4", "3")
    ),
    "one split too few": Bad(
        SEVERAL, lambda g: g.splits(128, 256), ValueError, ("split_sizes", "2", "3")
    ),
    "no splits": Bad(SEVERAL, lambda g: g.splits(), ValueError, ("split_sizes", "0", "3")),
    "a matrix of splits": Bad(
        SEVERAL, _matrix_of_splits, ValueError, ("split_sizes", "(1, 3)", "(3,)")
    ),
    "equal splits in two tensors": Bad(
        SEVERAL, _second_splits, RuntimeError, ("split_sizes", "3 values", "same tensor")
    ),
    "fewer splits for FC2": Bad(
        SEVERAL, _fewer_second_splits, RuntimeError, ("split_sizes", "1 values", "same tensor")
    ),
    "splits in float": Bad(
        SEVERAL,
        lambda g: g.splits(128, 0, 256, dtype=torch.float32),
        TypeError,
        ("split_sizes", "float32", "int32 or int64"),
    ),
    "splits in int16": Bad(
        SEVERAL,
        lambda g: g.splits(128, 0, 256, dtype=torch.int16),
        TypeError,
        ("split_sizes", "int16", "int32 or int64"),
    ),
    "splits elsewhere": Bad(SEVERAL, _meta_splits, ValueError, ("split_sizes", "meta", "cpu")),
    "a split of 100": Bad(
        SEVERAL, lambda g: g.splits(128, 100, 256), ValueError, ("split_sizes[1]", "100", "128")
    ),
    "a split of 64": Bad(
        SINGLE, lambda g: g.splits(64), ValueError, ("split_sizes[0]", "64", "128")
    ),
    "a negative split": Bad(
        SEVERAL,
        lambda g: g.splits(128, 256, -128),
        ValueError,
        ("split_sizes[2]", "-128", "positive"),
    ),
    "splits past the buffer": Bad(
        SEVERAL, lambda g: g.splits(128, 256, 256), ValueError, ("split_sizes", "640", "512")
    ),
    "int32 splits past the buffer": Bad(
        SINGLE,
        lambda g: g.splits(384, dtype=torch.int32),
        ValueError,
        ("split_sizes", "384", "256"),
    ),
    # Promises about rows
    "full rows promised": Bad(
        PADDED,
        lambda g: None,
        ValueError,
        ("split_sizes", "256", "NVTE_GROUPED_MLP_FULL_ROWS=1", "512"),
        _FULL,
    ),
    "unit scale in a padded buffer": Bad(
        PADDED.but(unit_scale=True),
        lambda g: None,
        ValueError,
        ("split_sizes", "256", "unit activation scale", "512"),
    ),
    # Probabilities
    "too few probabilities": Bad(
        SEVERAL, _set(prob=lambda p: p[:384]), ValueError, ("probabilities", "384", "512")
    ),
    "too many probabilities": Bad(
        SEVERAL, _set(prob=lambda p: p.repeat(2)), ValueError, ("probabilities", "1024", "512")
    ),
    "probabilities of integers": Bad(
        SEVERAL, _set(prob=torch.Tensor.int), TypeError, ("probabilities", "int32", "float32")
    ),
    "probabilities elsewhere": Bad(
        SEVERAL, _set(prob=lambda p: p.to("meta")), ValueError, ("probabilities", "meta", "cpu")
    ),
    "two probability tensors": Bad(
        SCALED, _second_prob, ValueError, ("scale of FC2's bias", "same tensor")
    ),
    "fewer bias scales": Bad(
        SCALED, _fewer_bias_scales, ValueError, ("scale of FC2's bias", "same tensor")
    ),
    "unit scale and scale_bias": Bad(
        SINGLE.but(bias=True, scale_bias=True, unit_scale=True),
        lambda g: None,
        ValueError,
        ("scale_bias", "True", "one of them"),
    ),
    # Parameters
    "a weight elsewhere": Bad(
        SEVERAL.but(frozen=frozenset({"fc1", "fc2"})),
        _meta_weight,
        ValueError,
        ("FC2's weight", "meta", "cpu"),
        late=True,
    ),
    "no main_grad of FC1": Bad(
        MAIN,
        _weight(0, 0, _no_main_grad),
        RuntimeError,
        ("FC1 weight0.main_grad", "missing", "(128, 128)"),
    ),
    "no main_grad of the last expert": Bad(
        MAIN,
        _weight(2, 2, _no_main_grad),
        RuntimeError,
        ("FC2 weight2.main_grad", "missing", "(128, 64)"),
    ),
    "main_grad transposed": Bad(
        MAIN,
        _weight(2, 1, _main_grad(torch.t)),
        RuntimeError,
        ("FC2 weight1.main_grad", "(64, 128)", "(128, 64)"),
    ),
    "main_grad flat": Bad(
        MAIN,
        _weight(0, 2, _main_grad(torch.flatten)),
        RuntimeError,
        ("FC1 weight2.main_grad", "(16384,)", "(128, 128)"),
    ),
    "main_grad elsewhere": Bad(
        MAIN,
        _weight(0, 0, _main_grad(lambda g: g.to("meta"))),
        RuntimeError,
        ("FC1 weight0.main_grad", "meta", "cpu"),
    ),
    "main_grad of integers": Bad(
        MAIN,
        _weight(2, 0, _main_grad(torch.Tensor.int)),
        RuntimeError,
        ("FC2 weight0.main_grad", "int32", "floating"),
    ),
    "main_grad of the last expert elsewhere": Bad(
        MAIN,
        _weight(0, 2, _main_grad(lambda g: g.to("meta"))),
        RuntimeError,
        ("FC1 weight2.main_grad", "meta", "cpu"),
    ),
    "main_grad of the last expert of integers": Bad(
        MAIN,
        _weight(2, 2, _main_grad(torch.Tensor.int)),
        RuntimeError,
        ("FC2 weight2.main_grad", "int32", "floating"),
    ),
    "tied and delayed": Bad(
        SEVERAL.but(delay=(True, False)),
        _tied(0),
        ValueError,
        ("delay_wgrad_compute of FC1", "True", "distinct"),
    ),
    "tied linears, FC1 delayed": Bad(
        SQUARE.but(delay=(True, False), grad=("grad", "main_grad")),
        _tied_linears,
        ValueError,
        ("FC1 and FC2 share a weight", "distinct"),
    ),
    "tied linears, FC2 delayed": Bad(
        SQUARE.but(delay=(False, True)),
        _tied_linears,
        ValueError,
        ("FC1 and FC2 share a weight", "distinct"),
    ),
    "tied and delayed FC2": Bad(
        SEVERAL.but(delay=(False, True)),
        _tied(2),
        ValueError,
        ("delay_wgrad_compute of FC2", "True", "distinct"),
    ),
    # Buffers
    "output for FC1": Bad(
        SEVERAL, _buffers(_0_output=Given.buffer), ValueError, ("output", "FC1", "FC2 only")
    ),
    "grad_input for FC2": Bad(
        SEVERAL, _buffers(_2_grad_input=Given.buffer), ValueError, ("grad_input", "FC2", "FC1 only")
    ),
    "output too small": Bad(
        SEVERAL,
        _buffers(_2_output=lambda g: g.buffer(384)),
        ValueError,
        ("output", "(384, 128)", "(512, 128)"),
    ),
    "grad_input too large": Bad(
        SEVERAL,
        _buffers(_0_grad_input=lambda g: g.buffer(640)),
        ValueError,
        ("grad_input", "(640, 128)", "(512, 128)"),
    ),
    "output in fp32": Bad(
        SEVERAL,
        _buffers(_2_output=lambda g: g.buffer(dtype=torch.float32)),
        TypeError,
        ("output", "float32", "bfloat16"),
    ),
    "grad_input elsewhere": Bad(
        SEVERAL,
        _buffers(_0_grad_input=lambda g: g.buffer(device="meta")),
        ValueError,
        ("grad_input", "meta", "cpu"),
    ),
    "output that needs a gradient": Bad(
        SEVERAL,
        _buffers(_2_output=lambda g: g.buffer(requires_grad=True)),
        ValueError,
        ("output", "gradient", "detach"),
    ),
    "output over the input": Bad(
        SEVERAL,
        _buffers(_2_output=lambda g: g.inputs.x.detach()),
        ValueError,
        ("output", "shares memory"),
    ),
    "grad_input over the input": Bad(
        SEVERAL,
        _buffers(_0_grad_input=lambda g: g.inputs.x.detach()),
        ValueError,
        ("grad_input", "shares memory"),
    ),
    "one buffer for both": Bad(SEVERAL, _one_for_both, ValueError, ("grad_input", "shares memory")),
}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every call of a tex function and of a device operation."""
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    called: list[str] = []

    def spy(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def record(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, record)

    for name, value in list(vars(tex).items()):
        if inspect.isfunction(value) and not name.startswith("_"):
            spy(tex, name)
    for name in ("fc1_act", "gemm", "dact_dgrad", "wgrad"):
        spy(ReferenceBackend, name)
    return called


def is_fused(model: Any) -> bool:
    return type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")


def test_the_spy_sees_work(work: list[str]) -> None:
    given = Given.of(SEVERAL)
    before = given.hashes()
    given.forward().backward(given.inputs.dy)
    assert {"quantize", "group_quantize", "splits_to_offsets_multi", *OPERATIONS} <= set(work)
    after = given.hashes()
    assert {name for name in before if before[name] != after[name]} == {
        f"{name}.grad" for name, _ in given.model.named_parameters()
    }


OPERATIONS = ("fc1_act", "gemm", "dact_dgrad", "wgrad")


CALLS = [(name, False) for name, bad in BAD.items() if not bad.late]
CALLS += [(name, True) for name in BAD]


@pytest.mark.parametrize(("name", "warm"), CALLS)
def test_bad_input_is_named_before_any_work(
    name: str, warm: bool, work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = BAD[name]
    given = Given.of(bad.case.but(unit_scale=False) if warm else bad.case)
    if warm:
        given.forward()
        for op in given.model:
            op._grouped_mlp_unit_activation_scale = bad.case.unit_scale
    for variable, value in bad.env:
        monkeypatch.setenv(variable, value)
    bad.spoil(given)
    before = given.hashes()
    work.clear()
    with pytest.raises(bad.error, match=".*".join(map(re.escape, bad.words))):
        given.forward()
    assert work == []
    assert given.hashes() == before
    assert is_fused(given.model)


def test_the_same_calls_are_good_unspoiled() -> None:
    """So that an error comes from what was spoiled."""
    for case in {bad.case.but(buffer_rows=bad.case.live) for bad in BAD.values()}:
        if case.unit_scale and case.scale_bias:
            continue
        given = Given.of(case)
        assert given.forward().isfinite().all()
        assert is_fused(given.model)


# Split sizes that lie on a device ---------------------------------------------------------------


class DeviceSplits:
    """Split sizes on a GPU, as far as the check looks at them."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.reads = 0

    def tolist(self) -> list[int]:
        self.reads += 1
        return [128, 256]


@pytest.mark.parametrize("check", [False, True])
def test_splits_on_a_device_are_read_only_when_checks_are_on(check: bool) -> None:
    from te_grouped_mlp.op.te import adapter

    splits = DeviceSplits()
    found = adapter.sizes_on_host(splits, environment.Switches(check=check))
    assert found == ((128, 256) if check else None)
    assert splits.reads == check


def _read_call(host: tuple[int, ...] | None, env: dict[str, bool], **changes: Any) -> Any:
    """Read a call as if its splits lay on a GPU; `host` is what was read of them."""
    from te_grouped_mlp.op.step import inputs
    from te_grouped_mlp.op.te import adapter

    case = SINGLE.but(**changes)
    model, drawn = step.make_model(case), step.make_inputs(case)
    step.forward(model, case, drawn)
    ops = step.fused_op(model).basic_ops
    from transformer_engine.common.recipe import MXFP8BlockScaling

    problem = adapter.problem_of(*ops, MXFP8BlockScaling())
    read = inputs.read_inputs(
        ops, problem, drawn.x, [[drawn.split_sizes], [drawn.prob], [drawn.split_sizes]], [{}] * 3
    )
    switches = dataclasses.replace(environment.current().switches, **env)
    contexts = [SimpleNamespace(requires_grad=True)] * 3
    record = dataclasses.replace(environment.current(), switches=switches)
    return inputs.read_call(contexts, problem, read, drawn.prob, host, record)


def test_unread_splits_are_full_by_promise_alone() -> None:
    assert not _read_call(None, {}).rows_are_full
    assert _read_call(None, {"full_rows": True}).rows_are_full
    assert _read_call(None, {}, unit_scale=True).rows_are_full


@pytest.mark.parametrize(
    ("host", "words"),
    [((100,), "100.*128"), ((-128,), "-128.*128"), ((512,), "512.*256"), ((128,), "128.*256")],
)
def test_splits_that_were_read_are_checked(host: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=f"split_sizes.*{words}"):
        _read_call(host, {"check": True, "full_rows": True})


@pytest.mark.parametrize(
    ("host", "multiple"),
    [
        (None, None),
        ((512,), 256),
        ((384,), 128),
        ((0,), 256),
        ((256, 128, 0), 128),
        ((256, 256), 256),
    ],
    ids=str,
)
def test_planning_knows_what_divides_all_splits(
    host: tuple[int, ...] | None, multiple: int | None
) -> None:
    """A backend whose tiles have 256 rows asks for it."""
    assert _read_call(host, {"check": True}, splits=(512,)).split_multiple == multiple


# The environment --------------------------------------------------------------------------------

SWITCHES = (
    environment.FUSED_SWITCH,
    environment.FULL_ROWS_SWITCH,
    environment.CHECK_SWITCH,
    environment.DETERMINISM_SWITCH,
)
BAD_SWITCHES = [
    (name, value, when)
    for name in SWITCHES
    for value in ("yes", "1.0", "on", "-")
    for when in ("first", "forward", "backward")
]
# The backward chooses no backend.
BAD_SWITCHES += [
    (environment.BACKEND_SWITCH, value, when)
    for value in ("fast", "Reference", "1")
    for when in ("first", "forward")
]


@pytest.mark.parametrize(("name", "value", "when"), BAD_SWITCHES)
def test_bad_switches_are_named_before_any_work(
    name: str, value: str, when: str, work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given.of(SEVERAL)
    if when != "first":
        given.forward()
    y = given.forward() if when == "backward" else None
    monkeypatch.setenv(name, value)
    before = given.hashes()
    work.clear()
    with pytest.raises(ValueError, match=f"{name} is '{re.escape(value)}'; allowed"):
        given.forward() if y is None else y.backward(given.inputs.dy)
    assert work == []
    assert given.hashes() == before


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_a_bad_fork_switch_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.FORK_SWITCH, value)
    with pytest.raises(ValueError, match=f"{environment.FORK_SWITCH} is '{value}'; allowed: 0"):
        _bootstrap.fork_enabled()


# Without a GPU ----------------------------------------------------------------------------------


def test_linears_without_a_device_are_made_on_the_cpu() -> None:
    import transformer_engine.pytorch as te

    op = te.ops.GroupedLinear(2, 128, 64)
    assert {parameter.device.type for parameter in op.parameters()} == {"cpu"}


def test_a_tex_function_that_is_missing_is_named() -> None:
    import transformer_engine_torch as tex

    with pytest.raises(NotImplementedError, match="fused_attn_fwd"):
        tex.fused_attn_fwd()


# No errors, but the next step of the fallback ---------------------------------------------------


def _recipe(name: str, **options: Any) -> Any:
    from transformer_engine.common import recipe

    if "fp8_format" in options:
        options["fp8_format"] = getattr(recipe.Format, options["fp8_format"])
    return getattr(recipe, name)(**options)


MXFP8: tuple[str, dict[str, Any]] = ("MXFP8BlockScaling", {})
GLU = SEVERAL.but(dtype=torch.bfloat16)
# Name -> the case, the recipe, the cause, and what the detail has.
DECLINED: dict[str, tuple[StepCase, tuple[str, dict[str, Any]], Reason, str]] = {
    "hidden 96": (GLU.but(hidden=96), MXFP8, Reason.FEATURES, "96.*64"),
    "ffn 96": (GLU.but(ffn=96), MXFP8, Reason.FEATURES, "96.*64"),
    "unary ffn 32": (GLU.but(activation="srelu", ffn=32), MXFP8, Reason.FEATURES, "32.*64"),
    "interleave 16": (GLU.but(interleave=16), MXFP8, Reason.INTERLEAVE, "is 16; allowed: 32"),
    "no interleave": (GLU.but(interleave=None), MXFP8, Reason.INTERLEAVE, "is None; allowed: 32"),
    "hybrid": (
        GLU,
        ("MXFP8BlockScaling", {"fp8_format": "HYBRID"}),
        Reason.GRADIENT_FORMAT,
        "E4M3",
    ),
    "delayed scaling": (GLU, ("DelayedScaling", {}), Reason.RECIPE, "DelayedScaling.*mxfp8"),
    "current scaling": (GLU, ("Float8CurrentScaling", {}), Reason.RECIPE, "Float8CurrentScaling"),
    "block scaling": (GLU, ("Float8BlockScaling", {}), Reason.RECIPE, "Float8BlockScaling"),
    "nvfp4": (GLU, ("NVFP4BlockScaling", {}), Reason.RECIPE, "nvfp4.*mxfp8"),
    "nvfp4 without rht": (GLU, ("NVFP4BlockScaling", {"disable_rht": True}), Reason.RECIPE, "rht"),
    "float64": (GLU, MXFP8, Reason.DTYPE, "float64.*bfloat16"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_does_not_fit_is_declined_with_one_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    case, (recipe, options), reason, detail = DECLINED[name]
    # A number of experts that no other test has, up to the 64 that TE quantizes together: an equal
    # decision is not said twice.
    case = case.but(splits=(128,) * (64 - list(DECLINED).index(name)))
    model = step.make_model(case)
    ops = list(model.double() if name == "float64" else model)
    fuse = grouped_mlp.fuse_glu_ops if case.gated else grouped_mlp.fuse_unary_activation_ops
    caplog.set_level(logging.INFO, logger="te_grouped_mlp")
    for _ in range(3):
        assert fuse(ops, recipe=_recipe(recipe, **options)) == ops
    decision = te_grouped_mlp.explain()[-1]
    assert decision.path == "unfused"
    refusals = dict(decision.refusals)
    assert refusals["reference"].reason is reason
    assert re.search(detail, refusals["reference"].detail)
    assert refusals["upstream"].reason is Reason.PACKAGE
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert re.match(r"grouped MLP: \d+ x \d+ x \d+ .*: unfused \(not ", lines[0])
    assert reason.value in lines[0]


@pytest.mark.parametrize("name", ["hidden 96", "ffn 96", "no interleave"])
def test_what_is_declined_still_runs(name: str) -> None:
    case, _, reason, _ = DECLINED[name]
    case = case.but(buffer_rows=None)
    fixtures.assert_unfused(case, reason)
    found = step.run_step(case, fused=None)
    assert all(value is None or value.isfinite().all() for value in found.values())


def test_linears_that_do_not_fit_together_are_declined() -> None:
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    three, two = step.make_model(SEVERAL), step.make_model(SEVERAL.but(splits=(128, 128)))
    wide = step.make_model(SEVERAL.but(ffn=128))
    table = (
        ([three[0], three[1], two[2]], Reason.GROUPS),
        ([three[0], three[1], wide[2]], Reason.FEATURES),
    )
    for ops, reason in table:
        assert grouped_mlp.fuse_glu_ops(ops, recipe=_recipe(*MXFP8[:1])) == ops
        assert [each.reason for _, each in te_grouped_mlp.explain()[-1].refusals] == [reason]


@pytest.mark.parametrize("place", [0, 2], ids=["first", "third"])
def test_a_triple_needs_both_linears(place: int) -> None:
    """The ops around it belong to the user, and are none of those that are read."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    before = te_grouped_mlp.explain()
    for activation, fuse in (
        ("swiglu", grouped_mlp.fuse_glu_ops),
        ("srelu", grouped_mlp.fuse_unary_activation_ops),
    ):
        ops = list(step.make_model(SEVERAL.but(activation=activation)))
        ops[place] = te.ops.Identity()
        assert fuse(ops, recipe=_recipe(*MXFP8[:1])) == ops
        # The triple that begins where the other one ends is found.
        rest = list(step.make_model(SEVERAL.but(activation=activation)))
        fused = fuse([*ops, *rest], recipe=_recipe(*MXFP8[:1]))
        assert fused[:3] == ops
        assert [type(each).__name__.startswith("GroupedMLP") for each in fused[3:]] == [True]
    assert len(te_grouped_mlp.explain()) <= len(before) + 2


def test_a_bias_scale_on_fc1_is_declined() -> None:
    """Upstream's fused op ignores it and then fails in the fuser's count of gradients."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    fc1 = te.ops.GroupedLinear(3, 128, 128, bias=True, scale_bias=True)
    ops = [fc1, *list(step.make_model(SEVERAL))[1:]]
    assert grouped_mlp.fuse_glu_ops(ops, recipe=_recipe(*MXFP8[:1])) == ops
    assert dict(te_grouped_mlp.explain()[-1].refusals)["reference"].reason is Reason.OPTION


# Direct construction ----------------------------------------------------------------------------


def _construct(case: StepCase, recipe: Any = None) -> Any:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    gated = case.gated
    cls = grouped_mlp.GroupedMLP_CuTeGEMMGLU if gated else grouped_mlp.GroupedMLP_CuTeGEMMUnary
    fc1, activation, fc2 = step.make_model(case)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return cls(fc1=fc1, activation=activation, fc2=fc2)


def test_direct_construction() -> None:
    assert _construct(SEVERAL).is_fused_op
    assert _construct(SEVERAL.but(activation="srelu")).is_fused_op


@pytest.mark.parametrize(
    "name", ["hidden 96", "ffn 96", "unary ffn 32", "interleave 16", "no interleave", "hybrid"]
)
def test_direct_construction_raises_for_what_does_not_fit(name: str) -> None:
    case, (recipe, options), reason, detail = DECLINED[name]
    with pytest.raises(ValueError, match=f"{re.escape(reason.value)}.*{detail}"):
        _construct(case, _recipe(recipe, **options))


def test_direct_construction_raises_for_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_grouped_mlp.op import fusion
    from te_grouped_mlp.op.te import adapter

    problem = adapter.problem_of(*step.make_model(SEVERAL), _recipe("DelayedScaling"))
    with pytest.raises(ValueError, match="recipe is DelayedScaling; allowed: mxfp8"):
        fusion.require_supported(problem)


def test_direct_construction_raises_when_the_switch_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.FUSED_SWITCH)
    with pytest.raises(RuntimeError, match=f"{environment.FUSED_SWITCH}=1"):
        _construct(SEVERAL)


def test_direct_construction_raises_for_another_activation() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    fc1, _, fc2 = step.make_model(SEVERAL)
    with pytest.raises(TypeError, match="activation is GELU; allowed: .*ScaledSwiGLU"):
        grouped_mlp.GroupedMLP_CuTeGEMMGLU(fc1=fc1, activation=te.ops.GELU(), fc2=fc2)
