# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every kind of launch compiles for both architectures, without float atomics and without spills.

These need the extra `kernels`. Where it must be installed, TE_GROUPED_MLP_REQUIRE_KERNELS=1 makes
its absence a failure.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from te_grouped_mlp.op.backends.cutedsl import compile as kernels
from te_grouped_mlp.op.backends.cutedsl import keys, launch, library
from te_grouped_mlp.op.backends.cutedsl.config import Op
from tests.op.backends.cutedsl import compile_all
from tests.op.backends.cutedsl.problems import ACTIVATIONS, problem_of

ROOT = Path(__file__).resolve().parents[4]
NEEDED = ("quack", "cutlass", "triton")
ABSENT = [name for name in NEEDED if importlib.util.find_spec(name) is None]
REQUIRED = os.environ.get("TE_GROUPED_MLP_REQUIRE_KERNELS") == "1"

needs_kernels = pytest.mark.skipif(
    bool(ABSENT) and not REQUIRED, reason=f"not installed: {', '.join(ABSENT)}"
)
LAUNCHES = list(compile_all.wanted(9))
# A reduction in memory, of any type and width; barriers in shared memory are another instruction.
FLOAT_ATOMIC = re.compile(
    r"^\s*(?:@!?%\w+\s+)?(?:red|atom|multimem\.red)\.\S*\.(?:f|bf)\d+\S*", re.MULTILINE
)
ANY_ATOMIC = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:red|atom)(?:\.async)?\.global\S*", re.M)


