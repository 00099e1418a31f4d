# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The parts of the build that pyproject.toml cannot say.

Three of them: the extension is built by CMake; the forked file and the patches live in the
repository where a reader of Transformer Engine looks for them, but are installed inside our own
package; and a `.pth` file at the root of site-packages starts the overlay in every interpreter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PTH = "te_grouped_mlp.pth"
# Set to 1, an installation fails where the extension cannot be built; see op/extension.py.
REQUIRE = "TE_GROUPED_MLP_REQUIRE_EXTENSION"
FORK_DIR = "transformer_engine/pytorch/ops/fused"
# Of the emulator, beside the extension; loaded by path, so it has no name that Python could import.
RUNTIME_SHIM = "emulator/libcute_dsl_runtime.so"


def tool(name: str) -> str | None:
    """Find a build tool: the pip package's program first, then the one on PATH.

    Args:
        name: `cmake` or `ninja`, the name of the pip package and of its program.

    Returns:
        The program's path, or None if neither exists. The pip packages are asked for their files,
        because a build environment's scripts folder is not always on PATH.
    """
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        files = []
    programs = [Path(str(f.locate())) for f in files if f.name == name and f.parent.name == "bin"]
    for program in sorted(programs, key=lambda p: "data" not in p.parts):
        if os.access(program, os.X_OK):
            return str(program.resolve())
    return shutil.which(name)


def extension_required() -> bool:
    """Read `TE_GROUPED_MLP_REQUIRE_EXTENSION`: 0 or unset installs without what cannot be built."""
    value = os.environ.get(REQUIRE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{REQUIRE} is {value!r}; allowed: 0, 1, or unset")
    return value == "1"


class CMakeBuild(build_ext):
    """Build `te_grouped_mlp._C` and the emulator's library with the repository's CMakeLists.txt.

    Where the tools for that are missing, the package is installed without them: steps on a GPU need
    neither. A build that fails with its tools in place is an error.
    """

    def build_extension(self, ext: Extension) -> None:
        """Build one extension into the folder where setuptools expects it.

        Raises:
            RuntimeError: The extension is required, and cmake, pybind11 or a compiler is missing;
                or CMake ended without the file.
            CalledProcessError: The compiler refused the sources.
        """
        try:
            target, work, config = self._configure(ext)
        except RuntimeError as error:
            if extension_required():
                raise RuntimeError(f"{ext.name} cannot be built: {error}") from error
            sys.stderr.write(
                f"\n*** te-grouped-mlp is installed WITHOUT its C++ extension: {error}\n"
                "*** Steps on a GPU give the same results but take more host time; CPU tensors\n"
                f"*** cannot be computed. {REQUIRE}=1 makes this an error.\n\n"
            )
            return
        cmake = tool("cmake") or "cmake"
        jobs = os.environ.get("MAX_JOBS") or str(min(os.cpu_count() or 1, 8))
        subprocess.run(
            [cmake, "--build", str(work), "--config", config, "--parallel", jobs], check=True
        )
        for file in (target, target.parent / RUNTIME_SHIM):
            if not file.is_file():
                raise RuntimeError(f"CMake ended without error, but {file} does not exist")

    def _configure(self, ext: Extension) -> tuple[Path, Path, str]:
        """Return the file to be built, the folder to build it in, and CMake's configuration.

        Raises:
            RuntimeError: A tool is missing, or CMake finds no way to build here.
        """
        cmake = tool("cmake")
        if cmake is None:
            raise RuntimeError("cmake was not found: `pip install cmake`, or put it on PATH")
        try:
            import pybind11
        except ImportError as error:
            raise RuntimeError("pybind11 was not found: `pip install pybind11`") from error

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        work = Path(self.build_temp).resolve() / ext.name
        # A cache of an earlier build names tools of a build environment that is gone.
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        config = "Debug" if self.debug else "Release"
        arguments = [
            f"-DCMAKE_BUILD_TYPE={config}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY_{config.upper()}={target.parent}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        ninja = tool("ninja")
        if ninja is not None:
            arguments += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        done = subprocess.run([cmake, "-S", str(ROOT), "-B", str(work), *arguments], check=False)
        if done.returncode:
            raise RuntimeError(
                f"CMake found no way to build it (exit code {done.returncode}, its output is "
                "above); most often there is no C++17 compiler"
            )
        return target, work, config

    def copy_extensions_to_source(self) -> None:
        """Copy what was built into the source tree, as an editable install wants it."""
        super().copy_extensions_to_source()
        if self._shim():
            self.copy_file(self._shim()[0], str(ROOT / "te_grouped_mlp" / RUNTIME_SHIM))

    def get_outputs(self) -> list[str]:
        """Name every file that is built."""
        return [*super().get_outputs(), *self._shim()]

    def get_output_mapping(self) -> dict[str, str]:
        """Say which file of the source tree stands for a built one, in an editable install."""
        source = str(Path("te_grouped_mlp") / RUNTIME_SHIM)
        shim = self._shim() if self.inplace else []
        return {**super().get_output_mapping(), **dict.fromkeys(shim, source)}

    def _shim(self) -> list[str]:
        """Return the emulator's library where it was built, or nothing."""
        file = Path(self.build_lib) / "te_grouped_mlp" / RUNTIME_SHIM
        return [str(file)] if file.is_file() else []


class BuildPth(Command):
    """Place the `.pth` file at the root of the wheel, in the editable wheel too.

    An editable wheel holds what the commands write into its unpacked folder; setuptools names
    that folder as the install folder while it builds one, and `build_lib` is thrown away.
    """

    description = f"copy {PTH} to the root of the wheel"
    user_options = [("build-lib=", "d", "folder to copy it to")]
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        folder = Path(self._folder())
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / PTH, folder / PTH)

    def _folder(self) -> str:
        if self.editable_mode:
            return self.get_finalized_command("install").install_lib
        return self.build_lib or "build/lib"

    def get_source_files(self) -> list[str]:
        return [PTH]

    def get_outputs(self) -> list[str]:
        return [os.path.join(self._folder(), PTH)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    """The usual build, and the `.pth` file."""

    sub_commands = [*build.sub_commands, ("build_pth", None)]

    def run(self) -> None:
        # What an earlier build left there would enter the wheel, deleted modules too.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def packages() -> list[str]:
    """Name every installed package; the two mapped ones under the names they get."""
    patches = [name for name in find_packages(str(ROOT)) if name.split(".")[0] == "patches"]
    if not patches or not (ROOT / FORK_DIR / "grouped_mlp.py").is_file():
        raise RuntimeError(f"incomplete source tree: {ROOT} lacks patches/ or {FORK_DIR}/")
    return [
        *find_packages(str(ROOT), include=["te_grouped_mlp", "te_grouped_mlp.*"]),
        "te_grouped_mlp._fork",
        *(f"te_grouped_mlp.{name}" for name in patches),
    ]


setup(
    packages=packages(),
    package_dir={
        "te_grouped_mlp": "te_grouped_mlp",
        "te_grouped_mlp._fork": FORK_DIR,
        "te_grouped_mlp.patches": "patches",
    },
    package_data={"te_grouped_mlp": ["py.typed"]},
    include_package_data=False,
    # Optional: a file that was not built is not missed when the built ones are copied.
    ext_modules=[Extension("te_grouped_mlp._C", sources=[], optional=not extension_required())],
    cmdclass={"build": Build, "build_ext": CMakeBuild, "build_pth": BuildPth},
    zip_safe=False,
)
