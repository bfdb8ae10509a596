# Every target sets up what it needs; `make demo` and `make test` work on a machine with Python >= 3.11, make and pip.
# PYTHON=/path/to/python3 chooses the interpreter, PYTEST_ARGS adds arguments to the test runs.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup setup-517 real-model demo test test-compat test-517 contract-table conformance lint format types contracts fast slow slow-part gpu clean

# Two workers fit the smallest machine that this is tested on, and each starts with seconds of imports.
WORKERS ?= 2
PYTEST_ARGS ?=
# Which seventh of the slow tests to run, K/7.
SLOW_PART ?= 0/7
FAST := -m "not slow and not gpu"
CODE := hf_treespec kernels tests evals configs

export HF_HUB_OFFLINE := 1

help:
	@echo "make demo        three prompts, plainly and with tree speculation, on a real model"
	@echo "make test        lint, types, contracts and the fast tests (transformers 5.24)"
	@echo "make test-compat the fast tests on both ends of the supported range, transformers 5.17 and 5.24"
	@echo "make fast | lint | format | types | contracts    one part of make test"
	@echo "make slow        all slow tests;  make slow-part SLOW_PART=K/7  one seventh of them"
	@echo "make contract-table  write docs/contract.md from the rows that its tests run"
	@echo "make conformance     put every causal-LM model type through its calls on both versions, and write docs/models.md"
	@echo "make gpu         the tests that need a CUDA device"
	@echo "make real-model  convert SmolLM2-135M once (demo and tests do it on their own)"
	@echo "make clean       remove environments, caches and build folders"

setup:
	@sh scripts/setup.sh .venv tf524 cli,dev

setup-517:
	@sh scripts/setup.sh .venv-517 tf517 cli,test

real-model: setup
	.venv/bin/python evals/real_model.py

demo: setup
	.venv/bin/python evals/demo.py

test: lint types contracts fast

lint: setup
	.venv/bin/ruff check $(CODE)
	.venv/bin/ruff format --check $(CODE)

format: setup
	.venv/bin/ruff check --fix $(CODE)
	.venv/bin/ruff format $(CODE)

types: setup
	.venv/bin/mypy

contracts: setup
	.venv/bin/lint-imports

fast: setup
	.venv/bin/pytest $(FAST) -n $(WORKERS) $(PYTEST_ARGS)

test-compat: fast test-517

test-517: setup-517
	.venv-517/bin/pytest $(FAST) -n $(WORKERS) $(PYTEST_ARGS)

# CONFORMANCE=llama,mamba2 runs these types only.
conformance: setup setup-517
	PYTHONPATH=tests .venv/bin/python -m conformance.zoo --jobs $(WORKERS) $(CONFORMANCE)
	PYTHONPATH=tests .venv-517/bin/python -m conformance.zoo --jobs $(WORKERS) --present $(CONFORMANCE)

contract-table: setup
	PYTHONPATH=tests .venv/bin/python -m conformance.contract

slow: setup
	.venv/bin/pytest -m "slow and not gpu" $(PYTEST_ARGS)

# pytest leaves with 5 when nothing is selected, which a seventh of few tests may well be.
slow-part: setup
	.venv/bin/pytest -m "slow and not gpu" --slow-part $(SLOW_PART) $(PYTEST_ARGS) || [ $$? -eq 5 ]

gpu: setup
	.venv/bin/python tests/gpu/attention_device.py
	.venv/bin/python tests/gpu/append_device.py
	.venv/bin/python tests/gpu/commit_device.py

clean:
	rm -rf .venv .venv-517 .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find hf_treespec kernels tests evals configs -name __pycache__ -type d -prune -exec rm -rf {} +