def cuobjdump() -> str:
    """The tool that reads a cubin: CUDA's own, or the one that Triton brings."""
    found = shutil.which("cuobjdump")
    if found:
        return found
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Folders of PTX and cubins of every kind of launch, by architecture."""
    return compile_for_all(tmp_path_factory, "launches")


def compile_for_all(tmp_path_factory, which):
    """Compile a set for each architecture; the two processes run side by side."""
    folders = {target: tmp_path_factory.mktemp(target) for target in compile_all.ARCHITECTURES}
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", compile_all.__name__, target, str(folder), which],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for target, folder in folders.items()
    ]  # fmt: skip
    for process in running:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output[-4000:]
    return folders


@needs_kernels
@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("target", compile_all.ARCHITECTURES)
def test_no_float_is_added_in_memory_by_an_instruction(compiled, target, name):
    text = (compiled[target] / f"{name}.ptx").read_text()
    assert f".target {target}" in text
    assert not FLOAT_ATOMIC.findall(text)
    assert not ANY_ATOMIC.findall(text)
    # The sum of a row that is added in place by TMA would hide from the patterns above.
    assert "cp.reduce.async" not in text


def test_the_patterns_find_what_they_look_for():
    for line in (
        "\tred.global.add.f32 \t[%rd1], %f1;",
        "@%p1 atom.global.add.f32 %f1, [%rd1], %f2;",
        "  red.relaxed.gpu.global.add.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};",
        "  red.async.relaxed.cluster.global.add.bf16x2 [%rd1], %r1;",
    ):
        assert FLOAT_ATOMIC.search(line), line
    assert ANY_ATOMIC.search("\tatom.global.add.u32 %r1, [%rd1], 1;")
    assert not FLOAT_ATOMIC.search("\tmbarrier.arrive.shared.b64 %rd1, [%r1];")


@needs_kernels
@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("target", compile_all.ARCHITECTURES)
def test_no_register_is_spilled(compiled, target, name):
    assert stack_sizes(compiled[target] / f"{name}.cubin") == {"0"}


def stack_sizes(cubin):
    """Bytes of stack that a cubin's kernels use, as text: spills do not show in PTX."""
    done = subprocess.run(
        [cuobjdump(), "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"STACK:(\d+)", done.stdout + done.stderr))


@pytest.mark.slow
@needs_kernels
def test_every_activation_compiles_without_float_atomics_or_spills(tmp_path_factory):
    folders = compile_for_all(tmp_path_factory, "activations")
    for target, folder in folders.items():
        for name in compile_all.of_every_activation(compile_all.ARCHITECTURES[target]):
            assert not FLOAT_ATOMIC.findall((folder / f"{name}.ptx").read_text()), (target, name)
            assert stack_sizes(folder / f"{name}.cubin") == {"0"}, (target, name)


@needs_kernels
def test_weights_in_blocks_are_read_by_a_five_dimensional_box(compiled):
    text = (compiled["sm_90a"] / "fc1_act.ptx").read_text()
    assert "cp.async.bulk.tensor.5d.shared" in text
    assert "cp.async.bulk.tensor.5d.global" in (compiled["sm_90a"] / "fc1_wgrad.ptx").read_text()


@needs_kernels
@pytest.mark.parametrize("op", [op.value for op in launch.EPILOGUES])
@pytest.mark.parametrize("target", compile_all.ARCHITECTURES)
def test_the_expert_is_counted_from_the_end_where_matrices_descend(compiled, target, op):
    """Of B where weights are read; of D, and of C where it is added to, of a weight gradient."""
    counts = [
        (compiled[target] / f"{name}.ptx").read_text().count("sub.s32")
        for name in (op, f"{op} descending")
    ]
    assert counts[1] - counts[0] == (2 if "wgrad" in op else 1)


@needs_kernels
def test_forked_workers_fill_the_disk_cache(tmp_path):
    code = (
        "from te_grouped_mlp.op.backends.cutedsl import compile as kernels, keys\n"
        "from te_grouped_mlp.op.backends.cutedsl.config import Op\n"
        "from tests.op.backends.cutedsl.problems import ACTIVATIONS, problem_of\n"
        "problem = problem_of(ACTIVATIONS['swiglu'])\n"
        "wanted = [keys.gemm(problem, 9, op) for op in (Op.FC2_FORWARD, Op.FC1_DGRAD)]\n"
        "print(kernels.compile_ahead(wanted, 2), kernels.compile_ahead(wanted, 2))\n"
        "kernels._compile = None\n"
        "print([callable(kernels.kernel(key)) for key in wanted])\n"
    )
    done = python(code, tmp_path)
    assert done.stdout.split("\n")[:2] == ["2 0", "[True, True]"]


ONE_KERNEL = (
    "from te_grouped_mlp.op.backends.cutedsl import compile as kernels, keys\n"
    "from te_grouped_mlp.op.backends.cutedsl.config import Op\n"
    "key, compile = keys.KernelKey(Op.ZERO_TAIL, 9), kernels._compile\n"
    "kernels._compile = lambda key: print('compiled') or compile(key)\n"
    "print(callable(kernels.kernel(key)))\n"
)


@needs_kernels
def test_a_library_of_which_the_end_is_gone_is_replaced(tmp_path):
    """Loaded, it would end the process: what is mapped has no memory behind it."""
    assert python(ONE_KERNEL, tmp_path).stdout == "compiled\nTrue\n"
    (linked,) = tmp_path.glob("*/*.so")
    linked.write_bytes(linked.read_bytes()[: linked.stat().st_size // 2])
    assert python(ONE_KERNEL, tmp_path).stdout == "compiled\nTrue\n"
    assert python(ONE_KERNEL, tmp_path).stdout == "True\n"


@pytest.mark.slow
@needs_kernels
def test_an_object_serves_where_the_library_does_not_load(tmp_path):
    python(ONE_KERNEL, tmp_path)
    (linked,) = tmp_path.glob("*/*.so")
    (listed,) = tmp_path.glob("*/*.sha256")
    linked.write_bytes(b"of another machine")
    digest = hashlib.sha256(linked.read_bytes()).hexdigest()
    listed.write_text(listed.read_text().split("\n")[0] + f"\n{digest}  {linked.name}\n")
    assert python(ONE_KERNEL, tmp_path).stdout == "True\n"


@pytest.mark.slow
@needs_kernels
def test_processes_that_start_at_once_compile_a_kernel_once(tmp_path):
    running = [start(ONE_KERNEL, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert sorted(outputs) == ["True\n", "compiled\nTrue\n"]


def python(code, cache, **variables):
    """Run statements for Hopper in a process of their own, over a cache folder."""
    process = start(code, cache, **variables)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr[-4000:]
    return subprocess.CompletedProcess(code, 0, stdout, stderr)


def start(code, cache, **variables):
    env = {
        **os.environ,
        "CUTE_DSL_ARCH": "sm_90a",
        "HOME": str(cache),
        kernels.CACHE_SWITCH: str(cache),
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@needs_kernels
def test_plain_tuples_hold_what_the_kernels_name():
    with library.deprecations_ignored():
        from te_grouped_mlp.op.backends.cutedsl.kernels import dact_dgrad, fc1_act, gemm, wgrad
    modules = {
        Op.FC1_ACT: fc1_act,
        Op.FC2_FORWARD: gemm,
        Op.FC1_DGRAD: gemm,
        Op.DACT_DGRAD: dact_dgrad,
        Op.FC1_WGRAD: wgrad,
        Op.FC2_WGRAD: wgrad,
    }
    assert {op: module.Arguments._fields for op, module in modules.items()} == launch.EPILOGUES
    with library.deprecations_ignored():
        from quack.tile_scheduler import TileSchedulerOptions
        from quack.varlen_utils import VarlenArguments
    assert TileSchedulerOptions._fields[::2][:2] == ("max_active_clusters", "max_swizzle_size")
    assert len(TileSchedulerOptions._fields) == 6
    assert VarlenArguments._fields[:2] == ("mCuSeqlensM", "mCuSeqlensK")
    assert len(VarlenArguments._fields) == 4


@needs_kernels
def test_main_loops_take_the_experts_matrices_where_they_are_turned():
    with library.deprecations_ignored():
        from te_grouped_mlp.op.backends.cutedsl.kernels import quack_base
    for loop in quack_base._MAIN_LOOPS.values():
        _, *names = inspect.signature(loop.kernel).parameters
        found = {varlen: [names[i] for i in at] for varlen, at in quack_base._EXPERTS.items()}
        assert found == {"m": ["mB_nkl"], "k": ["mD_mnl", "mC_mnl"]}


@needs_kernels
def test_a_launch_from_disk_imports_no_compiler(tmp_path):
    compile_it = (
        "from te_grouped_mlp.op.backends.cutedsl import compile as kernels, keys\n"
        "from te_grouped_mlp.op.backends.cutedsl.config import Op\n"
        "from tests.op.backends.cutedsl.problems import ACTIVATIONS, problem_of\n"
        "key = keys.gemm(problem_of(ACTIVATIONS['swiglu']), 9, Op.FC2_FORWARD)\n"
        "kernels.kernel(key)\n"
    )
    launch_it = compile_it + (
        "import sys, torch\n"
        "from te_grouped_mlp.op.backends.cutedsl import launch\n"
        "launch._active_clusters = lambda size, device: 66\n"
        "x = torch.zeros(64, 64).bfloat16()\n"
        "try:\n"
        "    launch.launcher(key, 0)(x, x[None], x, None, torch.zeros(2).int())\n"
        "except ValueError as error:\n"
        "    print('device_type=cuda' in str(error))\n"
        "try:\n"
        "    launch.launcher(key, 0)(x, x[None], x, None, torch.zeros(2).int(), biass=x)\n"
        "except TypeError as error:\n"
        "    print(\"['biass']; allowed: ('bias', 'bias_scale')\" in str(error))\n"
        "print({'quack', 'cutlass'} & set(sys.modules) or 'no compiler')\n"
    )
    # The packages keep caches below a folder that anybody can make, and QuACK runs what is there.
    theirs = tmp_path / "theirs"
    names = {name: str(theirs) for name in ("QUACK_CACHE_DIR", "CUTE_DSL_CACHE_DIR")}
    assert python(compile_it, tmp_path, **names).stdout == ""
    # What CuTe DSL found in sources, as text that is read as data; no program.
    assert {path.suffix for path in theirs.rglob("*") if path.is_file()} <= {".json"}
    assert python(launch_it, tmp_path).stdout == "True\nTrue\nno compiler\n"


def test_kernels_are_cached_by_what_their_code_depends_on():
    one, other = (keys.of_problem(problem_of(ACTIVATIONS["swiglu"]), arch) for arch in (9, 10))
    names = {kernels._name(key) for key in (*one, *other)}
    assert len(names) == 16
    again = keys.of_problem(problem_of(ACTIVATIONS["swiglu"]), 9)
    assert [kernels._name(key) for key in again] == [kernels._name(key) for key in one]
