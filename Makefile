# Each target makes the environment it needs. PYTHON may name another interpreter (3.10 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# The heap is kept between large buffers: eager PyTorch on a CPU spends half its time on page faults otherwise.
export MALLOC_TRIM_THRESHOLD_ ?= 4000000000
export MALLOC_MMAP_THRESHOLD_ ?= 4000000000

.PHONY: demo test slow bench check kernels format cpp sanitize clang neon coverage sdist clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.runtime            ## evaluate the bundled model against the baselines; leaves demo/
	$(BIN)/looped eval --out demo

test: $(VENV)/.dev                ## run the tests
	$(BIN)/python -m pytest

slow: $(VENV)/.dev                ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

bench: $(VENV)/.bench             ## our time beside the peers', what exits save, and the engine's functions; on a quiet machine
	$(BIN)/python benches/peers.py
	$(BIN)/python benches/exit.py
	$(BIN)/python -m pytest benches

CPP_SOURCES := $(shell find csrc -name '*.?pp')

check: $(VENV)/.dev               ## style, types, import layers, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)

kernels: $(VENV)/.dev             ## compile the GPU kernels for every target, and hold them to their gates
	$(BIN)/python -W ignore -m loopkernels.aot --target all --kernel all
	$(BIN)/python -W ignore -m loopkernels.decode_aot --target all --kernel all

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

# The C++ tests of csrc/tests, in a folder of their own under build/: $(call cpp_tests,FOLDER,OPTIONS OF CMAKE). They need doctest's
# header (apt-get install doctest-dev, or -DLOOPED_DOCTEST_INCLUDE=FOLDER in CMAKE_OPTIONS), and no Python, torch or GPU.
CMAKE_OPTIONS ?=
cpp_tests = PATH="$(abspath $(BIN)):$$PATH"; set -e; \
	cmake -S csrc -B build/$(1) -G Ninja -DLOOPED_MODULE=OFF -DLOOPED_TESTS=ON $(2) $(CMAKE_OPTIONS); \
	cmake --build build/$(1); ctest --test-dir build/$(1) --output-on-failure

cpp: $(VENV)/.dev                 ## the C++ tests, on every instruction set of this machine
	$(call cpp_tests,cpp,-DCMAKE_COMPILE_WARNING_AS_ERROR=ON)

sanitize: $(VENV)/.dev            ## the C++ tests under AddressSanitizer with UBSan, and under ThreadSanitizer
	$(call cpp_tests,address,-DLOOPED_SANITIZE=address)
	$(call cpp_tests,thread,-DLOOPED_SANITIZE=thread)

clang: $(VENV)/.dev               ## the C++ tests and the module built by clang (apt-get install clang), warnings are errors
	$(call cpp_tests,clang,-DCMAKE_CXX_COMPILER=clang++ -DCMAKE_COMPILE_WARNING_AS_ERROR=ON)
	PATH="$(abspath $(BIN)):$$PATH"; cmake -S csrc -B build/clang-module -G Ninja -DCMAKE_CXX_COMPILER=clang++ \
		-DCMAKE_COMPILE_WARNING_AS_ERROR=ON -DPYBIND11_FINDPYTHON=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python \
		-Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) && cmake --build build/clang-module

# apt-get install g++-aarch64-linux-gnu qemu-user
neon: $(VENV)/.dev                ## the C++ tests cross-compiled for AArch64, under qemu
	$(call cpp_tests,neon,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu")

coverage: $(VENV)/.dev            ## which lines and branches of csrc the C++ tests reach
	rm -rf build/coverage
	$(call cpp_tests,coverage,-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="--coverage -fprofile-update=atomic")
	$(PIP) gcovr
	$(BIN)/gcovr --root csrc --exclude csrc/tests --exclude-throw-branches --merge-lines --gcov-suspicious-hits-threshold 0 \
		--print-summary build/coverage

sdist: $(VENV)/.dev               ## an sdist that builds the engine where there is no torch
	$(PIP) build
	$(BIN)/python tests/check_sdist.py

clean:
	rm -rf $(VENV) build dist demo *.egg-info python/*.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("looped needs Python 3.10 or newer, found " + sys.version.split()[0] + "; run make PYTHON=...") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml constraints.txt setup.py $(shell find csrc -path csrc/tests -prune -o -type f -print)

$(VENV)/.runtime: $(SOURCES) | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(SOURCES) | $(BIN)/python
	$(PIP) -e '.[dev,gpu,tabular]'
	touch $(VENV)/.runtime $@

$(VENV)/.bench: $(SOURCES) | $(BIN)/python
	$(PIP) -e '.[bench]'
	touch $(VENV)/.runtime $@
