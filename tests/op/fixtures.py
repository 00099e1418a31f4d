# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What every correctness test of the op can use: the seven ways in which a step is tried.

1 poisoned memory, 2 padded against exact size, 3 experts without tokens, 4 references on O(1) data,
5 repeat and hash, 6 capture-and-replay order, 7 was it fused.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch

import te_grouped_mlp
from te_grouped_mlp.op import environment, packages
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.tensors import memory
from tests.csrc import naive_mxfp8
from tests.op.backends.reference import naive
from tests.support import step
from tests.support.step import StepCase

TAILS = (0.0, math.nan, math.inf, 3.0, 1e30)
"""What rows that belong to no expert may hold."""

Found = dict[str, Any]


# 1. Hostile memory ------------------------------------------------------------------------------


def assert_memory_invisible(case: StepCase) -> Found:
    """Run on buffers of 0xFF, of zeros, and of large finite values; return the result."""
    results = []
    for byte in (0xFF, 0x00, 0x7B):
        with memory.poisoned(byte):
            results.append(step.run_step(case))
    for other in results[1:]:
        step.assert_same(other, results[0])
    return results[0]


# 2. Padded against exact size -------------------------------------------------------------------


def exact_size(case: StepCase) -> Found:
    """Run the valid rows alone, laid out PACKED like a padded call."""
    with environment.override(treat_rows_as_full=False):
        return step.run_step(case.but(buffer_rows=None, fill=0.0))


def assert_padding_invisible(case: StepCase) -> Found:
    """Compare a padded step with the exact-size one bit by bit, and its tails with zero."""
    padded = step.run_step(case)
    step.assert_same(step.live(case, padded), exact_size(case))
    for name in ("y", "dx", "dprob"):
        if padded[name] is not None:
            assert not padded[name][case.live :].any(), f"tail of {name} is not zero"
    return padded


# 3. Experts without tokens ----------------------------------------------------------------------


