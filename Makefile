# Everything from a fresh clone: Python 3.11 or later, pip, make, and git are all you need.

PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
# The tests passed with these versions. Warnings are errors in tests, so a new release of a
# dependency can break them. To try the newest releases: make test CONSTRAINTS=/dev/null
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# If this variable is set, every Python process compiles all modules again, which takes longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check notebooks docs clean

demo: $(VENV)/installed  ## Train the tiny model on number words, translate, and score.
	@$(BIN)/transformer-jax train configs/tiny.py --out runs/demo --resume
	@$(BIN)/transformer-jax evaluate runs/demo

test: $(VENV)/installed-test  ## Run the fast tests: six minutes on two cores.
	$(PYTEST) -m "not slow and not exhaustive"

test-all: $(VENV)/installed-test  ## Run all tests.
	$(PYTEST)

check: $(VENV)/installed-lint  ## Check format, lint, spelling, import layers, and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

notebooks: $(VENV)/installed-notebooks  ## Convert the scripts of notebooks/ and execute them.
	$(BIN)/python notebooks/build.py

# With `--quiet`, MkDocs would not count warnings, so `--strict` would have no effect.
docs: $(DOCS_VENV)/installed  ## Build the documentation in site/; warnings are errors.
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

clean:  ## Delete the environments and the built documentation; keep runs.
	rm -rf $(VENV) $(DOCS_VENV) site

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; select one with make PYTHON=...")'
	@echo "creating $(VENV); this takes about a minute, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip
	@$(PIP) install --constraint $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@$(PIP) install --constraint $(CONSTRAINTS) --group test
	@touch $@

$(VENV)/installed-lint: $(VENV)/installed-test
	@$(PIP) install --constraint $(CONSTRAINTS) --group lint
	@touch $@

$(VENV)/installed-notebooks: $(VENV)/installed
	@$(PIP) install --constraint $(CONSTRAINTS) --group notebooks
	@touch $@

# This environment is separate because the site does not need the package's dependencies.
$(DOCS_VENV)/installed: pyproject.toml
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade pip
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --group docs
	@touch $@
