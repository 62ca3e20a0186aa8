# Every target makes its own environment in .venv, from the versions in constraints.txt, and can
# be repeated: what is done already is not done again.
#
#   make PYTHON=python3.12 test    use another Python to make .venv
#   make PY=python test-gpu        run the GPU tests with a Python that has torch, without .venv

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
OUT     ?= runs/laptop

# What the caller's shell has active is not what runs here, unless the caller names the Python.
ifndef PY
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help reproduce test lint bench docs test-gpu clean

help:  ## this list
	@echo "rankone: what make can do"
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1|/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

reproduce: $(VENV)/.run  ## Table 1 and the figures of the paper at laptop size, about 5 minutes
	@echo "make reproduce: the laptop preset into $(OUT) (an interrupted run is continued)"
	@$(BIN)/rankone icl reproduce all --preset laptop --out $(OUT) --resume
	@$(BIN)/rankone icl page $(OUT) -o $(OUT)/page.html

test: lint  ## lint, types and all tests
	@echo "make test: the tests, and the examples in the documentation of the package"
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

lint: $(VENV)/.test  ## style and types
	@echo "make lint: ruff and mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.run  ## time the training step and the operations beside their peers
	@echo "make bench: one training step, ours and the plain one, on this machine"
	@$(BIN)/rankone bench icl
	@echo "make bench: linear attention and the delta rule beside their peers, some 20 minutes"
	@$(BIN)/rankone bench ops

docs: $(VENV)/.run  ## docs/reproduction.md and the results in other pages, from benchmarks/results
	@echo "make docs: pages from the files in benchmarks/results"
	@$(BIN)/python -m rankone.icl.docs_page
	@$(BIN)/python -m rankone.bench.docs_page
	@$(BIN)/python -m rankone.report.mechanisms
	@$(BIN)/python -m rankone.report.measured

ifdef PY
test-gpu:  ## the tests that need an NVIDIA GPU
	@echo "make test-gpu: the tests marked gpu, with $(PY)"
	@PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PY) -m pytest -q -m gpu
else
test-gpu: $(VENV)/.test
	@echo "make test-gpu: the tests marked gpu, with $(BIN)/python"
	@$(BIN)/python -m pytest -q -m gpu
endif

clean:  ## remove .venv, caches and build products; runs/ is kept
	@echo "make clean: removing $(VENV), caches and build products"
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: no $(PYTHON) here; install Python 3.11 or later, or name one: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), but 3.11 or later is needed; name one: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) has no venv module; install it (Debian and Ubuntu: apt install python3-venv)" >&2; \
		exit 1; }
	@echo "make: a virtual environment in $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	@echo "make: installing rankone and its dependencies into $(VENV) (once; some minutes)"
	@$(PIP) install -c constraints.txt -e . || { \
		echo "make: the installation failed, see above; it can be repeated" >&2; exit 1; }
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "make: installing rankone and what its tests need into $(VENV) (once; some minutes)"
	@$(PIP) install -c constraints.txt -e '.[test]' || { \
		echo "make: the installation failed, see above; it can be repeated" >&2; exit 1; }
	@touch $@ $(VENV)/.run
