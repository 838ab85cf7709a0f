PYTHON ?= python3
CONFIG ?= model_configs/tiny_cpu.yaml
ARGS   ?=
VENV   := .venv
READY  := $(VENV)/.ready

.PHONY: help env quickstart ladder test test-long test-layouts test-sync test-slurm lint \
        mlflow-ui clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: $(READY)  ## create .venv from the CPU lock (once; a second call reuses it)

$(READY): requirements-cpu.txt pyproject.toml tools/make_env.sh
	tools/make_env.sh "$(PYTHON)" $(VENV)

quickstart: env  ## train the tiny model on this machine; more arguments with ARGS="key.path=value ..."
	$(VENV)/bin/python -m dapo_megatron train $(CONFIG) $(ARGS)

ladder: env  ## the paper's ladder on the tiny task, six rungs and three seeds (half an hour): docs/ladder.md
	$(VENV)/bin/python tools/ladder.py $(ARGS)

test: env  ## the tests, without those of the next three; more arguments with ARGS="-k name"
	$(VENV)/bin/python -m pytest $(ARGS)

test-long: env  ## only the tests marked long
	$(VENV)/bin/python -m pytest -m long $(ARGS)

test-layouts: env  ## only the whole matrix of layouts: four ranks, eight models, an hour
	$(VENV)/bin/python -m pytest -m layouts $(ARGS)

test-sync: env  ## only the whole matrix of policy and engine layouts: four ranks, seven models
	$(VENV)/bin/python -m pytest -m sync $(ARGS)

test-slurm: env  ## only the job scripts, on an emulated cluster: installs Slurm with apt-get (root or sudo)
	tests/slurm/install.sh
	$(VENV)/bin/python -m pytest -m slurm $(ARGS)

lint: env  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

mlflow-ui: env  ## browse the runs of this machine
	$(VENV)/bin/mlflow ui --backend-store-uri $${MLFLOW_TRACKING_URI:-sqlite:///runs/mlflow.db} $(ARGS)

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
