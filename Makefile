# Everything runs in .venv, which the targets make and keep up to date themselves.

PYTHON ?= python3
MODEL ?= smollm2
PROMPT ?= Explain in three sentences how a hand mill turns grain into flour.
ONCE ?=
INPUTS ?= 100000
TUNE ?=
ARGS ?=

# As typed, and out of the shell's hands: quotes and dollars in a prompt stay what they are.
override export PROMPT := $(value PROMPT)

BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help run test lint type protos fuzz bench bench-peer gpu-check oldest-triton clean set-up-run set-up-dev

help: ## List the targets
	@echo "usage: make TARGET [VARIABLE=value ...]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

run: set-up-run ## Answer PROMPT with MODEL, then serve until Ctrl-C (ONCE=1: then end; ARGS: flags of kvern run)
	@$(BIN)/kvern run $(if $(ONCE),,--serve) $(ARGS) -- "$(MODEL)" "$$PROMPT"

test: set-up-dev ## Run all tests (ARGS: arguments of pytest)
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: set-up-dev ## Check style, imports between parts, and protos
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python tools/protos.py check

type: set-up-dev ## Check types
	$(BIN)/mypy
	$(BIN)/mypy tests bench tools

fuzz: set-up-dev ## Call every method of every service with INPUTS bad messages (ARGS: arguments of pytest)
	@FUZZ_INPUTS=$(INPUTS) $(BIN)/pytest tests/fuzz $(ARGS)

protos: set-up-dev ## Generate src/kvern/v1 from protos/
	$(BIN)/python tools/protos.py generate

bench: set-up-dev ## Measure tokens/s and latencies of MODEL through the front door (ARGS: see bench/generate.py --help)
	@$(BIN)/python bench/generate.py "$(MODEL)" $(ARGS)

bench-peer: set-up-dev ## Measure Kvern beside vLLM and llama.cpp, which go into .venv-peer, 3 GB (ARGS: see bench/peer.py --help)
	@$(BIN)/python bench/peer.py $(ARGS)

gpu-check: ## Check and measure this machine's GPU; needs torch and triton only (TUNE=1: rewrite tilings; ARGS: see bench/gpu_check.py --help)
	@$(PYTHON) bench/gpu_check.py $(if $(TUNE),--tune) $(ARGS)

oldest-triton: set-up-dev ## Put the oldest Triton that kernels must compile with, 0.6 GB, where a test finds it
	@$(BIN)/python tools/oldest_triton.py

clean: ## Remove .venv, .venv-peer, caches and build output
	rm -rf .venv .venv-peer build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

set-up-run:
	@$(PYTHON) tools/bootstrap.py run

set-up-dev:
	@$(PYTHON) tools/bootstrap.py dev
