# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Small trees, written here, with the structure that the patches look for. They run.

The TE file is a model of the joint op: every shortcut notes in `EVENTS` whether it took the dense
or the packed layout, and the backward kernel notes its arguments. The Megatron file is a model of
the experts on the operation fuser.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

_count = itertools.count()

_TE_HEAD = '''
"""A model of a fused grouped MLP module."""
import functools
import inspect
import os

import torch

EVENTS = []
REGISTERED = []
FRONTEND = (1, 32)
DETERMINISM = False
KERNEL_ARGUMENTS = {}


class Note:
    """Stands for TE's compiled module."""

    def group_quantize(self, *_, **__):
        EVENTS.append(("quantize", False))
        return "packed"

    def quantize(self, *_, **__):
        EVENTS.append(("quantize", True))
        return "dense"

    def group_with_amax(self, *_, **__):
        EVENTS.append(("quantize with amax", False))
        return "packed"

    def with_amax(self, *_, **__):
        EVENTS.append(("quantize with amax", True))
        return "dense"


tex = Note()


class ScaledSReLU:
    glu_interleave_size = None


class ScaledSwiGLU:
    glu_interleave_size = 32


def is_glu_activation(op):
    return isinstance(op, ScaledSwiGLU)


def get_device_compute_capability():
    return (10, 0)


def register_forward_backward_fusion(func, prepend=False):
    REGISTERED.append((func, prepend))


def _cudnn_frontend_version_at_least(text):
    return tuple(int(part) for part in text.split(".")[:2]) <= FRONTEND


def _cudnn_frontend_supports_single_group_runtime_offsets(kind):
    return kind is not ScaledSReLU and _cudnn_frontend_version_at_least("1.27.0")


def _deterministic_algorithms_required():
    return DETERMINISM
'''

