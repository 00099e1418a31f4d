# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every name, and every switch, of upstream's module is here, or is absent for a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformer_engine.pytorch as te

from te_grouped_mlp.integration import installed_te
from te_grouped_mlp.op import environment
from tests.oracle import runner

pytestmark = pytest.mark.usefixtures("fused_switch")

_MODULE = Path("pytorch", "ops", "fused", "grouped_mlp.py")
_STEP = "a part of upstream's own step, which other functions do here"
_NVFP4 = "of NVFP4, which upstream's own op computes from its own file"
_LIVE = "parameters of an activation are read at each call, not kept at construction"

ABSENT = {
    "_alloc_cudnn_wgrad_workspace": _STEP,
    "_compute_grad_params": _STEP,
    "_cudnn_compute_wgrad": _STEP,
    "_cudnn_wgrad_workspace": _STEP,
    "_cudnn_wgrad_workspace_size_fn": _STEP,
    "_group_quantize_for_grouped_mlp": _STEP,
    "_group_quantize_with_amax_for_grouped_mlp": _NVFP4,
    "_nvfp4_amax": _NVFP4,
    "_pack_grouped_linear_bias_for_cudnn": _STEP,
    "_single_group_dgrad_gemm": _STEP,
    "_single_group_fc2_gemm": _STEP,
    "_single_group_wgrad_gemm": _STEP,
    "_single_quantized_tensor_from_grouped": _STEP,
    "_use_tmem_post_rht_amax": _NVFP4,
    "_wrap_single_quantized_as_grouped": _STEP,
    "self._cudnn_act_func": _LIVE,
    "self._cudnn_dact_func": _LIVE,
    "self._cudnn_geglu_alpha": _LIVE,
    "self._cudnn_glu_clamp_max": _LIVE,
    "self._cudnn_glu_clamp_min": _LIVE,
    "self._cudnn_linear_offset": _LIVE,
    "self._cudnn_situ_beta1": _LIVE,
    "self._cudnn_situ_beta2": _LIVE,
    "self._cudnn_tanh_clamp_scale": _LIVE,
    "self._pass_geglu_runtime_params": _LIVE,
    "self._pass_situglu_params": _LIVE,
    "self._pass_srelu_tanh_params": _LIVE,
}
"""Name of upstream's -> why it is not here; an attribute of an instance begins with `self.`."""

SWITCHES = {
    environment.FUSED_SWITCH: "read, at the first step",
    environment.WGRAD_SWITCH: "read: the frontend's backend declines",
    environment.DETERMINISM_SWITCH: "read, in each pass",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM": _NVFP4,
}
"""Switch that upstream's module reads -> what becomes of it here."""


@pytest.fixture(params=["installed", pytest.param("2.19.0", marks=pytest.mark.slow)])
def upstream(request: pytest.FixtureRequest) -> str:
    """The text of upstream's module, of the installed version and of the oldest supported one."""
    root = installed_te.te_root()
    if request.param != "installed":
        root = runner.unpacked(request.param) / "transformer_engine"
    assert root is not None
    return (root / _MODULE).read_text()


def names(text: str) -> Iterator[tuple[str, str]]:
    """Yield (class or "", name): functions and classes, methods, and `self.` attributes."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield "", node.name
        if isinstance(node, ast.ClassDef):
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef):
                    yield node.name, each.name
                elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    owner = each.value
                    if isinstance(owner, ast.Name) and owner.id == "self":
                        yield node.name, f"self.{each.attr}"


def lacking(text: str) -> set[str]:
    """Return the names that our module has not."""
    from transformer_engine.pytorch.ops.fused import grouped_mlp as ours

    options = {"bias": False, "device": "cpu"}
    linears = [te.ops.GroupedLinear(2, 64, 64, **options) for _ in range(2)]
    op = ours.GroupedMLP_CuTeGEMMUnary(
        fc1=linears[0], activation=te.ops.ScaledSReLU(), fc2=linears[1]
    )
    found = set()
    for cls, name in names(text):
        attribute = name.removeprefix("self.")
        owner = ours if not cls else op if name != attribute else getattr(ours, cls)
        if not hasattr(owner, attribute):
            found.add(name)
    return found


def test_every_name_is_here_or_absent_for_a_reason(upstream: str) -> None:
    found = lacking(upstream)
    assert found <= ABSENT.keys()
    assert ("_deterministic_algorithms_required" not in upstream) or found == ABSENT.keys()


def test_a_name_that_is_missing_is_seen() -> None:
    text = "def news(): pass\nclass GroupedMLP_CuTeGEMMGLU:\n  def more(self): self.state = 1"
    assert lacking(text) == {"news", "more", "self.state"}


def test_every_cached_function_has_a_cache_to_clear(upstream: str) -> None:
    """Tests of TE clear what upstream caches."""
    from transformer_engine.pytorch.ops.fused import grouped_mlp as ours

    pattern = r"lru_cache\(maxsize=\w+\)\n( *)def (\w+)"
    cached = {(bool(indent), name) for indent, name in re.findall(pattern, upstream)}
    assert len(cached) > 5
    for is_method, name in sorted(cached):
        for owner in (ours.GroupedMLP_CuTeGEMMGLU, ours.GroupedMLP_CuTeGEMMUnary)[: 1 + is_method]:
            function = getattr(owner if is_method else ours, name, None)
            if function is None:
                assert name in ABSENT
            else:
                assert function.cache_clear() is None


def test_every_switch_of_upstreams_module_is_treated(upstream: str) -> None:
    found = re.findall(r"os\.(?:environ\.get|getenv)\(\s*\"(\w+)\"", upstream)
    assert len(found) == len(re.findall(r"\benviron\b|\bgetenv\b", upstream))
    assert set(found) <= SWITCHES.keys()
