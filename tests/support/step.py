# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One training step of a grouped MLP: a value, run by TE and recomputed in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch

ACTIVATIONS = ("swiglu", "qgeglu", "situ", "srelu", "tanh_srelu")
GATED = ("swiglu", "qgeglu", "situ")
DEFAULTS: dict[str, dict[str, float]] = {
    "swiglu": {},
    "qgeglu": {"limit": 1.5, "alpha": 1.3, "glu_linear_offset": 0.5},
    "situ": {"beta1": 3.0, "beta2": 5.0},
    "srelu": {},
    "tanh_srelu": {"tanh_clamp_scale": 2.0},
}
"""Parameters of TE's activation ops, away from TE's defaults so that ignoring one shows."""

# Of MXFP8 operands against the unquantized ones, per expert and 16-column stripe: three products
# in a row, each with two operands of at most 2^-4 relative rounding; 5 to 7 % are usual.
MXFP8_BOUND = 0.12
# The clamps' derivative jumps, so a rounded pre-activation near a clamp gets the other side's.
CLAMPED_BOUND = 0.25
# Sums over rows cancel, so their stripes are smaller than what went into them.
SUM_FACTOR = 2.0


@dataclass(frozen=True)
class Linear:
    """The choices that both linears have, for one of them; `StepCase` says what they mean."""

    bias: bool
    weight: str
    bias_weight: str
    grad: str
    delay: bool
    frozen: bool

    @property
    def has_main_grad(self) -> bool:
        return self.grad != "grad"

    @property
    def accumulates(self) -> bool:
        """Whether a weight gradient is added to what `main_grad` holds."""
        return self.grad in ("main_grad", "fused")


@dataclass(frozen=True)
class StepCase:
    """A step; every field is a choice that a user of the op has.

    `bias`, `weight`, `bias_weight`, `grad` and `delay` are one choice for both linears, or a pair:
    FC1's and FC2's. `linears` has them one by one.

    Attributes:
        params: Changes to the activation's `DEFAULTS`, as (name, value) pairs.
        weight: "discrete", "grouped" (one parameter) or "quantized" (MXFP8 parameters).
        bias_weight: "discrete" or "grouped" biases; None to follow `weight`.
        round_prob: Use probabilities that bf16 holds, for an implementation that rounds them.
        device: Where the parameters are made; None for TE's choice.
        grad: "grad", "main_grad", "fused" (main_grad with Megatron's flags) or "overwrite". A
            main_grad starts at `main_grad_start`.
        frozen: Of "fc1", "fc2", "prob", "x": what needs no gradient.
        fill: What the rows past the valid ones of x, dy and the probabilities hold.
    """

    activation: str = "swiglu"
    splits: tuple[int, ...] = (256,)
    buffer_rows: int | None = None
    hidden: int = 256
    ffn: int = 128
    fill: float = 0.0
    bias: bool | tuple[bool, bool] = False
    scale_bias: bool = False
    params: tuple[tuple[str, float], ...] = ()
    weight: str | tuple[str, str] = "discrete"
    bias_weight: str | tuple[str | None, str | None] | None = None
    grad: str | tuple[str, str] = "grad"
    frozen: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.bfloat16
    prob_dtype: torch.dtype = torch.float32
    round_prob: bool = False
    split_dtype: torch.dtype = torch.int64
    delay: bool | tuple[bool, bool] = False
    recompute: bool = False
    unit_scale: bool = False
    interleave: int | None = 32
    mxfp8: bool = True
    device: str | None = None
    seed: int = 0

    @property
    def rows(self) -> int:
        return sum(self.splits) if self.buffer_rows is None else self.buffer_rows

    @property
    def live(self) -> int:
        return sum(self.splits)

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def wide(self) -> int:
        """Output features of FC1."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def parameters(self) -> dict[str, float]:
        """The activation's parameters by TE's names."""
        return {**DEFAULTS[self.activation], **dict(self.params)}

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """The choices of FC1 and of FC2."""
        first, second = (self._linear(index) for index in (0, 1))
        return first, second

    def _linear(self, index: int) -> Linear:
        def own(choice: Any) -> Any:
            return choice[index] if isinstance(choice, tuple) else choice

        bias, weight = own(self.bias), own(self.weight)
        return Linear(
            bias=bias,
            weight=weight,
            bias_weight=own(self.bias_weight) or weight,
            grad=own(self.grad),
            delay=own(self.delay),
            frozen=("fc1", "fc2")[index] in self.frozen,
        )

    @property
    def scales_bias(self) -> bool:
        """Whether there is an FC2 bias that the probabilities scale."""
        return self.linears[1].bias and self.scale_bias

    def but(self, **changes: Any) -> StepCase:
        return dataclasses.replace(self, **changes)


@dataclass
class Inputs:
    """Tensors of a step: the valid rows do not depend on the buffer's length or fill."""

    x: torch.Tensor
    dy: torch.Tensor
    prob: torch.Tensor
    split_sizes: torch.Tensor


