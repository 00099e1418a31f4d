# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Drives `TEGroupedMLP._fused_forward` of an experts module with a stand-in for TE's fused op.

Used on models in the test process, and as a program on the published file in a process of its own
(`python drive_megatron.py TREE`), where it prints a JSON object. All numbers are small dyadic
fractions, so every sum is exact and every comparison is for equality.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROWS, FEATURES = 6, 8
FUSED_MODULE = "transformer_engine.pytorch.ops.fused.grouped_mlp"


class StandInOps(torch.nn.Module):
    """y = x * w * p per row, as the fused op would: p in the activation, rounded to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.w = torch.arange(1, FEATURES + 1).to(torch.bfloat16) / 4

    def forward(self, x: torch.Tensor, *extra: torch.Tensor, **options: Any) -> torch.Tensor:
        self.calls.append(((x, *extra), options))
        return x * self.w * extra[1].to(x.dtype).unsqueeze(-1)


@contextlib.contextmanager
def op_declares(value: bool | None) -> Iterator[None]:
    """Let the module of TE's fused op declare DETERMINISTIC_DPROB; None takes the module away."""
    before = sys.modules.get(FUSED_MODULE)
    module = ModuleType(FUSED_MODULE)
    if value is None:
        sys.modules.pop(FUSED_MODULE, None)
    else:
        module.DETERMINISTIC_DPROB = value  # type: ignore[attr-defined]
        sys.modules[FUSED_MODULE] = module
    try:
        yield
    finally:
        sys.modules.pop(FUSED_MODULE, None)
        if before is not None:
            sys.modules[FUSED_MODULE] = before


