# te_fast. `make help` lists the targets; each one creates what it needs, inside this checkout only.
#
# Needed beforehand: Rust, Python >= 3.10, g++ and make. No GPU, no CUDA toolkit: nvcc comes from PyPI.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# An active virtual environment of the user's is not used: it would make build.rs rebuild.
unexport VIRTUAL_ENV
unexport CONDA_PREFIX
unexport PYTHONPATH

PYTHON ?= python3
VERSION_OF = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PYTHON_VERSION := $(call VERSION_OF,$(PYTHON))
# TORCH is the release that the environment gets, any from 2.6 on. Each release has its own environment.
# No release after 2.14.1 has a wheel for Python 3.10.
CURRENT_TORCH := $(if $(filter 3.10,$(PYTHON_VERSION)),2.14.1,2.15.0)
TORCH ?= $(CURRENT_TORCH)
# GPU architectures of the build that is tested, or `release`: then the release wheel is tested, which `make wheel` makes for
# the list of rust/kernels/build.rs.
TEST_ARCHS ?= 90
SOME_ARCHS := $(filter-out release,$(TEST_ARCHS))
# WHEEL_ARCHS, for instance 80,90,120, are the architectures of release wheels, all of the release's unless given.
WHEEL_ARCHS ?=
FOR_WHEELS := $(WHEEL_ARCHS:%=TE_FAST_CUDA_ARCHS=%)
FOR_ARCHS := $(or $(SOME_ARCHS:%=TE_FAST_CUDA_ARCHS=%),$(FOR_WHEELS))
CHECKED_ARCHS := $(addprefix --archs ,$(or $(SOME_ARCHS),$(WHEEL_ARCHS)))
WHEEL_PYTHONS := 3.10 3.11 3.12 3.13 3.14
WHEEL_MACHINES := x86_64 aarch64
MACHINE := $(shell uname -m)
THIS_WHEEL = wheel-$(PYTHON_VERSION)-$(MACHINE)
PYTEST_ARGS ?=
# Every test runs on the current torch, slow ones with some of their cases; on another torch the quick tests and those marked
# every_torch run. `CASES=all` runs every case of every test.
CASES ?=
FEWER := $(if $(filter-out $(CURRENT_TORCH),$(TORCH)),slow,combination)
SELECTED := -m "not gpu and not te and not patience$(if $(filter-out all,$(or $(CASES),some)), and not $(FEWER))"
DEMO_ARGS ?=

# A Python other than python3 has environments of its own, too.
OTHER_PYTHON := $(filter-out $(call VERSION_OF,python3),$(PYTHON_VERSION))
VENV := .venv$(if $(filter-out $(CURRENT_TORCH),$(TORCH)),-torch-$(TORCH))$(OTHER_PYTHON:%=-python-%)
PY := $(VENV)/bin/python
BUILD := .build
BUILD_PY := $(BUILD)/venv/bin/python
MATURIN := $(BUILD)/venv/bin/maturin
# Megatron-LM has wheels for Python 3.11 and later; the tests of one torch train it.
MEGATRON := $(if $(filter 2.15.0,$(TORCH)),$(VENV)/.group-megatron)
PIP_VERSION := pip==26.3
PIP := -m pip install --quiet --disable-pip-version-check
CRATES := --package te_fast_kernels --package te_fast_core
NVCC = $$(ls "$(CURDIR)"/$(BUILD)/venv/lib/python*/site-packages/nvidia/cu*/bin/nvcc)
# Device code is compiled once for all Pythons and machines.
FATBINS := $(CURDIR)/$(BUILD)/fatbins
# Rust tests, lints and docs look at host code alone, so they need no nvcc.
HOST_ONLY := TE_FAST_SKIP_CUDA=1

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\n%s\n' "variables: PYTHON=$(PYTHON) TORCH=$(TORCH) TEST_ARCHS=$(TEST_ARCHS) CASES=$(CASES) PYTEST_ARGS= DEMO_ARGS="

# ---- environments and the build

$(BUILD)/venv/.ready: pyproject.toml tools/build_requirements.py
	test -x $(BUILD_PY) || $(PYTHON) -m venv $(BUILD)/venv
	$(BUILD_PY) $(PIP) '$(PIP_VERSION)'
	$(BUILD_PY) tools/build_requirements.py > $(BUILD)/requirements.txt
	$(BUILD_PY) $(PIP) -r $(BUILD)/requirements.txt
	touch $@

