# Each target works on a fresh machine that has Python 3.11 or newer and a package registry; no other step is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

# Installs once; again when a dependency or a pin changes. A failed installation leaves no stamp.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and "error: Python %d.%d is too old, 3.11 or newer is needed. Install it and run: make PYTHON=python3.11 $(or $(MAKECMDGOALS),test)" % v)'
	@echo 'Setting up $(VENV): a few minutes, once.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev,gguf-verify]' -c constraints.txt
	@touch $@

demo: $(STAMP) ## raw text -> tokenizer -> shards -> training -> evaluation -> GGUF -> llama.cpp, under runs/demo
	$(BIN)/hf-tinylm demo

test: $(STAMP) ## the test suite without the slow tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' $(PYTEST_ARGS)

test-all: $(STAMP) ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP) ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## speed of this machine beside the stock trainer
	$(BIN)/python -m benchmarks

clean: ## remove the environment and what was built; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
