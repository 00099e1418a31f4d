# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
#
# Every command works in a fresh clone: the environment is made by the first one that needs it.
#
#   make repro                        the padded single-group case, as a table
#   make test PYTEST_ARGS="-k layout" the tests
#   make VENV=.venv-2.13 TORCH=torch==2.13.0 test   the same with a chosen torch, beside the other
#   make PIP_ARGS="--pre" test        arguments for every pip call
#   make emulator-score               how many removed waits of the kernels the emulator notices
#   make PY=python3 test-gpu          the tests of a device, in an environment that has everything

PYTHON ?= python3
TORCH ?= torch
TE ?= transformer-engine==2.20.2
EXTRAS ?= standalone,cli
PIP_ARGS ?=
PYTEST_ARGS ?=
# Tests run in this many processes, one thread of torch each, with one seed: both must name tests alike.
JOBS ?= 2
# 1: `make test` installs the packages of the GPU kernels and compiles them, which needs no GPU;
# 0 leaves those tests out.
KERNELS ?= 1
# `make test-gpu` runs its tests in this many processes, all on one device.
GPU_JOBS ?= 4
# The oldest torch with which TE can be imported where there is no GPU: the Triton of an older CUDA
# build wants a driver. The newest is what TORCH brings by default.
OLDEST_TORCH ?= torch==2.8.0

VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.dev
KERNELS_STAMP := $(VENV)/.kernels
SETTINGS := $(VENV)/.settings
BUILD_INPUTS := setup.py pyproject.toml CMakeLists.txt te_grouped_mlp.pth $(shell find csrc -type f)

# The tests and the wheel have the C++ extension, or fail here.
export TE_GROUPED_MLP_REQUIRE_EXTENSION := 1

.PHONY: help venv repro test test-slow test-torch test-gpu mutation emulator-score lint bench examples
.PHONY: pictures reference wheel aarch64 clean FORCE
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

venv: $(DEV_STAMP)

# Rewritten only when a setting differs from that of the last call, so that it triggers then only.
$(SETTINGS): FORCE
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo '$(TORCH) $(TE) $(EXTRAS) $(PIP_ARGS)' | cmp -s - $@ || \
	    echo '$(TORCH) $(TE) $(EXTRAS) $(PIP_ARGS)' > $@

# TE without its dependencies: its pure-Python wheel is what the tests run on, and the extra
# `standalone` names what that wheel imports.
$(STAMP): $(SETTINGS) $(BUILD_INPUTS)
	$(PIP) install --quiet $(PIP_ARGS) '$(TORCH)'
	$(PIP) install --quiet $(PIP_ARGS) --no-deps '$(TE)'
	$(PIP) install --quiet $(PIP_ARGS) --editable '.[$(EXTRAS)]'
	@touch $@

# What only tests and tools need; one installation for the tests of the kernels, or none of these.
$(DEV_STAMP): $(STAMP)
	$(PIP) install --quiet $(PIP_ARGS) --editable '.[dev]'
	@touch $@

$(KERNELS_STAMP): $(STAMP)
	$(PIP) install --quiet $(PIP_ARGS) --editable '.[dev,kernels-cu13,kernels-dev]'
	@touch $(DEV_STAMP) $@

# One thread: a second one gains nothing at these sizes, and waits in vain on a busy machine.
repro: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/te-grouped-mlp repro

ifeq ($(KERNELS),1)
test test-slow: $(KERNELS_STAMP)
test test-slow: export TE_GROUPED_MLP_REQUIRE_KERNELS := 1
else
test test-slow: $(DEV_STAMP)
endif

# A file's tests run in one process, so that what they share is made once.
PYTEST := PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile

test:
	$(PYTEST) $(PYTEST_ARGS)

test-slow:
	$(PYTEST) -m "slow or not slow" $(PYTEST_ARGS)
	$(MAKE) VENV=$(VENV)-oldest TORCH=$(OLDEST_TORCH) test-torch

# The tests that lean most on torch, for another one in an environment of its own.
test-torch: export TE_GROUPED_MLP_REQUIRE_KERNELS :=
test-torch: $(DEV_STAMP)
	$(PYTEST) tests/cli tests/op/gpu tests/integration/overlay tests/integration/standalone $(PYTEST_ARGS)

# With PY=<python> it takes that environment as it is, and installs nothing.
test-gpu: $(if $(filter command line,$(origin PY)),,$(KERNELS_STAMP))
	PYTHONHASHSEED=0 $(PY) -m pytest -n $(GPU_JOBS) -m "gpu or sm90 or sm100" $(PYTEST_ARGS)

# Faults in a copy of the source, each with the test that must find it.
mutation: $(DEV_STAMP)
	OMP_NUM_THREADS=1 $(PY) -m tests.mutation --jobs $(JOBS)

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Minutes: removed waits, fences and barriers of the GPU kernels, executed on an emulated GPU.
emulator-score: $(KERNELS_STAMP)
	OMP_NUM_THREADS=1 $(PY) -m tests.emulator.score

# Each program prints its own table; one that fails, by its correctness gate or by an aim that the
# machine misses, does not keep the others from running.
bench: venv
	@failed=; for file in benchmarks/bench_*.py; do \
	    echo "== $$file"; $(PY) $$file || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Each example as its first lines say, the expert-parallel one twice: the hashes are equal.
TORCHRUN := $(PY) -m torch.distributed.run --standalone --nproc-per-node 2
examples: export OMP_NUM_THREADS := 1
examples: venv
	@mkdir -p build
	$(PY) examples/train_moe.py --deterministic --plot build/loss.svg
	$(TORCHRUN) examples/train_expert_parallel.py
	$(TORCHRUN) examples/train_expert_parallel.py --capacity 700

# docs/commands.md, from the parsers.
reference: $(STAMP)
	$(PY) docs/write_commands.py

# What the README shows of `repro`.
pictures: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) docs/draw_repro.py

wheel: venv
	$(PY) -m build

# The kernels without the Python binding, whose headers belong to the target machine, and without
# the SIMD levels of x86-64.
aarch64: venv
	@mkdir -p build/aarch64
	@set -e; for file in $$(find csrc -name '*.cpp' ! -name bindings.cpp ! -name 'level_avx*' | sort); do \
	    echo "aarch64 $$file"; \
	    $(PY) -m ziglang c++ -target aarch64-linux-gnu -std=c++17 -O2 -fPIC -Wall -Wextra -Werror \
	        -Icsrc -c $$file -o build/aarch64/$$(basename $$file .cpp).o; \
	done

clean:
	rm -rf $(VENV) build dist te_grouped_mlp.egg-info te_grouped_mlp/_C*.so
