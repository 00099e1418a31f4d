# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The structural rules of the source as pure functions over text.

`test_source_rules.py` applies them to the package under test, and checks that the hooks of
`.pre-commit-config.yaml` use the same patterns. A rule that is broken here for a good reason gets
an entry in its table, with the reason.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import te_grouped_mlp
from te_grouped_mlp.integration import installed_te

# How a group count is spelled: a name, or the length of the splits.
_COUNT = (
    r"(?:[\w.]*(?:num|n)_(?:groups|gemms|tensors|experts)\b|\b(?:[\w.]+\.)?groups\b"
    r"|len\(\s*[\w.]*(?:splits|split_sizes|groups)\s*\)"
    r"|[\w.]*(?:splits|split_sizes)(?:\.numel\(\)|\.size\(0\)|\.shape\[0\]))"
)
# Only comparisons that tell one group from several; `num_groups < 1` asks something else.
GROUP_COUNT = (
    rf"{_COUNT}\s*(?:(?:==|!=|<=|>)\s*1\b|(?:<|>=)\s*2\b|in\s*[(\[{{]\s*1\s*,?\s*[)\]}}])"
    rf"|\b1\s*(?:==|!=|>=|<)\s*{_COUNT}|\b2\s*(?:>|<=)\s*{_COUNT}"
)
ENVIRON = r"\bos\.(?:environ|environb|getenv|putenv)\b|from os import .*\b(?:environ|getenv)\b"
CAPABILITY = r"get_device_(?:compute_)?capability"

_ASKERS = (
    "op/environment.py",
    "_bootstrap.py",
    "integration/standalone/loader.py",
    "op/backends/cutedsl/compile.py",
)
# Pattern -> the files where it may occur.
ALLOWED = {
    GROUP_COUNT: ("op/layout.py",),
    ENVIRON: _ASKERS,
    # All but the first answer TE's question; they do not ask it.
    CAPABILITY: (
        "emulator/fake_cuda.py",
        *_ASKERS,
        "integration/standalone/torch_view.py",
        "integration/standalone/overrides.py",
    ),
}
# The patches name upstream's own text in order to find it.
EXEMPT_FOLDERS = ("patches/",)

# Folders whose modules each have a place of their own in the order.
_ROOMS = ("", "integration", "op", "op.kernels", "op.step", "op.te", "op.tensors")

# What a backend can run is known before what runs it is imported.
_CAPABILITIES = tuple(
    f"op.backends.{name}.capability" for name in ("cudnn", "cutedsl", "reference", "upstream")
)

