# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a program changes between a forward and its backward does not change the backward.

Each change comes after a forward that an undisturbed step also makes. Then every gradient is that
step's, bit for bit, or the backward raises the error that the change has coming.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import environment, selection
from te_grouped_mlp.op.tensors import memory
from tests.op.backends.cudnn.simulated import simulation
from tests.support import step, values_backend
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch")

BASE = StepCase(splits=(128, 0, 128), hidden=64, ffn=64, bias=True, scale_bias=True, grad="fused")
LARGE = BASE.but(splits=(256, 0, 256))
CASES = {
    "mxfp8": BASE,
    "mxfp8-grad": BASE.but(grad="grad", activation="qgeglu"),
    "mxfp8-grouped": BASE.but(weight="grouped", activation="tanh_srelu"),
    "mxfp8-quantized": BASE.but(weight="quantized", activation="situ"),
    "mxfp8-delayed": BASE.but(delay=True, activation="srelu", recompute=True),
    "plain": BASE.but(mxfp8=False),
    "plain-grad": BASE.but(mxfp8=False, grad="grad", activation="srelu"),
    "plain-grouped": BASE.but(mxfp8=False, weight="grouped", activation="qgeglu"),
    "plain-quantized": BASE.but(mxfp8=False, weight="quantized", activation="tanh_srelu"),
    "plain-delayed": BASE.but(mxfp8=False, delay=True, activation="situ"),
}
IN_PLACE = "modified by an inplace operation"
OTHER_KIND = r"FC1 weight0 is torch\.float32 of shape .* now; expected torch\.bfloat16"


class Program:
    """A step between its two passes, whose parts a change may reach."""

    def __init__(self, case: StepCase) -> None:
        self.case = case
        self.model, self.inputs = step.make_model(case), step.make_inputs(case)
        self.fc1, self.activation, self.fc2 = self.model
        self.parameters = dict(self.model.named_parameters())
        for name, parameter in self.parameters.items():
            # Adding to it differs from writing it.
            if case.grad != "grad" and "weight" in name:
                parameter.main_grad.fill_(3.0)
        self.main_grads = {
            name: getattr(parameter, "main_grad", None)
            for name, parameter in self.parameters.items()
        }
        self.y = step.forward(self.model, case, self.inputs)
        assert type(step.fused_op(self.model)).__name__.startswith("GroupedMLP_CuTeGEMM")

    @property
    def linears(self) -> tuple[Any, Any]:
        return self.fc1, self.fc2

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [value for name, value in self.model.named_parameters() if "weight" in name]

    def finish(self) -> dict[str, torch.Tensor | None]:
        """Run the backward; the gradients of everything that the forward used, by name."""
        self.y.backward(self.inputs.dy)
        for op in self.linears if self.case.delay else ():
            op.backward_dw()
        found = {"y": self.y.detach(), "dx": self.inputs.x.grad, "dprob": self.inputs.prob.grad}
        for name, parameter in self.parameters.items():
            main_grad = self.main_grads[name]
            # PyTorch gives nothing to a parameter that needs no gradient any more.
            if main_grad is not None or parameter.requires_grad:
                found[name] = parameter.grad if main_grad is None else main_grad
            if main_grad is not None:
                found[f"{name} added"] = torch.tensor(parameter.grad_added_to_main_grad)
        return found

    def other_step(self, recipe: Any, *, backward: bool = False) -> None:
        """Run the same layer as another part of a program does.

        It names no backend, so that what none of ours computes runs; but a step without recipe
        again runs only by name on a CPU.
        """
        import transformer_engine.pytorch as te

        again = recipe is None and not self.case.mxfp8
        backend = environment.current_switches().backend if again else selection.AUTO
        switches = dataclasses.replace(environment.current_switches(), backend=backend, fused=True)
        inputs = step.make_inputs(self.case.but(seed=5))
        extra = [inputs.split_sizes, inputs.prob, inputs.split_sizes, inputs.prob]
        with (
            warnings.catch_warnings(),
            environment.override(switches=switches),
            te.autocast(enabled=recipe is not None, recipe=recipe),
            torch.set_grad_enabled(backward),
        ):
            # TE says so when a recipe comes back to quantized parameters, and of unfused ops.
            warnings.filterwarnings("ignore", "Quantizer is being updated", UserWarning)
            warnings.filterwarnings("ignore", "Scaled.*activation_recompute_in_mlp", UserWarning)
            y = self.model(inputs.x, *extra)
        if backward:
            torch.autograd.grad(y, [inputs.x, inputs.prob], inputs.dy)


