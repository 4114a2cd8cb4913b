# One environment in .venv serves every target. Other wheels: make TORCH="torch==2.14.1" demo
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint test-slow bench clean

demo: $(VENV)/.demo
	$(BIN)/python -m kda_fn.demo $(ARGS)

test: lint
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m slow $(ARGS)

bench: $(VENV)/.peers
	$(BIN)/python benchmarks/cpu.py $(ARGS)

clean:
	rm -rf $(VENV)

# The pinned torch comes first, so that no extra can draw another.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.peers: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[demo,peers]"
	touch $@
