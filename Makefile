# The only entry points of developers and CI. Each target installs what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# pip writes the stamp's target last, so an interrupted install is done again.
$(VENV)/.installed: pyproject.toml hatch_build.py $(shell find protos -name '*.proto')
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "extproc needs Python 3.11 or later; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

.PHONY: install
install: $(VENV)/.installed ## The package and its tools, editable, in .venv

.PHONY: demo
demo: install ## Envoy + service + simulated engines on this machine (ONCE=1: end by itself)
	$(BIN)/extproc demo $(if $(ONCE),--once)

.PHONY: test
test: lint types ## Everything that needs no GPU and no vLLM: lint, types, unit, gRPC and real-Envoy tests
	$(BIN)/python -m pytest tests/unit tests/grpc tests/envoy -n 2 --dist=loadfile -q

.PHONY: coverage
coverage: install ## The same tests with coverage shown (slower)
	$(BIN)/python -m pytest tests/unit tests/grpc tests/envoy --cov --cov-report=term:skip-covered -n 2 --dist=loadfile -q

.PHONY: unit
unit: install ## Unit and in-process gRPC tests only
	$(BIN)/python -m pytest tests/unit tests/grpc -q

.PHONY: envoy
envoy: install ## Tests through the real Envoy only
	$(BIN)/python -m pytest tests/envoy -q

.PHONY: vllm
vllm: install ## Real engines: vLLM on CPU in .venv-vllm (once; 3.9 GB) and a tiny model
	$(BIN)/python -m extproc.demo.vllm.install

.PHONY: demo-vllm
demo-vllm: vllm ## The demo on real vLLM (ONCE=1: end by itself)
	$(BIN)/extproc demo --engine vllm $(if $(ONCE),--once)

.PHONY: test-vllm
test-vllm: vllm ## Tests on a real vLLM prefiller and decoder
	$(BIN)/python -m pytest tests/vllm -q

.PHONY: browser
browser: install ## The status page in a real headless Chromium (installed by apt-get where there is none and we are root)
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  { echo 'make browser needs Chromium: apt-get install chromium' >&2; exit 1; }
	$(BIN)/python -m pytest tests/browser -q

$(VENV)/.fuzz: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	touch $@

.PHONY: fuzz
fuzz: $(VENV)/.fuzz ## Coverage-guided fuzzing of bodies and streams (FUZZ_SECONDS=60), and the properties from a new seed
	$(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile=default tests/unit tests/grpc
	$(BIN)/python -m fuzz --seconds $(or $(FUZZ_SECONDS),60)

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	touch $@

.PHONY: bench
bench: $(VENV)/.bench ## Contenders side by side: time and CPU (about 15 minutes; writes bench/results)
	$(BIN)/python -m bench.run --write

.PHONY: bench-release
bench-release: $(VENV)/.bench ## From a dead stream to freed blocks
	$(BIN)/python -m bench.release

.PHONY: soak
soak: $(VENV)/.bench ## Ten minutes of churn, hang-ups and restarts; then nothing may be left
	$(BIN)/python -m bench.soak --seconds 600

.PHONY: lint
lint: install ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: install ## mypy --strict
	$(BIN)/mypy

.PHONY: format
format: install ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## Remove what the targets made
	rm -rf $(VENV) extproc/pb .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