_TE_BODY = """

def _group_quantize_for_grouped_mlp(x, quantizer, num_groups, splits, *, offsets=None{KWONLY}):
    if {MANY} or quantizer is None:
        return tex.group_quantize(x)
    return tex.quantize(x)


def _group_quantize_with_amax_for_grouped_mlp(x,
    quantizer,
    num_groups,
    splits,
    *,
    offsets=None,{KWONLY_LINE}
):
    if quantizer == "mxfp8":
        return _group_quantize_for_grouped_mlp(x, quantizer, num_groups, splits{KW})
    if {MANY}:
        return tex.group_with_amax(x)
    return tex.with_amax(x)


def _compute_grad_params(op, num_groups, *, label{KWONLY}):
    if (
        {ONE}
        and op is not None
    ):
        EVENTS.append(("weight gradient " + label, True))
    else:
        EVENTS.append(("weight gradient " + label, False))
    return [label]


def _single_group_fc2_gemm(out):
    EVENTS.append(("FC2", True))
    return out


class _GroupedMLP_CuTeGEMMBase:
    @classmethod
    def grouped_gemm_dactivation_kernel(cls):
        raise AssertionError("the classes below have kernels")

    @classmethod
    def grouped_gemm_dactivation_is_deterministic(cls):
        return False

    def __init__(self, fc1, activation, fc2):
        self.basic_ops = (fc1, activation, fc2)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, nvfp4=False):
        (fc1_op, activation_op, fc2_op) = self.basic_ops
        fc1_ctx, _, fc2_ctx = basic_op_ctxs
        in_shape = list(input_.shape)
        num_groups = fc1_op.num_groups{DECISION}
        split_sizes = basic_op_extra_inputs[0][0]
        n, s = num_groups, split_sizes
        scales = basic_op_extra_inputs[1][-1]
        unit_activation_scale = bool(getattr(activation_op, "unit", False))
        if unit_activation_scale and num_groups != 1:
            unit_activation_scale = not unit_activation_scale
        runtime_offsets = _cudnn_frontend_supports_single_group_runtime_offsets(
            type(activation_op)
        )
        use_offsetless_metadata = {ONE} and unit_activation_scale and runtime_offsets
        EVENTS.append(("offsets", use_offsetless_metadata))
        grouped_weight = fc1_op.single_grouped_weight
        if grouped_weight:
            grouped_fc1_weight = _group_quantize_for_grouped_mlp(fc1_op.weight,
                "mxfp8",
                num_groups,
                None{KW},
            )
            grouped_fc2_weight = _group_quantize_for_grouped_mlp(fc2_op.weight, "mxfp8", n, s{KW})
        grouped_fc1_x = _group_quantize_for_grouped_mlp(input_, "mxfp8", n, s{KW})
        fc1_activation_kwargs = {{}}
        if runtime_offsets:
            fc1_activation_kwargs["use_single_group_runtime_offsets"] = {ONE}
        EVENTS.append(
            ("FC1 kernel", fc1_activation_kwargs.get("use_single_group_runtime_offsets", False))
        )
        if grouped_weight:
            use_single_group_weight_swizzle = {ONE}
            EVENTS.append(("FC1 grouped scales", use_single_group_weight_swizzle))
        else:
            use_single_discrete_weight = {ONE}
            EVENTS.append(("FC1 discrete weight", use_single_discrete_weight))
        if nvfp4:
            grouped_fc2_x = _group_quantize_with_amax_for_grouped_mlp("x", "nvfp4", n, s{KW})
            grouped_fc2_x = _group_quantize_for_grouped_mlp("x", "nvfp4", n, s{KW})
            if {ONE} and grouped_fc2_x is not None:
                fc2_out_buf = _single_group_fc2_gemm("out")
            else:
                EVENTS.append(("FC2", False))
        else:
            use_single_group_dense_fc2 = {ONE}
            EVENTS.append(("FC2", use_single_group_dense_fc2))
            if not use_single_group_dense_fc2:
                fc2_quant_kwargs = {{}}
                if runtime_offsets:
                    fc2_quant_kwargs["use_single_group_runtime_offsets"] = {ONE}
                EVENTS.append(("FC2 kernel", any(fc2_quant_kwargs.values())))
        fc1_ctx.saved = (split_sizes, scales)
        fc1_ctx.unit = unit_activation_scale
        return input_

    def fuser_backward(self, basic_op_ctxs, grad_output, *, recompute=False):
        (fc1_op, activation_op, fc2_op) = self.basic_ops
        fc1_ctx, _, fc2_ctx = basic_op_ctxs
        split_sizes, scales = fc1_ctx.saved
        num_groups = fc1_op.num_groups{DECISION}
        n, s = num_groups, split_sizes
        scale_bias = fc2_op.scale_bias
        grouped_fc2_dy = _group_quantize_for_grouped_mlp(grad_output, "mxfp8", n, s{KW})
        unit_activation_scale = bool(fc1_ctx.unit){CHECK}
        dscales_tensor: object = None
        if unit_activation_scale is False:
            dscales_tensor = torch.zeros_like(scales)
        fc2_dactivation_kwargs = {{"dprob_tensor": dscales_tensor}}
        dactivation_kernel = self.grouped_gemm_dactivation_kernel(){FLAG}
        offsets = _cudnn_frontend_supports_single_group_runtime_offsets(type(activation_op))
        if offsets:
            fc2_dactivation_kwargs["use_single_group_runtime_offsets"] = {ONE}
        KERNEL_ARGUMENTS.clear()
        KERNEL_ARGUMENTS.update(fc2_dactivation_kwargs)
        EVENTS.append(
            (
                "dactivation kernel",
                fc2_dactivation_kwargs.get("use_single_group_runtime_offsets", False),
            )
        )
        use_single_discrete_weight = {ONE}
        EVENTS.append(("FC2 discrete weight", use_single_discrete_weight))
        grad_scales = dactivation_kernel(**fc2_dactivation_kwargs)["dprob_tensor"]
        if recompute:
            grouped_fc2_x = _group_quantize_for_grouped_mlp("again", "nvfp4", n, s{KW})
        grouped_fc1_dy = _group_quantize_for_grouped_mlp(grad_output, "nvfp4", n, s{KW})
        fc2_grad_params = _compute_grad_params(fc2_op, num_groups, label="FC2"{KW})
        use_single_group_dense_dgrad = {ONE}
        EVENTS.append(("FC1 dgrad", use_single_group_dense_dgrad))
        if not use_single_group_dense_dgrad:
            fc1_dgrad_kwargs = {{}}
            if offsets:
                fc1_dgrad_kwargs["use_single_group_runtime_offsets"] = {ONE}
            EVENTS.append(("FC1 kernel", any(fc1_dgrad_kwargs.values())))
        fc1_grad_params = _compute_grad_params(fc1_op,
            num_groups,
            label="FC1"{KW},
        )
        if unit_activation_scale:  # nobody asks for it
            activation_grad_extra = tuple([None])
        else:
            activation_grad_extra = () if grad_scales is None else (grad_scales,)
        return grad_output, [fc1_grad_params, fc2_grad_params], activation_grad_extra


def dglu_kernel(*, dprob_tensor, use_single_group_runtime_offsets=False, deterministic=False):
    return {{"dprob_tensor": dprob_tensor}}


def dsrelu_kernel(*, dprob_tensor, deterministic=None):
    return {{"dprob_tensor": torch.ones(4) if dprob_tensor is None else dprob_tensor}}


class Supported:
    @classmethod
    def is_supported(cls):
        return True


class GroupedMLP_CuTeGEMMGLU(Supported, _GroupedMLP_CuTeGEMMBase):
    @classmethod
    @functools.cache
    def grouped_gemm_dactivation_kernel(cls):
        return dglu_kernel


class GroupedMLP_CuTeGEMMUnary(Supported, _GroupedMLP_CuTeGEMMBase):
    @classmethod
    def grouped_gemm_dactivation_kernel(cls):
        return dsrelu_kernel

    @classmethod
    def grouped_gemm_dactivation_is_deterministic(cls):
        return True


# Tell the fuser.
if GroupedMLP_CuTeGEMMGLU.is_supported() is True:
    register_forward_backward_fusion("glu", prepend=True)
if GroupedMLP_CuTeGEMMUnary.is_supported() is True:
    register_forward_backward_fusion("unary", prepend=True)
"""

