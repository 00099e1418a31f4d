# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The builders' keywords against the signatures of every frontend, and the views they pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.cudnn import arguments, views
from te_grouped_mlp.op.tensors.operands import Axis
from te_grouped_mlp.op.tensors.scale_layout import swizzled_offset
from tests.op.backends.cudnn import operands
from tests.support.frontend_signatures import VERSIONS, number, signature

ROWS, H, FFN, GROUPS = 512, 192, 128, 2
RELEASES = [version for version in VERSIONS if number(version) >= (1, 27)]
SPECS = {
    kind: ActivationSpec(kind, interleave=32 if kind.is_gated else None) for kind in Activation
}
SINCE = {Activation.SITU_GLU: (1, 28), Activation.TANH_SRELU: (1, 29)}
SERVED = [
    (release, kind)
    for release in RELEASES
    for kind in Activation
    if number(release) >= SINCE.get(kind, (0,))
]
PARTS = ("bias", "dprob", "bias_grad", "deterministic", "accumulate")


def shared(wrapper: str, release: str, *, all_rows: bool = False) -> arguments.SharedArguments:
    takes = frozenset(signature(wrapper, release).parameters)
    return arguments.SharedArguments(takes, None, all_rows, torch.ones(GROUPS), torch.ones(1))


def token_views(cols: int) -> views.Tokens:
    ends = torch.tensor([256, 512], dtype=torch.int32)
    return views.tokens("a", operands.copy(ROWS, cols, Axis.ROW), (ROWS, cols), ends)


def experts(out: int, width: int, axis: Axis, *, stacked: bool) -> views.WeightArguments:
    return views.weights(operands.weights(GROUPS, out, width, axis, stacked=stacked, swizzled=True))


def build(
    wrapper: str, release: str, kind: Activation, *, stacked: bool = False, **parts: bool
) -> dict[str, Any]:
    """Build the keywords of a launch with the named parts."""
    spec = SPECS[kind]
    wide = FFN * spec.expansion
    call = shared(wrapper, release)
    has = {name: parts.get(name, False) for name in PARTS}
    if wrapper in ("glu", "srelu"):
        bias = torch.zeros(GROUPS, wide, dtype=torch.bfloat16) if has["bias"] else None
        make = getattr(arguments, wrapper)
        w = experts(wide, H, Axis.ROW, stacked=stacked)
        return make(call, token_views(H), w, spec, bias=bias, prob=torch.ones(ROWS))
    if wrapper in ("dglu", "dsrelu"):
        d = arguments.Derivative(
            pre_activation=torch.zeros(ROWS, wide, dtype=torch.bfloat16),
            prob=torch.ones(ROWS),
            dprob=torch.zeros(ROWS) if has["dprob"] else None,
            want_bias_grad=has["bias_grad"],
            deterministic=has["deterministic"],
        )
        w = experts(H, FFN, Axis.COLUMN, stacked=stacked)
        return getattr(arguments, wrapper)(call, token_views(H), w, spec, d)
    if wrapper == "quant":
        bias = torch.zeros(GROUPS, H, dtype=torch.bfloat16) if has["bias"] else None
        out = torch.zeros(ROWS, H, dtype=torch.bfloat16)
        w = experts(H, FFN, Axis.ROW, stacked=stacked)
        return arguments.quant(call, token_views(FFN), w, out, bias=bias, bias_scale=None)
    dy, x = operands.copy(ROWS, H, Axis.COLUMN), operands.copy(ROWS, FFN, Axis.COLUMN)
    target = torch.zeros(GROUPS, H, FFN) if stacked else torch.zeros(GROUPS, dtype=torch.int64)
    return arguments.wgrad(
        call, dy, x, torch.tensor([256, 512], dtype=torch.int32), target,
        dtype=torch.float32, accumulate=has["accumulate"], workspace=None,
    )  # fmt: skip


def wrappers_of(kind: Activation) -> tuple[str, ...]:
    return ("glu", "dglu") if kind.is_gated else ("srelu", "dsrelu")


@pytest.mark.parametrize("stacked", [False, True], ids=["tables", "stacked"])
@pytest.mark.parametrize(("release", "kind"), SERVED)
def test_every_keyword_is_the_wrappers(release: str, kind: Activation, stacked: bool) -> None:
    """And every argument without a default is given."""
    for wrapper in (*wrappers_of(kind), "quant", "wgrad"):
        for part in (None, *PARTS[:3], "accumulate"):
            given = build(wrapper, release, kind, stacked=stacked, **({part: True} if part else {}))
            signature(wrapper, release).bind(**given)


@pytest.mark.parametrize("kind", [Activation.SITU_GLU, Activation.TANH_SRELU])
def test_a_parameter_that_the_wrapper_lacks_is_never_dropped(kind: Activation) -> None:
    argument = {"SITU_GLU": "situ_beta1", "TANH_SRELU": "tanh_clamp_scale"}[kind.name]
    for wrapper in wrappers_of(kind):
        with pytest.raises(ValueError, match=argument):
            build(wrapper, "1.27.0", kind)


def test_determinism_that_the_wrapper_lacks_is_never_dropped() -> None:
    assert "deterministic" not in build("dglu", "1.30.0", Activation.SWIGLU)
    with pytest.raises(ValueError, match="dglu has no argument deterministic"):
        build("dglu", "1.30.0", Activation.SWIGLU, deterministic=True)
    # Said although it is the default: the unary wrapper follows torch's flag otherwise.
    assert build("dsrelu", "1.32.0", Activation.SRELU)["deterministic"] is False


