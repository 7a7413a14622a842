# The commands of this project. CI runs these and nothing else.
#
#   make train RECIPE=recipes/pushcube.toml ARGS="--seed 3"
#   make test  ARGS="tests/store -k lease"

RECIPE ?= recipes/pushcube.toml
ARGS ?=
BENCH ?= simulator
WORKERS ?= 2

BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup train test check protos bench test-gpu check-compose clean

# Small tensors: more threads only take cores from the other roles and test workers.
test test-gpu: export OMP_NUM_THREADS ?= 1

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

setup: ## make .venv and install what is missing (train and test do this by themselves)
	@bash deploy/setup.sh

train: setup ## train a policy on this machine: RECIPE=file, ARGS=flags of `dvla train`
	@$(BIN)/dvla train $(RECIPE) $(ARGS)

test: setup ## run all tests that need no GPU: ARGS=arguments for pytest
	@$(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) $(ARGS)

test-gpu: setup ## run the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu $(ARGS)

check: setup ## lint, format, types, proto drift and proto lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	bash protos/generate.sh --check
	cd protos && ../$(BIN)/buf lint

protos: setup ## generate protos/gen from the .proto files
	@bash protos/generate.sh

bench: setup ## measure this machine: BENCH=simulator or weight_plane, ARGS=its flags
	@$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

check-compose: ## build and run docker-compose.yml for real with podman (as root, Debian)
	@bash deploy/check_compose.sh

clean: ## remove caches and the environments, keep runs
	rm -rf .venv .venv-protos .venv-*.lock .venv-setup.log .mypy_cache .ruff_cache .pytest_cache .hypothesis