# Imports go to the same stage or an earlier one. The longest prefix of a module's name decides.
STAGES: tuple[tuple[str, ...], ...] = (
    ("", "_C", "integration", "integration.installed_te", "_bootstrap"),
    ("op.tensors.capacity",),
    (
        "op",
        "op.kernels",
        "op.step",
        "op.te",
        "op.tensors",
        "op.tensors.digest",
        "op.tensors.memory",
        "op.tensors.tensor_dataclass",
        "op.extension",
        "op.tensors.stacking",
        "op.activations",
        "op.emulated",
        "op.layout",
        "op.packages",
        "op.environment",
        "op.formats",
    ),
    ("op.tensors.scale_layout",),
    (
        "op.kernels.block_scale",
        "op.kernels.block_scale_kernels",
        "op.kernels.block_scale_math",
        "op.kernels.group_reductions",
        "op.kernels.group_reductions_kernels",
    ),
    ("integration.standalone",),
    ("emulator",),
    ("integration.overlay",),
    ("op.problem",),
    ("op.plan",),
    ("op.step.split_guard", "op.kernels.split_guard_kernels"),
    ("op.shape_constraints",),
    ("op.backends", *_CAPABILITIES),
    ("op.selection",),
    ("op.decisions",),
    ("op.te.probes",),
    ("op.tensors.checks", "op.tensors.operands", "op.tensors.gradients"),
    ("op.te.quantizers",),
    ("op.te.adapter",),
    (
        "op.tensors.dequantized_tokens",
        "op.tensors.dequantized_weights",
        "op.tensors.experts",
        "op.tensors.requantize",
    ),
    ("op.tensors.quantize", "op.tensors.weights"),
    ("op.backends.base",),
    ("op.backends.checked",),
    (
        "op.backends.cudnn",
        "op.backends.cutedsl",
        "op.backends.reference",
        "op.backends.upstream",
    ),
    ("op.execution",),
    ("op.step.saved",),
    ("op.step.intact",),
    ("op.step.inputs", "op.step.bias_gradient", "op.step.data_gradient", "op.step.weight_gradient"),
    ("op.fusion", "op.row_padding", "op.step.unfused"),
    ("op.explain",),
    ("integration.upstream_api",),
    ("_fork",),
    ("patches",),
    ("checkpoint",),
    ("emulator.process", "emulator.launch_results", "emulator.launches"),
    ("measure", "cli", "_command", "emulator.padded_step"),
)
UPWARD_ALLOWED = {
    # The finder imports the rest when the first name of TE is looked up, not at start-up.
    ("_bootstrap", "integration.overlay"),
    # Entered from there alone, by name, where the switch asks for it.
    ("integration.overlay", "emulator.process"),
    # The package's own names are looked up when they are asked for, not at start-up.
    ("", "integration.overlay"),
    ("", "integration.standalone"),
    ("", "op"),
    ("", "op.explain"),
    ("", "op.row_padding"),
    ("", "op.tensors.digest"),
    ("", "patches"),
}
# Where a module is imported by a name that is put together at run time, and what names it can be.
COMPUTED_IMPORTS = {
    "integration/installed_te.py": "the modules of TE in its table",
    "op/execution.py": "the backends, of their literals",
    "op/selection.py": "the backends' capability modules, of their literals",
    "cli/output.py": "a package for people",
    "__init__.py": "the package's own, of its literals",
    "integration/overlay.py": "the package that holds TE's module",
    "patches/__init__.py": "its own modules",
}
# Who may import TE; everything else must work where it is absent.
TE_IMPORTERS = (
    "_fork",
    "measure.bench.te_layer",
    "cli",
    "op.backends.cudnn.te_calls",
    "op.backends.upstream",
    "op.tensors.experts",
    "op.fusion",
    "op.tensors.quantize",
    "op.te.quantizers",
    "op.tensors.requantize",
    "op.te.adapter",
    "op.tensors.weights",
    "integration.overlay",
    "emulator.padded_step",
    "emulator.process",
    "measure.selftest",
    "measure.step",
    "integration.standalone",
)
LEAVES = (
    "activations",
    "extension",
    "layout",
    "packages",
    "environment",
    "tensors.tensor_dataclass",
    "formats",
    "tensors.scale_layout",
    "problem",
    "plan",
    "shape_constraints",
    "selection",
    "decisions",
)

MAX_FUNCTION_LINES = 60
# 300 is the aim; the slack is for a last helper that belongs where it is.
MAX_MODULE_LINES = 330
# File (or file:function) -> why it may be longer.
LONG: dict[str, str] = {
    "op/kernels/block_scale_kernels.py": "device code",
    "op/kernels/block_scale_kernels.py:quantize_tiles": "one kernel",
    "op/kernels/block_scale.py:quantize": "most of it is the contract of six outputs",
}


def sources() -> dict[str, Path]:
    """Return every Python file of the package under test by its installed path."""
    package = Path(te_grouped_mlp.__file__).resolve().parent
    found = {
        file.relative_to(package).as_posix(): file
        for file in sorted(package.rglob("*.py"))
        if "__pycache__" not in file.parts
    }
    fork = installed_te.fork_file()
    if fork is not None:
        found["_fork/grouped_mlp.py"] = fork
    patches = importlib.util.find_spec("te_grouped_mlp.patches")
    for folder in (patches.submodule_search_locations or ()) if patches is not None else ():
        for file in sorted(Path(folder).rglob("*.py")):
            found[f"patches/{file.relative_to(folder).as_posix()}"] = file
    return found


def is_kernel(path: str) -> bool:
    """Say whether a file is a device kernel, which is one kernel and has no length limit."""
    return path.startswith("op/backends/") and "/kernels/" in path and "/reference/" not in path


def pattern_hits(pattern: str, path: str, text: str) -> Iterator[str]:
    """Yield `path:line: text` for every line that a pattern forbids there."""
    if path in ALLOWED[pattern] or path.startswith(EXEMPT_FOLDERS):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(pattern, line):
            yield f"{path}:{number}: {line.strip()}"


def module_name(path: str) -> str:
    """Turn `op/plan.py` into `op.plan` and `op/__init__.py` into `op`."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def stage(name: str) -> int | None:
    """Return a module's place in the order, or None if no prefix of it has one."""
    best: tuple[int, int] | None = None
    for index, names in enumerate(STAGES):
        for prefix in names:
            fits = name == prefix or (prefix not in _ROOMS and name.startswith(f"{prefix}."))
            if fits and (best is None or len(prefix) > best[0]):
                best = (len(prefix), index)
    return None if best is None else best[1]


