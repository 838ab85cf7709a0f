PYTHON ?= python3
CONFIG ?= model_configs/tiny_cpu.yaml
ARGS   ?=
JOBS   ?= 3
VENV   := .venv
READY  := $(VENV)/.ready
GPU    := .venv-gpu

# `make test-contracts` also tests the next Megatron-core, from a folder that hides the installed one.
# NEXT_LOCK has its version and hashes. For another version see docs/gpu_stack.md, Upgrading.
NEXT_LOCK     := tests/contracts/next_megatron.txt
NEXT_MEGATRON := $(shell sed -n 's/^megatron-core==\([^ ]*\).*/\1/p' $(NEXT_LOCK))
NEXT   := $(CURDIR)/.contracts/megatron-core-$(NEXT_MEGATRON)
CORE   := tests/contracts tests/parity/test_policy.py tests/parity/test_families.py \
          tests/parity/test_router_replay.py tests/parity/test_overlap.py \
          tests/parity/test_checkpoint.py tests/parity/test_transfer.py \
          tests/parity/test_torch_dist.py tests/parity/test_torch_dist_models.py \
          tests/parity/test_megatron_state.py \
          tests/unit/test_torch_dist_layouts.py

.PHONY: help env env-gpu quickstart ladder test test-long test-layouts test-sync test-slurm \
        test-browser test-contracts test-triton test-te-cpu test-mutations test-gpu-stack lint mlflow-ui clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: $(READY)  ## create .venv from the CPU lock; a second call reuses it

$(READY): requirements-cpu.txt pyproject.toml tools/make_env.sh tools/pins.sh
	tools/make_env.sh "$(PYTHON)" $(VENV)

env-gpu:  ## create .venv-gpu from the H100 lock and compile what has no wheel: PYTHON=python3.12, docs/gpu_stack.md
	tools/make_gpu_env.sh "$(PYTHON)" $(GPU)
	$(GPU)/bin/pip install -qq --no-deps --no-build-isolation -e .

quickstart: env  ## train the tiny model on this machine; ARGS="key.path=value ..." adds arguments
	$(VENV)/bin/python -m dapo_megatron train $(CONFIG) $(ARGS)

ladder: env  ## run the paper's ladder on the tiny task, six rungs and three seeds (half an hour): docs/ladder.md
	$(VENV)/bin/python tools/lab/ladder.py $(ARGS)

# --no-loadscope-reorder, because tests/conftest.py sorts the files. PYTHONDONTWRITEBYTECODE is unset,
# because tests start hundreds of processes, and each would compile this package again.
test test-long: export PYTHONDONTWRITEBYTECODE =
test: env  ## run the tests, three files at a time (JOBS=3), without those of the next four; ARGS="-k name" adds arguments
	@$(MAKE) -s build/te_cpu/.ready || echo "no wheel of Transformer Engine: tests/te_cpu will be skipped"
	@$(MAKE) -s build/verifiers/.ready || echo "no packages: tests/unit/test_verifiers.py will be skipped"
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: env  ## run only the tests marked long
	$(VENV)/bin/python -m pytest -m long $(ARGS)

test-layouts: env  ## run the whole matrix of layouts: four ranks, every family, hours
	$(VENV)/bin/python -m pytest -m layouts $(ARGS)

test-sync: env  ## run the whole matrix of policy and engine layouts: four ranks, every family, hours
	$(VENV)/bin/python -m pytest -m sync $(ARGS)

test-slurm: env  ## test the job scripts on an emulated cluster: installs Slurm with apt-get (root or sudo)
	tests/slurm/install.sh
	$(VENV)/bin/python -m pytest -m slurm $(ARGS)

test-browser: env  ## test the report's page in Chromium: installs it with apt-get (root or sudo) if it is missing
	tests/browser/install.sh
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/browser $(ARGS)

test-contracts: env $(NEXT)/.ready build/renderers/.ready build/peft/.ready  ## test what is expected of Megatron-core and vLLM, and the main parity tests: on the pinned, then on the next Megatron-core
	PYTHONPATH=build/renderers:build/peft $(VENV)/bin/python -m pytest $(CORE) $(ARGS)
	PYTHONPATH=$(NEXT) $(VENV)/bin/python -m pytest -p tests.contracts.next_megatron $(CORE) $(ARGS)

