# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The module object: what it has not raises by name, and so does a tensor on another device."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.integration.standalone.tex import module as tex_module
from tests.integration.standalone.test_quantize import make_quantizer

META = torch.device("meta")


def test_a_missing_function_raises_when_called(tex):
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.layernorm_fwd"):
        tex.layernorm_fwd(torch.ones(2))
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.CommOverlapType\.RS"):
        tex.CommOverlapType.RS()
    assert isinstance(tex.CommOverlap, type)
    with pytest.raises(AttributeError):
        tex.__wrapped__  # noqa: B018


def test_a_missing_triton_function_raises_when_called(te):
    from transformer_engine.pytorch.triton import permutation

    with pytest.raises(NotImplementedError, match=r"triton\.permutation\.make_row_id_map"):
        permutation.make_row_id_map()
    with pytest.raises(ModuleNotFoundError):
        import transformer_engine.pytorch.triton.no_such_module  # noqa: F401


def test_versions_choose_the_grouped_path(te, tex):
    from transformer_engine.pytorch.ops.basic.grouped_linear import (
        is_op_fuser_grouped_tensor_path_supported,
    )

    assert tex.get_cublasLt_version() >= 130400
    assert tex.get_cudnn_version() == 0
    assert is_op_fuser_grouped_tensor_path_supported(None, torch.bfloat16)


def _calls(tex):
    """One call of every function that takes tensors, with a tensor that is not on the CPU."""
    x = torch.empty(128, 128, device=META, dtype=torch.bfloat16)
    one = torch.empty(1, device=META)
    quantizer = make_quantizer(tex)
    gemm = (x, True, x, False, None, None, None, None, 6, False, None, False, x, 1, False, False)
    grouped = (x, True, x, False, x, None, None, one, one, one, one, False, 0)
    glu = (x, one, None)
    return {
        "quantize": (x, quantizer),
        "bgrad_quantize": (x, quantizer),
        "dequantize": (x, 4),
        "split_quantize": (x, [128], [quantizer]),
        "create_empty_quantized_tensor": (quantizer, [128, 128], torch.float32, META),
        "swizzle_scales_for_gemm_": (x,),
        "group_quantize": (x, quantizer, 1, None),
        "group_dequantize": (x, 4),
        "bgrad_group_quantize": (x, quantizer, 1, None),
        "group_requantize_inplace": (x, quantizer, 1, None, 4),
        "grouped_swizzle_for_gemm": (x, True, True),
        "bulk_allocate": ([(1,)], [torch.uint8], META),
        "copy_data_ptrs_to_device": ([x], torch.device("cpu")),
        "splits_to_offsets": (one, 1),
        "splits_to_offsets_multi": (one, META),
        "generic_gemm": gemm,
        "te_general_grouped_gemm": ([x], True, [x], False, [x], 6, [1], [x], 6, False, [one],
                                    False, [one], 1, False, False, 0),
        "te_general_grouped_gemm_for_discrete_in": ([x], *grouped[1:]),
        "te_general_grouped_gemm_for_discrete_out": (*grouped[:4], [x], *grouped[5:]),
        "te_general_grouped_gemm_for_grouped_tensor": grouped,
        "scaled_swiglu": glu,
        "scaled_clamped_swiglu": glu,
        "scaled_situglu": glu,
        "scaled_srelu": glu,
        "scaled_dswiglu": (x, *glu),
        "scaled_clamped_dswiglu": (x, *glu),
        "scaled_dsituglu": (x, *glu),
        "scaled_dsrelu": (x, *glu),
    }  # fmt: skip


WITHOUT_TENSORS = {"get_grouped_gemm_setup_workspace_size"}


def test_every_function_refuses_other_devices(tex):
    calls = _calls(tex)
    names = {name for names in tex_module.FUNCTIONS.values() for name in names}
    assert set(calls) == names - WITHOUT_TENSORS
    options = {"strides": [1], "include_leading_zero": [True], "dtypes": [torch.int64]}
    for name, arguments in calls.items():
        keywords = options if name == "splits_to_offsets_multi" else {}
        with pytest.raises(NotImplementedError, match=f"{name} was given a tensor on meta"):
            getattr(tex, name)(*arguments, **keywords)


def test_a_quantized_tensor_on_another_device_is_refused(tex):
    quantized = tex.quantize(torch.zeros(32, 32), make_quantizer(tex))
    quantized._rowwise_data = quantized._rowwise_data.to(META)
    with pytest.raises(NotImplementedError, match="dequantize was given a tensor on meta"):
        tex.dequantize(quantized, 4)