class Experts:
    """One experts module over the stand-in, without Megatron's constructor."""

    def __init__(self, experts: ModuleType, bias: bool = False, **config: Any) -> None:
        fields = {
            "fp8": None,
            "fp4": None,
            "moe_paged_stash": False,
            # The router has padded, so that the tokens reach the op as they come.
            "moe_router_padding_for_quantization": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_flex_dispatcher_backend": None,
            "moe_use_grouped_tensor": True,
            "delay_offload_until_cuda_graph": False,
            "deterministic_mode": False,
        }
        cls = experts.TEGroupedMLP
        self.module = cls.__new__(cls)
        torch.nn.Module.__init__(self.module)
        self.module.config = SimpleNamespace(**{**fields, **config})
        self.ops = StandInOps()
        self.module._fused_ops = (self.ops,)
        self.module._use_grouped_tensor = True
        self.module.linear_fc2 = SimpleNamespace(use_bias=bias)
        generator = torch.Generator().manual_seed(0)
        self.x = _fractions((ROWS, FEATURES), 127, generator).to(torch.bfloat16).requires_grad_()
        # More bits than bfloat16 has, as a router's float32 probabilities do.
        self.probs = _fractions((ROWS,), 4095, generator).abs().requires_grad_()
        self.tokens = torch.tensor([2, ROWS - 2])
        self.dy = _fractions((ROWS, FEATURES), 127, generator).to(torch.bfloat16)

    def run(self, output_buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Call the path under test."""
        buffers = {} if output_buffer is None else {"output_buffer": output_buffer}
        return self.module._fused_forward(self.x, self.tokens, self.probs, **buffers)


def zero_copy(experts: ModuleType) -> bool:
    """Whether the method takes zero-copy buffers, as Megatron-Core does from 0.19 on."""
    return "output_buffer" in inspect.signature(experts.TEGroupedMLP._fused_forward).parameters


def scales_fc2_bias(experts: ModuleType) -> bool:
    """Whether the probabilities go to FC2 too if it has a bias; from 0.19 on."""
    return "fc2_extra_inputs" in experts.TEGroupedMLP._fused_forward.__code__.co_varnames


def _fractions(shape: tuple[int, ...], limit: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-limit, limit + 1, shape, generator=generator) / float(limit + 1)


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).double()


def _formula(case: Experts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx and dprob of unit probabilities and a scaled output, in float64 with bf16 roundings."""
    x, w = case.x.detach().double(), case.ops.w.double()
    p, dy = case.probs.detach().double()[:, None], case.dy.double()
    unit = _bf16(x * w)
    return _bf16(unit * p), _bf16(_bf16(dy * p) * w), (dy * unit).sum(1)


def _step(case: Experts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case.x.grad = case.probs.grad = None
    y = case.run()
    y.backward(case.dy)
    assert case.x.grad is not None
    # A gradient that never arrives is a fault, not an error of the driver.
    dprob = torch.full_like(case.probs, torch.nan) if case.probs.grad is None else case.probs.grad
    return y.detach(), case.x.grad, dprob


def rewrite_faults(experts: ModuleType) -> list[str]:
    """What is not as promised in deterministic mode."""
    faults = []
    case = Experts(experts, deterministic_mode=True, moe_dispatch_fwd_dtype="mxfp8")
    results = [_step(case) for _ in range(2)]
    seen = case.ops.calls[0][0][2]
    if seen is case.probs or not torch.equal(seen, torch.ones(ROWS)) or seen.requires_grad:
        faults.append("the op did not get unit probabilities")
    for name, found, expected in zip(("y", "dx", "dprob"), results[0], _formula(case), strict=True):
        if not torch.equal(found.double(), expected):
            faults.append(f"{name} differs from the formula")
    if results[0][0].dtype != torch.bfloat16:
        faults.append("y has another dtype")
    for first, second in zip(*results, strict=True):
        if not torch.equal(first.view(torch.int16), second.view(torch.int16)):
            faults.append("a second run gives other bytes")
    return faults + _guard_faults(experts)


def _guard_faults(experts: ModuleType) -> list[str]:
    faults = []
    buffer = torch.zeros(ROWS, FEATURES, dtype=torch.bfloat16)
    guards: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("add_bias_linear", {"bias": True}, {}),
        ("moe_combine_bwd_dtype", {"moe_combine_bwd_dtype": "mxfp8"}, {}),
    ]
    if zero_copy(experts):
        guards.append(("moe_ncclep_zero_copy", {}, {"output_buffer": buffer}))
    for setting, options, arguments in guards:
        case = Experts(experts, deterministic_mode=True, **options)
        try:
            case.run(**arguments)
            faults.append(f"{setting} is not refused")
        except RuntimeError as error:
            if setting not in str(error) or "deterministic_mode" not in str(error):
                faults.append(f"the refusal does not name {setting}: {error}")
        if case.ops.calls:
            faults.append(f"the op ran before {setting} was refused")
    return faults


def untouched_faults(experts: ModuleType) -> list[str]:
    """What changes without deterministic_mode, with and without torch's own flag."""
    faults = []
    for flag in (False, True):
        torch.use_deterministic_algorithms(flag)
        try:
            faults += [f"{fault} with torch's flag {flag}" for fault in _handed_on(experts, {})]
        finally:
            torch.use_deterministic_algorithms(False)
    return faults


def skip_faults(experts: ModuleType) -> list[str]:
    """What is still rewritten or refused in deterministic mode although the op is active."""
    try:
        return _handed_on(experts, {"deterministic_mode": True})
    except RuntimeError as error:
        return [str(error)]


def _handed_on(experts: ModuleType, config: dict[str, Any]) -> list[str]:
    """Everything must reach the op as the very object that came in, and the output come back."""
    faults = []
    buffer = torch.zeros(ROWS, FEATURES, dtype=torch.bfloat16)
    case = Experts(experts, bias=True, moe_combine_bwd_dtype="mxfp8", **config)
    produced: list[torch.Tensor] = []
    case.ops.register_forward_hook(lambda _m, _a, output: produced.append(output))
    y = case.run(output_buffer=buffer if zero_copy(experts) else None)
    (x, tokens, probs, *fc2), options = case.ops.calls[0]
    if x is not case.x or tokens is not case.tokens or probs is not case.probs:
        faults.append("an input was replaced")
    expected = [case.tokens, case.probs][: 1 + scales_fc2_bias(experts)]
    if len(fc2) != len(expected) or any(a is not b for a, b in zip(fc2, expected, strict=True)):
        faults.append("the FC2 splits or its bias scale were replaced")
    handed = next(iter(options.get("op_kwargs", {}).get(-1, {"": None}).values()))
    if handed is not (buffer if zero_copy(experts) else None):
        faults.append("the zero-copy buffer was replaced")
    if y is not produced[0]:
        faults.append("the output was replaced")
    return faults


def _import_published(tree: str) -> ModuleType:
    """Import the published file without TE, Triton or a GPU."""
    import importlib

    # Before there is a Triton to be seen, whose insides the compiler would look for.
    for name in ("torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)
    sys.path.insert(0, tree)
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    triton = _Anything("triton")
    triton.language = _Anything("triton.language")  # type: ignore[attr-defined]
    triton.__version__ = "3.4.0"  # type: ignore[attr-defined]
    sys.modules.update({"triton": triton, "triton.language": triton.language})
    experts = importlib.import_module("megatron.core.transformer.moe.experts")
    experts.OUTPUT_BUFFER_KEY = "output"
    experts.GRAD_INPUT_BUFFER_KEY = "grad_input"
    return experts


class _Anything(ModuleType):
    """Stands for a package whose decorators are applied at import and never called."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self


def main(tree: str) -> None:
    """Drive the file of a tree and print what was found."""
    experts = _import_published(tree)
    report = {"file": experts.__file__}
    for declared in (None, False, True):
        with op_declares(declared):
            report[str(declared)] = {
                "rewrite": rewrite_faults(experts),
                "skip": skip_faults(experts),
                "untouched": untouched_faults(experts),
            }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
