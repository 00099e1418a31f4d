# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The overrides table and the view of torch."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from te_grouped_mlp.integration import standalone
from te_grouped_mlp.integration.standalone import loader


@pytest.fixture(scope="module")
def overrides(te):
    from te_grouped_mlp.integration.standalone import overrides

    return overrides


def test_every_row_is_applied(overrides):
    from te_grouped_mlp.integration.standalone.torch_view import VIEW

    for row in overrides.TABLE:
        if row.module == overrides.GROUPED_MLP:
            continue  # the module may be the fork
        target = importlib.import_module(row.module)
        *owners, name = row.name.split(".")
        for owner in owners:
            target = getattr(target, owner)
        file = getattr(getattr(target, name), "__module__", "")
        if row.name == "torch":
            assert target.torch is VIEW
        else:
            assert file.startswith("te_grouped_mlp") or hasattr(target, "__wrapped__") or file, row
        assert row.reason


def test_rows_are_unique(overrides):
    keys = [(row.module, row.name) for row in overrides.TABLE]
    assert len(keys) == len(set(keys))


def test_names_imported_elsewhere_are_the_replacements(te, overrides):
    """Each module is patched before others copy its names."""
    from transformer_engine.pytorch import utils
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.ops import _common
    from transformer_engine.pytorch.ops.basic import grouped_linear, swiglu

    from te_grouped_mlp.integration.standalone import replacements

    assert grouped_linear.canonicalize_device is utils.canonicalize_device
    assert swiglu.clear_tensor_data is utils.clear_tensor_data is replacements.clear_tensor_data
    assert gemm._empty_tensor is utils._empty_tensor is replacements.no_elements
    assert (
        grouped_linear.general_grouped_gemm_for_grouped_tensor
        is gemm.general_grouped_gemm_for_grouped_tensor
    )
    dummies = grouped_linear.get_dummy_wgrads_for_params
    assert dummies is _common.get_dummy_wgrads_for_params is replacements.dummy_wgrads_for_params


def test_a_missing_name_is_an_error_that_says_so(te, overrides, monkeypatch):
    from transformer_engine.pytorch import utils

    row = overrides.Override(utils.__name__, "no_such_name", "does a thing", lambda m, o: o)
    monkeypatch.setattr(overrides, "TABLE", (row,))
    with pytest.raises(RuntimeError, match=r"pytorch\.utils has no no_such_name"):
        overrides.apply(utils.__name__, utils)


