# Everything runs in .venv, which the first command makes. No target but `gpu` needs a GPU.
SHELL := /bin/bash
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready
# Also where .venv is not activated: its torchrun, ninja and jupyter-lab, and no others.
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY)
# One thread per process, as recorded: ranks on one machine share its cores. Notebooks import torch
# before anything of this repository can say so.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-all test-weekly tour record electives lint book slides bench gpu doctor clean

help: ## print what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## install the packages into .venv (once; later calls install nothing)

# The last step writes $(READY), so a set-up that was interrupted starts over, and loses nothing:
# what was downloaded is in the installer's cache.
$(READY): requirements.txt constraints.txt
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"Python 3.11 to 3.13 is needed, and this is {v[0]}.{v[1]}: name another one, as in `make setup PYTHON=python3.12`.")'
	@"$(PYTHON)" -c 'import shutil, sys; gb = shutil.disk_usage(".").free / 1e9; sys.exit(None if gb > 10 else f"The packages need 10 GB of free disk, and this folder has {gb:.1f}: free some, then run `make setup` again.")'
	@if [ -e .venv ] && [ ! -d .venv ]; then echo "There is a file called .venv where the environment belongs: move it away, then run 'make setup' again."; exit 1; fi
	@if [ -d .venv ] && [ ! -e .venv/.ready ]; then echo "An earlier set-up was interrupted: starting it over."; fi
	@rm -f $(READY)
	@if command -v uv >/dev/null; then \
	  uv venv --quiet --clear --python "$(PYTHON)" .venv && uv pip install --compile-bytecode --python $(PY) -r requirements.txt; \
	else \
	  { $(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv; } && $(PY) -m pip install -r requirements.txt; \
	fi || { echo "The packages could not be installed (the lines above say why): fix that, then run 'make setup' again."; exit 1; }
	@$(PY) -m ipykernel install --prefix .venv --name python3 --display-name "Python (Ray Train)"
	@touch $(READY)

# Whoever names a Python gets it, or a sentence, also where .venv has been made with another one.
ifneq ($(origin PYTHON),file)
VERSION := import sys; print("%d.%d" % sys.version_info[:2])
$(READY): | same-python
.PHONY: same-python
same-python:
	@there=$$($(PY) -c '$(VERSION)' 2>/dev/null) || exit 0; \
	named=$$("$(PYTHON)" -c '$(VERSION)') || exit 1; \
	[ "$$there" = "$$named" ] || { echo "The environment in .venv has Python $$there, and $(PYTHON) is Python $$named: delete the folder .venv (your results are in build and stay), then run this again."; exit 1; }
endif

# Settings for this workshop stand in docs/lab; those that a reader has made come first.
# What is open, and where, JupyterLab notes in LAB_STATE: at first the contents, on the left.
# nbgitpuller is used as a command: its address in a server would clone what a link names.
LAB_STATE ?= build/lab
WORKSPACE := default-37a8.jupyterlab-workspace
lab: $(READY) $(LAB_STATE)/$(WORKSPACE) ## open the first notebook in JupyterLab
	@$(RUN) -m jupyter lab --ServerApp.ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb --LabApp.app_settings_dir="$(CURDIR)/docs/lab" --LabApp.workspaces_dir="$(LAB_STATE)" --ServerApp.jpserver_extensions=nbgitpuller=False $(LAB_ARGS)

$(LAB_STATE)/$(WORKSPACE):
	@mkdir -p $(@D) && cp docs/lab/$(@F) $@

# Two processes side by side, as much of a test's time is waiting. --dist loadgroup, which pytest
# from 9.2 on does not obey (xdist #1386): all that starts Ray runs in one of them (conftest.py).
PYTEST := $(RUN) -m pytest -n 2 --dist loadgroup --durations=25 -rs

test: $(READY) ## run the quick tests, each part's first main line, and the solutions (5 minutes)
	@$(PYTEST) --nbval -m "not slow and not weekly"

test-all: $(READY) ## run what gates a change: all main lines, parity, kills, bad input (20 minutes)
	@$(PYTEST) --nbval -m "not weekly"

# With side trips and electives: tests/test_offline.py executes whole notebooks.
test-weekly: electives .venv-weekly/.ready ## run what is long and rarely breaks, and the electives (over an hour)
	@$(PYTEST) tests -m weekly -o timeout=3600 -o faulthandler_timeout=3660

# A browser's driver, JupyterHub and uv, for weekly tests and nothing else.
.venv-weekly/.ready: tests/requirements-weekly.txt
	@"$(PYTHON)" -m venv .venv-weekly && .venv-weekly/bin/python -m pip install -r $< || { echo "The packages of weekly tests could not be installed (the lines above say why)."; exit 1; }
	@npm install --silent --no-fund --no-audit --prefix .venv-weekly configurable-http-proxy@5.3.0 || echo "JupyterHub's proxy comes from npm, which is not here: the tests of a hub are skipped."
	@touch $@

tour: $(READY) ## execute all notebooks in order, and print what each one proved
	@$(RUN) -m tests.tools.notebooks tour

record: $(READY) ## execute notebooks and save their outputs (NOTEBOOKS=path for some)
	@$(RUN) -m tests.tools.notebooks record $(NOTEBOOKS)

ELECTIVES := 02-ddp-pytorch-ray/electives
electives: .venv/.electives ## install what the electives need, too (once; no pin changes)

.venv/.electives: $(READY) $(ELECTIVES)/requirements.txt $(ELECTIVES)/constraints.txt
	@if command -v uv >/dev/null; then uv pip install --compile-bytecode --python $(PY) -r $(ELECTIVES)/requirements.txt; \
	else $(PY) -m pip install -r $(ELECTIVES)/requirements.txt; \
	fi || { echo "The packages of the electives could not be installed (the lines above say why); the other lessons run without."; exit 1; }
	@touch $@

lint: $(READY) ## check style, format, types, spelling and GitHub's workflows
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check . && $(RUN) -m mypy && $(RUN) -m codespell_lib && .venv/bin/zizmor --offline --quiet .github/workflows

book: .venv-book/.ready ## render notebooks, READMEs and guides as a book in build/book, to read offline
	@rm -rf build/book && .venv-book/bin/python -m sphinx -W --keep-going --quiet -E -c docs -d build/book-doctrees . build/book
	@echo "The book is in build/book/index.html."

.venv-book/.ready: docs/requirements.txt docs/constraints.txt
	@"$(PYTHON)" -m venv .venv-book && .venv-book/bin/python -m pip install -r $< || { echo "The packages for the book could not be installed (the lines above say why); the lessons run without."; exit 1; }
	@touch $@

slides: $(READY) ## write slides of the lessons to build/slides, to project without a network
	@$(RUN) -m tests.tools.slides

bench: $(READY) ## measure ratios, and write tests/tools/benchmarks/RESULTS.md
	@$(RUN) -m tests.tools.benchmarks

gpu: $(READY) ## on GPUs: run everything, and print a table of what passed and was measured
	@$(RUN) -m tests.tools.gpu

# Installs nothing: it says what is missing.
doctor: ## say what this machine can run, and how to fix what it cannot
	@if [ -x $(PY) ]; then $(RUN) -m utils.doctor; else "$(PYTHON)" -m utils.doctor; fi

clean: ## remove .venv and build, with the checkpoints and downloaded data in build/storage
	@rm -rf .venv .venv-* build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