_CHECK = """
        asked = _deterministic_algorithms_required()
        deterministic_dactivation = asked and not unit_activation_scale
        if deterministic_dactivation and asked:
            kernel_can = self.grouped_gemm_dactivation_is_deterministic()
            dprob_is_deterministic = not scale_bias and kernel_can
            if not dprob_is_deterministic:  # atomics
                raise RuntimeError("upstream refuses")"""

_FLAG = """
        if deterministic_dactivation and asked:
            fc2_dactivation_kwargs["deterministic"] = True"""

_DECISION = """
        use_dense_single_group = num_groups == 1 and (
            _cudnn_frontend_supports_single_group_runtime_offsets(type(activation_op))
        )"""


def te_source(version: str) -> str:
    """The model of 2.19.0's structure (every shortcut asks by itself) or of 2.20.2's."""
    old = version == "2.19.0"
    dense = "use_dense_single_group"
    fields = {
        "ONE": "num_groups == 1" if old else dense,
        "MANY": "num_groups != 1" if old else f"not {dense}",
        "KW": "" if old else f", {dense}={dense}",
        "KWONLY": "" if old else f", {dense}",
        "KWONLY_LINE": "" if old else f"\n    {dense},",
        "DECISION": "" if old else _DECISION,
        "CHECK": "" if old else _CHECK,
        "FLAG": "" if old else _FLAG,
    }
    return _TE_HEAD.lstrip("\n") + _TE_BODY.format(**fields)


_MEGATRON = '''
"""A model of the experts on the operation fuser."""
import contextlib

import torch

OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"


class TEGroupedMLP(torch.nn.Module):
    def _make_fused_ops(self):
        raise AssertionError("the tests give the ops")

    def quantization_unpadding(self, output, tokens):
        return output[: sum(tokens)]

    def _fused_forward(
        self, permuted_local_hidden_states, tokens_per_expert, permuted_probs,{BUFFERS}
    ):
        """Run the ops."""{OWN}
        if None is self._fused_ops:
            self._fused_ops = [self._make_fused_ops()]
        ops = self._fused_ops[0]

        unpadded_tokens_per_expert, op_kwargs = None, {{}}
        with contextlib.nullcontext():
{CALL}
        if unpadded_tokens_per_expert:
            output = self.quantization_unpadding(tokens=unpadded_tokens_per_expert, output=output)
        return output
'''

