# Each target makes the environment it needs. PYTHON may name another interpreter (3.10 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# The heap is kept between large buffers: eager PyTorch on a CPU spends half its time on page faults otherwise.
export MALLOC_TRIM_THRESHOLD_ ?= 4000000000
export MALLOC_MMAP_THRESHOLD_ ?= 4000000000

.PHONY: demo test check kernels format clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.runtime            ## evaluate the bundled model against the baselines; leaves demo/
	$(BIN)/looped eval --out demo

test: $(VENV)/.dev                ## run the tests
	$(BIN)/python -m pytest

check: $(VENV)/.dev               ## style, types, import layers, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

kernels: $(VENV)/.dev             ## compile the GPU kernels for every target, and hold them to their gates
	$(BIN)/python -W ignore -m loopkernels.aot --target all --kernel all

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo *.egg-info python/*.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("looped needs Python 3.10 or newer, found " + sys.version.split()[0] + "; run make PYTHON=...") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml constraints.txt setup.py $(shell find csrc -type f)

$(VENV)/.runtime: $(SOURCES) | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(SOURCES) | $(BIN)/python
	$(PIP) -e '.[dev,gpu,tabular]'
	touch $(VENV)/.runtime $@
