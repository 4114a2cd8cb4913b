# One environment in .venv serves every target. Other wheels: make TORCH="torch==2.14.1" demo
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Beside another torch, which brings its own triton: make TORCH=.. EXTRAS=dev test
EXTRAS ?= dev,emulator
VENV := .venv
BIN := $(VENV)/bin
APT := mlir-19-tools clang-19

.PHONY: demo test lint tools test-slow notebooks docs bench bench-gpu report npu-schemas ascend clean

demo: $(VENV)/.demo
	$(BIN)/python -m kda_fn.demo $(ARGS)

test: lint tools
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m slow $(ARGS)

# The scripts are the source: they are written to the .ipynb beside them, which run into build/notebooks. What Jupyter
# left in one, output and times, is cleared.
CLEAR := nbconvert --clear-output --inplace --ClearMetadataPreprocessor.enabled=True \
	--ClearMetadataPreprocessor.preserve_nb_metadata_mask="{'jupytext', 'kernelspec'}" \
	--ClearMetadataPreprocessor.preserve_cell_metadata_mask="{'tags', 'lines_to_next_cell'}"
notebooks: $(VENV)/.notebooks
	$(BIN)/jupytext --quiet --to ipynb --update notebooks/*.py
	$(BIN)/jupyter $(CLEAR) notebooks/*.ipynb
	$(BIN)/jupyter nbconvert --to notebook --execute --output-dir build/notebooks notebooks/*.ipynb

# Into build/site; the notebooks with their pictures, where `make notebooks` has run.
docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.peers
	$(BIN)/python benchmarks/cpu.py $(ARGS)

# Autotuning peers compile for minutes in one process: WORKERS of them do it first.
WORKERS ?= 12
bench-gpu: $(VENV)/.peers-gpu
	$(BIN)/python benchmarks/gpu.py $(ARGS) --prewarm $(WORKERS)
	$(BIN)/python benchmarks/gpu.py $(ARGS)
	$(BIN)/python benchmarks/gpu.py --plot

# In the environment at hand, not in .venv: what this one does is what is asked.
report:
	@$(PYTHON) -c "from importlib.util import find_spec; \
	    absent = [name for name in ('torch', 'optree', 'pytest') if find_spec(name) is None]; \
	    absent and exit('make report needs ' + ', '.join(absent) + ' in an environment of yours, not in $(PYTHON);' \
	        ' another: make report PYTHON=.venv/bin/python')"
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/device_report.py $(ARGS)

# The vendor's schemas, from its wheel, beside the stand-ins of tests/contracts.
npu-schemas: $(VENV)/.dev
	$(BIN)/python tests/contracts/schemas.py $(ARGS)

ascend: $(VENV)/.dev
	$(BIN)/python benchmarks/ascend.py $(ARGS)

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
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

# LLVM 19 for the kernels' emulator. Without it (or the right to install it) their tests are skipped, and say so.
tools:
	@test -x /usr/lib/llvm-19/bin/mlir-opt -a -x /usr/lib/llvm-19/bin/clang \
		|| (test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends $(APT)) \
		|| echo "The kernels' tests will be skipped. To run them: sudo apt-get install --no-install-recommends $(APT)"

$(VENV)/.notebooks: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[notebooks]"
	touch $@

$(VENV)/.peers: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[demo,peers]"
	touch $@

$(VENV)/.peers-gpu: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[demo,peers-gpu]"
	touch $@
