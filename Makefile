# `make demo` and `make test` need Python 3.11 or newer, make and a package registry; nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# MLX needs another extra on each platform: Metal on a Mac, CUDA where an NVIDIA driver is, else the CPU.
ifeq ($(shell uname -s),Darwin)
  EXTRA :=
else ifneq ($(wildcard /proc/driver/nvidia/version),)
  EXTRA := ,cuda
else
  EXTRA := ,cpu
endif

PYTEST := $(BIN)/python -m pytest
# The pages of the API reference; all else is internal.
PAGES := mlx_qlayers $(addprefix mlx_qlayers.,layers ops reference metal runtime tuning conversion)

# Tests and notebooks start many processes: what one has compiled of the package the next one takes.
export PYTHONDONTWRITEBYTECODE :=

# Modules are compiled where they are imported: all of the packages' would take a third of a setup.
.PHONY: setup demo test test-fast test-caches test-faults test-metal test-cuda metal-sources test-floors stress soak invariance fuzz bench plots architectures docs notebooks lint size clean
setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev,host,notebooks$(EXTRA)]'
	@touch $@

demo: setup
	$(BIN)/python -m mlx_qlayers demo

test: setup
	$(PYTEST) -n auto --dist load --maxschedchunk 4

test-fast: setup
	$(PYTEST) -n auto --dist load --maxschedchunk 4 -m 'not slow and not thorough and not metal and not cuda'

# Tensor operations in every format, beyond the selection that is in `make test`.
test-tensors: setup
	$(PYTEST) -n auto --dist load --maxschedchunk 4 -m tensors

# Every fault in every kernel on a simulated Apple GPU, beyond the selection that is in `make test`.
test-faults: setup
	$(PYTEST) -n auto --dist load --maxschedchunk 4 -m faults

# Every architecture with every kind of cache, beyond the selection that is in `make test`.
test-caches: setup
	$(PYTEST) -n auto --dist load --maxschedchunk 4 -m caches

# Every kernel on the GPU, against the same oracles.
test-metal: setup
	$(PYTEST) -m metal

test-cuda: setup
	$(PYTEST) -m cuda

# The launches of the tests, as texts for Apple's compiler; on a Mac tests/compile_metal_sources.py
# compiles them. Kernels give zeros and assertions come to nothing, so nothing is compiled here. Left
# out are slow tests that launch nothing of the package, or in other processes.
ELSEWHERE := fuzz models runtime/host metal/test_instructions.py \
  $(patsubst %,commands/test_%.py,arguments convert ranks server_lives server_load serving) \
  $(patsubst %,conversion/test_%.py,quantize sharding) \
  $(patsubst %,decode/test_%.py,compiled_step effects step_faults step_graph step_interrupts) \
  $(patsubst %,test_%.py,apple_faults benchmarks metal_sources notebooks sanitize stress wheel)
metal-sources: setup
	PYTHONOPTIMIZE=1 $(PYTEST) -n auto --dist load --maxschedchunk 4 --tb=no --timeout 60 -rN \
	  $(addprefix --ignore=tests/,$(ELSEWHERE)) -p tests.metal_sources --metal-sources build/metal
	$(BIN)/python -m tests.metal_sources build/metal

# The oldest versions that pyproject.toml admits, in an environment of their own.
test-floors:
	$(PYTHON) -m venv $(VENV)-floors
	$(VENV)-floors/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint tests/floors.txt --editable '.[dev,host,notebooks$(EXTRA)]'
	$(VENV)-floors/bin/python -m pytest -n auto --dist load --maxschedchunk 4

# Threads, tasks, interrupts and exits; make stress ARGS="threads --rounds 5000"
stress: setup
	$(BIN)/python -m tests.stress $(ARGS)

# Clients of a server for 20 minutes; make soak ARGS="--batch-invariant --minutes 5"
soak: setup
	$(BIN)/python -m tests.load --minutes 20 $(ARGS)

# A thousand random batches of a batch-invariant model, bit by bit; make invariance ARGS="--rules cuda"
invariance: setup
	$(BIN)/python tests/batches.py $(ARGS)

# Random calls and damaged files, on all cores; make fuzz MINUTES=60
MINUTES ?= 10
fuzz: setup
	$(BIN)/python -m tests.fuzz $(MINUTES) $(ARGS)

# Measures every family beside stock MLX, into benchmarks/results/<machine>; make bench ARGS=--quick
bench: setup
	$(BIN)/python -m mlx_qlayers bench --out benchmarks/results $(ARGS)

# Draws the pictures of the stored results anew, and writes their numbers into README.md and docs/.
plots: setup
	$(BIN)/python -m mlx_qlayers bench --from benchmarks/results
	$(BIN)/python benchmarks/readme.py

# Converts a small model of each architecture, and writes the table in docs/models.md.
architectures: setup
	$(BIN)/python tests/architecture_rows.py

# The API reference, from the docstrings, into build/docs.
docs: setup
	$(BIN)/python -m pdoc --docformat google --output-directory build/docs $(PAGES)

# Runs the notebooks and stores their outputs; the tests run them without storing.
notebooks: setup
	$(BIN)/python notebooks/execute.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/size.py

# Lines by room, beside the budgets in .ci/budget.toml; fails above one.
size: setup
	$(BIN)/python .ci/size.py

clean:
	rm -rf $(VENV) $(VENV)-floors build dist *.egg-info