def empty_expert_splits(groups: int, rows: int = 128) -> dict[str, tuple[int, ...]]:
    """Return splits by the place of the experts without tokens; the others have `rows` each."""
    full = [rows] * groups
    two = min(2, groups)
    places = {
        "first": [0],
        "middle": [groups // 2],
        "last": [groups - 1],
        "two in a row": list(range(groups // 2 - 1, groups // 2 - 1 + two)),
        "all but one": [index for index in range(groups) if index != groups // 2],
        "all": list(range(groups)),
    }
    found = {}
    for name, empty in places.items():
        splits = list(full)
        for index in empty:
            splits[index] = 0
        found[name] = tuple(splits)
    return found


def without_empty_experts(model: Any, case: StepCase) -> Found:
    """Run the experts that have tokens as a model of their own, with the weights of `model`.

    Returns:
        The result, its parameter gradients put back to the places of `case`.
    """
    kept = [index for index, size in enumerate(case.splits) if size]
    small = case.but(splits=tuple(case.splits[index] for index in kept))
    other = step.make_model(small)
    with torch.no_grad():
        for mine, theirs in ((other[0], model[0]), (other[2], model[2])):
            for position, index in enumerate(kept):
                for kind in ("weight", "bias") if mine.has_bias else ("weight",):
                    getattr(mine, f"{kind}{position}").copy_(getattr(theirs, f"{kind}{index}"))
    inputs = step.make_inputs(small)
    with environment.override(treat_rows_as_full=False):
        y = step.run_model(other, small, inputs)
    found = step.collect(small, other, inputs, y)
    for name in ("dW1", "dW2", "db1", "db2"):
        if found[name] is not None:
            whole = found[name].new_zeros((len(case.splits), *found[name].shape[1:]))
            whole[kept] = found[name]
            found[name] = whole
    return found


# 4. References on O(1) data ---------------------------------------------------------------------


def kind_of(case: StepCase) -> Activation:
    """Return the activation of a case."""
    return Activation(type(step.make_activation(case)).__name__)


def emulated(case: StepCase) -> Found:
    """Compute the step as docs/numerics.md and docs/padding.md say: valid rows and all gradients,
    in their dtypes, down to the last bit. Nothing of the package's arithmetic is used.

    Every intermediate is quantized by the written-out formula where the kernels quantize it.
    """
    model = step.make_model(step.plain(case).but(device="cpu"))
    inputs = step.make_inputs(case.but(buffer_rows=None, device="cpu"))
    dense = is_dense(case)
    numbers = naive.Numbers(case.mxfp8, case.dtype)
    kind = kind_of(case)
    params: dict[str, Any] = {p.name: case.parameters[p.keyword] for p in kind.row.parameters}
    params["interleave"] = case.interleave
    # As upstream, SReLU alone makes its output anew.
    recompute = case.recompute and case.activation == "srelu"
    parts: list[Found] = []
    start = 0
    for index, size in enumerate(case.splits):
        group = _group(case, model, inputs, index, slice(start, start + size))
        start += size
        found = naive.step(group, kind.value, params, numbers, dense=dense, recompute=recompute)
        dy, scale = group.dy.float(), None
        if case.scales_bias:
            found["dprob"] += naive_mxfp8.row_dots(dy, group.b2.float()[None], None)
            scale = group.prob.float()
        found["db2"] = naive_mxfp8.column_sums(dy, None, scale)[0]
        parts.append(found)
    return _joined(case, parts, dense)


def is_dense(case: StepCase) -> bool:
    """Whether a step is laid out as one dense matrix: one expert whose rows are known to be full,
    where every kernel can; without a frontend, those of the newest one."""
    current = environment.current()
    wrappers = current.wrappers
    if isinstance(wrappers, packages.Absent):
        wrappers = FRONTENDS["new"]
    launched = ("glu", "dglu", "quant") if case.gated else ("srelu", "dsrelu", "quant")
    return (
        len(case.splits) == 1
        and case.rows == case.live
        and current.treat_rows_as_full is not False
        and all(wrappers.get(name, frozenset()) >= _OFFSETS for name in launched)
    )


def _joined(case: StepCase, parts: list[Found], dense: bool) -> Found:
    """Put the experts' results together, in the dtypes and the places in which a step has them."""
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("y", "dx", "dprob")}
    joined["dprob"] = joined["dprob"].to(case.prob_dtype)
    for index, linear in enumerate(case.linears):
        contents = step.main_grad_start(case, index)
        if not linear.has_main_grad:
            contents = contents.to(case.dtype)
        grads = [
            naive.into_target(
                content, part[f"dw{index + 1}"], accumulate=linear.accumulates, dense=dense
            )
            for content, part in zip(contents, parts, strict=True)
        ]
        joined[f"dW{index + 1}"] = torch.stack(grads)
        joined[f"db{index + 1}"] = torch.stack([part[f"db{index + 1}"] for part in parts]).to(
            case.dtype
        )
    due = joined.keys() - step.absent(case)
    return {name: value if name in due else None for name, value in joined.items()}


def _group(case: StepCase, model: Any, inputs: Any, index: int, rows: slice) -> naive.Group:
    def parameter(op: Any, kind: str) -> torch.Tensor | None:
        there = kind == "weight" or op.has_bias
        return getattr(op, f"{kind}{index}").detach() if there else None

    prob = inputs.prob.detach()[rows]
    return naive.Group(
        x=inputs.x.detach()[rows],
        dy=inputs.dy[rows],
        prob=None if case.unit_scale else prob,
        w1=parameter(model[0], "weight"),
        w2=parameter(model[2], "weight"),
        b1=parameter(model[0], "bias"),
        b2=parameter(model[2], "bias"),
        bias_scale=prob if case.scale_bias else None,
    )


def assert_right(case: StepCase, found: Found) -> None:
    """Compare a step of the reference backend with its emulation bit by bit, and within the
    format's bound with float64 on the unquantized inputs."""
    assert_emulated(case, found)
    step.assert_close(case, found, step.reference(case))


def assert_emulated(case: StepCase, found: Found) -> None:
    """Compare a step of the reference backend with its emulation, bit by bit."""
    step.assert_present(case, found)
    cut = step.live(case, found)
    for name, expected in emulated(case).items():
        if expected is None:
            continue
        actual = cut[name]
        assert actual.dtype is expected.dtype, name
        actual = actual.view(expected.shape)
        bits = {2: torch.int16, 4: torch.int32}[expected.itemsize]
        other = actual.contiguous().view(bits) != expected.contiguous().view(bits)
        if other.any():
            at = tuple(other.nonzero()[0].tolist())
            raise AssertionError(
                f"{name} differs in {int(other.sum())} of {other.numel()} places; at {at} it is "
                f"{actual[at]}, not {expected[at]}"
            )


# 5. Repeat and hash -----------------------------------------------------------------------------


def digest(tensor: torch.Tensor | None) -> str:
    """Hash the bytes of a tensor."""
    if tensor is None:
        return ""
    host = tensor.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(host.data_ptr(), host.nbytes)).hexdigest()


def hashes(found: Found) -> dict[str, str]:
    """Hash every output and gradient."""
    return {name: digest(value) for name, value in found.items()}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch and our kernels use `count` threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_repeats(case: StepCase, runs: int = 2) -> None:
    """Run a step repeatedly under several thread counts; one hash for each output."""
    seen = []
    for count in (1, 2, 3):
        with threads(count):
            seen += [hashes(step.run_step(case)) for _ in range(runs)]
    assert all(each == seen[0] for each in seen), "outputs vary from run to run"


def assert_repeats_on_device(case: StepCase, runs: int = 12) -> None:
    """Run a step on a GPU while a second stream keeps some of its processors busy."""
    other, noise = torch.cuda.Stream(), torch.randn(512, 512, device="cuda")
    seen = []
    for run in range(runs):
        with torch.cuda.stream(other):
            for _ in range(run):
                noise = torch.tanh(noise @ noise)
        seen.append(hashes(step.run_step(case)))
        torch.cuda.synchronize()
    assert all(each == seen[0] for each in seen), "outputs vary from run to run"


# 6. Capture-and-replay order --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One step of a sequence that one model runs: what changes before it.

    Attributes:
        seed: Of the new data.
        splits: The new splits.
        shift: Added to every weight in place before the step.
    """

    seed: int
    splits: tuple[int, ...]
    shift: float = 0.0


def assert_order_invisible(case: StepCase, sequence: list[Replayed]) -> None:
    """Let one model, one input buffer and one splits tensor live through a sequence of steps, as a
    captured graph would, and compare each step with a model that runs it first."""
    static, buffers = step.make_model(case), step.make_inputs(case)
    total = 0.0
    for item in sequence:
        current, drawn = arrange(case, item, static, buffers)
        total += item.shift
        found = one_step(current, static, buffers)
        step.assert_same(found, one_step(current, shifted(case, total), drawn))


def assert_replay_equals_eager(case: StepCase, sequence: list[Replayed]) -> None:
    """Capture a step on a GPU after warming up, run eagerly before the first replay and after each
    replay, and compare all of them. The gradients live in the capture's own memory."""
    static, buffers = step.make_model(case), step.make_inputs(case)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            one_step(case, static, buffers)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one_step(case, static, buffers)
    total = 0.0
    for item in sequence:
        current, drawn = arrange(case, item, static, buffers)
        total += item.shift
        expected = one_step(current, shifted(case, total), drawn)
        graph.replay()
        torch.cuda.synchronize()
        step.assert_same(step.live(current, captured), step.live(current, expected))
        step.assert_same(one_step(current, shifted(case, total), drawn), expected)


def arrange(
    case: StepCase, item: Replayed, model: Any, buffers: step.Inputs
) -> tuple[StepCase, step.Inputs]:
    """Put a step's data and splits into the static buffers, and change the weights in place."""
    current = case.but(seed=item.seed, splits=item.splits, buffer_rows=case.rows)
    drawn = step.make_inputs(current)
    with torch.no_grad():
        for name in ("x", "dy", "prob", "split_sizes"):
            getattr(buffers, name).copy_(getattr(drawn, name))
    shift(model, item.shift)
    return current, drawn


def shifted(case: StepCase, amount: float) -> Any:
    """Return a new model of the case whose parameters are changed by `amount`."""
    model = step.make_model(case)
    shift(model, amount)
    return model


def shift(model: Any, amount: float) -> None:
    """Add to every parameter in place."""
    if not amount:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            # A grouped parameter is a wrapper; its storage is what the op reads.
            storage = getattr(parameter, "rowwise_data", None)
            if storage is not None:
                storage.add_(amount)
            elif hasattr(parameter, "dequantize") and hasattr(parameter, "_rowwise_data"):
                parameter.copy_(parameter.dequantize() + amount)
            else:
                parameter.add_(amount)


def one_step(case: StepCase, model: Any, inputs: Any) -> Found:
    """Run a step whose gradients are new tensors."""
    for tensor in (*model.parameters(), inputs.x, inputs.prob):
        tensor.grad = None
    y = step.run_model(model, case, inputs)
    return step.collect(case, model, inputs, y)


# 7. Was it fused --------------------------------------------------------------------------------


def assert_unfused(case: StepCase, reason: Reason, **switches: str) -> Reject:
    """Run a step that must not be fused, and return the refusal that says why."""
    with step.switches(**switches):
        step.run_step(case, fused=None)
    fit = [decision for decision in te_grouped_mlp.explain() if _is_of(decision.problem, case)]
    found = [
        reject
        for decision in fit
        if decision.path == "unfused"
        for _, reject in decision.refusals
        if reject.reason is reason
    ]
    assert found, f"{reason} is not among {[str(decision) for decision in fit]}"
    return found[-1]


def _is_of(problem: Any, case: StepCase) -> bool:
    return (
        problem.num_groups == len(case.splits)
        and problem.fc1.in_features == case.hidden
        and problem.fc2.in_features == case.ffn
        and problem.activation.kind is kind_of(case)
        and problem.activation.interleave == (case.interleave if case.gated else None)
    )


# The rows that the kernels of a frontend can be told to touch ------------------------------------

_OFFSETS = frozenset({packages.RUNTIME_OFFSETS})
FRONTENDS: dict[str, Any] = {
    "none": packages.Absent("not installed"),
    "old": {name: frozenset() for name in packages.WRAPPERS},
    "new": {name: _OFFSETS if name in ("glu", "dglu", "quant") else frozenset() for name in
            packages.WRAPPERS},
    "all": dict.fromkeys(packages.WRAPPERS, _OFFSETS),
    "glu only": {"glu": _OFFSETS},
    "all but dglu": {name: _OFFSETS for name in packages.WRAPPERS if name != "dglu"},
}  # fmt: skip
"""Wrapper signatures by which a plan decides about row extents."""