$(BUILD)/venv/.group-wheel: $(BUILD)/venv/.ready
	$(BUILD_PY) $(PIP) --group wheel
	touch $@

$(VENV)/.torch:
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) $(PIP) '$(PIP_VERSION)'
	@echo "installing torch $(TORCH) into $(VENV): about 3 GB, a minute or two"
	$(PY) $(PIP) 'torch==$(TORCH)'
	touch $@

# One dependency group of pyproject.toml, for example $(VENV)/.group-test.
$(VENV)/.group-%: pyproject.toml | $(VENV)/.torch
	$(PY) $(PIP) --group $*
	touch $@

# Megatron-LM's wheel for Python 3.11 says that it needs 3.12, but only its training scripts do.
$(VENV)/.group-megatron: pyproject.toml | $(VENV)/.torch
	$(PY) $(PIP) --no-deps --ignore-requires-python --group megatron
	touch $@

# Formatters and similar tools need no torch, so this environment takes seconds to install.
TOOLS := $(BUILD)/tools
$(TOOLS)/.ready: pyproject.toml
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python $(PIP) '$(PIP_VERSION)'
	$(TOOLS)/bin/python $(PIP) --group format
	touch $@

# The wheel of this tree for TEST_ARCHS; BUILT is its file. This target always runs, since cargo decides which parts are stale.
.PHONY: build
ifeq ($(TEST_ARCHS),release)
BUILT = dist/te_fast-*-cp$(subst .,,$(PYTHON_VERSION))-*_$(MACHINE).whl
build: $(THIS_WHEEL)
else
BUILT = $(BUILD)/wheel/te_fast-*.whl
build: $(BUILD)/venv/.ready
	rm -rf $(BUILD)/wheel
	$(FOR_ARCHS) TE_FAST_NVCC="$(NVCC)" TE_FAST_FATBINS="$(FATBINS)" $(MATURIN) build --release --quiet --interpreter $(PYTHON) --out $(BUILD)/wheel
endif

.PHONY: install
install: build | $(VENV)/.torch
	$(PY) $(PIP) --no-deps --force-reinstall $(BUILT)

##@ Try it
.PHONY: demo
demo: ## train on handwritten digits in FP8 beside FP32 (DEMO_ARGS='--recipe block')
	@# torch is downloaded while the compilers work.
	$(MAKE) --no-print-directory --jobs=2 build $(VENV)/.group-bench
	$(MAKE) --no-print-directory install
	$(PY) examples/digits.py $(DEMO_ARGS)

##@ Work on it
.PHONY: dev
dev: $(BUILD)/venv/.ready $(VENV)/.group-test $(MEGATRON) $(VENV)/.group-lint $(VENV)/.group-bench $(VENV)/.group-docs ## .venv with every tool, and te_fast installed from python/ as it stands
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(FOR_ARCHS) TE_FAST_NVCC="$(NVCC)" TE_FAST_FATBINS="$(FATBINS)" $(MATURIN) develop --release --quiet --target-dir target/dev

.PHONY: format
format: $(TOOLS)/.ready ## format Rust, CUDA and Python
	cargo fmt --all
	$(TOOLS)/bin/clang-format -i $$(git ls-files 'cuda/*.cu' 'cuda/*.cuh' 'tools/*.c')
	$(TOOLS)/bin/ruff format --quiet .
	$(TOOLS)/bin/ruff check --quiet --fix .

.PHONY: check
check: $(TOOLS)/.ready ## formats, ruff, spelling and the rules of tools/, in seconds; the pre-commit hook runs it
	cargo fmt --all -- --check
	$(TOOLS)/bin/clang-format --dry-run --Werror $$(git ls-files 'cuda/*.cu' 'cuda/*.cuh' 'tools/*.c')
	$(TOOLS)/bin/ruff format --quiet --check .
	$(TOOLS)/bin/ruff check --quiet .
	$(TOOLS)/bin/typos
	$(TOOLS)/bin/python tools/check_rules.py
	$(TOOLS)/bin/python tools/check_version.py

.PHONY: lint
lint: install $(VENV)/.group-lint $(VENV)/.group-bench ## all of check, and clippy, rustdoc, types and stubs
	$(HOST_ONLY) PY=$(PY) PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash tools/lint.sh

##@ Test it
.PHONY: test
test: install test-rust test-python ## build, install and run every test (CASES=all for every case; TORCH=2.6.0, PYTHON=python3.10 for others)

