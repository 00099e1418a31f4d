# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Argument names of the cuDNN frontend's grouped-GEMM wrappers, release by release.

Facts read off the published wheels 1.23.0 to 1.32.0. Dtype defaults are given as None, which is
what releases from 1.28 on say; the wrappers' own choice is then the same in all of them.
"""

from __future__ import annotations

import ast
import inspect

VERSIONS = (
    "1.23.0", "1.24.0", "1.24.1", "1.25.0", "1.26.0", "1.27.0",
    "1.28.0", "1.29.0", "1.29.1", "1.30.0", "1.31.0", "1.32.0",
)  # fmt: skip

_TAIL = "cd_major='n' mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16 vector_f32=False"
_POINTERS = "b_ptrs=None sfb_ptrs=None n=None b_dtype=None b_major='k'"
_GEGLU = "linear_offset=None@1.24.0 geglu_alpha=1.702@1.24.0 glu_clamp_max=7.0@1.24.0"
_GEGLU += " glu_clamp_min=-7.0@1.24.0"
_SITU = "situ_beta1=4.0@1.28.0 situ_beta2=25.0@1.28.0"
_LATE = f"{_SITU} use_dynamic_sched=False use_single_group_runtime_offsets=False@1.27.0"

# "name", "name=default", "name=default@first" or "name=default@release,first" (that release alone,
# then again from `first` on); "*" makes the rest keyword-only.
_ARGUMENTS = {
    "glu": f"""a_tensor sfa_tensor padded_offsets alpha_tensor b_tensor=None sfb_tensor=None
        bias_tensor=None {_POINTERS} norm_const_tensor=None prob_tensor=None acc_dtype=None
        c_dtype=None d_dtype=None {_TAIL} m_aligned=256 discrete_col_sfd=False act_func='swiglu'
        {_GEGLU} {_LATE} current_stream=None generate_c=False@1.27.0
        sf_fp8_dtype_override=None@1.28.0 * scheduler_counter_tensor=None@1.31.0""",
    "dglu": f"""a_tensor c_tensor sfa_tensor padded_offsets alpha_tensor beta_tensor prob_tensor
        dprob_tensor b_tensor=None sfb_tensor=None generate_dbias=False {_POINTERS}
        norm_const_tensor=None acc_dtype=None d_dtype=None {_TAIL} m_aligned=256
        discrete_col_sfd=False act_func='dswiglu' {_GEGLU} epilogue_op=None {_LATE}
        current_stream=None sf_fp8_dtype_override=None@1.28.0
        round_dgrad_to_input_dtype=False@1.31.0 activation_tensor=None@1.31.0
        deterministic=False@1.29.1,1.31.0""",
    "srelu": f"""a_tensor b_tensor=None sfa_tensor=None sfb_tensor=None padded_offsets=None
        alpha_tensor=None bias_tensor=None {_POINTERS} norm_const_tensor=None prob_tensor=None
        acc_dtype=None c_dtype=None d_dtype=None {_TAIL} m_aligned=256 discrete_col_sfd=False
        use_dynamic_sched=False current_stream=None tanh_clamp_scale=None@1.29.0""",
    "dsrelu": f"""a_tensor b_tensor=None c_tensor=None sfa_tensor=None sfb_tensor=None
        padded_offsets=None alpha_tensor=None prob_tensor=None dprob_tensor=None
        generate_dbias=False {_POINTERS} norm_const_tensor=None acc_dtype=None d_dtype=None {_TAIL}
        m_aligned=256 discrete_col_sfd=False use_dynamic_sched=False use_dsrelu_reuse=False@1.24.0
        current_stream=None deterministic=None@1.28.0 tanh_clamp_scale=None@1.29.0""",
    "quant": f"""a_tensor sfa_tensor padded_offsets alpha_tensor b_tensor=None sfb_tensor=None
        bias_tensor=None {_POINTERS} norm_const_tensor=None prob_tensor=None
        row_scale_tensor=None@1.25.0 d_tensor=None@1.26.0 acc_dtype=None d_dtype=None {_TAIL}
        m_aligned=256 discrete_col_sfd=False use_dynamic_sched=False
        use_single_group_runtime_offsets=False@1.27.0 current_stream=None
        sf_fp8_dtype_override=None@1.28.0 * generate_amax=True@1.31.0
        scheduler_counter_tensor=None@1.31.0""",
    "wgrad": """a_tensor b_tensor sfa_tensor sfb_tensor offsets_tensor output_mode='dense'
        wgrad_tensor=None wgrad_ptrs=None global_scale_a=None global_scale_b=None acc_dtype=None
        wgrad_dtype=None mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16
        accumulate_on_output=False input_order='tensor2d'@1.24.0 current_stream=None
        sf_fp8_dtype_override=None@1.28.0 * descriptor_workspace=None@1.30.0""",
    "glu_hadamard": f"""a_tensor b_tensor=None sfa_tensor=None sfb_tensor=None padded_offsets=None
        alpha_tensor=None prob_tensor=None bias_tensor=None {_POINTERS} acc_dtype=None c_dtype=None
        d_dtype=None {_TAIL} m_aligned=256 act_func='swiglu' {_SITU} use_dynamic_sched=False
        use_tmem_post_rht_amax=False@1.24.0 current_stream=None""",
}

WRAPPERS = tuple(_ARGUMENTS)
"""Short names, as in `grouped_gemm_<name>_wrapper_sm100`."""


def number(version: str) -> tuple[int, ...]:
    """Return a version as numbers that compare."""
    return tuple(int(part) for part in version.split("."))


def signature(
    wrapper: str, version: str, changes: dict[str, bool] | None = None
) -> inspect.Signature:
    """Return the signature of a wrapper.

    Args:
        wrapper: One of WRAPPERS.
        version: A release, one of VERSIONS.
        changes: Argument name to whether this installation has it, against the release.

    Raises:
        ValueError: `version` or `wrapper` is not known.
    """
    if version not in VERSIONS:
        raise ValueError(f"version is {version!r}; allowed: {', '.join(VERSIONS)}")
    if wrapper not in _ARGUMENTS:
        raise ValueError(f"wrapper is {wrapper!r}; allowed: {', '.join(WRAPPERS)}")
    found, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for word in _ARGUMENTS[wrapper].split():
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        declaration, _, since = word.partition("@")
        name, _, default = declaration.partition("=")
        if (changes or {}).get(name, _is_in(version, since)):
            value = ast.literal_eval(default) if default else inspect.Parameter.empty
            found.append(inspect.Parameter(name, kind, default=value))
    return inspect.Signature(found)


def _is_in(version: str, since: str) -> bool:
    *alone, first = since.split(",")
    return version in alone or not first or number(version) >= number(first)
