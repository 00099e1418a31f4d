# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The structure of the source is tested like its behaviour."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import te_grouped_mlp
from te_grouped_mlp.integration import installed_te
from tests import source_rules as rules

SOURCES = rules.sources()
TEXTS = {path: file.read_text(encoding="utf-8") for path, file in SOURCES.items()}
MODULES = {rules.module_name(path) for path in SOURCES} | {"_C"}
HOOKS = Path(__file__).resolve().parent.parent / ".pre-commit-config.yaml"
PATTERNS = {
    "group-count": rules.GROUP_COUNT,
    "environ": rules.ENVIRON,
    "capability": rules.CAPABILITY,
}


def _all(rule: Callable[[str, str], Iterator[str]]) -> list[str]:
    return [hit for path, text in TEXTS.items() for hit in rule(path, text)]


@pytest.mark.parametrize("name", PATTERNS)
def test_question_is_asked_in_one_place(name: str) -> None:
    assert _all(lambda path, text: rules.pattern_hits(PATTERNS[name], path, text)) == []


def test_imports_go_one_way() -> None:
    assert _all(lambda path, text: rules.import_hits(path, text, MODULES)) == []


def test_modules_and_functions_are_short() -> None:
    assert _all(rules.length_hits) == []
    assert all(reason.strip() for reason in rules.LONG.values())


def test_tensor_dataclasses_are_not_changed() -> None:
    fields = rules.tensor_fields(TEXTS.values())
    assert {"layout", "scale", "want_column", "pre_activation"} <= fields
    assert _all(lambda path, text: rules.mutation_hits(path, text, fields)) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("operand.axis = Axis.ROW", True),
        ("state.x.scale, other = a, b", True),
        ("operand.axis += 1", True),
        ("del operand.axis", True),
        ("for operand.axis in both: pass", True),
        ("x = operand.axis", False),
        ("self.axis = axis", False),
        ("ctx.scale = scale", False),
        ("compact.columnwise_data = None", False),
        ("operand.axis.name = 1", False),
    ],
)
def test_a_change_of_a_tensor_dataclass_is_found(line: str, found: bool) -> None:
    defined = "@tensor_dataclass\nclass Operand:\n    axis: Axis\n    scale: Tensor = None\n"
    other = "@dataclass\nclass Other:\n    columnwise_data: Tensor\n"
    fields = rules.tensor_fields([defined, other])
    assert fields == {"axis", "scale"}
    assert bool(list(rules.mutation_hits("op/x.py", line, fields))) is found


def test_every_file_has_the_licence_header() -> None:
    assert _all(rules.header_hits) == []


@pytest.mark.parametrize(
    "line",
    [
        "if num_groups == 1:",
        "if self.num_groups==1:",
        "dense = 1 == num_groups",
        "x = num_gemms != 1",
        "x = num_tensors > 1",
        "x = n_groups <= 1",
        "x = layout.num_groups < 2",
        "x = 2 > layout.num_groups",
        "x = 2 <= num_groups",
        "x = num_groups >= 2",
        "if len(splits) == 1:",
        "if len(call.split_sizes) < 2:",
        "if split_sizes.numel() == 1:",
        "if 1 != split_sizes.numel():",
        "if split_sizes.shape[0] == 1:",
        "if splits.size(0) == 1:",
        "if num_groups in (1,):",
        "if self.groups == 1:",
    ],
)
def test_group_count_pattern_finds(line: str) -> None:
    assert list(rules.pattern_hits(rules.GROUP_COUNT, "op/x.py", line))
    assert not list(rules.pattern_hits(rules.GROUP_COUNT, "op/layout.py", line))


@pytest.mark.parametrize(
    "line",
    [
        "if num_groups < 1:",
        "if num_groups == 16:",
        "if num_groups >= 1:",
        "if len(splits) != num_groups:",
        "if layout.use_dense_single_group:",
        "for i in range(num_groups - 1):",
        "rows == 1",
        "number of groups is not 1 to 64",
        "num_groups = 1",
    ],
)
def test_group_count_pattern_leaves_alone(line: str) -> None:
    assert not list(rules.pattern_hits(rules.GROUP_COUNT, "op/x.py", line))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("environ", "x = os.environ['A']"),
        ("environ", "x = os.getenv('A')"),
        ("environ", "from os import path, environ"),
        ("capability", "torch.cuda.get_device_capability(0)"),
        ("capability", "from ..utils import get_device_compute_capability"),
    ],
)
def test_other_patterns_find(name: str, line: str) -> None:
    assert list(rules.pattern_hits(PATTERNS[name], "op/x.py", line))


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("op/plan.py", "from te_grouped_mlp.op.problem import Problem", False),
        ("op/problem.py", "from te_grouped_mlp.op.plan import Plan", True),
        ("op/problem.py", "def f():\n    from te_grouped_mlp.op import plan", True),
        ("op/problem.py", "from .plan import Plan", True),
        ("op/problem.py", "import te_grouped_mlp.op.plan", True),
        ("op/problem.py", "import transformer_engine", True),
        ("op/te/adapter.py", "import transformer_engine", False),
        ("op/problem.py", "import_module('te_grouped_mlp.op.plan')", True),
        ("op/problem.py", "importlib.import_module(f'te_grouped_mlp.op.plan.{name}')", True),
        ("op/problem.py", "__import__('te_grouped_mlp.op.plan')", True),
        ("op/problem.py", "NAMES = {'plan': 'te_grouped_mlp.op.plan'}", True),
        ("op/problem.py", "import_module(f'{package}.plan')", True),
        ("op/problem.py", "import_module('transformer_engine.common')", True),
        ("op/plan.py", "import_module('te_grouped_mlp.op.problem')", False),
        ("op/plan.py", "import_module('cudnn')", False),
        ("op/plan.py", "'See te_grouped_mlp.op.selection for who asks.'", False),
        ("op/backends/reference/backend.py", "from te_grouped_mlp.op import execution", True),
        ("op/backends/cudnn/capability.py", "from te_grouped_mlp.op import selection", True),
        ("op/selection.py", "from te_grouped_mlp.op.backends.cudnn import capability", False),
        ("op/selection.py", "from te_grouped_mlp.op.backends.cudnn import backend", True),
        ("op/decisions.py", "from te_grouped_mlp.op import fusion", True),
        ("op/explain.py", "from te_grouped_mlp.op import fusion", False),
        ("op/unheard_of.py", "", True),
    ],
)
def test_import_rule(path: str, line: str, found: bool) -> None:
    assert bool(list(rules.import_hits(path, line, MODULES))) is found