.PHONY: test-rust
test-rust: ## the tests of the Rust crates
	@if cargo nextest --version >/dev/null 2>&1; then \
	  $(HOST_ONLY) cargo nextest run $(CRATES); \
	else \
	  $(HOST_ONLY) cargo test $(CRATES) --lib --tests; \
	fi
	$(HOST_ONLY) cargo test $(CRATES) --doc

.PHONY: test-python
test-python: install test-environment ## build, install and run the tests in Python
	$(PY) -m pytest $(SELECTED) $(PYTEST_ARGS)

# Packages that tests need beside te_fast: they can be downloaded while the compilers work.
.PHONY: test-environment
test-environment: $(VENV)/.group-test $(MEGATRON)

# An environment takes several GB: a test of many releases of torch removes each before the next.
.PHONY: remove-environment
remove-environment: ## remove the environment of TORCH and PYTHON
	rm -rf $(VENV)

.PHONY: test-gpu
test-gpu: install $(VENV)/.group-test ## the tests that need an NVIDIA GPU, for the architecture of TEST_ARCHS
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

.PHONY: coverage
coverage: install $(VENV)/.group-test ## which lines of python/te_fast the tests run
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -n 0 $(SELECTED) $(PYTEST_ARGS)
	$(PY) -m coverage report

.PHONY: fuzz
fuzz: install $(VENV)/.group-fuzz ## a million inputs for each reader of checkpoints, 100000 cases of each kind of plan
	PROPTEST_CASES=100000 $(HOST_ONLY) cargo test --quiet --package te_fast_core --test plans
	for kind in own pickled; do \
	  PYTHONPATH=tests $(PY) tests/fuzz/checkpoints.py $$kind $(BUILD)/fuzz/$$kind -runs=1000000 -seed=1 -max_len=4096 -timeout=10 \
	    -rss_limit_mb=3000 -verbosity=0 -print_final_stats=1 -artifact_prefix=$(BUILD)/fuzz/$$kind-; \
	done

# Files of tests/unit that start no processes of their own: the kernel starts Arm processes only where qemu-user is registered.
ARM_TESTS := $(addprefix tests/unit/test_,linear.py quantize_reference.py norm.py norm_backward.py activation.py layernorm_linear.py \
  layernorm_mlp.py extra_state.py permutation.py ops_fp8.py checkpoint.py packaging.py)

.PHONY: test-arm
test-arm: $(BUILD)/arm/.wheels ## tests of the aarch64 wheel under qemu-user, and its outputs beside x86-64's, bit for bit (debootstrap, qemu-user)
	tools/arm/python.sh -m pytest -n 0 -p no:cacheprovider -o timeout=900 $(SELECTED) $(ARM_TESTS) $(PYTEST_ARGS)
	tools/arm/python.sh tools/arm/hashes.py > $(BUILD)/arm/hashes.aarch64
	PYTHONPATH=$(BUILD)/arm/x86_64 $(PY) tools/arm/hashes.py > $(BUILD)/arm/hashes.x86_64
	cmp $(BUILD)/arm/hashes.*
	@echo "$$(wc -l < $(BUILD)/arm/hashes.aarch64) hashes are equal"

# The wheels of this tree for both machines, unpacked; Debian's Python is 3.11.
.PHONY: $(BUILD)/arm/.wheels
$(BUILD)/arm/.wheels: wheel-3.11-aarch64 wheel-3.11-x86_64 | $(VENV)/.torch
	tools/arm/userland.sh
	for machine in $(WHEEL_MACHINES); do \
	  rm -rf $(BUILD)/arm/$$machine; \
	  $(PYTHON) -m zipfile -e dist/te_fast-*-cp311-*_$$machine.whl $(BUILD)/arm/$$machine; \
	done

##@ Measure it
.PHONY: bench
bench: install $(VENV)/.group-bench ## criterion and host-time benches; JSON in benches/results/
	PYO3_PYTHON="$(CURDIR)/$(BUILD_PY)" $(FOR_ARCHS) cargo bench --package te_fast_core
	$(PY) benches/linear_host.py
	$(PY) benches/linear_cpu_overhead.py

.PHONY: bench-instructions
bench-instructions: $(BUILD)/arm/.wheels ## instructions per forward on Arm and x86-64, under qemu-user (libcapstone4, too)
	$(PY) benches/instructions.py --arm-packages $(BUILD)/arm/aarch64 --packages $(BUILD)/arm/x86_64 $(wildcard $(VENV)/lib/python*/site-packages)

