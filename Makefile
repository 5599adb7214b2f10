# Each target makes the environment that it needs inside this folder; `make help` lists them.
# PYTHON=/path/to/python3.12 picks the interpreter (before the first target, or after `make clean`).
# TORCH_INDEX=URL adds a package index for torch, where the default one has no CPU build.

PYTHON ?= python3
TORCH_INDEX ?=
CHECK ?=
FORCE ?=
INTO ?=
KERNELS ?=
SEED ?=
PROJECT_URL ?=
TAG ?=
export PROJECT_URL TAG

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs test test-torch test-release fuzz fuzz-long mutants check artifacts dist bench clean prerequisites

PIP := -m pip --disable-pip-version-check install --quiet --quiet
VENV := .venv/bin/python
VENV_TORCH := .venv-torch/bin/python
VENV_LOWEST := .venv-lowest/bin/python
BUILD := build/artifacts
KERNEL_SOURCES = $(sort $(shell find kernels_src -name '*.cu' -o -name '*.cuh'))
ACCELERATOR := $(wildcard accelerator/*.[ch]) accelerator/setup.py accelerator/pyproject.toml

##@ Start here
help: ## Say what each target does
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-13s  %s\n", $$1, $$2}' Makefile

demo: .venv/.ready ## Two kernels from source to launch, step by step; DEMO=full shows details
	@$(VENV) tools/demo.py

.PHONY: install
install: ## Package and kernels into the active environment, or INTO=DIR; KERNELS=WHEEL gives the kernels
	@"$(PYTHON)" tools/install.py $(if $(INTO),--into "$(INTO)") $(if $(KERNELS),--kernels "$(KERNELS)")

##@ Test
.PHONY: test-install
test-install: .venv/.ready ## The ways to install, in clean environments and a root with Python alone (after make artifacts)
	@$(VENV) tools/try_install.py

# One thread each in numpy and torch: threads of one process that wait in loops take the cores from the others.
test: .venv/.ready ## The tests that need no GPU, no torch and no published release (10 minutes of CPU time)
	@OPENBLAS_NUM_THREADS=1 $(VENV) -m pytest -n auto -m "not torch and not release"

.PHONY: test-private
test-private: .venv/.ready ## As root: tests that switch to another user, from a copy that only root can read
	@place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; umask 077; \
	    cp -r cubin_runtime tests pyproject.toml "$$place"; cd "$$place"; \
	    PYTHONPATH=$$place "$(CURDIR)/$(VENV)" -m pytest -q $$(grep -rl --include='test_*.py' as_user=True tests)

.PHONY: test-lowest
test-lowest: .venv-lowest/.ready ## Artifacts and command line with the lowest version of each dependency
	@$(VENV_LOWEST) -m pytest -q -n auto -m "not torch and not release" tests/artifacts tests/cli tests/test_imports.py \
	    tests/test_config.py tests/launch/test_driver.py --ignore-glob "tests/artifacts/test_kills*" \
	    --ignore-glob "tests/cli/test_memory*" --ignore-glob "tests/cli/test_secrets*" \
	    --ignore-glob "tests/cli/test_failing_calls*"

test-torch: .venv-torch/.ready ## The tests that need torch (its CPU build is enough) or transformers
	@OMP_NUM_THREADS=1 $(VENV_TORCH) -m pytest -n auto -m torch

.PHONY: test-engines
test-engines: .venv-torch/.ready build/engines/.ready ## The plug-ins on three versions each of vLLM and SGLang (1.3 GB, downloaded once)
	@ls -d build/engines/{vllm,sglang}-* | OMP_NUM_THREADS=1 xargs -P "$$(nproc)" -I ENGINE bash -c '\
	    name=$$(basename ENGINE); status=0; \
	    output=$$(PYTHONPATH=ENGINE:build/engines/site $(VENV_TORCH) -m pytest -q -p no:cacheprovider \
	        tests/integrations/test_$${name%-*}*.py 2>&1) || status=$$?; \
	    printf "%s\n%s\n" "$$name" "$$output"; exit $$status'

build/engines/.ready: tools/stage_engines.py .venv-torch/.ready
	@$(VENV_TORCH) tools/stage_engines.py --into build/engines
	@touch $@

test-release: .venv/.ready ## Every row of NVIDIA's published release (458 MB, downloaded once)
	@$(VENV) -m pytest -m release -s

fuzz: .venv/.ready ## 15 s of damaged input for each reader of untrusted bytes; SEED=n repeats a run
	@$(VENV) -m tests.fuzz.run --seconds 15 --jobs 2 $(if $(SEED),--seed $(SEED))

fuzz-long: .venv/.ready ## The same with 10 minutes a reader; results in benchmarks/results
	@$(VENV) -m tests.fuzz.run --seconds 600 --jobs 2 --json benchmarks/results/fuzz.json

mutants: .venv/.ready .venv-torch/.ready ## Bugs put in on purpose, each of which a test must notice (15 minutes)
	@$(VENV) tests/mutants/run.py

##@ Check and document
check: .venv/.ready ## Lint, format and types
	@status=0; for gate in "ruff check ." "ruff format --check --output-format concise ." "mypy --strict"; do \
	    $(VENV) -m $$gate || status=1; done; \
	    .venv/bin/clang-format --dry-run --Werror $(KERNEL_SOURCES) || status=1; exit $$status

docs: .venv-docs/.ready ## The documentation site, into build/site; a warning or a broken link is an error
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

##@ Build and release
artifacts: .venv/.ready ## Build our kernels and write their pin; CHECK=1 changes nothing, FORCE=1 compiles all
	@$(VENV) -m kernels_src.build --out $(BUILD) $(if $(filter-out 0,$(FORCE)),--force)
	@$(VENV) -m kernels_src.pinning $(if $(filter-out 0,$(CHECK)),--check)

dist: .venv/.ready ## Wheels and sdist, the same bytes twice; SBOM and provenance of the kernels; PROJECT_URL=URL
	@$(VENV) -m kernels_src.build --out $(BUILD) $(if $(filter-out 0,$(FORCE)),--force)
	@$(VENV) -m kernels_src.pinning --check
	@$(VENV) tools/dist.py
	@ls -l dist

.PHONY: release
release: .venv/.ready ## Check that this commit can be released (version, changelog, pin, same bytes twice); PROJECT_URL=URL TAG=1
	@$(VENV) tools/dist.py --problems
	@$(VENV) -m kernels_src.build --out $(BUILD)
	@$(VENV) -m kernels_src.pinning --check
	@$(VENV) tools/dist.py --release

##@ Measure
.PHONY: soak
soak: .venv/.ready ## 200 processes killed while they fetch, fetching compared with FlashInfer's (nginx), long fuzzing (40 minutes)
	@$(VENV) $(PIP) -e '.[bench]'
	@CUBIN_RUNTIME_KILLS=200 CUBIN_RUNTIME_KILLS_REPORT=benchmarks/results/kills.json \
	    $(VENV) -m pytest -s tests/artifacts/test_kills.py
	@$(VENV) benchmarks/fetch_peers.py
	@$(MAKE) --no-print-directory fuzz-long

bench: .venv/.ready ## The benchmarks that need no GPU, and what `make figures` writes
	@for script in benchmarks/*.py; do case "$$script" in */gpu_* | */figures.py) ;; *) \
	    echo "== $$script"; $(VENV) "$$script" ;; esac; done
	@$(MAKE) --no-print-directory figures

