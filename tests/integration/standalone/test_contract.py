# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every tex function takes what Transformer Engine's binding takes and refuses what it refuses."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from te_grouped_mlp.integration.standalone.tex import module as tex_module
from te_grouped_mlp.integration.standalone.tex.contract import CONTRACTS
from tests.integration.standalone.tex_calls import GOOD, REFUSED, SIGNATURES, refused

NAMES = sorted(SIGNATURES)
EXPERIMENTAL = "swizzle_scales_and_pack_ptrs_for_discrete_weights"
SOURCE = re.compile(r"(common/|extensions/)?[\w/]+\.(cpp|h|cu|cuh):\d+")
# Annotations of ours, as the test's data write the binding's types.
_TYPES = {"Any": "object", "Size": "size_t", "TeDType": "DType", "torch.Tensor": "Tensor"}


def function_of(tex, name):
    return getattr(tex.grouped_mlp_experimental if name == EXPERIMENTAL else tex, name)


def bound_type(annotation):
    if annotation.endswith(" | None"):
        return bound_type(annotation.removesuffix(" | None")) + "?"
    if annotation.startswith("Sequence["):
        return f"list[{bound_type(annotation[len('Sequence[') : -1])}]"
    return _TYPES.get(annotation, annotation.removeprefix("torch."))


def bound_signature(function):
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=bound_type(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return text.removeprefix("(").removesuffix(")").replace("'", "")


def called(tex, name, arguments):
    """Call a function: by keyword where it has them, as pybind does."""
    given = dict(arguments)
    kinds = inspect.signature(function_of(tex, name)).parameters
    positional = [given.pop(key) for key, p in kinds.items() if p.kind is p.POSITIONAL_ONLY]
    return function_of(tex, name)(*positional, **given)


def test_the_tables_have_every_function(tex):
    names = {name for names in tex_module.FUNCTIONS.values() for name in names} | {EXPERIMENTAL}
    assert names == set(CONTRACTS) == set(SIGNATURES) == set(GOOD) == set(REFUSED)


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_is_the_bindings(tex, name):
    line, expected = SIGNATURES[name]
    assert bound_signature(function_of(tex, name)) == expected, f"extensions/pybind.cpp:{line}"


@pytest.mark.parametrize("name", NAMES)
def test_a_good_call_is_taken_and_a_wrong_type_is_not(tex, name):
    called(tex, name, GOOD[name](tex))
    for parameter in inspect.signature(function_of(tex, name)).parameters.values():
        if parameter.annotation in ("Any", "bool"):
            continue
        for wrong in (object(), 1.5, None):
            if wrong is None and parameter.annotation.endswith("None"):
                continue
            if wrong == 1.5 and parameter.annotation.startswith("float"):
                continue
            arguments = {**GOOD[name](tex), parameter.name: wrong}
            with pytest.raises(TypeError, match=rf"^{name}: {parameter.name} is a "):
                called(tex, name, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_every_refusal_has_its_source_and_its_input(name):
    refusals = CONTRACTS[name].refusals
    assert {refusal.name for refusal in refusals} == set(REFUSED[name])
    assert len({refusal.name for refusal in refusals}) == len(refusals)
    for refusal in refusals:
        upstream = bool(refusal.source)
        assert not upstream or SOURCE.fullmatch(refusal.source), refusal
        # NotImplementedError is a RuntimeError: what standalone has not, it refuses as upstream.
        assert issubclass(refusal.error, RuntimeError if upstream else Exception), refusal


@pytest.mark.parametrize(("name", "kind"), list(refused()), ids=lambda text: text.replace(" ", "-"))
def test_a_refused_call_raises_what_upstream_raises(tex, name, kind):
    contract, arguments = CONTRACTS[name], GOOD[name](tex)
    REFUSED[name][kind](tex, arguments)
    refusal = next(one for one in contract.refusals if one.name == kind)
    if not refusal.applies:
        called(tex, name, arguments)
        return
    with pytest.raises(refusal.error) as raised:
        called(tex, name, arguments)
    assert type(raised.value) is refusal.error
    defaults = {n: p.default for n, p in contract.signature.parameters.items()}
    assert str(raised.value) == f"{name}: {refusal.rule({**defaults, **arguments})}"


def test_positional_only_and_unknown_names_are_refused(tex):
    with pytest.raises(TypeError):
        tex.get_grouped_gemm_setup_workspace_size(num_tensors=2)
    with pytest.raises(TypeError, match="bogus"):
        tex.quantize(torch.zeros(32, 32), None, bogus=1)
    with pytest.raises(TypeError, match="quantizer"):
        tex.quantize(torch.zeros(32, 32))
    with pytest.raises(TypeError, match="multiple values"):
        tex.quantize(torch.zeros(32, 32), None, tensor=torch.zeros(32, 32))
    with pytest.raises(TypeError, match="too many"):
        tex.splits_to_offsets(torch.zeros(1).long(), 1, 2)
    with pytest.raises(TypeError, match="num_tensors is a int"):
        tex.group_quantize(torch.zeros(128, 32), None, -1, None)