##@ Release it
.PHONY: docs
docs: install $(VENV)/.group-docs ## HTML documentation in docs/_build/html
	rm -rf docs/reference/generated # pages of an earlier build may name removed functions
	$(PY) -m sphinx -W --keep-going -q -j auto -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The wheel must not hold paths of this machine: they would differ on another machine. With `--target`, cargo does not pass
# the flags to build scripts.
REMAP = --remap-path-prefix=$(CURDIR)=te_fast --remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}=cargo

# For example wheel-3.12-aarch64. zig links for glibc 2.28, and for the other machine. maturin knows the settings of each
# Python, so the Python need not be installed.
wheel-%: $(BUILD)/venv/.ready $(BUILD)/venv/.group-wheel
	rm -f dist/te_fast-*-cp$(subst .,,$(word 1,$(subst -, ,$*)))-*_$(word 2,$(subst -, ,$*)).whl
	rustup --quiet target add $(word 2,$(subst -, ,$*))-unknown-linux-gnu 2>/dev/null || :
	PATH="$(CURDIR)/$(BUILD)/venv/bin:$$PATH" RUSTFLAGS="$(REMAP)" TE_FAST_NVCC="$(NVCC)" TE_FAST_FATBINS="$(FATBINS)" $(FOR_WHEELS) \
	  $(MATURIN) build --release --quiet --zig --compatibility manylinux_2_28 --target-dir target/wheels \
	  --target $(word 2,$(subst -, ,$*))-unknown-linux-gnu --interpreter python$(word 1,$(subst -, ,$*)) --out dist

.PHONY: alias
alias: $(BUILD)/venv/.ready ## the wheel in dist/ of te_fast_alias, by which `import transformer_engine` gives te_fast
	rm -f dist/te_fast_alias-*.whl
	$(BUILD_PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist python/alias

.PHONY: wheel
wheel: ## release wheels in dist/ for this Python and machine, and their checks
	rm -rf dist
	@# torch, which the checks import, is downloaded while the compilers work.
	$(MAKE) --no-print-directory --jobs=2 $(THIS_WHEEL) $(VENV)/.torch
	$(MAKE) --no-print-directory alias
	$(PY) tools/check_wheel.py dist/te_fast-*.whl $(WHEEL_ARCHS:%=--archs %)

.PHONY: wheels
wheels: | $(VENV)/.torch ## release wheels for every Python and machine; `make wheel-3.12-aarch64` for one
	rm -rf dist
	$(MAKE) --no-print-directory $(foreach machine,$(WHEEL_MACHINES),$(foreach python,$(WHEEL_PYTHONS),wheel-$(python)-$(machine))) alias
	$(PY) tools/check_wheel.py dist/te_fast-*.whl $(WHEEL_ARCHS:%=--archs %)

# Both builds run in one folder, one after the other: nvcc hashes a source's path into the names of its internal symbols.
.PHONY: reproduce
reproduce: ## build the wheel of HEAD twice, from nothing: both must have the same bytes
	rm -rf $(BUILD)/clone $(BUILD)/built
	mkdir -p $(BUILD)/built
	for name in one another; do \
	  git clone --quiet . $(BUILD)/clone; \
	  $(MAKE) --no-print-directory -C $(BUILD)/clone $(THIS_WHEEL); \
	  mv $(BUILD)/clone/dist/*.whl $(BUILD)/built/$$name.whl; \
	  rm -rf $(BUILD)/clone; \
	done
	cmp $(BUILD)/built/one.whl $(BUILD)/built/another.whl

.PHONY: sdist
sdist: $(BUILD)/venv/.ready | $(VENV)/.torch ## source distribution in dist/, and a wheel built from it alone, for TEST_ARCHS
	rm -rf dist/te_fast-*.tar.gz $(BUILD)/of_sdist
	$(MATURIN) sdist --out dist
	@# This wheel shows that nothing is missing in the distribution; nobody uses it, so that it is not optimised.
	CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off $(FOR_ARCHS) TE_FAST_FATBINS="$(FATBINS)" $(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(BUILD)/of_sdist dist/te_fast-*.tar.gz
	$(PY) tools/check_wheel.py $(BUILD)/of_sdist/te_fast-*.whl $(CHECKED_ARCHS) --of-this-machine

.PHONY: clean
clean: ## remove everything that make created, environments included
	rm -rf .venv* $(BUILD) dist target demo_out docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