.PHONY: figures
figures: .venv/.ready ## All tables and pictures of the pages and the README, from benchmarks/results
	@$(VENV) $(PIP) -e '.[bench]'
	@$(VENV) benchmarks/figures.py

##@ This machine
clean: ## Remove everything that make made here, environments included
	rm -rf venv .venv .venv-docs .venv-lowest .venv-torch build accelerator/build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

prerequisites: ## Check what this machine must have, and print the command that installs what is missing
	@tools/prerequisites.sh "$(PYTHON)"
	@echo "This machine has what is needed."

# The toolchain's packages are 100 MB: they come only if no nvcc of exactly their version is on PATH.
.venv/.ready: pyproject.toml tools/prerequisites.sh kernels_src/toolchain.py $(ACCELERATOR)
	@tools/prerequisites.sh "$(PYTHON)"
	@test -x $(VENV) || "$(PYTHON)" -m venv .venv
	@echo "Installing into .venv ..."
	@$(VENV) $(PIP) -e '.[dev]'
	@$(VENV) $(PIP) --no-deps --force-reinstall ./accelerator
	@$(VENV) -m kernels_src.toolchain 2> /dev/null || $(VENV) $(PIP) -e '.[build]'
	@touch $@

.venv-lowest/.ready: .venv/.ready tools/lowest_versions.py
	@test -x $(VENV_LOWEST) || "$(PYTHON)" -m venv .venv-lowest
	@echo "Installing the lowest versions into .venv-lowest ..."
	@$(VENV) tools/lowest_versions.py > .venv-lowest/constraints.txt
	@$(VENV_LOWEST) $(PIP) -c .venv-lowest/constraints.txt -e '.[signing]' 'hypothesis>=6.100,<7' numpy \
	    'pytest>=8,<10' 'pytest-timeout>=2.3,<3' 'pytest-xdist>=3.6.1,<4'
	@touch $@

.venv-docs/.ready: pyproject.toml tools/prerequisites.sh
	@tools/prerequisites.sh "$(PYTHON)"
	@test -x .venv-docs/bin/python || "$(PYTHON)" -m venv .venv-docs
	@echo "Installing into .venv-docs ..."
	@.venv-docs/bin/python $(PIP) -e '.[docs]'
	@touch $@

# psutil tells transformers' continuous batching how much memory there is, where there is no GPU.
.venv-torch/.ready: pyproject.toml tools/prerequisites.sh $(ACCELERATOR)
	@tools/prerequisites.sh "$(PYTHON)"
	@test -x $(VENV_TORCH) || "$(PYTHON)" -m venv .venv-torch
	@echo "Installing torch into .venv-torch ..."
	@$(VENV_TORCH) $(PIP) $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") 'torch==2.13.0'
	@$(VENV_TORCH) $(PIP) -e '.[dev,transformers]' 'transformers==5.17.0' psutil
	@$(VENV_TORCH) $(PIP) --no-deps --force-reinstall ./accelerator
	@touch $@
