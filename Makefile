# make help says what there is. Each target first installs what it needs into an environment of its own (.venv).
# PYTHON=3.12 or PYTHON=/path/to/python chooses the interpreter; its environment is then .venv-3.12.

PYTHON ?=
ARGS ?=
VENV ?= .venv$(if $(PYTHON),-$(patsubst python%,%,$(notdir $(PYTHON))))
PARITY_VENV ?= .venv-parity
PARITY_PYTHON ?= $(PYTHON)
AOT_VENV ?= .venv-aot

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-quick parity aot aot-all plan-all lint format docs clean install install-dev

help:  ## this text
	@echo 'make TARGET [PYTHON=3.12] [ARGS="more arguments"]'
	@sed -n "s/^\([a-z-]*\):[^#]*## /\1: /p" Makefile | awk -F": " "{printf \"  %-12s %s\\n\", \$$1, \$$2}"

quickstart: install  ## train a real 135M-parameter language model with GRPO on this machine
	$(VENV)/bin/python -m rlax_stack.launch --config=configs/quickstart.py $(ARGS)

test: install-dev  ## all tests
	$(VENV)/bin/python -m pytest $(ARGS)

test-quick: install-dev  ## the tests that take seconds
	$(VENV)/bin/python -m pytest -m 'not slow' $(ARGS)

parity:  ## compare logits with torch and transformers (in .venv-parity)
	@.ci/environment $(PARITY_VENV) dev,parity $(PARITY_PYTHON)
	$(PARITY_VENV)/bin/python -m pytest --timeout=900 tests/parity $(ARGS)

aot:  ## compile the kernels for TPU, without one (in .venv-aot)
	@.ci/environment $(AOT_VENV) dev,aot $(PYTHON)
	$(AOT_VENV)/bin/python -m pytest tests/aot -m 'not aot_all' $(ARGS)

aot-all:  ## the same, with every row length of the largest heads
	@.ci/environment $(AOT_VENV) dev,aot $(PYTHON)
	$(AOT_VENV)/bin/python -m pytest tests/aot $(ARGS)

plan-all:  ## plan every config of configs/clusters (minutes each)
	@.ci/environment $(AOT_VENV) dev,aot $(PYTHON)
	$(AOT_VENV)/bin/python -m pytest tests/aot/test_plan.py --timeout=1800 $(ARGS)

lint: install-dev  ## formatting, lint and types; changes nothing
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	@command -v node >/dev/null || $(VENV)/bin/python -m pip install --quiet 'pyright[nodejs]'
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: install-dev  ## format the code and mend what lint can mend
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: install-dev  ## write docs/config.md and docs/algorithms.md from configs/ and the boxes
	$(VENV)/bin/python -m rlax_stack.docs_config
	$(VENV)/bin/python -m rlax_stack.docs_algorithms

install:  ## what the quickstart needs
	@.ci/environment $(VENV) quickstart,math $(PYTHON)

install-dev:  ## what the tests need
	@.ci/environment $(VENV) dev,quickstart,math $(PYTHON)

clean:  ## remove the environments (runs/ stays)
	rm -rf .venv .venv-*
