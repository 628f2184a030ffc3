# Two commands on a fresh machine: `make train` and `make test`. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# The same with the last torch for CUDA 12.
CUDA12 := .venv-cuda12
# An own Python: make PYTHON=/path/to/python3.12 train
PYTHON ?=
# Options for the trainer: make train ARGS="--epochs 3"
ARGS ?=
# Some tests, in place of all: make test TESTS=tests/entrypoint
TESTS ?=

RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
CUDA12_DEV := $(CUDA12)/.dev-installed

.PHONY: help
help: ## List these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: train
train: $(RUNTIME) ## Set up, then train ResNet-18 on whatever this machine has
	@$(BIN)/train ddp $(ARGS)

.PHONY: test
test: check packages ## Set up, then run every test that this machine can run
ifdef TESTS
	@$(BIN)/pytest $(TESTS)
else
	@echo "Two parts of the tests run at once; each shows what it said when it is over."
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target \
	  test-train test-clusters test-image test-cuda12 test-others
endif

# Clusters wait for their daemons and for each other, an image for its packages: other tests take the time that they leave.
.PHONY: test-clusters
test-clusters: $(DEV)
	@$(BIN)/pytest tests/clusters

.PHONY: test-train
test-train: $(DEV)
	@$(BIN)/pytest tests/train

.PHONY: test-others
test-others: $(DEV)
	@$(BIN)/pytest tests --ignore=tests/clusters --ignore=tests/image --ignore=tests/train

.PHONY: test-image
test-image: $(DEV)
	@$(BIN)/pytest tests/image

# Its environment is made as a part of it: as a prerequisite it would put the tests themselves behind all others.
.PHONY: test-cuda12
test-cuda12: ## The unit and process levels with the last torch for CUDA 12, but for tests marked `once`
	@$(MAKE) --no-print-directory $(CUDA12_DEV)
	@$(CUDA12)/bin/pytest tests/entrypoint tests/train tests/report -m "not once"

.PHONY: check
check: $(DEV) packages ## Static checks: style, types, shell scripts, the Containerfile
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@if command -v shellcheck > /dev/null; then shellcheck .ci/run scripts/*.sh image/*.sh; \
	   find jobs -maxdepth 1 -type f ! -name '*.yaml' -exec shellcheck {} +; \
	 else echo "shellcheck is missing: shell scripts were not checked"; [ "$${CI:-}" != true ]; fi
	@$(BIN)/hadolint Containerfile

.PHONY: packages
packages: ## The system packages that the tests need, by apt-get
	@scripts/install-packages.sh tests/packages.txt tests/clusters/packages.txt tests/image/packages.txt

# ENGINE=, VARIANT=cuda12, BASE_IMAGE=, TAG=, APT_SOURCES=
.PHONY: image
image: ## Build the container image; VARIANT=cuda12: docs/image.md
	@$(or $(PYTHON),python3) -m image.build $(if $(ENGINE),--engine "$(ENGINE)") $(if $(VARIANT),--variant "$(VARIANT)") \
	  $(if $(BASE_IMAGE),--base-image "$(BASE_IMAGE)") $(if $(TAG),--tag "$(TAG)") \
	  $(if $(APT_SOURCES),--apt-sources "$(APT_SOURCES)")

# ENGINE=, VARIANT=cuda12, IMAGE=, SOURCE=oci:FOLDER, SIF=FILE
.PHONY: sif
sif: ## Make muster.sif for Apptainer from that image
	@$(or $(PYTHON),python3) -m image.sif $(if $(ENGINE),--engine "$(ENGINE)") $(if $(VARIANT),--variant "$(VARIANT)") \
	  $(if $(IMAGE),--image "$(IMAGE)") $(if $(SOURCE),--source "$(SOURCE)") $(if $(SIF),--output "$(SIF)")

.PHONY: jobs
jobs: $(RUNTIME) ## Render the job scripts in jobs/ from the profiles in jobs/sites/
	@$(BIN)/python -P -m entrypoint.jobs.making

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

.PHONY: venv
venv: $(DEV) ## The virtual environment with all tools, and nothing else

.PHONY: lock
lock: ## Resolve the locks anew (needs uv)
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
