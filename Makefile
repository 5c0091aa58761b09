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
.PHONY: help setup wheelhouse lab test test-all test-weekly electives test-electives keras book hub coverage tour record progress bench gpu lint doctor clean catch-up update rehearse

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
	@[ -z "$(WHEELHOUSE)" ] || [ -d "$(WHEELHOUSE)" ] || { echo "There is no folder $(WHEELHOUSE) to install from: 'make wheelhouse' on a machine with a network makes one."; exit 1; }
	@rm -f $(READY)
	@if [ -z "$(WHEELHOUSE)" ] && command -v uv >/dev/null; then \
	  uv venv --quiet --clear --python "$(PYTHON)" .venv && uv pip install --compile-bytecode --python $(PY) -r requirements.txt; \
	else \
	  { $(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv; } && $(if $(WHEELHOUSE),PIP_NO_INDEX=1 PIP_FIND_LINKS="$(WHEELHOUSE)" )$(PY) -m pip install -r requirements.txt; \
	fi || { echo "The packages could not be installed (the lines above say why): mend that, then run 'make setup' again."; exit 1; }
	@$(PY) -m ipykernel install --prefix .venv --name python3 --display-name "Python (Ray Train)"
	@touch $(READY)

# setuptools builds this repository's own package, on the other machine, too.
wheelhouse: ## collect the packages, to install them where there is no network
	@"$(PYTHON)" -m venv build/pip && build/pip/bin/python -m pip wheel --wheel-dir build/wheelhouse -r requirements.txt setuptools || { echo "The packages could not be collected (the lines above say why): mend that, then run 'make wheelhouse' again."; exit 1; }
	@echo "$$(ls build/wheelhouse | wc -l) packages, $$(du -sh build/wheelhouse | cut -f1), are in build/wheelhouse. Copy this folder without .venv to the other machine, and there: make setup WHEELHOUSE=build/wheelhouse"

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
LAB_STATE ?= build/lab
WORKSPACE := default-37a8.jupyterlab-workspace
lab: $(READY) $(LAB_STATE)/$(WORKSPACE) ## open the first notebook in JupyterLab
	@$(RUN) -m jupyter lab --ServerApp.ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb --LabApp.app_settings_dir="$(CURDIR)/docs/lab" --LabApp.workspaces_dir="$(LAB_STATE)" $(LAB_ARGS)

$(LAB_STATE)/$(WORKSPACE):
	@mkdir -p $(@D) && cp docs/lab/$(@F) $@

# Two lanes side by side (tests/lanes.py): one core each, and what waits in one leaves it to the other.
LANES := -n 2
# Marks say what is slow, or of a part; tests/tiers.py marks the notebooks.
test: $(READY) ## run the quick tests and first notebooks (PART=02: all of a part)
ifdef PART
	@$(if $(wildcard $(PART)-*),,echo "There is no part $(PART): name a numbered folder, as in 'make test PART=02'."; exit 1;) $(RUN) -m pytest --nbval $(LANES) -m "part$(PART) and not weekly"
else
	@$(RUN) -m pytest --nbval $(LANES) -m "not slow and not weekly" --note-run=test
endif

test-all: $(READY) ## run what gates a change: main lines, parity, kills, scripts, bad input
	@$(RUN) -m pytest --nbval $(LANES) -m "not weekly and not side_trip and not elective" --note-run=test-all

# A long test may take longer than others may. Lessons run whole here, by tests/test_offline.py.
test-weekly: $(READY) ## run what is long and rarely breaks
	@$(RUN) -m pytest -m weekly --note-run=test-weekly -o timeout=3600 -o faulthandler_timeout=3660

ELECTIVES := 02-ddp-pytorch-ray/electives
electives: .venv/.electives ## install what the electives need, too (once; no pin changes)

.venv/.electives: $(READY) $(ELECTIVES)/requirements.txt $(ELECTIVES)/constraints.txt
	@if command -v uv >/dev/null; then uv pip install --compile-bytecode --python $(PY) -r $(ELECTIVES)/requirements.txt; \
	else $(PY) -m pip install -r $(ELECTIVES)/requirements.txt; \
	fi || { echo "The packages of the electives could not be installed (the lines above say why); the other lessons run without."; exit 1; }
	@touch $@

test-electives: .venv/.electives ## run the electives, and that no pin has changed
	@$(RUN) -m pytest --nbval $(LANES) -m "elective and not weekly" --note-run=test-electives

KERAS := $(ELECTIVES)/keras
keras: .venv-keras/.ready ## train with Keras on two workers, in an environment of its own
	@.venv-keras/bin/python $(KERAS)/train_keras.py

.venv-keras/.ready: $(KERAS)/requirements.txt
	@"$(PYTHON)" -m venv .venv-keras && .venv-keras/bin/python -m pip install -r $< || { echo "The packages for Keras could not be installed (the lines above say why); the other lessons run without."; exit 1; }
	@touch $@

book: .venv-book/.ready ## render notebooks, READMEs and guides as a book in build/book, to read offline
	@.venv-book/bin/python -m tests.tools.book

.venv-book/.ready: docs/requirements.txt docs/constraints.txt
	@"$(PYTHON)" -m venv .venv-book && .venv-book/bin/python -m pip install -r $< || { echo "The packages for the book could not be installed (the lines above say why); the lessons run without."; exit 1; }
	@touch $@

# For tests that drive Chromium, and for nothing else: they make it when they need it.
.venv-browser/.ready: tests/browser/requirements.txt
	@"$(PYTHON)" -m venv .venv-browser && .venv-browser/bin/python -m pip install -r $< || { echo "Playwright could not be installed (the lines above say why); the lessons run without."; exit 1; }
	@touch $@

# For one machine that many people share (02-ddp-pytorch-ray/cluster/README.md), and for tests of that.
ONE_MACHINE := 02-ddp-pytorch-ray/cluster/one-machine
hub: .venv-hub/.ready ## install JupyterHub into .venv-hub, for one machine that many people share

.venv-hub/.ready: $(ONE_MACHINE)/requirements.txt
	@command -v npm >/dev/null || { echo "JupyterHub's proxy comes from npm, which is not here: install Node 20 or newer, which brings it (nodejs.org)."; exit 1; }
	@{ "$(PYTHON)" -m venv .venv-hub && .venv-hub/bin/python -m pip install -r $< && npm install --silent --no-fund --no-audit --prefix .venv-hub configurable-http-proxy@5.3.0; } || { echo "JupyterHub could not be installed (the lines above say why); the lessons run without."; exit 1; }
	@touch $@

# The table comes also if a test fails; then the command fails, too.
coverage: $(READY) ## run what test-all runs, and side trips; print which lines of ours they ran
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(RUN) -m coverage run -m pytest --nbval $(LANES) -m "not weekly and not elective"; status=$$?; \
	$(PY) -m coverage combine --quiet && $(PY) -m coverage report; exit $$status

tour: $(READY) ## execute all notebooks in order, and print what each one proved
	@$(RUN) -m tests.tools.notebooks tour

record: $(READY) ## execute notebooks and save their outputs (NOTEBOOKS=path for some)
	@$(RUN) -m tests.tools.notebooks record $(NOTEBOOKS)

progress: $(READY) ## show which exercises you have solved, tried and not begun
	@$(RUN) -m tests.tools.notebooks progress

bench: $(READY) ## measure ratios, and write tests/tools/benchmarks/RESULTS.md
	@$(RUN) -m tests.tools.benchmarks

gpu: $(READY) ## on GPUs: run everything, and print a table of what passed and was measured
	@$(RUN) -m tests.tools.gpu

lint: $(READY) ## check style, format, types and spelling, and print sizes that nothing limits
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && $(PY) -m codespell_lib && $(PY) -m tests.tools.sizes

# Installs nothing: it says what is missing.
doctor: ## say what this machine can run, and how to mend what it cannot
	@if [ -x $(PY) ]; then $(RUN) -m utils.doctor; else "$(PYTHON)" -m utils.doctor; fi

clean: ## remove .venv and build, with the checkpoints and downloaded data in build/storage
	@rm -rf .venv .venv-keras .venv-book .venv-browser .venv-hub build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# These install nothing: in a class, whoever is behind must not wait for packages.
INSTALLED := @[ -x $(PY) ] || { echo "There is no environment in .venv yet: run 'make setup' first."; exit 1; }

catch-up: ## put a solved copy of NOTEBOOK=path beside yours, with outputs
	$(INSTALLED)
	@$(RUN) -m tests.tools.catch_up $(or $(NOTEBOOK),$(error Name a lesson, as in 'make catch-up NOTEBOOK=02-ddp-pytorch-ray/01_ray_core.ipynb'))

# Needs no package, so that it also brings other pins.
update: ## bring corrections of the lessons, and keep what you edited and ran
	@"$(PYTHON)" -m tests.tools.update

rehearse: ## run each lesson in each seat that SEATS=file lists, and print a table
	$(INSTALLED)
	@$(RUN) -m tests.tools.rehearse $(or $(SEATS),$(error Name a file with a seat in each line, as in 'make rehearse SEATS=seats.txt'))
