"""Test the undocumented names of vLLM that this project uses, also those that only a GPU uses.

tests/parity/test_engine*.py test what they do: loading by slices, sampling, log-probs, interrupts.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo_megatron.engine.delta import importable_torchvision
from tests.contracts.names import check_arguments, check_name, find, imports_of
from tests.helpers.configs import tiny_config
from tests.helpers.engines import run_alone
from tests.helpers.models import make_random_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

LAYERS, RELOAD = "vllm.model_executor.layers.", "vllm.model_executor.model_loader.reload."
CPU_EXPERTS = f"{LAYERS}fused_moe.experts.cpu_moe:CPUUnquantizedExperts"
EXPERT_METHOD = f"{LAYERS}fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"
LLM = "vllm:LLM."
ENGINE = "vllm.v1.engine.llm_engine:LLMEngine."
V2 = "vllm.v1.worker.gpu."

NAMES = {
    "engine/routes.py": f"""
        vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache
        {V2}model_runner:GPUModelRunner.initialize_kv_cache
        vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks
        vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids
        {LAYERS}fused_moe.router.base_router:BaseRouter.set_capture_fn""",
    "engine/device.py": f"""
        vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name
        {LAYERS}rotary_embedding.base:RotaryEmbedding.forward_cpu
        {LAYERS}rotary_embedding.base:RotaryEmbedding.forward_native
        {LAYERS}vocab_parallel_embedding:ParallelLMHead
        vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_head_sizes
        {CPU_EXPERTS}.apply""",
    "engine/delta.py": f"""
        {LAYERS}mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core
        vllm._custom_ops:causal_conv1d_weight_pack""",
    "engine/loads.py": f"""
        {RELOAD}layerwise:_get_original_loader {RELOAD}layerwise:get_layerwise_info
        {RELOAD}meta:restore_layer_on_meta""",
    "engine/loading.py": f"""
        {RELOAD}layerwise:get_layerwise_info {RELOAD}layerwise:_layerwise_process
        {RELOAD}meta:materialize_layer""",
    "engine/readback.py": f"""
        vllm._custom_ops:cpu_prepack_moe_weight
        {LAYERS}fused_moe.oracle.unquantized:UnquantizedMoeBackend.TRITON
        {LAYERS}fused_moe.oracle.unquantized:UnquantizedMoeBackend.BATCHED_TRITON
        {LAYERS}vocab_parallel_embedding:UnquantizedEmbeddingMethod""",
    "engine/engine.py": f"""
        {LLM}collective_rpc {LLM}reset_prefix_cache {LLM}sleep {LLM}wake_up
        {ENGINE}add_request {ENGINE}step {ENGINE}abort_request {ENGINE}has_unfinished_requests""",
    "engine/tool_calls.py": """
        vllm.parser.engine.parser_engine_config:ParserEngineConfig.validate_tool_names""",
    "engine/extension.py": "vllm.v1.worker.gpu_worker:Worker.get_model",
    "engine/memory.py (CUDA)": "vllm.device_allocator:AllocationData",
}
"""Our file -> private names that it uses. What it imports is read from its source."""

ARGUMENTS = {
    "vllm.device_allocator:AllocationData": ("handle tag is_asleep", "engine/memory.py (CUDA)"),
    CPU_EXPERTS + ".apply": ("topk_weights topk_ids expert_map", "engine/device.py"),
    f"{LAYERS}rotary_embedding.base:RotaryEmbedding.forward_cpu": (
        "positions query key",
        "engine/device.py",
    ),
    f"{LAYERS}mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core": (
        "mixed_qkv b a core_attn_out layer_name",
        "engine/delta.py",
    ),
    f"{LAYERS}mamba.ops.cpu.causal_conv1d:causal_conv1d_update_cpu": (
        "x conv_state weight bias activation conv_state_indices",
        "engine/delta.py",
    ),
    "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata": (
        "num_decodes num_prefills has_initial_state non_spec_query_start_loc "
        "non_spec_state_indices_tensor",
        "engine/delta.py",
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
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_V2_MODEL_RUNNER",
)


@pytest.mark.parametrize("user", NAMES)
def test_private_names_exist(user: str) -> None:
    for path in NAMES[user].split():
        check_name(path, user)


def test_imported_names_exist() -> None:
    with importable_torchvision():
        for path, user in imports_of("vllm").items():
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


def names_of_the_extension() -> set[str]:
    from dapo_megatron.engine import device

    device.prepare_environment()
    from dapo_megatron.engine.extension import WorkerExtension

    return {name for name in dir(WorkerExtension) if not name.startswith("__")}


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