@contextlib.contextmanager
def running_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let steps run on a backend, whose fresh buffers hold NaN."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(memory.poisoned(0xFF))
        stack.enter_context(step.switches(NVTE_GROUPED_MLP_BACKEND=backend))
        if backend == "cudnn":
            stack.enter_context(simulation(monkeypatch))
        elif backend == "cutedsl":
            stack.enter_context(values_backend.in_use(monkeypatch))
        yield


def mxfp8(hybrid: bool = False) -> Any:
    from transformer_engine.common.recipe import Format, MXFP8BlockScaling

    return MXFP8BlockScaling(fp8_format=Format.HYBRID if hybrid else Format.E4M3)


# The changes -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that a program does between the passes.

    Attributes:
        apply: Does it.
        error: The pattern of the error that the backward of a case has coming; None for none.
        concerns: Whether a case has what is changed.
    """

    apply: Callable[[Program], Any]
    error: Callable[[StepCase], str | None] = lambda _case: None
    concerns: Callable[[StepCase], bool] = lambda _case: True


def runs(*recipes: str, backward: bool = False) -> Change:
    """Steps of the layer under other recipes: "none", "E4M3" or "HYBRID"."""
    of_name = {"none": lambda: None, "E4M3": mxfp8, "HYBRID": lambda: mxfp8(True)}

    def apply(program: Program) -> None:
        for name in recipes:
            program.other_step(of_name[name](), backward=backward)

    # Without recipe, TE's unfused ops take no grouped weight on a CPU.
    return Change(apply, concerns=lambda case: case.weight != "grouped")


def nested(program: Program) -> None:
    import transformer_engine.pytorch as te

    with te.autocast(enabled=True, recipe=mxfp8()):
        program.other_step(None)


def of_quantizers(change: Callable[[Any], Any]) -> Change:
    def apply(program: Program) -> None:
        for op in program.linears:
            for quantizer in itertools.chain(*(op._quantizers or {}).values()):
                change(quantizer)

    return Change(apply, concerns=lambda case: case.mxfp8)


def to_e5m2(quantizer: Any) -> None:
    quantizer.dtype = type(quantizer.dtype).kFloat8E5M2


def other_usages(quantizer: Any) -> None:
    quantizer.set_usage(rowwise=False, columnwise=False)
    quantizer.optimize_for_gemm = not quantizer.optimize_for_gemm
    quantizer.internal = not quantizer.internal


def without_quantizers(program: Program) -> None:
    for op in program.linears:
        op.reset_recipe_state(recipe=None)


def switch(name: str, value: str) -> Change:
    # `outcome` puts it back.
    return Change(lambda _program: environment.os.environ.update({name: value}))


@functools.cache
def activation_of(case: StepCase) -> frozenset[str]:
    """The attributes of the case's activation."""
    return frozenset(dir(step.make_activation(case)))


def on_activation(**values: Any) -> Change:
    def apply(program: Program) -> None:
        for name, value in values.items():
            *parents, last = name.split("__")
            owner = functools.reduce(getattr, parents, program.activation)
            assert hasattr(owner, last)
            setattr(owner, last, value)

    return Change(
        apply,
        concerns=lambda case: all(name.split("__")[0] in activation_of(case) for name in values),
    )


def on_linears(change: Callable[[Any], Any], **options: Any) -> Change:
    def apply(program: Program) -> None:
        for op in program.linears:
            change(op)

    return Change(apply, **options)


@torch.no_grad()
def written(program: Program) -> None:
    for weight in program.weights:
        weight.mul_(2)


@torch.no_grad()
def written_inside(program: Program) -> None:
    for weight in program.weights:
        weight.rowwise_data.mul_(2)


