"""Test the undocumented names and behavior of vLLM that this project uses.

Names that only a GPU uses are checked as well. Behavior is that of the engine on this machine,
observed in one process (vllm_probe.py). tests/parity/test_engine*.py test weight loading by slices,
sampling and log-probs.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contracts.names import check_arguments, check_name, find, imports_of
from tests.contracts.vllm_probe import names_of_the_extension, observe
from tests.helpers.configs import tiny_config
from tests.helpers.engines import run_alone
from tests.helpers.models import make_random_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

LAYERS, LOADER = "vllm.model_executor.layers.", "vllm.model_executor.model_loader."
CPU_EXPERTS = f"{LAYERS}fused_moe.experts.cpu_moe:CPUUnquantizedExperts"
EXPERT_METHOD = f"{LAYERS}fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"
SHARED_MEMORY = "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed"
LLM = "vllm:LLM."
ENGINE = "vllm.v1.engine.llm_engine:LLMEngine."
V2 = "vllm.v1.worker.gpu."

NAMES = {
    # Replaced.
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache": "engine/routes.py",
    f"{V2}model_runner:GPUModelRunner.initialize_kv_cache": "engine/routes.py",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks": "engine/routes.py",
    SHARED_MEMORY + ".make_group_name": "engine/device.py",
    f"{LAYERS}rotary_embedding.base:RotaryEmbedding.forward_cpu": "engine/device.py",
    f"{LAYERS}rotary_embedding.base:RotaryEmbedding.forward_native": "engine/device.py",
    CPU_EXPERTS + ".apply": "engine/device.py",
    # Private, or internal.
    LOADER + "reload.layerwise:_get_original_loader": "engine/loads.py",
    LOADER + "reload.layerwise:get_layerwise_info": "engine/loads.py, engine/loading.py",
    LOADER + "reload.layerwise:_layerwise_process": "engine/loading.py",
    LOADER + "reload.meta:materialize_layer": "engine/loading.py",
    LOADER + "reload.meta:restore_layer_on_meta": "engine/loads.py",
    "vllm._custom_ops:cpu_prepack_moe_weight": "engine/readback.py",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_head_sizes": (
        "engine/device.py"
    ),
    f"{LAYERS}fused_moe.oracle.unquantized:UnquantizedMoeBackend.TRITON": "engine/readback.py",
    f"{LAYERS}fused_moe.oracle.unquantized:UnquantizedMoeBackend.BATCHED_TRITON": (
        "engine/readback.py"
    ),
    f"{LAYERS}vocab_parallel_embedding:ParallelLMHead": "engine/device.py",
    f"{LAYERS}vocab_parallel_embedding:UnquantizedEmbeddingMethod": "engine/readback.py",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": "engine/routes.py",
    f"{LAYERS}fused_moe.router.base_router:BaseRouter.set_capture_fn": "engine/routes.py",
    # Methods.
    **{
        LLM + name: "engine/engine.py"
        for name in ("collective_rpc", "reset_prefix_cache", "sleep", "wake_up")
    },
    **{
        ENGINE + name: "engine/engine.py"
        for name in ("add_request", "step", "abort_request", "has_unfinished_requests")
    },
    "vllm.v1.worker.gpu_worker:Worker.get_model": "engine/extension.py",
    "vllm.device_allocator:AllocationData": "engine/memory.py (CUDA)",
}

ARGUMENTS = {
    "vllm.device_allocator:AllocationData": ("handle tag is_asleep", "engine/memory.py (CUDA)"),
    CPU_EXPERTS + ".apply": ("topk_weights topk_ids expert_map", "engine/device.py"),
    f"{LAYERS}rotary_embedding.base:RotaryEmbedding.forward_cpu": (
        "positions query key",
        "engine/device.py",
    ),
    "vllm._custom_ops:cpu_prepack_moe_weight": ("weight isa", "engine/readback.py"),
}
"""Functions that are replaced, or used in one place only. Arguments of an engine and of a request
are tested by every engine that is started."""

VARIABLES = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_NO_USAGE_STATS",
    "VLLM_LOGGING_LEVEL",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CACHE_ROOT",
    "VLLM_ALLREDUCE_USE_FLASHINFER",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_V2_MODEL_RUNNER",
)

IMPORTS = imports_of("vllm")


def test_names_exist() -> None:
    for path, user in (NAMES | IMPORTS).items():
        check_name(path, user)


@pytest.mark.parametrize("path", ARGUMENTS)
def test_arguments_are_accepted(path: str) -> None:
    check_arguments(path, *ARGUMENTS[path])


def test_environment_variables_exist() -> None:
    """engine/device.py and slurm/env.sh set them."""
    assert not {*VARIABLES} - {*find("vllm.envs:environment_variables")}


def test_log_probs_mode_has_processed_logprobs() -> None:
    """engine/engine.py: processed log-probs are at the request's temperature, raw ones are not."""
    assert "processed_logprobs" in str(find("vllm.config.model:LogprobsMode"))