def test_every_name_of_te_is_in_the_table() -> None:
    """A version of TE that this package does not know is judged by that table alone."""
    missing = []
    for path, text in TEXTS.items():
        used = rules.te_names(text) if path.startswith(("op/", "_fork/")) else {}
        for (module, name), keywords in used.items():
            known = installed_te.HOST_NAMES.get(module, {}).get(name)
            if known is None or not keywords <= set(known):
                missing.append(f"{path}: {module} {name} {sorted(keywords)}")
    assert missing == []


def test_names_of_te_are_found() -> None:
    text = """
import transformer_engine_torch as tex
from transformer_engine.pytorch.utils import a, b as c
tex.group.function(tex.other, getattr(tex, "optional", None), x=1)
c(y=2, **rest)
c.method(z=3)
"""
    tex = "transformer_engine_torch"
    utils = "transformer_engine.pytorch.utils"
    assert rules.te_names(text) == {
        (tex, "group.function"): {"x"},
        (tex, "other"): set(),
        (utils, "a"): set(),
        (utils, "b"): {"y"},
    }


def test_length_rule() -> None:
    body = "def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION_LINES
    assert list(rules.length_hits("op/x.py", body))
    assert not list(rules.length_hits("op/x.py", body.replace("    x = 1\n", "", 1)))
    assert list(rules.length_hits("op/x.py", "x = 1\n" * (rules.MAX_MODULE_LINES + 1)))
    assert not list(rules.length_hits("op/backends/cutedsl/kernels/x.py", body))


def _leaves() -> list[str]:
    capability = [
        name for name in MODULES if name.startswith("op.backends.") and name.endswith(".capability")
    ]
    return [*(f"op.{name}" for name in rules.LEAVES), *sorted(capability)]


@pytest.mark.parametrize("name", _leaves())
def test_leaf_imports_neither_torch_nor_te(name: str) -> None:
    """In a process of its own, where both are made impossible."""
    code = f"""
import sys
class Block:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname.split(".")[0] in ("torch", "transformer_engine", "numpy"):
            raise ModuleNotFoundError(fullname + " is blocked")
sys.meta_path.insert(0, Block)
import te_grouped_mlp.{name}
assert "torch" not in sys.modules
"""
    package_parent = str(Path(te_grouped_mlp.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package_parent, inherited])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_names_of_the_op_say_what_they_are() -> None:
    assert _all(rules.vague_hits) == []
    assert list(rules.vague_hits("op/x.py", "def f(given):\n    made = [each for each in given]"))
    assert not list(rules.vague_hits("op/x.py", "a.found, f(kept=1)"))
    assert not list(rules.vague_hits("cli/x.py", "found = 1"))


def test_each_module_of_the_op_has_tests_of_its_name() -> None:
    tests = Path(__file__).parent
    assert [hit for path in TEXTS for hit in rules.untested_hits(path, tests)] == []
    assert rules.TESTED_BY.keys() <= TEXTS.keys()
    assert list(rules.untested_hits("op/unheard_of.py", tests))


def test_words_of_the_glossary_stand_in_the_code() -> None:
    if not HOOKS.is_file():
        return
    lines = (HOOKS.parent / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    ours = [
        word
        for line in lines
        if line.startswith("|")
        for word in re.findall(r"`([\w.]+)`", line.split("|")[1])
    ]
    assert len(ours) > 40
    source = "\n".join(TEXTS.values())
    assert [word for word in ours if not re.search(rf"\b{re.escape(word)}\b", source)] == []


def test_hooks_and_tests_use_the_same_patterns() -> None:
    """In a copy of the tests without the repository there are no hooks to compare with."""
    if not HOOKS.is_file():
        assert not (HOOKS.parent / "pyproject.toml").is_file()
        return
    text = HOOKS.read_text(encoding="utf-8")
    for pattern in PATTERNS.values():
        assert pattern in text
