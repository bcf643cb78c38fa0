# `make help` lists the targets. Everything runs from .venv, which `make setup` creates and keeps up to date.

PYTHON ?= python3
# Passed to pip, for example PIP_FLAGS="--index-url URL" for a mirror, or "--extra-index-url URL" for PyTorch's CPU builds.
PIP_FLAGS ?=
# Overrides for `make train`, in Hydra's syntax: make train ARGS="model.seed=2"
ARGS ?=
# More for pytest: make test PYTEST_ARGS="-k config -x"
PYTEST_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
# Two workers of one thread each: on two cores, more threads only wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
FAST := $(wildcard tests/unit tests/numerics tests/integration tests/gpu)
SCRIPTS := .ci/run $(wildcard slurm/*.sub)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-distributed test-slow test-slurm lint bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r target text; do \
		printf '  make %-18s %s\n' "$$target" "$$text"; done

setup: $(STAMP) ## create .venv with everything that runs without a GPU (about two minutes; once)

# Megatron-Core 0.11, which NeMo needs, goes into a folder that only its tests put in front of the installed version.
$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "make setup: $(PYTHON) is not Python 3.11 or 3.12; name one: make setup PYTHON=python3.11" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c .ci/constraints.txt -e '.[cpu,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps --upgrade \
		--target .venv/megatron_core_0.11 megatron-core==0.11.0
	@touch $@

train: setup ## train the small model; ARGS="model.seed=2" overrides its config
	$(BIN)/nemo-sspo train --config-name tiny_moe_cpu $(ARGS)

test: setup ## unit, numeric and fast integration tests
	$(PYTEST) -n 2 -m "not slow and not distributed" $(FAST) $(PYTEST_ARGS)

test-distributed: setup ## tests that start several processes
	$(PYTEST) tests/distributed $(PYTEST_ARGS)

test-slow: setup ## whole runs, builds and everything else that `make test` leaves out
	$(PYTEST) -n 2 --dist loadfile -m "slow or distributed" $(FAST) $(PYTEST_ARGS)

test-slurm: setup ## slurm/sspo_moe.sub on a real Slurm of one node; as root, installs slurm-wlm and munge if missing
	@export PATH="$$PATH:/usr/sbin"; if ! { command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null; then \
		if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
			echo "make test-slurm: needs Slurm and munge; on Debian, as root: apt-get install slurm-wlm munge" >&2; exit 2; \
		fi; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq -y --no-install-recommends slurm-wlm munge; \
	fi
	$(PYTEST) tests/slurm $(PYTEST_ARGS)

lint: setup ## ruff, pyright, import-linter, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/shellcheck $(SCRIPTS)

bench: setup ## run the benchmarks of tests/benchmarks: ratios and medians, side by side
	$(BIN)/python tests/benchmarks/logprobs.py
	$(BIN)/python tests/benchmarks/objectives.py
	$(BIN)/python -m tests.benchmarks.layouts
	$(BIN)/python -m tests.benchmarks.routing

clean: ## remove .venv and caches; runs in results/ stay
	rm -rf .venv build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
