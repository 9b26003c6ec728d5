# Each target does its own set-up in $(VENV). For a CPU-only torch: make run TORCH_INDEX_URL=<the CPU index that PyTorch's
# install page names>. Without it pip takes the build that the package index has for this platform.
VENV ?= .venv
PYTHON ?= python3
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
JOBS ?= 2
PROMPT ?= an owl to the left of a red apple on a teal background, 3d style
OUT ?= out.png
# Through the environment, so that quotes in a prompt reach the program and not the shell.
export PROMPT OUT

.PHONY: run test lint schema release-h3-mini golden build clean
.DELETE_ON_ERROR:

run: $(VENV)/.run
	$(VENV)/bin/portable-dit run --recipe recipes/cpu/h3-mini.yaml --prompt "$$PROMPT" -o "$$OUT"

# By file, for the sake of fixtures of a module; in the order of the folders, which ends with the quick ones.
# With bytecode kept, where an image turns that off: hundreds of processes would each compile the package anew.
test: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy backends/*/portable_dit_*

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "portable-dit needs Python 3.10 to 3.13, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	        "Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV), which takes some minutes the first time"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(VENV)/bin/python constraints-dev.txt
	$(PIP) install -q $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) \
	    "$$(grep '^torch==' constraints-dev.txt)"
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -c constraints-dev.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install -q -c constraints-dev.txt -e ".[dev]"
	touch $@

schema: $(VENV)/.run
	$(VENV)/bin/portable-dit recipes schema > recipes/schema.json

# Everything in the repository that depends on the weights, anew from a training run in the folder RUN.
release-h3-mini: $(VENV)/.dev
	$(VENV)/bin/python -m training.release --run "$(RUN)"

golden: $(VENV)/.dev
	$(VENV)/bin/python -m training.golden --write

build: $(VENV)/bin/python
	$(PIP) wheel -q --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info
