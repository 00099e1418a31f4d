# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's enums equal Transformer Engine's Python mirrors of them."""

from __future__ import annotations

import pickle


def test_dtype_has_exactly_the_mirrored_members(te, tex):
    from transformer_engine.pytorch.constants import DType

    mirrored = {member.name: int(member) for member in DType}
    assert {name: int(member) for name, member in tex.DType.__members__.items()} == mirrored
    assert len(mirrored) == 8
    for member in DType:
        assert member == getattr(tex.DType, member.name)
        assert hash(member) == hash(getattr(tex.DType, member.name))


def test_dtype_agrees_with_torch(te, tex):
    from transformer_engine.pytorch.constants import TE_DType

    from te_grouped_mlp.integration.standalone.tex.codes import torch_dtype

    for dtype, code in TE_DType.items():
        assert torch_dtype(code) == dtype


def test_tensor_slots(te, tex):
    from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx

    forward = {name: int(member) for name, member in tex.FP8FwdTensors.__members__.items()}
    backward = {name: int(member) for name, member in tex.FP8BwdTensors.__members__.items()}
    assert sorted(forward.values()) == list(range(9))
    assert sorted(backward.values()) == list(range(6))
    assert vars(FP8FwdTensorIdx).items() <= forward.items()
    assert vars(FP8BwdTensorIdx).items() <= backward.items()
    assert [forward[f"GEMM1_{part}"] for part in ("INPUT", "WEIGHT", "OUTPUT")] == [0, 1, 2]
    assert (forward["GEMM3_OUTPUT"], backward["GRAD_OUTPUT1"], backward["GRAD_INPUT3"]) == (8, 0, 5)


def test_attention_backends(te, tex):
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    mirror = getattr(fused_attn, "FusedAttnBackend", None)
    if isinstance(mirror, dict):
        mirrored = {member.name: int(member) for member in mirror.values()}
    else:
        mirrored = {f"NVTE_{member.name}": int(member) for member in mirror}
    members = tex.NVTE_Fused_Attn_Backend.__members__
    assert {name: int(member) for name, member in members.items()} == mirrored


def test_a_dtype_survives_pickling(te, tex):
    assert pickle.loads(pickle.dumps(tex.DType.kFloat8E4M3)) is tex.DType.kFloat8E4M3


def test_integers_that_te_takes_while_it_is_imported(te, tex):
    """Of 2.20.2's pybind.cpp:137-142; 2.19.0 has no NVTEQBHistogramMode."""
    formats, modes = tex.NVTERoutingMapFormat, tex.NVTEQBHistogramMode
    assert {m.name: int(m) for m in formats} == {"BYTEMAP": 0, "BITMAP_U8": 1}
    assert {m.name: int(m) for m in modes} == {"TWO_KERNEL": 0, "FUSED_ATOMIC": 1}
