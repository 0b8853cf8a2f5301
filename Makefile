# Each target works on a fresh machine that has Python 3.11 or newer and a package registry; no other step is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
XLA := .venv-xla

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-xla lint bench clean

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

# torch_xla works with the torch of its own version only, so it has an environment of its own (about 7 GB).
$(XLA)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(XLA)
	sed '/^torch==/d' constraints.txt > $(XLA)/constraints.txt
	$(XLA)/bin/python -m pip install --disable-pip-version-check torch==2.9.1 torch_xla==2.9.0 -e . pytest pytest-timeout -c $(XLA)/constraints.txt
	@touch $@

test-xla: $(XLA)/.installed ## training on an XLA device, as TPUs are, on torch_xla's CPU backend
	USE_TORCH_XLA=0 HF_TINYLM_XLA_PYTHON=$(abspath $(XLA)/bin/python) $(XLA)/bin/python -m pytest tests/training/test_xla.py $(PYTEST_ARGS)

lint: $(STAMP) ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## speed of this machine beside the stock trainer
	$(BIN)/python -m benchmarks

clean: ## remove the environment and what was built; runs/ stays
	rm -rf $(VENV) $(XLA) build dist .pytest_cache .mypy_cache .ruff_cache