def imports(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything a file imports, at any depth.

    Also by string: what is handed to `import_module`, and every literal that is the dotted name of
    a part of this package. Of an f-string, what stands before its first value. Not what only a type
    checker imports, which binds nothing at run time.
    """
    tree = ast.parse(text)
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                root = ["te_grouped_mlp", *path.split("/")][: -node.level]
                base = ".".join([*root, *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _imports_by_string(node):
            yield node.lineno, _literal_head(node.args[0])
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            head = _literal_head(node)
            if re.fullmatch(r"te_grouped_mlp(\.\w+)+\.?", head):
                yield node.lineno, head.rstrip(".")


def _imports_by_string(node: ast.Call) -> bool:
    called = ast.unparse(node.func).rpartition(".")[2]
    return called in ("import_module", "__import__") and bool(node.args)


def _literal_head(node: ast.expr) -> str:
    """Return the text of a literal, or of an f-string up to its first value; else nothing."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def import_hits(path: str, text: str, known: set[str]) -> Iterator[str]:
    """Yield imports that go up, modules without a place in the order, and forbidden uses of TE."""
    name = module_name(path)
    own = stage(name)
    if own is None:
        yield f"{path}: has no place in the import order; add it to STAGES"
        return
    for line, target in imports(path, text):
        if not target and path not in COMPUTED_IMPORTS:
            yield f"{path}:{line}: imports a module whose name cannot be read"
        of_te = target.split(".")[0] in ("transformer_engine", "transformer_engine_torch")
        if of_te and not name.startswith(TE_IMPORTERS):
            yield f"{path}:{line}: imports {target}"
        if not target.startswith("te_grouped_mlp."):
            continue
        other = target.removeprefix("te_grouped_mlp.")
        # `from module import name`: the name belongs to the module.
        while other not in known and "." in other:
            other = other.rpartition(".")[0]
        other_stage = stage(other)
        goes_up = other_stage is not None and other_stage > own
        if goes_up and (name, other) not in UPWARD_ALLOWED:
            yield f"{path}:{line}: {name} imports {other}, which comes later"


def te_names(text: str) -> dict[tuple[str, str], set[str]]:
    """Find everything of TE that a file cannot do without.

    Imported names, and dotted names below an imported module (`tex.quantize`). A name that is
    looked up with `getattr` and a default is optional, and is not found here.

    Returns:
        (module, name) -> the keywords of the calls in this file.
    """
    tree = ast.parse(text)
    modules: dict[str, str] = {}
    local: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "transformer_engine"
        ):
            local |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}
        elif isinstance(node, ast.Import):
            te = [a for a in node.names if a.name.startswith("transformer_engine") and a.asname]
            modules |= {alias.asname or "": alias.name for alias in te}
    found: dict[tuple[str, str], set[str]] = {entry: set() for entry in local.values()}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, _, name = ast.unparse(node).partition(".")
            if root in modules:
                found.setdefault((modules[root], name), set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            root, _, name = ast.unparse(node.func).partition(".")
            entry = (modules[root], name) if root in modules else local.get(root)
            if entry in found and (name == "" or root in modules):
                found[entry] |= {k.arg for k in node.keywords if k.arg is not None}
    return found


def length_hits(path: str, text: str) -> Iterator[str]:
    """Yield modules and functions that are longer than a reader holds in mind."""
    if is_kernel(path):
        return
    lines = len(text.splitlines())
    if lines > MAX_MODULE_LINES and path not in LONG:
        yield f"{path}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES and f"{path}:{node.name}" not in LONG:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines"


def tensor_fields(texts: Iterable[str]) -> set[str]:
    """Return the names of the fields of all tensor dataclasses that some source defines."""
    classes = [
        node
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(each, ast.Name) and each.id == "tensor_dataclass"
            for each in node.decorator_list
        )
    ]
    fields = [each for node in classes for each in node.body if isinstance(each, ast.AnnAssign)]
    return {each.target.id for each in fields if isinstance(each.target, ast.Name)}


def mutation_hits(path: str, text: str, fields: set[str]) -> Iterator[str]:
    """Yield assignments that may change a tensor dataclass: to a field, of what is not one's own.

    Only the op's own code has them in hand; autograd's context is written to there, too.
    """
    if not path.startswith(("op/", "_fork/")):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
            continue
        if node.attr in fields and ast.unparse(node.value) not in ("self", "ctx"):
            yield f"{path}:{node.lineno}: assigns to {ast.unparse(node)}"