def test_the_extension_hides_nothing_of_a_worker() -> None:
    """vLLM refuses an extension (engine/extension.py) with a name that its worker has."""
    names = run_alone(names_of_the_extension)
    assert {"trace_slices", "load_slices", "read_slices", "clear_cache"} <= names
    for worker in ("gpu_worker:Worker", "cpu_worker:CPUWorker"):
        assert not names & {*dir(find(f"vllm.v1.worker.{worker}"))}


def test_experts_have_no_kernel_until_they_are_packed() -> None:
    """engine/device.py (forget_expert_kernels) sets moe_kernel back to None."""
    assert "moe_kernel is not None" in inspect.getsource(find(EXPERT_METHOD))


def test_buffers_of_the_v2_sampler_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan/engine_memory.py (sampler_bytes) counts every buffer that the GPU would hold."""
    import torch

    from dapo_megatron.model import read_architecture
    from dapo_megatron.plan.engine_memory import sampler_bytes

    # Buffers in pinned host memory take no memory of the GPU, and there is none without a GPU.
    monkeypatch.setattr(find(V2 + "buffer_utils"), "is_uva_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    folder = make_random_model("qwen3", tmp_path / "qwen3")
    config = tiny_config(model__path=folder, engine__max_sequences=6)
    vocab, cpu = read_architecture(config).vocab_size, torch.device("cpu")
    requests = find(V2 + "states:RequestState")(6, 32, 64, 0, vocab, cpu)
    sampler = find(V2 + "sample.sampler:Sampler")(
        SimpleNamespace(reasoning_config=None), 6, vocab, cpu, requests
    )
    masks = find(V2 + "structured_outputs:StructuredOutputsWorker")(6, vocab, cpu, 1, 1)
    holders = (*sampler.logits_processors, sampler.logprob_token_ids_state, masks)
    staged = find(V2 + "buffer_utils:StagedWriteTensor")
    values = [value for holder in holders for value in vars(holder).values()]
    buffers = [value.gpu if isinstance(value, staged) else value for value in values]
    tensors = [buffer for buffer in buffers if isinstance(buffer, torch.Tensor)]
    assert len(tensors) == 11
    assert sum(tensor.nbytes for tensor in tensors) == sampler_bytes(
        config, read_architecture(config)
    )


# ------------------------------------------------------------------- behavior, one real engine


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") is None and find("torch:cuda.is_available")():
        pytest.skip("tests an engine on a CPU; tools/gpu_check.py tests one on a GPU")
    folder = make_random_model("qwen3", tmp_path_factory.mktemp("contracts") / "qwen3")
    return dict(run_alone(observe, folder))


def test_running_requests_keep_the_ids_we_gave(observed: dict[str, Any]) -> None:
    """engine/engine.py: output_processor.request_states, external_req_id."""
    assert observed["names"] == {"7/0", "7/1"}


def test_sampled_so_far_has_flat_log_probs(observed: dict[str, Any]) -> None:
    """engine/engine.py: detokenizer.output_token_ids, logprobs_processor.logprobs.logprobs."""
    for tokens, logprobs in observed["so_far"].values():
        assert len(tokens) == len(logprobs) == observed["steps"]
        assert all(isinstance(token, int) for token in tokens)
        assert all(isinstance(logprob, float) and logprob <= 0 for logprob in logprobs)


def test_aborted_requests_are_removed_at_once(observed: dict[str, Any]) -> None:
    """engine/engine.py (interrupt)."""
    assert observed["left_after_abort"] == 0


def test_reset_prefix_cache_returns_whether_it_was_reset(observed: dict[str, Any]) -> None:
    """engine/engine.py: False would mean that requests are in flight."""
    assert observed["reset"] is True


def test_linear_layers_are_packed_and_emptied(observed: dict[str, Any]) -> None:
    """engine/readback.py: with cpu_linear, a weight is read through the kernel."""
    assert observed["packed"]


def test_layers_remember_how_they_were_created(observed: dict[str, Any]) -> None:
    """engine/loads.py: restored on meta, parameters have loaders and the shapes of a checkpoint."""
    shape, device, has_loader = observed["restored"]
    assert (shape, device, has_loader) == ((96 * 2, 64), "meta", True)


def test_the_embedding_has_the_number_of_rows_without_padding(observed: dict[str, Any]) -> None:
    """engine/loads.py: shard_indices.num_org_elements; the rest is padding."""
    real, padded = observed["rows"]
    assert real == observed["vocab"] <= padded
