# P-EAGLE Train. `make` alone lists what can be made.
#
# Settings, on the command line as NAME=value:
#   MODEL        recipe to run: recipes/MODEL.yaml                        smollm2
#   TWIN         1: rehearse it in minutes with a random twin of its target
#   ARGS         overrides of the recipe, e.g. ARGS="train.steps=100"; options of the other commands
#   TORCH        auto | cpu | cuda: the build of torch to install         auto
#   PYTHON       interpreter to build the environments on                 python3
#   VLLM_PYTHON  interpreter that has a vLLM                              .venv-vllm/bin/python

MODEL ?= smollm2
ARGS ?=
PYTHON ?= python3
TORCH ?= auto
VLLM_PYTHON ?= .venv-vllm/bin/python
BIN := .venv/bin
# One test process a core, file by file: each keeps to one thread.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile

export PYTHON TORCH VLLM_PYTHON

.DEFAULT_GOAL := help
.PHONY: help install train test test-processes test-vllm test-all side-by-side compare-peer gpu-check lint format wheel lock ablate

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 14

install: .venv/.installed ## make the environment, .venv

train: .venv/.installed ## run recipes/MODEL.yaml from prompts to a proven head
	$(BIN)/peagle run recipes/$(MODEL).yaml $(if $(filter-out 0,$(TWIN)),--twin )$(ARGS)

test: .venv/.installed ## all tests but the slow ones, those of many processes and those that need a vLLM
	$(BIN)/python -m pytest -m "not slow and not processes and not vllm" $(PARALLEL)

test-processes: .venv/.installed ## workers, launchers and kills: tests that start processes of their own
	$(BIN)/python -m pytest -m "processes and not slow and not vllm" $(PARALLEL)

test-vllm: .venv/.installed $(filter .venv-vllm/%,$(VLLM_PYTHON:bin/python=.installed)) ## prove heads against a real vLLM
	$(BIN)/python -m pytest tests/vllm -m "vllm and not slow"

test-all: .venv/.installed $(filter .venv-vllm/%,$(VLLM_PYTHON:bin/python=.installed)) ## every test there is
	$(BIN)/python -m pytest

side-by-side: .venv/.installed .venv-peer/.installed ## time our training step against another trainer's
	$(BIN)/python -m scripts.side_by_side $(ARGS)

compare-peer: .venv/.installed .venv-peer/.installed ## what a head learns beside another trainer's, in equal time
	$(BIN)/python -m scripts.compare_peer $(ARGS)

gpu-check: .venv/.installed ## hold all that needs a GPU against the reference, on a machine with CUDA
	$(BIN)/python -m scripts.gpu_check $(ARGS)

ablate: .venv/.installed ## which settings learn most in equal time; the table of docs/ablation.md
	$(BIN)/python -m scripts.ablate $(ARGS)

lint: .venv/.installed ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: .venv/.installed ## build the package into dist/
	$(BIN)/python -m build --wheel --installer uv

lock: .venv/.installed ## renew constraints.txt within pyproject.toml's floors
	scripts/lock.sh

.venv/.installed: pyproject.toml constraints.txt scripts/install.sh
	scripts/install.sh main

.venv-vllm/.installed: constraints-vllm.txt scripts/install.sh
	scripts/install.sh vllm

.venv-peer/.installed: constraints.txt constraints-peer.txt scripts/install.sh
	scripts/install.sh peer