def header_hits(path: str, text: str) -> Iterator[str]:
    """Yield a file whose first two lines are not the licence header."""
    expected = [
        "# Copyright (c) 2026, the te-grouped-mlp authors.",
        "# SPDX-License-Identifier: Apache-2.0",
    ]
    lines = [line for line in text.splitlines()[:3] if not line.startswith("#!")]
    if lines[:2] != expected:
        yield f"{path}: no licence header"


VAGUE = frozenset({"found", "made", "given", "kept", "each"})
"""What no name of the op says: a value is called by what it is."""

TESTED_BY = {
    # Data and small parts of a step, which whole steps test.
    "op/backends/base.py": "op/backends/test_checked.py",
    "op/execution.py": "op/test_selection.py",
    "op/packages.py": "op/test_environment.py",
    "op/decisions.py": "op/test_fusion.py",
    "op/explain.py": "op/test_fusion.py",
    "op/step/data_gradient.py": "op/test_gradients_wanted.py",
    "op/step/weight_gradient.py": "op/test_gradients_wanted.py",
    "op/step/intact.py": "op/test_changes_between_passes.py",
    "op/step/unfused.py": "op/te/test_quantizers.py",
    "op/te/adapter.py": "op/test_changes_between_steps.py",
    "op/te/probes.py": "op/test_upstream_api.py",
    "op/tensors/quantize.py": "op/test_inputs_and_buffers.py",
    "op/tensors/requantize.py": "op/test_inputs_and_buffers.py",
    "op/tensors/tensor_dataclass.py": "test_source_rules.py",
    # Over the C++ extension, by what it reads and writes.
    # Between the op and the frontend: by whole launches, over stand-ins or the real one.
    "op/backends/cudnn/checks.py": "op/backends/cudnn/test_guards.py",
    "op/backends/cudnn/launch.py": "op/backends/cudnn/test_guards.py",
    "op/backends/cudnn/outputs.py": "op/backends/cudnn/test_guards.py",
    "op/backends/cudnn/streams.py": "op/backends/cudnn/test_guards.py",
    "op/backends/cudnn/te_calls.py": "op/backends/cudnn/test_guards.py",
    "op/backends/cudnn/views.py": "op/backends/cudnn/test_arguments.py",
    # By what they compile, or by the bytes that come out.
    "op/backends/cutedsl/keys.py": "op/backends/cutedsl/test_config.py",
    "op/backends/cutedsl/launch.py": "op/backends/cutedsl/test_config.py",
    "op/backends/cutedsl/library.py": "op/backends/cutedsl/test_compile.py",
    "op/backends/reference/arguments.py": "op/backends/reference/test_extents.py",
    "op/backends/upstream/capability.py": "op/test_blackwell_selection.py",
    "op/kernels/block_scale_kernels.py": "op/kernels/test_block_scale.py",
    "op/kernels/block_scale_math.py": "op/kernels/test_block_scale.py",
    "op/kernels/split_guard_kernels.py": "op/step/test_split_guard.py",
}
"""Modules of the op whose tests have another name; kernels of a backend are tested as launches."""


def vague_hits(path: str, text: str) -> Iterator[str]:
    """Yield names in the op that say nothing about their value."""
    if not path.startswith(("op/", "_fork/")):
        return
    for node in ast.walk(ast.parse(text)):
        name = getattr(node, "id", None) or getattr(node, "arg", None)
        if isinstance(node, (ast.Name, ast.arg)) and name in VAGUE:
            yield f"{path}:{node.lineno}: {name}"


def test_of(path: str) -> str:
    """Return the test file, below tests/, of a module of the op."""
    folder, _, name = path.rpartition("/")
    return TESTED_BY.get(path, f"{folder}/test_{name}")


def untested_hits(path: str, tests: Path) -> Iterator[str]:
    """Yield a module of the op without a test file of its name, and an exception without need."""
    inner = path.endswith("/__init__.py") or re.match("op/backends/.*/kernels/", path)
    if not path.startswith("op/") or inner:
        return
    if not (tests / test_of(path)).is_file():
        yield f"{path}: there is no tests/{test_of(path)}"
    folder, _, name = path.rpartition("/")
    if path in TESTED_BY and (tests / folder / f"test_{name}").is_file():
        yield f"{path}: has a test file of its name, and TESTED_BY names another"
