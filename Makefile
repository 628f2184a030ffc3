# Two commands on a fresh machine: `make train` and `make test`. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# A second environment, with the last torch for CUDA 12.
CUDA12 := .venv-cuda12
# A Python of your own: make PYTHON=/path/to/python3.12 train
PYTHON ?=
# Options: make train ARGS="--epochs 3", make test-all ARGS="--keep FOLDER"
ARGS ?=
# Only some of the tests: make test TESTS=tests/entrypoint
TESTS ?=

RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
CUDA12_DEV := $(CUDA12)/.dev-installed

.PHONY: help
help: ## List these targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: train
train: $(RUNTIME) ## Set up, then train ResNet-18 on this machine's GPUs or CPUs
	@$(BIN)/train ddp $(ARGS)

.PHONY: test
test: $(DEV) ## Checks and tests that take 10 to 15 minutes on 2 cores
ifdef TESTS
	@$(BIN)/pytest $(TESTS)
else
	@$(BIN)/python -m tests.lanes quick $(ARGS)
endif

.PHONY: test-all
test-all: $(DEV) ## All of `make test`, and tests of clusters, faults and image
	@$(BIN)/python -m tests.lanes all $(ARGS)

.PHONY: test-long
test-long: $(DEV) ## Long tests: a soak test, the image built twice, CUDA 12
	@$(BIN)/python -m tests.lanes long $(ARGS)

.PHONY: test-setup
test-setup: ## Install system packages for the tests; no other target does
	@scripts/install-packages.sh tests/packages.txt tests/clusters/packages.txt tests/image/packages.txt

.PHONY: mutants
mutants: $(DEV) ## Change the code, and show which changes `make test` misses
	@$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: tour
tour: $(DEV) ## Show which files run in a launch, a run, a step and a save
	@$(BIN)/python -m tests.tour $(ARGS)

.PHONY: test-cuda12
test-cuda12: $(CUDA12_DEV)
	@$(CUDA12)/bin/pytest $(or $(TESTS),tests/entrypoint tests/train tests/report) -m "not once and not long"

.PHONY: check
check: $(DEV) ## Static checks: style, types, shell scripts, the Containerfile
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@PATH="$(abspath $(BIN)):$$PATH" shellcheck -x .ci/run scripts/*.sh image/*.sh
	@PATH="$(abspath $(BIN)):$$PATH" find jobs -maxdepth 1 -type f ! -name '*.yaml' -exec shellcheck {} +
	@$(BIN)/hadolint Containerfile

# The scripts read these variables from the environment, into which make puts the variables of its command line:
# ENGINE=, VARIANT=cuda12, BASE_IMAGE=, TAG=, APT_SOURCES=
.PHONY: image
image: ## Build the container image; VARIANT=cuda12: docs/image.md
	@image/build.sh

# ENGINE=, VARIANT=cuda12, IMAGE=, SOURCE=oci:FOLDER, SIF=FILE
.PHONY: sif
sif: ## Make muster.sif for Apptainer from the image
	@image/sif.sh

.PHONY: jobs
jobs: $(RUNTIME) ## Render the job scripts in jobs/ from the profiles of sites
	@$(BIN)/python -m tests.jobs.kept

.PHONY: bench
bench: $(DEV) ## Run the benchmarks, and add to benchmarks/RESULTS.md
	@$(BIN)/python benchmarks/launch.py --record
	@$(BIN)/python benchmarks/trainer.py --workload resnet18-64 --record
	@$(BIN)/python benchmarks/trainer.py --workload resnet50-224 --record
	@$(BIN)/python benchmarks/trainer.py --workload gpt --record
	@$(BIN)/python benchmarks/data.py --record
	@$(BIN)/python benchmarks/measuring.py --record
	@$(BIN)/python benchmarks/checkpoints.py --record
	@$(BIN)/python benchmarks/sif.py --record
	@$(BIN)/python benchmarks/bench.py --record
	@$(BIN)/python benchmarks/preflight.py --record

.PHONY: gpu
gpu: $(DEV) ## Run the checks that need a GPU; their options: ARGS="--help"
	@$(BIN)/python benchmarks/gpu/runner.py $(ARGS)

.PHONY: venv
venv: $(DEV) ## Set up the virtual environment with all tools

.PHONY: lock
lock: ## Resolve the lock files again (needs uv)
	@scripts/lock.sh

.PHONY: clean
clean: ## Remove the virtual environment and the caches; runs/ stays
	@rm -rf $(VENV) $(CUDA12) .apptainer .pytest_cache .ruff_cache .hypothesis muster.egg-info

$(RUNTIME): requirements.lock pyproject.toml scripts/install.sh
	@scripts/install.sh $(VENV) requirements.lock "$(PYTHON)"
	@touch $@

$(CUDA12_DEV): requirements-cuda12-test.lock pyproject.toml scripts/install.sh
	@scripts/install.sh $(CUDA12) requirements-cuda12-test.lock "$(PYTHON)"
	@touch $@

$(DEV): $(RUNTIME) requirements-dev.lock
	@scripts/install.sh $(VENV) requirements-dev.lock "$(PYTHON)"
	@touch $@
