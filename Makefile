# make install | demo | quick | test | test-all | serving | ray | fp8 | gguf | durations | gpu-check | check | docs | notebook | notebooks | lock | stack | wheel.   VENV=DIR: another environment.
.DEFAULT_GOAL := help
ROOT := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
ifeq ($(origin VENV), undefined)
VENV := $(ROOT).venv
PREPARE := $(VENV)/.installed
endif
PYTHON := $(VENV)/bin/python
# Without --no-compile pip would compile every module, for half a minute; Python compiles what it imports.
PIP = $(PYTHON) -m pip install --quiet --no-compile --disable-pip-version-check
# Two at a time, a file's tests together, since they share fixtures; more only where there are cores for their ranks.
PYTEST = $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
ARGS =
# Images often switch bytecode off; every rank would compile the whole stack again, for seconds.
export PYTHONDONTWRITEBYTECODE =
# For environments in which the package is not installed: VENV=DIR.
export PYTHONPATH := $(ROOT)src$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help install demo quick test test-all serving ray fp8 gguf durations gpu-check check docs notebook notebooks lock wheel ops stack
help:
	@echo "make install   make .venv with the pinned stack"
	@echo "make demo      fine-tune the tiny recipe with ZeRO-3 and print the score before and after"
	@echo "make quick     the tests that start neither ranks nor servers and take less than 0.3 s each"
	@echo "make test      the test suite, with a choice from the large matrices"
	@echo "make test-all  every test: all variants, all templates, all layouts"
	@echo "make serving   make .serving, a second environment with vLLM (for CPUs), llm-compressor and lm-evaluation-harness"
	@echo "make ray       add Ray to .venv, for launch.py --ray and its tests"
	@echo "make fp8       add torchao to .venv, for fp8=true and its tests"
	@echo "make gguf      add llama.cpp and its converter to .serving (compiled)"
	@echo "make durations run the test suite and write what each test costs to tests/durations.txt"
	@echo "make gpu-check techniques and kernels beside plain PyTorch on this machine's GPUs, then the launcher on them"
	@echo "make check     lint, format and types: ruff and mypy"
	@echo "make docs      update the generated parts of the documents"
	@echo "make notebook  add JupyterLab to .venv and open notebooks/ in it"
	@echo "make notebooks execute the notebooks on an idle machine and keep their outputs"
	@echo "make lock      write requirements.lock, the image's pins with hashes, after a change of constraints.txt"
	@echo "make stack     make .stacks/NAME of tests/stacks: STACK=oldest WITH=python3.11; then make quick VENV=.stacks/oldest"
	@echo "make wheel     build the package into dist/"
	@echo "VENV=DIR       use the environment in DIR instead of .venv; nothing is installed into it"
	@echo "ARGS=...       more options for pytest, e.g. make quick ARGS='-k layout'"

install: $(PREPARE)

$(ROOT).venv/.installed: constraints.txt pyproject.toml
	test -x $(PYTHON) || python3 -m venv $(VENV)
	@echo "installing constraints.txt: about a minute plus the download"
	$(PIP) -r constraints.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

# Without --no-deps pip would refuse the list: each of the three asks for another version of what the others share.
SERVING = $(ROOT).serving
serving: $(SERVING)/.installed
$(SERVING)/.installed: constraints-serving.txt constraints.txt
	test -x $(SERVING)/bin/python || python3 -m venv $(SERVING)
	@echo "installing vLLM, llm-compressor and lm-evaluation-harness: about two minutes plus the download, 2.6 GB"
	$(SERVING)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(SERVING)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps -r constraints-serving.txt
	touch $@

# Into .venv: it changes none of its versions.
ray: $(PREPARE)
	$(PIP) -c constraints.txt -r constraints-ray.txt

fp8: $(PREPARE)
	$(PIP) --no-deps -r constraints-fp8.txt

# llama.cpp, compiled, and its converter, which only the package's source has.
LLAMA = llama-cpp-python==0.3.36
gguf: $(SERVING)/llama.cpp/.installed
$(SERVING)/llama.cpp/.installed: | $(SERVING)/.installed
	@echo "compiling llama.cpp: about four minutes on two idle cores"
	mkdir -p $(@D)
	$(SERVING)/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $(@D) $(LLAMA)
	tar -xzf $(@D)/*.tar.gz -C $(@D) --strip-components=3 --wildcards '*/vendor/llama.cpp/convert_hf_to_gguf.py' \
	    '*/vendor/llama.cpp/conversion' '*/vendor/llama.cpp/gguf-py'
	CMAKE_ARGS=-DLLAVA_BUILD=OFF $(SERVING)/bin/python -m pip install --quiet --no-compile --no-deps diskcache $(@D)/*.tar.gz
	rm $(@D)/*.tar.gz
	touch $@

TWO = from deepspeed_recipes.launching.command import visible_gpus as found; print(min(2, found() or 2))
demo: install
	@$(PYTHON) scripts/launch.py tiny full --gpus $$($(PYTHON) -c "$(TWO)")

quick: install
	$(PYTEST) -m "not engine and not server and not slow and not every" $(ARGS)

# What DeepSpeed by itself loads on a CPU, in tests without this project's training.
ops: install
	@$(PYTHON) -m deepspeed_recipes.machine.ops deepspeed_shm_comm

test: ops
	$(PYTEST) $(ARGS)

test-all: ops serving
	$(PYTEST) -m "" --hypothesis-profile all $(ARGS)

durations: ops
	$(PYTEST) -p tests.durations $(ARGS)

docs: $(PREPARE)
	$(PYTHON) -m scripts.maintain.documents

# What to run first on a machine with GPUs; on one without it is rehearsed on CPU ranks. `benchmark.py all` measures.
gpu-check: install
	@$(PYTHON) scripts/doctor.py --prove
	@$(PYTHON) scripts/launch.py tiny full
	@$(PYTHON) scripts/launch.py tiny lora max_steps=40 precision=bf16
	@$(PYTHON) scripts/launch.py llama3-8b qlora --draft max_steps=10 sequence_length=1024 global_batch_size=16

notebook: $(PREPARE)
	$(PIP) -c constraints.txt -r constraints-notebook.txt
	$(PYTHON) -m jupyterlab notebooks $(ARGS)

notebooks: install
	$(PYTHON) -m tests.notebooks

check: $(PREPARE)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

lock: $(PREPARE)
	$(PYTHON) .ci/lock

# The versions that users have: python3.11 for the oldest, python3.12 for the middle, python3.13 for the newest.
stack:
	.ci/stack $(STACK) $(WITH)

wheel: $(PREPARE)
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
