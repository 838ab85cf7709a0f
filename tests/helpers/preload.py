"""Imports of the server that processes of tests are forked from (warm.py)."""

import contextlib
import gc
import importlib
import os
import warnings

# OpenMP reads it when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from dapo_megatron.engine import device

# vLLM reads it when it is imported.
device.prepare_environment(0, 0)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if not device.has_cuda():
        device.compile_nothing()
    for module in (
        "dapo_megatron.engine.engine",
        "dapo_megatron.policy.policy",
        "dapo_megatron.run.build",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
        "transformers.models.auto.modeling_auto",
        "hypothesis",
        "pytest",
    ):
        # A test that needs the module reports its absence better.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

# Collections in a child would copy the pages of all these objects.
gc.freeze()
