"""Import what a rank imports, in the server from which test processes are forked (warm.py)."""

import contextlib
import gc
import importlib
import os
import warnings

# OpenMP reads this variable when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from dapo_megatron.engine import device
from dapo_megatron.run.session import import_libraries

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_libraries()
    device.prepare_environment()
    device.import_vllm()
    for module in (
        "dapo_megatron.run.build",
        "compressed_tensors",
        "vllm.model_executor.models.glm4_moe_lite",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.qwen3_moe",
        "vllm.model_executor.models.qwen3_next",
        "vllm.model_executor.models.qwen3_vl",
        "vllm.v1.worker.cpu_worker",
        "hypothesis",
        "pytest",
    ):
        # A test that needs a missing module gives a better error message.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


# A garbage collection in a child would copy the pages of all these objects and take 0.3 s. vLLM
# unfreezes all objects when an engine ends, and collects six times when the next one starts.
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None