def make_inputs(case: StepCase) -> Inputs:
    """Draw the valid rows, and fill the rest."""
    generator = torch.Generator().manual_seed(case.seed + 1)

    def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
        live = torch.randn(case.live, width, generator=generator)
        out = torch.full((case.rows, width), case.fill)
        out[: case.live] = live
        return out.to(dtype)

    x = rows(case.hidden, case.dtype)
    dy = rows(case.hidden, case.dtype)
    prob = torch.full((case.rows,), case.fill)
    drawn = torch.rand(case.live, generator=generator) + 0.25
    prob[: case.live] = drawn.bfloat16().float() if case.round_prob else drawn
    if case.unit_scale:
        prob[: case.live] = 1.0
    if case.device not in (None, "meta"):
        x, dy, prob = (tensor.to(case.device) for tensor in (x, dy, prob))
    return Inputs(
        x=x.requires_grad_("x" not in case.frozen),
        dy=dy,
        prob=prob.to(case.prob_dtype).requires_grad_("prob" not in case.frozen),
        split_sizes=torch.tensor(case.splits, dtype=case.split_dtype, device=x.device),
    )


def make_activation(case: StepCase) -> Any:
    """Build TE's activation op."""
    import transformer_engine.pytorch as te

    if case.gated:
        names = {"swiglu": "ScaledSwiGLU", "qgeglu": "ScaledClampedQGeGLU", "situ": "ScaledSiTUGLU"}
        cls = getattr(te.ops, names[case.activation])
        return cls(glu_interleave_size=case.interleave, **case.parameters)
    cls = te.ops.ScaledSReLU if case.activation == "srelu" else te.ops.ScaledTanhSReLU
    return cls(activation_recompute_in_mlp=case.recompute, **case.parameters)