def test_every_row_that_the_wrapper_cannot_compute_is_never_dropped() -> None:
    call = shared("srelu", "1.32.0", all_rows=True)
    with pytest.raises(ValueError, match="srelu has no argument use_single_group_runtime_offsets"):
        arguments.srelu(
            call, token_views(H), experts(FFN, H, Axis.ROW, stacked=True),
            SPECS[Activation.SRELU], bias=None, prob=torch.ones(ROWS),
        )  # fmt: skip


def test_an_amax_is_declined_where_it_can_be() -> None:
    assert build("quant", "1.32.0", Activation.SWIGLU)["generate_amax"] is False
    assert "generate_amax" not in build("quant", "1.30.0", Activation.SWIGLU)


PARAMETERS = {
    Activation.CLAMPED_QGEGLU: {
        "linear_offset": 0.5, "geglu_alpha": 1.3, "glu_clamp_max": 1.5, "glu_clamp_min": -1.5,
    },
    Activation.SITU_GLU: {"situ_beta1": 3.0, "situ_beta2": 5.0},
    Activation.TANH_SRELU: {"tanh_clamp_scale": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_are_the_same_forward_and_backward(
    kind: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ActivationSpec(
        kind, 32, limit=1.5, alpha=1.3, linear_offset=0.5, beta1=3.0, beta2=5.0, clamp_scale=2.0
    )
    monkeypatch.setitem(SPECS, kind, spec)
    for wrapper in wrappers_of(kind):
        given = build(wrapper, "1.32.0", kind)
        assert {name: given[name] for name in PARAMETERS[kind]} == PARAMETERS[kind]
        if kind.is_gated:
            assert given["act_func"].startswith("d") == (wrapper == "dglu")


def test_beta_is_always_given() -> None:
    """The wrapper takes None and ends in an error of the compiler."""
    assert torch.equal(
        build("dglu", "1.32.0", Activation.SWIGLU)["beta_tensor"], torch.ones(GROUPS)
    )


# Shapes ------------------------------------------------------------------------------------------


def test_tokens_share_the_operands_memory() -> None:
    found = operands.copy(ROWS, H, Axis.ROW)
    view = views.tokens("a", found, (ROWS, H), torch.tensor([256, 512], dtype=torch.int32))
    assert tuple(view.data.shape) == (ROWS, H, 1)
    assert view.data.stride() == (H, 1, ROWS * H)
    assert view.data.data_ptr() == found.data.data_ptr()
    found.scale[swizzled_offset(300, 5, H // 32)] = 130
    flat = view.scale.view(torch.uint8)
    assert flat[300 % 32, 300 % 128 // 32, 300 // 128, 5 % 4, 5 // 4, 0] == 130


@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "tiles"])
@pytest.mark.parametrize("axis", Axis)
@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_weights_point_at_the_members(stacked: bool, axis: Axis, swizzled: bool) -> None:
    out, width = 256, 192
    w = operands.weights(3, out, width, axis, stacked=stacked, swizzled=swizzled)
    found = views.weights(w)
    n, k = (out, width) if axis is Axis.ROW else (width, out)
    assert (found.n, found.major) == (n, "k" if axis is Axis.ROW else "n")
    assert (found.stacked is None, found.tables is None) == (not stacked, stacked)
    if found.stacked is not None:
        data, scale = found.stacked
        assert tuple(data.shape) == (n, k, 3)
        assert data.stride() == ((k, 1, n * k) if axis is Axis.ROW else (1, n, n * k))
        assert tuple(scale.shape) == (32, 4, -(-n // 128), 4, -(-k // 128), 3)
        for index, member in enumerate(w.data):
            assert data[:, :, index].data_ptr() == member.data_ptr()
        if swizzled:
            assert scale.data_ptr() == w.scale[0].data_ptr()
    else:
        assert found.tables is not None
        assert found.tables[0].tolist() == [member.data_ptr() for member in w.data]
        if swizzled:
            assert found.tables[1].tolist() == [scale.data_ptr() for scale in w.scale]
        else:
            base, size = found.owners[1].data_ptr(), w.scale[0].numel()
            assert found.tables[1].tolist() == [base + index * size for index in range(3)]


@pytest.mark.parametrize("width", [64, 128, 160, 192, 224])
def test_row_scales_that_no_kernel_writes_become_zero(width: int) -> None:
    """The next product multiplies them with zeros, and NaN times zero is NaN."""
    source = operands.copy(256, width, Axis.ROW)
    source.scale.fill_(0xFF)
    tokens = views.tokens if width % 64 == 0 else None
    data = views.as_kernel_matrix(source.data).view(views.E4M3)
    scale = views.to_kernel_view(source.scale.view(views.E8M0), 256, -(-width // 32))
    found = views.quantized_copy(data, scale, Axis.ROW)
    assert found.scale.data_ptr() == source.scale.data_ptr()
    blocks, padded = -(-width // 32), -(-width // 128) * 4
    for row in (0, 31, 127, 255):
        written = [int(found.scale[swizzled_offset(row, b, blocks)]) for b in range(padded)]
        assert written == [0xFF] * blocks + [0] * (padded - blocks)
    if tokens is not None:
        tokens("a", found, (256, width), torch.tensor([256], dtype=torch.int32))