_BUFFERS = """
        output_buffer=None,
        grad_input_buffer=None,"""

_CALL = """\
            if output_buffer is not None and OUTPUT_BUFFER_KEY:
                op_kwargs[-1] = {OUTPUT_BUFFER_KEY: output_buffer}
            fc2_extra_inputs = (tokens_per_expert,)
            if self.linear_fc2.use_bias:
                fc2_extra_inputs = (tokens_per_expert, permuted_probs)
            output = ops(
                permuted_local_hidden_states, tokens_per_expert,
                {PROBS},  # the activation's scales
                *fc2_extra_inputs,
                **({"op_kwargs": op_kwargs} if op_kwargs else {}),
            )"""

# Before 0.19.
_OLD_CALL = """\
            output = ops(
                permuted_local_hidden_states, tokens_per_expert,
                {PROBS},  # the activation's scales
                tokens_per_expert,
            )"""

_OWN_REWRITE = """
        behind = self.config.deterministic_mode
        if self.config.deterministic_mode and self.linear_fc2.use_bias:
            raise RuntimeError("its own guard")"""


def megatron_source(own_rewrite: bool = False, zero_copy: bool = True) -> str:
    """The model without a deterministic mode, or with a rewrite of Megatron's own.

    Without `zero_copy`, the method has no buffers and FC2 no bias scale, as before 0.19.
    """
    probs = "torch.ones_like(permuted_probs) if behind else permuted_probs"
    text = _MEGATRON.lstrip("\n").format(
        BUFFERS=_BUFFERS if zero_copy else "",
        CALL=(_CALL if zero_copy else _OLD_CALL).replace(
            "{PROBS}", probs if own_rewrite else "permuted_probs"
        ),
        OWN=_OWN_REWRITE if own_rewrite else "",
    )
    if not own_rewrite:
        return text
    return text.replace(
        "        if unpadded_tokens_per_expert:\n",
        "        if behind:\n"
        "            output = (output.float() * permuted_probs[:, None].float()).to(output.dtype)\n"
        "        if unpadded_tokens_per_expert:\n",
    )


def write_tree(
    root: Path,
    te: str | None = None,
    te_version: str = "2.20.2",
    megatron: str | None = None,
    megatron_version: str = "0.19.2",
) -> Path:
    """Write a site-packages folder with the given file texts; returns it."""
    for text, package, below, info in (
        (te, "transformer_engine", "pytorch/ops/fused/grouped_mlp.py", te_version),
        (megatron, "megatron/core", "transformer/moe/experts.py", megatron_version),
    ):
        if text is None:
            continue
        file = root / package / below
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
        name = "transformer_engine" if package == "transformer_engine" else "megatron_core"
        (root / f"{name}-{info}.dist-info").mkdir()
    return root


def te_file(root: Path) -> Path:
    """The TE file of a tree."""
    return root / "transformer_engine/pytorch/ops/fused/grouped_mlp.py"


def megatron_file(root: Path) -> Path:
    """The Megatron file of a tree."""
    return root / "megatron/core/transformer/moe/experts.py"


def load(source: str | bytes, folder: Path) -> ModuleType:
    """Run a file's text as a module of its own."""
    name = f"model_{next(_count)}"
    path = folder / f"{name}.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def linear(groups: int = 1, bias: bool = False, **options: object) -> SimpleNamespace:
    """A stand-in for a grouped linear."""
    parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=bool(options.get("train", True)))
    fields = {
        "num_groups": groups,
        "has_bias": bias,
        "single_grouped_weight": bool(options.get("grouped", False)),
        "scale_bias": bool(options.get("scale_bias", False)),
        "weight": "weight",
        "named_parameters": lambda: [("weight0", parameter), ("bias0", parameter)][: 1 + bias],
    }
    return SimpleNamespace(**fields)