def make_model(case: StepCase) -> Any:
    """Build FC1, activation and FC2 with O(1) intermediates."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling

    torch.manual_seed(case.seed)
    groups = len(case.splits)

    def make(linear: Linear, *shape: int, **more: Any) -> Any:
        quantized = linear.weight == "quantized"
        with (
            warnings.catch_warnings(),
            te.quantized_model_init(enabled=quantized, recipe=MXFP8BlockScaling()),
        ):
            # TE says at each construction that grouped parameters are experimental.
            warnings.filterwarnings("ignore", "GroupedLinear is using single_grouped", UserWarning)
            return te.ops.GroupedLinear(
                groups,
                *shape,
                bias=linear.bias,
                dtype=case.dtype,
                device=case.device,
                accumulate_into_main_grad=linear.has_main_grad,
                single_grouped_weight=linear.weight == "grouped",
                single_grouped_bias=linear.bias_weight == "grouped" and linear.bias,
                delay_wgrad_compute=linear.delay,
                **more,
            )

    first, second = case.linears
    fc1 = make(first, case.hidden, case.wide)
    fc2 = make(second, case.ffn, case.hidden, scale_bias=case.scale_bias)
    activation = make_activation(case)
    if case.unit_scale:
        activation._grouped_mlp_unit_activation_scale = True
    for index, (op, linear) in enumerate(((fc1, first), (fc2, second))):
        if case.device != "meta":
            _initialise(op, case)
        for parameter in op.parameters():
            parameter.requires_grad_(not linear.frozen)
        if linear.has_main_grad:
            _attach_main_grads(op, linear, main_grad_start(case, index).to(case.device))
    return te.ops.Sequential(fc1, activation, fc2)


def _initialise(op: Any, case: StepCase) -> None:
    generator = torch.Generator().manual_seed(case.seed + 2 + op.in_features)
    shape = (op.num_groups, op.out_features, op.in_features)
    values = torch.randn(shape, generator=generator) / op.in_features**0.5
    values = values.to(case.dtype)
    bias = (torch.randn(op.num_groups, op.out_features, generator=generator) * 0.5).to(case.dtype)
    if case.device is not None:
        # Quantized parameters take their values where they lie.
        values, bias = values.to(case.device), bias.to(case.device)
    with torch.no_grad():
        for index in range(op.num_groups):
            if op.single_grouped_weight:
                op.weight.rowwise_data.view(shape)[index].copy_(values[index])
            else:
                getattr(op, f"weight{index}").copy_(values[index])
            if op.has_bias and op.single_grouped_bias:
                op.bias.rowwise_data.view(op.num_groups, -1)[index].copy_(bias[index])
            elif op.has_bias:
                getattr(op, f"bias{index}").copy_(bias[index])


def main_grad_start(case: StepCase, index: int) -> torch.Tensor:
    """Return what the main_grads of a linear hold before the first step: fp32 (G, out, in), of
    values that bf16 holds. Nowhere zero everywhere, so that to add is not to overwrite."""
    shape = (case.wide, case.hidden) if index == 0 else (case.hidden, case.ffn)
    generator = torch.Generator().manual_seed(case.seed + 1000 + index)
    return torch.randint(-128, 129, (len(case.splits), *shape), generator=generator) / 64


def _attach_main_grads(op: Any, linear: Linear, start: torch.Tensor) -> None:
    weights = [value for name, value in op.named_parameters() if name.startswith("weight")]
    parts = [start] if linear.weight == "grouped" else start.unbind(0)
    for parameter, content in zip(weights, parts, strict=True):
        parameter.main_grad = content.reshape(parameter.shape).clone()
        if linear.grad in ("fused", "overwrite"):
            parameter.grad_added_to_main_grad = False
        if linear.grad == "overwrite":
            parameter.overwrite_main_grad = True


def fused_op(model: Any) -> Any:
    """Return the first op of the forward plan of a model's first module group."""
    return model._module_groups[0]._forward_ops[0][0]


