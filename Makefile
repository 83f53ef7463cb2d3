# Two commands matter: `make demo` sets up and runs the main job, `make test` sets up and runs the tests.
# Both work in .venv, which they make; VENV=path uses another one, PYTHON=python3.12 another interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per test process: two that share two cores are several times slower than two that don't compete.
WORKERS ?= 2

.PHONY: demo test fast-test check install install-dev clean

demo: install
	$(BIN)/fold-bench

test: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

fast-test: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

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

$(BIN)/.installed-dev: requirements-dev.txt $(BIN)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
