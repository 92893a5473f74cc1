# `make demo` and `make test` need Python 3.11 or newer, make and a package registry; nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# What MLX needs differs by platform: Metal on a Mac, CUDA where an NVIDIA driver is, else the CPU.
ifeq ($(shell uname -s),Darwin)
  EXTRA :=
else ifneq ($(wildcard /proc/driver/nvidia/version),)
  EXTRA := ,cuda
else
  EXTRA := ,cpu
endif

.PHONY: setup demo test test-fast test-cuda test-floors notebooks lint clean
setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,host,notebooks$(EXTRA)]'
	@touch $@

demo: setup
	$(BIN)/python -m mlx_qlayers demo

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal

test-fast: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow'

test-cuda: setup
	$(BIN)/python -m pytest -m cuda

# The oldest versions that pyproject.toml admits, in an environment of their own.
test-floors:
	$(PYTHON) -m venv $(VENV)-floors
	$(VENV)-floors/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint tests/floors.txt --editable '.[dev,host,notebooks$(EXTRA)]'
	$(VENV)-floors/bin/python -m pytest -n auto --dist worksteal

# Runs the notebooks and stores their outputs; the tests run them without storing.
notebooks: setup
	$(BIN)/python notebooks/execute.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VENV)-floors build dist *.egg-info
