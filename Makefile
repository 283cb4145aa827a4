# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, which `make setup` builds; every target brings it up to date first.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
BIN := .venv/bin
TYPED := $(wildcard vllm_spec_ext tests examples scripts)

.PHONY: help setup check format lint types fix test ci demo docs bench-smoke gpu-check gpu-bench

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

setup:  ## Build .venv: vLLM for this machine, and this project in editable mode
	@$(PYTHON) scripts/setup_env.py

check: format lint types  ## Format, lint, types, unit tests (under two minutes)
	$(BIN)/python -m pytest tests/unit -q

format: setup  ## Is everything formatted? `make fix` formats
	$(BIN)/ruff format --check .

lint: setup  ## What the linter says
	$(BIN)/ruff check .

types: setup  ## What the type checker says
	$(BIN)/mypy $(TYPED)

fix: setup  ## Format, and repair what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup  ## All tests: unit, engine, e2e (half an hour)
	$(BIN)/python scripts/run_tests.py

ci:  ## All that continuous integration runs: format, lint, types, docs, all tests
	@.ci/run

demo:  ## The same text with and without speculation, on a small model (four minutes at first)
	@echo "demo: about four minutes the first time (environment, model, engines), two after that"
	@$(MAKE) --no-print-directory setup
	$(BIN)/vllm-spec demo

docs: setup  ## The documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench-smoke: setup  ## A very short benchmark run: does everything work, not how fast is it
	$(BIN)/vllm-spec bench --smoke

gpu-check: setup  ## On an NVIDIA GPU: what only one can show, in under ten minutes, as gpu-check.json
	PYTHONPATH=scripts $(BIN)/python -m gpu_check $(ARGS)

gpu-bench: setup  ## On an NVIDIA GPU: plain vLLM against our methods; run again, it goes on where it stopped
	PYTHONPATH=scripts $(BIN)/python -m gpu_bench $(ARGS)
