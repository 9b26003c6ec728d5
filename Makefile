# Each target does its own set-up in $(VENV). For a CPU-only torch: make run TORCH_INDEX_URL=<the CPU index that PyTorch's
# install page names>. Without it pip takes the build that the package index has for this platform.
VENV ?= .venv
PYTHON ?= python3
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
PROMPT ?= a red apple on a sky blue background, 3d style
OUT ?= out.png

.PHONY: run test lint schema clean

run: $(VENV)/.run
	$(VENV)/bin/portable-dit run --recipe recipes/cpu/h3-mini.yaml --prompt "$(PROMPT)" -o $(OUT)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

$(VENV)/bin/python:
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

clean:
	rm -rf $(VENV) build dist *.egg-info