def forward(model: Any, case: StepCase, inputs: Inputs, op_kwargs: Any = None) -> torch.Tensor:
    """Run one forward; `op_kwargs` is what TE's Sequential takes by that name."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling

    extra = [inputs.split_sizes, inputs.prob, inputs.split_sizes]
    if case.scales_bias:
        extra.append(inputs.prob)
    with (
        warnings.catch_warnings(),
        te.autocast(enabled=case.mxfp8, recipe=MXFP8BlockScaling()),
    ):
        # TE says so at the first call with quantized parameters.
        warnings.filterwarnings("ignore", "Quantizer is being updated", UserWarning)
        return model(inputs.x, *extra, op_kwargs=op_kwargs)


def run_model(
    model: Any,
    case: StepCase,
    inputs: Inputs,
    *,
    backward: bool = True,
    dy: torch.Tensor | None = None,
    op_kwargs: Any = None,
) -> torch.Tensor:
    """Run one forward, and one backward with `dy` (or the inputs' one); returns the output."""
    y = forward(model, case, inputs, op_kwargs)
    if backward and y.requires_grad:
        y.backward(inputs.dy if dy is None else dy)
        run_delayed(model, case)
    return y


def run_delayed(model: Any, case: StepCase) -> None:
    """Compute the weight gradients that were put off."""
    for linear, op in zip(case.linears, (model[0], model[2]), strict=True):
        if linear.delay:
            op.backward_dw()


def run_step(case: StepCase, *, fused: str | None = "GroupedMLP_CuTeGEMM") -> dict[str, Any]:
    """Run one step and collect what it returns, by name.

    Args:
        case: The step.
        fused: Prefix of the class that must stand in the forward plan; None for "unfused".
    """
    model, inputs = make_model(case), make_inputs(case)
    y = run_model(model, case, inputs)
    name = type(fused_op(model)).__name__
    assert name.startswith(fused) if fused else name == "GroupedLinear", name
    return collect(case, model, inputs, y)


def collect(case: StepCase, model: Any, inputs: Inputs, y: torch.Tensor) -> dict[str, Any]:
    """Return outputs and gradients by name; gradients that do not exist are None.

    A main_grad stands for the weight gradient that was put there; that of a frozen linear must hold
    what it started with.
    """
    found = {"y": y.detach(), "dx": inputs.x.grad, "dprob": inputs.prob.grad}
    for index, op in enumerate((model[0], model[2])):
        grad = _weight_gradient(op, case.linears[index])
        if case.linears[index].frozen and grad is not None:
            assert torch.equal(grad.cpu().flatten(), main_grad_start(case, index).flatten())
            grad = None
        found[f"dW{index + 1}"] = grad
        found[f"db{index + 1}"] = _bias_gradient(op)
    return found


def _weight_gradient(op: Any, linear: Linear) -> torch.Tensor | None:
    attribute = "main_grad" if linear.has_main_grad else "grad"
    if op.single_grouped_weight:
        return getattr(op.weight, attribute)
    grads = [getattr(getattr(op, f"weight{i}"), attribute) for i in range(op.num_groups)]
    return None if grads[0] is None else torch.stack(list(grads))


def _bias_gradient(op: Any) -> torch.Tensor | None:
    if not op.has_bias:
        return None
    if op.single_grouped_bias:
        return op.bias.grad
    grads = [getattr(op, f"bias{i}").grad for i in range(op.num_groups)]
    return None if grads[0] is None else torch.stack(list(grads))


def live(case: StepCase, found: dict[str, Any]) -> dict[str, Any]:
    """Cut the token tensors to their valid rows."""
    cut = dict(found)
    for name in ("y", "dx", "dprob"):
        if cut[name] is not None:
            cut[name] = cut[name][: case.live]
    return cut


def absent(case: StepCase) -> frozenset[str]:
    """Return the names of the results that a step must not have."""
    names = {name for name, label in (("dx", "x"), ("dprob", "prob")) if label in case.frozen}
    for index, linear in enumerate(case.linears, start=1):
        if linear.frozen:
            names.add(f"dW{index}")
        if linear.frozen or not linear.bias:
            names.add(f"db{index}")
    if case.unit_scale:
        names.add("dprob")
    return frozenset(names)


def assert_present(case: StepCase, found: dict[str, Any]) -> None:
    """Check that every gradient exists that is due, and no other."""
    missing = {name for name, value in found.items() if value is None}
    assert missing == absent(case), f"absent: {sorted(missing)}; due: {sorted(absent(case))}"


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two results bit by bit."""
    different = [name for name in expected if not same_bits(actual[name], expected[name])]
    assert not different, f"differ: {different}"


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(
        first.contiguous().view(-1).view(torch.uint8),
        second.contiguous().view(-1).view(torch.uint8),
    )


def plain(case: StepCase) -> StepCase:
    """Return the case with parameters as PyTorch has them, and gradients in `.grad` at once."""
    return case.but(weight="discrete", bias_weight=None, grad="grad", delay=False)


def reference(case: StepCase) -> dict[str, Any]:
    """Compute the step in float64 on the unquantized values, one expert after another."""
    model, inputs = make_model(plain(case)), make_inputs(case.but(buffer_rows=None))
    x = inputs.x.detach().double().requires_grad_()
    prob = inputs.prob.detach().double().requires_grad_()
    ops = (model[0], model[2])
    weights = [_leaves(op, "weight") for op in ops]
    biases = [_leaves(op, "bias") if op.has_bias else [] for op in ops]
    parts, start = [], 0
    for group, size in enumerate(case.splits):
        rows = slice(start, start + size)
        start += size
        h = x[rows] @ weights[0][group].T
        if biases[0]:
            h = h + biases[0][group]
        scale = 1.0 if case.unit_scale else prob[rows, None]
        out = (activate(case, h) * scale) @ weights[1][group].T
        if biases[1]:
            out = out + biases[1][group] * (prob[rows, None] if case.scale_bias else 1.0)
        parts.append(out)
    y = torch.cat(parts)
    y.backward(inputs.dy.double())
    found = {"y": y.detach(), "dx": x.grad, "dprob": prob.grad}
    for index, linear in enumerate(case.linears):
        grad = torch.stack([_grad(w) for w in weights[index]])
        start_at = main_grad_start(case, index) if linear.accumulates else 0
        found[f"dW{index + 1}"] = grad + start_at
        found[f"db{index + 1}"] = (
            torch.stack([_grad(b) for b in biases[index]]) if biases[index] else None
        )
    return found


def _leaves(op: Any, kind: str) -> list[torch.Tensor]:
    found = [getattr(op, f"{kind}{index}") for index in range(op.num_groups)]
    return [each.detach().double().requires_grad_() for each in found]


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def activate(case: StepCase, h: torch.Tensor) -> torch.Tensor:
    """Apply the unscaled activation, in the dtype of `h`."""
    if case.activation == "srelu":
        return h.relu().square()
    if case.activation == "tanh_srelu":
        scale = case.parameters["tanh_clamp_scale"]
        return (scale * torch.tanh(h.relu() / scale)).square()
    width = case.interleave or h.shape[1] // 2
    blocks = h.view(h.shape[0], h.shape[1] // (2 * width), 2, width)
    gate, linear = blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)
    if case.activation == "swiglu":
        return gate * gate.sigmoid() * linear
    p = case.parameters
    if case.activation == "qgeglu":
        gate, linear = gate.clamp(max=p["limit"]), linear.clamp(-p["limit"], p["limit"])
        return gate * (p["alpha"] * gate).sigmoid() * (linear + p["glu_linear_offset"])
    b1, b2 = p["beta1"], p["beta2"]
    return b1 * torch.tanh(gate / b1) * gate.sigmoid() * b2 * torch.tanh(linear / b2)


def assert_close(
    case: StepCase, found: dict[str, Any], wanted: dict[str, Any], bound: float | None = None
) -> None:
    """Compare with float64 per expert and per 16-column stripe, relative to the stripe's norm.

    The bound is that of MXFP8 operands against unquantized ones unless given.
    """
    cut = live(case, found)
    assert_present(case, found)
    for name, expected in wanted.items():
        actual, limit = cut[name], _format_bound(case, name) if bound is None else bound
        if actual is None or expected is None:
            continue
        assert actual.isfinite().all(), name
        for label, a, e in _stripes(case, name, actual.double(), expected.double()):
            error = (a - e).norm() / e.norm().clamp_min(1e-30)
            assert error <= limit, f"{name} {label}: relative error {error:.3f}"


def _format_bound(case: StepCase, name: str) -> float:
    clamped = case.activation == "qgeglu"
    if clamped and name == "db1":
        # Jumps add up over the rows while the sum cancels: nothing useful can be said.
        return float("inf")
    bound = CLAMPED_BOUND if clamped else MXFP8_BOUND
    return bound * SUM_FACTOR if name in ("db1", "db2") else bound


def _stripes(case: StepCase, name: str, actual: torch.Tensor, expected: torch.Tensor) -> Any:
    if name.startswith("d") and name[1] in "Wb":
        actual = actual.view(expected.shape)
        for group, size in enumerate(case.splits):
            if size == 0:
                assert torch.equal(actual[group], expected[group]), (
                    f"{name} of empty expert {group}"
                )
                continue
            for start in range(0, actual.shape[-1], 16):
                cut = (group, ..., slice(start, start + 16))
                yield f"expert {group} columns {start}", actual[cut], expected[cut]
        return
    begin = 0
    for group, size in enumerate(case.splits):
        a, e = actual[begin : begin + size], expected[begin : begin + size]
        begin += size
        if size == 0:
            continue
        if a.dim() == 1:
            yield f"expert {group}", a, e
            continue
        for start in range(0, a.shape[1], 16):
            yield (
                f"expert {group} columns {start}",
                a[:, start : start + 16],
                e[:, start : start + 16],
            )


@contextlib.contextmanager
def switches(**values: str | None) -> Any:
    """Set environment variables while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            _set(name, value)
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
