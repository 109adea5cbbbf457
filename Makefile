# Every target works on a fresh clone with no other command before it: the virtual environments are
# made on demand, and again when what they are made from changes. The targets never need a shell
# with an activated environment.

PYTHON ?= python3
# grpcio-tools is pinned to a release that has wheels for Python 3.11 and 3.12 only.
PROTO_PYTHON ?= $(PYTHON)
ARGS ?=

PIP_VERSION := 26.3
VENV := .venv
PROTO_VENV := .venv-proto
VLLM_VENV := .venv-vllm
READY := $(VENV)/.ready
PROTO_READY := $(PROTO_VENV)/.ready
VLLM_READY := $(VLLM_VENV)/.ready

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help setup proto proto-check lint format test test-vllm demo demo-vllm serve bench bench-vllm conformance clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv and install everything into it, pinned

# torch comes first and by its exact version: resolving it together with the rest may pick another
# build of it.
$(READY): pyproject.toml constraints.txt Makefile
	@echo "installing into $(VENV); the first time takes a minute or two"
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(VENV)/bin/python -m pip install -qq pip==$(PIP_VERSION)
	@$(VENV)/bin/python -m pip install -qq -c constraints.txt setuptools torch==2.13.0
	@$(VENV)/bin/python -m pip install -qq -c constraints.txt --no-build-isolation \
		-e '.[server,transformers,dev]'
	@touch $@

$(PROTO_READY): constraints-proto.txt Makefile
	@echo "installing into $(PROTO_VENV)"
	@$(PROTO_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PROTO_PYTHON) -m venv --clear $(PROTO_VENV)
	@$(PROTO_VENV)/bin/python -m pip install -qq pip==$(PIP_VERSION)
	@$(PROTO_VENV)/bin/python -m pip install -qq --only-binary=:all: -r constraints-proto.txt || \
		{ echo "$(PROTO_VENV) needs Python 3.11 or 3.12: set PROTO_PYTHON" >&2; exit 1; }
	@touch $@

$(VLLM_READY): pyproject.toml constraints-vllm.txt Makefile
	@echo "installing vLLM's CPU build into $(VLLM_VENV); it takes some minutes"
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq pip==$(PIP_VERSION)
	@$(VLLM_VENV)/bin/python -m pip install -qq -c constraints.txt setuptools torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-deps -r constraints-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

proto: $(PROTO_READY) ## generate engine_client/wire from proto/
	@$(PROTO_VENV)/bin/python tools/generate_proto.py

proto-check: $(PROTO_READY) ## fail when engine_client/wire is stale
	@$(PROTO_VENV)/bin/python tools/generate_proto.py --check

lint: $(READY) proto-check ## ruff, mypy, buf and proto-check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf format --diff --exit-code

format: $(READY) ## format Python and proto files, and fix what ruff can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/buf format --write

test: $(READY) ## run the tests; ARGS='-k name' narrows them
	$(VENV)/bin/python -m pytest $(ARGS)

# vLLM and what it loads warn of many things; they aren't ours to mend.
test-vllm: $(READY) $(VLLM_READY) ## run the tests in the real vLLM; ARGS='-k name' narrows them
	GRAMMAR_SERVICE_PYTHON=$(CURDIR)/$(VENV)/bin/python \
		$(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default tests/vllm $(ARGS)

demo: $(READY) ## service and model side by side: see examples/demo.py
	@$(VENV)/bin/python -m examples.demo $(ARGS)

demo-vllm: $(READY) $(VLLM_READY) ## service and vLLM's server side by side: see examples/demo_vllm.py
	@$(VLLM_VENV)/bin/python -m examples.demo_vllm $(ARGS)

serve: $(READY) ## run the service; ARGS='--help' shows its flags
	@$(VENV)/bin/grammar-service serve $(ARGS)

bench: $(READY) ## run the benchmarks; ARGS='--help' shows them
	@$(VENV)/bin/python -m benchmarks $(ARGS)

bench-vllm: $(READY) $(VLLM_READY) ## a step's cost to vLLM's engine thread, ours and vLLM's own
	@GRAMMAR_SERVICE_PYTHON=$(CURDIR)/$(VENV)/bin/python $(VLLM_VENV)/bin/python -m benchmarks $(ARGS)

conformance: $(READY) ## public schemas through the service; DATA=sample.jsonl names them
	@$(VENV)/bin/python -m tools.conformance $(DATA) $(ARGS)

clean: ## remove the virtual environments, caches and builds
	rm -rf $(VENV) $(PROTO_VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
