# Every target installs what it needs first: `make quickstart` and `make test` work in a fresh clone.
# Choose an interpreter with `make PYTHON=python3.12 ...`; .venv is rebuilt when its version changes.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif
PY_TAG := $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) or print("py{}{}".format(*v))'))
ifeq ($(PY_TAG),)
$(error Python 3.11 or later with venv is needed, and "$(PYTHON)" is none; name one with `make PYTHON=...`)
endif

VENV := .venv
BIN := $(VENV)/bin
# Empty on a Python that has no file of pins: pip then resolves from the floors in pyproject.toml.
CONSTRAINTS := $(wildcard constraints/$(PY_TAG).txt)
INSTALL := $(BIN)/python -m pip install --quiet $(CONSTRAINTS:%=--constraint %)

# Stamps are written last, so an interrupted step is done again.
MADE := $(VENV)/.made-$(PY_TAG)
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev
PARITY := $(VENV)/.installed-parity
INPUTS := $(MADE) pyproject.toml $(CONSTRAINTS)

AOT := .venv-aot
TOKAMAX := .venv-tokamax
PYTHON312 ?= python3.12
# The weight gradient of many experts waits for fresh pages of 4 KB (LOG.md).
LARGE_PAGES := GLIBC_TUNABLES=glibc.malloc.hugetlb=1

.PHONY: help venv parity aot quickstart test check bench bench-kda proof clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(MADE):
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(DEMO): $(INPUTS)
	$(INSTALL) --editable '.[demo]'
	touch $@

$(DEV): $(INPUTS)
	$(INSTALL) --editable '.[demo,dev]'
	touch $(DEMO) $@

$(PARITY): $(INPUTS)
	$(INSTALL) --editable '.[demo,dev,parity]'
	touch $(DEMO) $(DEV) $@

venv: $(DEV)  ## make .venv with all that tests and checks need

parity: $(PARITY)  ## the same, with PyTorch, transformers and PEFT to compare with

# Apart: a CUDA plugin without a driver complains at every start of JAX.
$(AOT)/.installed-$(PY_TAG): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --clear $(AOT)
	$(AOT)/bin/python -m pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable '.[demo,dev,aot]'
	touch $@

aot: $(AOT)/.installed-$(PY_TAG)  ## an environment that compiles for TPUs and GPUs which are not there, in .venv-aot

quickstart: $(DEMO)  ## train, quantise and generate on a tiny model
	$(BIN)/python -m trillion_moe.quickstart

test: $(DEV)  ## run the tests but those marked slow, aot, gpu or tpu
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not aot and not gpu and not tpu" $(ARGS)

check: $(DEV)  ## lint, formatting, types and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q -m "not slow" tests/test_guards.py

bench: $(PARITY)  ## measure speed beside PyTorch, transformers and, on Python 3.12, tokamax
	$(BIN)/python -m trillion_moe.bench $(ARGS)
	$(LARGE_PAGES) $(BIN)/python -m trillion_moe.bench --only grouped
	$(MAKE) bench-kda

# Apart: tokamax needs a later JAX than Python 3.11 has.
$(TOKAMAX)/.installed: pyproject.toml constraints/py312.txt
	$(PYTHON312) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { echo "tokamax needs Python 3.12: PYTHON312=..."; exit 1; }
	$(PYTHON312) -m venv --clear $(TOKAMAX)
	$(TOKAMAX)/bin/python -m pip install --quiet --constraint constraints/py312.txt --editable . tokamax==0.0.17
	touch $@

bench-kda: $(TOKAMAX)/.installed  ## measure KDA beside tokamax, in .venv-tokamax
	$(TOKAMAX)/bin/python -m trillion_moe.bench --only kda $(KDA_ARGS)

proof: $(PARITY) $(AOT)/.installed-$(PY_TAG)  ## run what is too long for CI and write it, with versions, to docs/proof
	mkdir -p docs/proof
	$(BIN)/python -m trillion_moe.bench --output docs/proof/bench.json
	$(LARGE_PAGES) $(BIN)/python -m trillion_moe.bench --only grouped --output docs/proof/bench_large_pages.json
	$(MAKE) bench-kda KDA_ARGS='--output docs/proof/bench_kda.json'
	$(AOT)/bin/python -m trillion_moe.verify.kernels --output docs/kernels.md
	$(BIN)/python -m tests.prove_meshes --json docs/proof/meshes.json
	$(AOT)/bin/trillion-moe plan --config kimi_k3_lora --mesh h200x16 --compile --json docs/proof/plan_h200x16.json
	$(AOT)/bin/trillion-moe plan --config kimi_k3_lora --mesh v5p_32 --compile --json docs/proof/plan_v5p_32.json

clean:  ## remove the environments and all that builds, tests and tools leave behind
	rm -rf $(VENV) $(AOT) $(TOKAMAX) build dist runs .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