# Its metadata requires Python 3.12, but it runs on 3.11. It imports Triton even without a GPU.
$(NEXT)/.ready: $(READY) $(NEXT_LOCK)
	rm -rf $(NEXT)
	mkdir -p $(NEXT)
	tools/pins.sh $(NEXT_LOCK) megatron-core==$(NEXT_MEGATRON) > $(NEXT)/pins.txt
	$(VENV)/bin/pip install -qq --no-deps --require-hashes --only-binary :all: --python-version 3.12 \
		--ignore-requires-python --target $(NEXT) -r $(NEXT)/pins.txt
	tools/pins.sh requirements.txt triton > $(NEXT)/pins.txt
	$(VENV)/bin/pip install -qq --no-deps --require-hashes --only-binary :all: --target $(NEXT) -r $(NEXT)/pins.txt
	touch $@

build/renderers/.ready build/peft/.ready build/verifiers/.ready: build/%/.ready: $(READY) tests/contracts/%.txt
	rm -rf build/$*
	mkdir -p build/$*
	$(VENV)/bin/pip install -qq --no-deps --require-hashes --only-binary :all: --target build/$* \
		-r tests/contracts/$*.txt
	touch $@

test-triton: env build/triton/.ready  ## test the Triton kernels of the log-prob head in Triton's interpreter
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(VENV)/bin/python -m pytest tests/unit/test_vocab_parallel.py $(ARGS)

# In a separate folder, because vLLM on CPU behaves differently where Triton is installed.
build/triton/.ready: $(READY) requirements.txt
	mkdir -p build/triton
	tools/pins.sh requirements.txt triton > build/triton/pins.txt
	$(VENV)/bin/pip install -qq --no-deps --require-hashes --only-binary :all: --upgrade --target build/triton \
		-r build/triton/pins.txt
	touch $@

test-te-cpu: env build/te_cpu/.ready  ## compute with Transformer Engine's layers on the CPU, its kernels replaced by torch, and compare with Megatron's own
	$(VENV)/bin/python -m pytest tests/te_cpu -m "long or not long" $(ARGS)

# Only its Python, 1.2 MB: tests/te_cpu takes the place of its compiled modules.
build/te_cpu/.ready: $(READY) requirements.txt
	mkdir -p build/te_cpu
	tools/pins.sh requirements.txt transformer-engine > build/te_cpu/pins.txt
	$(VENV)/bin/pip install -qq --no-deps --require-hashes --only-binary :all: --upgrade --target build/te_cpu \
		-r build/te_cpu/pins.txt
	touch $@

test-mutations: env build/mutations/.ready  ## put faults into algo, bridge, data and rollout, and list those that no unit test finds: an hour, tests/mutations/README.md
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/build/mutations $(VENV)/bin/python tests/mutations/run.py $(ARGS)

build/mutations/.ready: $(READY) tests/mutations/requirements.txt
	rm -rf build/mutations
	mkdir -p build/mutations
	$(VENV)/bin/pip install -qq --no-deps --require-hashes --only-binary :all: --target build/mutations \
		-r tests/mutations/requirements.txt
	touch $@

# Transformer Engine's layers are computed in .venv: .venv-gpu has the same Python of them.
test-gpu-stack: env-gpu test-te-cpu  ## test the H100 stack of requirements.txt in .venv-gpu, and test-te-cpu: PYTHON=python3.12, 10 GB, no GPU needed
	$(GPU)/bin/python -m pytest tests/gpu_stack tests/contracts/test_transformer_engine.py $(ARGS)

lint: env  ## run ruff and mypy, and check the language of docstrings and names
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/check_language.py dapo_megatron tools slurm tests

mlflow-ui: env  ## browse the runs of this machine in MLflow
	$(VENV)/bin/mlflow ui --backend-store-uri $${MLFLOW_TRACKING_URI:-sqlite:///runs/mlflow.db} $(ARGS)

clean:  ## remove environments and caches; runs/ stays
	rm -rf $(VENV) $(GPU) .contracts .pytest_cache .mypy_cache .ruff_cache .hypothesis build mutants *.egg-info
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