def saves_memory_of_weights(case: StepCase) -> str | None:
    """A step saves plain weights, and quantized ones where it multiplies quantized operands."""
    return IN_PLACE if (case.weight == "quantized") is case.mxfp8 else None


@torch.no_grad()
def biases_written(program: Program) -> None:
    for name, value in program.model.named_parameters():
        if "bias" in name:
            getattr(value, "rowwise_data", value).mul_(2)


def loaded(program: Program) -> None:
    state = program.model.state_dict()
    for name in program.parameters:
        state[name] = state[name] * 2
    program.model.load_state_dict(state)


def assigned(program: Program) -> None:
    state = {
        name: value.detach().clone()
        for name, value in program.model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    program.model.load_state_dict(state, assign=True)


def gathered_anew(program: Program) -> None:
    """As a framework that shards parameters does; the old memory is gone."""
    for weight in program.weights:
        old = weight.data
        weight.data = old.clone()
        old.fill_(float("nan"))


def repointed(program: Program) -> None:
    for weight in program.weights:
        weight.data = weight.data * 2


def replaced(program: Program) -> None:
    for op in program.linears:
        for name, old in list(op.named_parameters()):
            values = old.detach()
            if hasattr(values, "dequantize"):
                values = values.dequantize()
            del op._parameters[name]
            op.register_parameter(name, torch.nn.Parameter(values * -2))


def parameters_flag(name: str, value: Any) -> Change:
    def apply(program: Program) -> None:
        for parameter in program.model.parameters():
            setattr(parameter, name, value)

    return Change(apply)


def main_grads_gone(program: Program) -> None:
    for weight in program.weights:
        weight.main_grad = None


def main_grads_come(program: Program) -> None:
    for weight in program.weights:
        weight.main_grad = torch.zeros(tuple(weight.shape))
        weight.grad_added_to_main_grad = False


def to_float(program: Program) -> None:
    program.model.float()


def has_main_grad(case: StepCase) -> bool:
    return case.grad != "grad"


def is_plain(case: StepCase) -> bool:
    return case.weight == "discrete"


def float_error(case: StepCase) -> str | None:
    if case.weight == "quantized":
        # PyTorch exchanges the parameters themselves; whoever looks first says so.
        return f"poisoned by swap_tensors|{IN_PLACE}|main_grad is missing"
    return OTHER_KIND if not case.mxfp8 and is_plain(case) else None


def half_of(program: Program, name: str) -> None:
    with torch.no_grad():
        getattr(program.inputs, name).mul_(0.5)


CHANGES: dict[str, Change] = {
    # Other passes of the same layer.
    "a teacher": runs("none"),
    "a teacher, nested": Change(nested, concerns=lambda case: case.weight != "grouped"),
    "a step without recipe": dataclasses.replace(
        runs("none", backward=True),
        concerns=lambda case: case.weight != "grouped" and case.grad == "grad",
    ),
    "E4M3": runs("E4M3"),
    "HYBRID": runs("HYBRID"),
    "HYBRID after none": runs("none", "HYBRID"),
    "E4M3 after HYBRID": runs("none", "HYBRID", "none", "E4M3"),
    # Quantizers.
    "no quantizers": Change(without_quantizers),
    "quantizers to E5M2": of_quantizers(to_e5m2),
    "usages of quantizers": of_quantizers(other_usages),
    # Switches.
    "unfused": switch(environment.FUSED_SWITCH, "0"),
    "another backend": switch(environment.BACKEND_SWITCH, "upstream"),
    "no fork": switch(environment.FORK_SWITCH, "0"),
    "checks": switch(environment.CHECK_SWITCH, "1"),
    "full rows": switch(environment.FULL_ROWS_SWITCH, "1"),
    "weights reused": switch(environment.REUSE_WEIGHTS_SWITCH, "1"),
    # The activation.
    "interleave 16": on_activation(glu_interleave_size=16),
    "no interleave": on_activation(glu_interleave_size=None),
    "limit": on_activation(_clamped__limit=0.5),
    "alpha": on_activation(_clamped__alpha=0.25),
    "linear offset": on_activation(_clamped__glu_linear_offset=-2.0),
    "betas": on_activation(beta1=1.0, beta2=1.0),
    "clamp scale": on_activation(tanh_clamp_scale=0.25),
    "kept": on_activation(activation_recompute_in_mlp=False),
    "recomputed": on_activation(activation_recompute_in_mlp=True),
    "unit scale": Change(
        lambda program: setattr(program.activation, "_grouped_mlp_unit_activation_scale", True)
    ),
    # Weights and biases.
    "weights written": Change(written, saves_memory_of_weights),
    "weights written inside": Change(
        written_inside, saves_memory_of_weights, lambda case: case.weight == "grouped"
    ),
    "biases written": Change(biases_written),
    "loaded": Change(loaded, saves_memory_of_weights),
    "loaded by assignment": Change(assigned, concerns=is_plain),
    "weights gathered anew": Change(gathered_anew, concerns=is_plain),
    # Without a recipe the backward follows: the test after next.
    "weights repointed": Change(
        repointed, concerns=lambda case: case.weight != "quantized" and case.mxfp8
    ),
    "weights replaced": Change(replaced, concerns=lambda case: not case.delay),
    "float": Change(to_float, float_error),
    # Flags of parameters and ops.
    "frozen": Change(lambda program: program.model.requires_grad_(False)),
    "main_grads gone": Change(
        main_grads_gone,
        lambda _case: r"FC1 weight0?\.main_grad is missing|FC1 weight\.main_grad is missing",
        has_main_grad,
    ),
    "main_grads come": Change(main_grads_come, concerns=lambda case: case.grad == "grad"),
    "accumulation off": on_linears(
        lambda op: setattr(op, "_accumulate_into_main_grad", False),
        concerns=lambda case: has_main_grad(case) and not case.delay,
    ),
    "delay off": on_linears(
        lambda op: op.wgrad_store.disable_delay_wgrad_compute(), concerns=lambda case: case.delay
    ),
    "delay on": on_linears(
        lambda op: op.wgrad_store.enable_delay_wgrad_compute(),
        concerns=lambda case: not case.delay,
    ),
    # Inputs.
    "x written": Change(
        lambda program: half_of(program, "x"), lambda case: None if case.mxfp8 else IN_PLACE
    ),
    "probabilities written": Change(lambda program: half_of(program, "prob"), lambda _: IN_PLACE),
    "evaluation": Change(lambda program: program.model.eval()),
}
SWITCHES = (
    environment.FUSED_SWITCH,
    environment.BACKEND_SWITCH,
    environment.FORK_SWITCH,
    environment.CHECK_SWITCH,
    environment.FULL_ROWS_SWITCH,
    environment.REUSE_WEIGHTS_SWITCH,
)
OF_WEIGHTS = ("weights written", "weights written inside", "loaded")
PASSES = ("a teacher", "HYBRID after none", "quantizers to E5M2")


@functools.cache
def undisturbed(case: StepCase, _backend: str) -> dict[str, torch.Tensor | None]:
    return Program(case).finish()


def outcome(case: StepCase, backend: str, *names: str) -> str | None:
    """Run a step with changes: None if all its bits are as they were, else what became of it."""
    expected, refused = undisturbed(case, backend), (RuntimeError, ValueError, AttributeError)
    program = Program(case)
    with step.switches(**{name: environment.os.environ.get(name) for name in SWITCHES}):
        for name in names:
            # What comes after another change may be refused, by TE as well.
            with contextlib.suppress(*refused if len(names) > 1 else ()):
                CHANGES[name].apply(program)
        try:
            found = program.finish()
        except (RuntimeError, ValueError) as error:
            return str(error)
    different = [name for name in found if not step.same_bits(found[name], expected[name])]
    return f"differ: {different}" if different else None


def changes_of(case: StepCase) -> list[str]:
    return [name for name, change in CHANGES.items() if change.concerns(case)]


def due_of(name: str, case: StepCase, backend: str) -> str | None:
    """The error that a change has coming; values are new memory, also of quantized weights."""
    error = CHANGES[name].error(case)
    return None if backend == "cutedsl" and error == IN_PLACE and name in OF_WEIGHTS else error


def assert_each_alone(case: StepCase, backend: str) -> None:
    wrong = {}
    for name in changes_of(case):
        found, due = outcome(case, backend, name), due_of(name, case, backend)
        if found is not None if due is None else not re.search(due, str(found)):
            wrong[name] = f"due: {due}; found: {found}"
    assert wrong == {}


def assert_pairs(case: StepCase, backend: str, chosen: Iterable[str]) -> None:
    """Some changes before and after each other one; one may undo the other's error."""
    wrong, every = {}, changes_of(case)
    for one, other in itertools.product(set(chosen).intersection(every), every):
        due = [error for name in (one, other) if (error := due_of(name, case, backend)) is not None]
        for pair in ((one, other), (other, one)):
            found = outcome(case, backend, *pair)
            if found is not None and not any(re.search(each, found) for each in due):
                wrong[pair] = f"due: {due}; found: {found}"
    assert wrong == {}


@pytest.mark.parametrize("name", CASES)
def test_one_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on("reference", monkeypatch):
        assert_each_alone(CASES[name], "reference")


@pytest.mark.parametrize("backend", ["cudnn", "cutedsl"])
def test_one_change_on_the_host_side_of(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on(backend, monkeypatch):
        assert_each_alone(LARGE, backend)


def test_another_pass_and_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on("reference", monkeypatch):
        assert_pairs(CASES["mxfp8"], "reference", ["HYBRID after none"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", "cudnn", "cutedsl"])
def test_two_changes(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    if backend != "reference":
        if not case.mxfp8:
            pytest.skip("the stand-in for this backend computes MXFP8 alone")
        case = case.but(splits=LARGE.splits)
    with running_on(backend, monkeypatch):
        assert_each_alone(case, backend)
        every = backend == "reference" and name in ("mxfp8", "plain-grouped")
        assert_pairs(case, backend, CHANGES if every else PASSES)


def test_nothing_is_written_when_a_main_grad_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """FC1's is missed before FC2's is added to."""
    with running_on("reference", monkeypatch):
        program = Program(BASE)
        program.fc1.weight2.main_grad = None
        with pytest.raises(RuntimeError, match="FC1 weight2.main_grad is missing"):
            program.finish()
    for name in ("2.weight0", "2.weight1", "2.weight2"):
        assert bool((program.main_grads[name] == 3.0).all()), name


def test_flags_beside_main_grad_are_read_by_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As upstream reads them: Megatron sets them for a micro-batch."""
    with running_on("reference", monkeypatch):
        expected = undisturbed(BASE, "reference")
        program = Program(BASE)
        for weight in program.weights:
            weight.overwrite_main_grad = True
            weight.zero_out_wgrad = True
        found = program.finish()
    assert all(weight.grad_added_to_main_grad for weight in program.weights)
    for name in ("0.weight0", "2.weight2"):
        assert torch.allclose(found[name] + 3.0, expected[name], atol=1e-5)
        assert not program.parameters[name].grad.any()


def test_memory_of_plain_weights_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the place of a parameter's memory is what PyTorch's own backward would read.

    Twice the weights in the backward alone: every factor is a power of two, so bits are equal.
    """
    with running_on("reference", monkeypatch):
        case = CASES["plain-grad"].but(bias=False, scale_bias=False)
        expected = undisturbed(case, "reference")
        program = Program(case)
        repointed(program)
        found = program.finish()
    factors = {"dx": 4, "dprob": 2, **{f"0.weight{index}": 2 for index in range(3)}}
    for name, value in expected.items():
        assert torch.equal(found[name], value * factors.get(name, 1)), name


@pytest.mark.parametrize("kind", ["shape", "dtype"])
@pytest.mark.parametrize("index", [0, 2])
def test_memory_of_another_kind_is_refused(
    kind: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any kernel reads past its end, or bytes of another dtype."""
    with running_on("reference", monkeypatch):
        program = Program(CASES["plain"])
        weight = program.model[index].weight1
        weight.data = weight.data[:32].clone() if kind == "shape" else weight.data.float()
        label = "FC1" if index == 0 else "FC2"
        with pytest.raises(RuntimeError, match=f"{label} weight1 is .* now; expected torch.bfl"):
            program.finish()
    assert all(
        bool((grad == 3.0).all()) for grad in program.main_grads.values() if grad is not None
    )