def test_another_file_under_the_same_name_is_left_alone(overrides, tmp_path):
    file = tmp_path / "grouped_mlp.py"
    file.write_text("import torch\n")
    spec = importlib.util.spec_from_file_location("fork", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    overrides.apply(overrides.GROUPED_MLP, module)
    assert module.torch is torch


def test_the_view_delegates_and_answers():
    from te_grouped_mlp.integration.standalone.torch_view import make_view

    view = make_view()
    # Asked for hundreds of times in a step, so it is answered without delegating.
    assert vars(view)["Tensor"] is torch.Tensor
    assert view.nn is torch.nn
    assert view.cuda.Stream is torch.cuda.Stream
    assert view.cuda.get_device_capability() == (10, 0)
    properties = view.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == (10, 0)
    assert properties.multi_processor_count >= 1
    assert not view.cuda.is_current_stream_capturing()
    assert isinstance(view.cuda.current_stream().cuda_stream, int)
    assert "nn" in dir(view)
    assert float(view.version.cuda) >= 0
    with pytest.raises(AttributeError):
        view.no_such_name  # noqa: B018


@pytest.mark.skipif(torch.cuda.is_available(), reason="the answers differ where CUDA is")
def test_the_view_answers_for_the_cpu():
    from te_grouped_mlp.integration.standalone.torch_view import default_device, make_view

    view = make_view()
    assert view.cuda.current_device() == default_device() == torch.device("cpu")
    assert not view.is_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert view.is_autocast_enabled()
        assert view.is_autocast_enabled("cuda")
        assert view.get_autocast_dtype("cuda") == torch.bfloat16


def test_cleared_memory_lies_where_the_tensor_was(te):
    from transformer_engine.pytorch.utils import clear_tensor_data

    tensor, kept = torch.ones(3), torch.ones(3)
    kept._do_not_clear = True
    clear_tensor_data(tensor, None, kept)
    assert tensor.numel() == 0
    assert kept.numel() == 3


def test_dummy_gradients(te):
    from transformer_engine.pytorch.ops._common import get_dummy_wgrads_for_params

    plain = torch.nn.Parameter(torch.ones(2, 3))
    fused = torch.nn.Parameter(torch.ones(2, 3))
    fused.grad_added_to_main_grad = False
    fused.zero_out_wgrad = True
    nothing, dummy = get_dummy_wgrads_for_params([plain, fused])
    assert nothing is None
    assert fused.grad_added_to_main_grad is True
    assert torch.equal(dummy, torch.zeros(2, 3))


def test_autograd_takes_dummy_gradients_without_a_copy(te):
    from transformer_engine.pytorch.ops._common import get_dummy_wgrads_for_params

    from te_grouped_mlp.integration.standalone.replacements import dummy_wgrad

    params = [torch.nn.Parameter(torch.ones(size, 5)) for size in (7, 7, 3)]
    for param in params:
        param.grad_added_to_main_grad = False

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *weights):
            return weights[0].sum()

        @staticmethod
        def backward(ctx, grad):
            return tuple(get_dummy_wgrads_for_params(params))

    Step.apply(*params).backward()
    grads = [param.grad for param in params]
    assert len({id(grad) for grad in grads}) == 3
    assert [grad.shape for grad in grads] == [param.shape for param in params]
    shared = [dummy_wgrad(param.shape, param.dtype, param.device) for param in params]
    assert [g.data_ptr() for g in grads] == [one.data_ptr() for one in shared]
    assert grads[0].data_ptr() == grads[1].data_ptr() != grads[2].data_ptr()
    for grad in grads:
        grad.zero_()


def test_upstreams_fused_class_is_off_until_allowed(te, monkeypatch):
    from te_grouped_mlp.integration import overlay

    upstream = overlay.load_upstream()
    classes = (upstream.GroupedMLP_CuTeGEMMGLU, upstream.GroupedMLP_CuTeGEMMUnary)
    for name in (
        "_cudnn_frontend_version_supported",
        "_cudnn_frontend_supports_grouped_gemm_srelu",
    ):
        monkeypatch.setattr(upstream, name, lambda: True)
    base = upstream._GroupedMLP_CuTeGEMMBase
    for name in ("quant", "wgrad"):
        monkeypatch.setattr(base, f"grouped_gemm_{name}_kernel", classmethod(lambda cls: None))
    for fused in classes:
        for name in ("activation", "dactivation"):
            monkeypatch.setattr(fused, f"grouped_gemm_{name}_kernel", classmethod(lambda cls: None))
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    for fused in classes:
        fused.is_supported.cache_clear()
    assert [fused.is_supported() for fused in classes] == [False, False]
    standalone.allow_upstream_fused(True)
    try:
        assert [fused.is_supported() for fused in classes] == [True, True]
    finally:
        standalone.allow_upstream_fused(False)
        for fused in classes:
            fused.is_supported.cache_clear()
    assert [fused.is_supported() for fused in classes] == [False, False]


def test_nothing_else_is_served_by_the_finder(te):
    finder = loader.StandaloneFinder()
    assert finder.find_spec("json") is None
    assert finder.find_spec("transformer_engine_torch") is None
    assert finder.find_spec("triton") is None
    assert "triton" not in sys.modules or not hasattr(sys.modules["triton"], "_te_grouped_mlp")
