# make install | demo | test | test-all | check.   VENV=DIR uses an existing environment instead of making .venv.
.DEFAULT_GOAL := help
ROOT := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
ifeq ($(origin VENV), undefined)
VENV := $(ROOT).venv
PREPARE := $(VENV)/.installed
endif
PYTHON := $(VENV)/bin/python

.PHONY: help install demo test test-all check
help:
	@echo "make install   make .venv with the pinned stack and build DeepSpeed's CPU ops once"
	@echo "make demo      fine-tune the tiny recipe with ZeRO-3 and print the score before and after"
	@echo "make test      the test suite, with a choice from the large matrices"
	@echo "make test-all  the same, with every variant and every way to use a template"
	@echo "make check     ruff: lint and format"
	@echo "VENV=DIR       use the environment in DIR instead of .venv (nothing is installed into it)"

install: $(PREPARE)
	@$(PYTHON) -m recipes.training.ops

$(ROOT).venv/.installed: constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -r constraints.txt
	touch $@

demo: install
	$(PYTHON) scripts/launch.py tiny full --gpus $$($(PYTHON) -c "import torch; print(min(2, torch.cuda.device_count() or 2))")

test: install
	$(PYTHON) -m pytest

test-all: install
	$(PYTHON) -m pytest -m ""

check: $(PREPARE)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
