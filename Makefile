# Everything from a fresh clone: Python 3.11 or later, pip, make and git are all it takes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

.PHONY: demo test test-all check clean

demo: $(VENV)/installed  ## Train the tiny model on the embedded corpus, translate, score.
	@if [ -e runs/demo/run.json ]; \
	then $(BIN)/transformer-jax resume runs/demo; \
	else $(BIN)/transformer-jax train configs/tiny.py --out runs/demo; fi
	@$(BIN)/transformer-jax evaluate runs/demo

test: $(VENV)/installed-test  ## Run the tests that take minutes on two cores, not an hour.
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not slow"

test-all: $(VENV)/installed-test  ## Run all tests.
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

check: $(VENV)/installed-lint  ## Format, lint, floors of imports, types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

clean:  ## Forget the environment; runs stay.
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one by make PYTHON=...")'
	@echo "setting up $(VENV), once; about a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip
	@$(PIP) install --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@$(PIP) install --group test
	@touch $@

$(VENV)/installed-lint: $(VENV)/installed-test
	@$(PIP) install --group lint
	@touch $@
