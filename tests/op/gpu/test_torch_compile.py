# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a small MoE block: equal to eager, and the fused op stays outside the graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.op.gpu import moe, recorded
from tests.support import step
from tests.support.step import StepCase

# Read when Transformer Engine is first imported; where its extension is there it has no effect.
os.environ.setdefault("NVTE_GROUPED_MLP_STANDALONE", "1")

pytestmark = [
    pytest.mark.usefixtures("fused_switch", "poisoned_memory", "fresh_dynamo"),
    # What torch says of its own compiler: Functions that it instantiates, TF32 that is off.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

GPU = [pytest.mark.gpu, pytest.mark.sm90]
TOKENS, STEPS = 200, 10
CASE = StepCase(splits=(1,) * 5, hidden=128, ffn=64)
# Inductor keeps fp32 where eager rounds between two operations, and the op's operands are bf16.
FUSED_BOUND = 2.0**-6
FORMS = pytest.mark.parametrize(
    ("compiler", "device"),
    [
        ("aot_eager", "cpu"),
        pytest.param("aot_eager", "cuda", marks=GPU),
        pytest.param("inductor", "cuda", marks=GPU),
    ],
)
RECIPES = pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget what other tests compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def block(recipe: str, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[moe.Block]:
    name = recorded.BACKENDS[device]
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", name)
    with recorded.backends_used() as used:
        yield moe.Block(CASE.but(mxfp8=recipe == "mxfp8", device=device))
    assert used == {name}


def data(seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and dy; the first tokens prefer one expert more with each seed."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, TOKENS, CASE.hidden, generator=generator).bfloat16().to(device)
    x[: 15 * seed] = x[:1]
    return x, dy


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.isfinite().all(), name
        error = float((found[name].double() - value.double()).norm() / value.double().norm())
        assert error <= FUSED_BOUND, f"{name}: relative error {error:.1e}"


@FORMS
@RECIPES
def test_a_compiled_block_equals_eager(
    block: moe.Block, compiler: str, recipe: str, device: str
) -> None:
    """Ten different splits: no second compilation."""
    compiled = torch.compile(block, backend=compiler)
    splits = set()
    for seed in range(STEPS):
        x, dy = data(seed, device)
        wanted = moe.gradients(block, x, dy, block)
        # Nothing is compiled after the first step, and an attempt raises.
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            found = moe.gradients(block, x, dy, compiled)
        if compiler == "inductor":
            assert_close(found, wanted)
        else:
            step.assert_same(found, wanted)
        splits.add(tuple(block.route(x)[1].tolist()))
    assert len(splits) >= (STEPS if recipe == "bf16" else 2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@RECIPES
def test_the_op_stays_outside_the_graphs(block: moe.Block, recipe: str, device: str) -> None:
    """Two graphs hold tensors, the routing and the weighted sum; nothing of the op is in them.

    Between them is the op's break, or one of Transformer Engine's code just before it. From torch
    2.14 on that code is a graph as well, of attributes that it sets on its quantizers.
    """
    x, dy = data(0, device)
    moe.gradients(block, x, dy, block)
    found = torch._dynamo.explain(block)(x)
    # On a GPU, what Transformer Engine asks about the device may break too, with no graph between.
    breaks = len(found.graphs) - 1 + (2 if device == "cuda" else 0)
    assert 1 <= found.graph_break_count <= breaks, found.break_reasons
    traced = [str(node.stack_trace) for graph in found.graphs for node in graph.graph.nodes]
    assert any("moe.py" in each for each in traced)
    assert not any("grouped_mlp.py" in each or "te_grouped_mlp/op" in each for each in traced)
    called = [_targets(graph) for graph in found.graphs]
    first, second = (targets for targets in called if not targets <= {"__setattr__"})
    assert {"topk", "argsort", "index_copy"} <= first
    assert "sum" in second
    assert "topk" not in second


def _targets(graph: torch.fx.GraphModule) -> set[str]:
    return {
        node.target if isinstance(node.target, str) else node.target.__name__
        for node in graph.graph.nodes
        if node.op not in ("placeholder", "output")
    }


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("recipe", ["mxfp8"])
def test_two_percent_are_seen(block: moe.Block, recipe: str, device: str) -> None:
    """Every gradient is of an order that the comparison can see."""
    x, dy = data(0, device)
    wanted = moe.gradients(block, x, dy, block)
    for name, value in wanted.items():
        with pytest.raises(AssertionError, match=name):
            assert_close({**wanted, name: value * 1.02}, wanted)
