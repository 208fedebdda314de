# `make demo` and `make test` set everything up by themselves; nothing else is needed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(wildcard src/thinwire/kernels/native/*.c src/thinwire/kernels/native/*.h)

.PHONY: help setup demo docs test lint format bench-kernels bench-step bench-contest clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## create .venv and install thinwire into it (a no-op the second time)

$(STAMP): pyproject.toml constraints.txt setup.py $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	touch $@

demo: setup  ## train a GPT on a shaped 200 Mbit/s network: floor, dense DDP, thinwire
	$(BIN)/thinwire demo

docs: setup  ## regenerate what is made from code and results, then build the site into site/ (broken links fail)
	$(BIN)/thinwire compressors --markdown > docs/reference/compressors.md
	$(BIN)/python tools/cli_page.py > docs/reference/cli.md
	$(BIN)/python -m benchmarks.results
	$(BIN)/python -m benchmarks.figure
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Ranks spend half of their time waiting for each other or for a time-out, so two files of them run at once. Tests that
# plan from measured times, and labs, have the machine to themselves.
test: setup  ## run all tests (about 12 minutes on two cores)
	$(BIN)/python -m pytest -n 2 tests/checkpoint tests/contract tests/docs tests/sim tests/surface tests/unit
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/gloo --ignore tests/gloo/test_auto.py
	$(BIN)/python -m pytest tests/gloo/test_auto.py tests/lab

lint: setup  ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-kernels: setup  ## kernels against copy_ and against plain torch
	$(BIN)/python -m benchmarks.kernels

bench-step: setup  ## step time of compressors on the lab network
	$(BIN)/python -m benchmarks.step

bench-contest: setup  ## every method on seven networks and three models, predicted and measured (90 minutes)
	$(BIN)/python -m benchmarks.contest --out runs/contest

clean:  ## remove the virtual environment and build products
	rm -rf $(VENV) build dist src/*.egg-info
