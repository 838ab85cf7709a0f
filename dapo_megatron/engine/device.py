"""Differences between engines on CUDA and on CPU, and the process state that vLLM needs."""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dapo_megatron.cluster.imports import disable_compiler
from dapo_megatron.cluster.scratch import clear_abandoned, locked
from dapo_megatron.engine.delta import support_delta_nets
from dapo_megatron.model.families import WITH_IMAGES
from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from dapo_megatron.config import Config
    from dapo_megatron.model import Architecture

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
ENGINE = "DAPO_MEGATRON_ENGINE"
"""Environment variable with the process id of a server, in its workers."""
_CUDA_ENVIRONMENT = {
    # FlashInfer and DeepGEMM compile their kernels with nvcc at the first use. This takes minutes,
    # and on a node without nvcc the engine fails in its first all-reduce.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    # DeepGEMM also quantizes FP8 weights a second time, to scales that are powers of two.
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
}
"""Select kernels that vLLM's wheel ships compiled, so that all nodes use the same kernels."""

_SHARED_MEMORY = Path("/dev/shm")

FP8 = "fp8_per_block"
"""vLLM's quantization: a scale per 128 x 128 weights and per 128 activations of a token. vLLM's
other FP8 methods take a maximum over tensor-parallel ranks while weights arrive. That would be a
collective inside another collective, and could hang a sync that fails on one rank."""
FP8_BLOCK = 128
"""Rows, and columns, of a block of weights with one scale."""

CPU_LATENT_SIZE = 576
"""Elements per token in the cache of latent attention: the only size vLLM's CPU kernels support."""


def has_cuda() -> bool:
    """Return whether engines run on a GPU."""
    return torch.cuda.is_available()


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads on import, unless the user has set them."""
    variables = _ENVIRONMENT | {ENGINE: str(os.getpid())}
    if has_cuda():
        variables |= _CUDA_ENVIRONMENT
    else:
        disable_compiler()
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def import_vllm() -> None:
    """Import vLLM. Call after `prepare_environment`."""
    import vllm.entrypoints.llm  # noqa: F401


def arguments(config: Config, arch: Architecture) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that depend on the device."""
    engine = config.engine
    chosen: dict[str, Any] = {"enforce_eager": engine.enforce_eager}
    text_classes = [name for family, name in WITH_IMAGES.values() if family == arch.family]
    overrides: dict[str, Any] = {"architectures": text_classes} if text_classes else {}
    if engine.max_batched_tokens is not None:
        chosen["max_num_batched_tokens"] = engine.max_batched_tokens
    if engine.quantization == "fp8":
        chosen["quantization"] = FP8
    if engine.async_scheduling is not None:
        chosen["async_scheduling"] = engine.async_scheduling
    if has_cuda():
        if not engine.enforce_eager:
            chosen["compilation_config"] = _graphs(engine.max_sequences)
        if config.policy.precision == "bfloat16":
            # By default the output head rounds logits to bfloat16, which the policy's head does
            # not do. The mean gap is then about 0.025 nats if the largest logits are about 30.
            overrides["head_dtype"] = "float32"
        return chosen | {
            "hf_overrides": overrides or None,
            "gpu_memory_utilization": engine.memory_fraction,
            "enable_sleep_mode": engine.sleep,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            # Autotuning is a collective of all ranks that have nvcc. A rank without nvcc never
            # joins it, and the others hang.
            "enable_flashinfer_autotune": False,
        }
    return chosen | {
        "hf_overrides": overrides or None,
        # With a size in bytes and eager mode, vLLM takes the size as it is and needs no warm-up.
        "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30),
        # A seeded request whose prompt is cut at the step's token budget fails: vLLM then resets
        # the generator's state, which torch cannot do on CPU.
        "enable_chunked_prefill": False,
        # vLLM caches states of gated delta nets only between the chunks of a prefill.
        "enable_prefix_caching": arch.delta is None,
    }


def choose_kernels(config: Config) -> None:
    """Choose vLLM's model runner (engine.model_runner) and all-reduce for the engines made from now
    on."""
    if config.engine.model_runner != "auto":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(config.engine.model_runner == "v2"))
    if config.rollout.deterministic:
        # With NVLS the switch adds the values of the ranks, in no fixed order.
        os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")


def _graphs(max_sequences: int) -> dict[str, Any]:
    """Return the settings of CUDA graphs of whole decoding steps, for up to `max_sequences`.

    The graphs hold the same kernels that run without graphs. torch.compile would make other
    kernels, with other roundings, and take minutes.
    """
    return {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": capture_sizes(max_sequences),
    }


def capture_sizes(max_sequences: int) -> list[int]:
    """Return the batch sizes to capture: vLLM's own grid, and `max_sequences` itself. vLLM drops
    sizes above max_num_seqs, so a batch between the grid's last size and `max_sequences` would run
    without a graph."""
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, max_sequences, 16)]
    return [*(size for size in grid if size < max_sequences), max_sequences]


def check_config(config: Config, arch: Architecture) -> None:
    """Raise ConfigError naming a key with which vLLM would fail later, or compute wrong results."""
    engine = config.engine
    if not has_cuda() and (engine.max_batched_tokens or math.inf) < config.max_sequence_tokens:
        raise ConfigError(
            f"engine.max_batched_tokens: {engine.max_batched_tokens} is less than prompt and "
            f"response together ({config.max_sequence_tokens}). On CPU a prompt is never prefilled "
            "in chunks. Set it to null"
        )
    if engine.model_runner == "v2" and not has_cuda():
        raise ConfigError("engine.model_runner: v2 needs Triton and a GPU. Set it to auto")
    if engine.quantization == "fp8":
        _check_fp8(config, arch)
    _check_model(arch)


def _check_fp8(config: Config, arch: Architecture) -> None:
    key = "engine.quantization: fp8"
    if arch.num_experts and not has_cuda():
        raise ConfigError(f"{key}: vLLM has no FP8 experts for this CPU. Set it to none")
    if arch.num_experts and (config.engine.sleep or not config.engine.enforce_eager):
        # At each reload vLLM makes a new expert kernel with new strides, and maybe scales. They are
        # outside the memory that sleeps, and CUDA graphs go on reading the old ones.
        raise ConfigError(
            f"{key}: not for experts in an engine that sleeps or uses CUDA graphs. Set it to none, "
            "or engine.sleep false and engine.enforce_eager true"
        )
    if not has_cuda():
        return
    ranks = config.engine_tensor_parallel
    over_experts = 1 if config.engine.expert_parallel else ranks
    inputs = (  # inputs of linear layers: name, length, ranks that share it
        ("hidden_size", arch.hidden_size, 1),
        ("attention heads x head size", arch.value_columns, ranks),
        *((name, size, ranks) for name, size in arch.mlp_columns(whole_experts=True).items()),
        ("moe_intermediate_size", arch.moe_intermediate_size, over_experts),
    )
    for input_name, size, over in inputs:
        if size % (FP8_BLOCK * over):
            raise ConfigError(
                f"{key}: {input_name} = {size}, over {over} of engine.tensor_parallel = {ranks} "
                f"ranks, is not a multiple of {FP8_BLOCK} per rank. Use fewer ranks per engine, "
                "engine.expert_parallel for experts, or engine.quantization none"
            )


def _check_model(arch: Architecture) -> None:
    if arch.grouped_routing and arch.tie_word_embeddings:
        raise ConfigError(
            f"model.path: tie_word_embeddings: vLLM does not tie the head of {arch.family}"
        )
    if has_cuda():
        return
    if arch.latent:
        if (size := arch.latent.down_rows) != CPU_LATENT_SIZE:
            raise ConfigError(
                f"model.path: kv_lora_rank + qk_rope_head_dim = {size}, but vLLM on CPU supports "
                f"only {CPU_LATENT_SIZE} (512 + 64)"
            )
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if arch.head_dim not in sizes:
        raise ConfigError(
            f"model.path: head_dim = {arch.head_dim}, but vLLM on CPU supports only "
            f"{', '.join(map(str, sizes))}"
        )


@contextmanager
def construction() -> Iterator[None]:
    """Prepare this process for an engine that is constructed inside this context.

    First, shared memory of killed runs is deleted. Afterwards the names of the engine's own are
    deleted, so that a later kill leaves nothing behind.
    """
    clear_abandoned(_SHARED_MEMORY)
    adapt_process()
    with locked(_SHARED_MEMORY / _shared_memory_name()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@cache
def adapt_process() -> None:
    """Adapt vLLM in this process, a server or a worker of one."""
    shared_memory.SharedMemory = _NamedMemory  # type: ignore[misc]
    if not has_cuda():
        _adapt_cpu_platform()


class _NamedMemory(shared_memory.SharedMemory):
    """Shared memory with a name that identifies its server, and that may be deleted while in use.

    It is not registered with Python's resource tracker, which would warn about names that are
    already deleted, and is killed together with the server.
    """

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        is_new = create and name is None
        name = f"{_shared_memory_name()}-{secrets.token_hex(4)}" if is_new else name
        super().__init__(name, create, size)
        if create:
            resource_tracker.unregister(f"/{self.name}", "shared_memory")

    def unlink(self) -> None:
        """Delete the name, unless another process has deleted it."""
        (_SHARED_MEMORY / self.name).unlink(missing_ok=True)


def _adapt_cpu_platform() -> None:
    """Patch errors of vLLM on CPU before it is used, and name the shared memory of its workers."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    name = _shared_memory_name()
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"/{name}-{original(communicator).replace('/', '')}"
    )
    # vLLM's AMX kernels refuse some sizes of small models, and pack weights in forms of their own,
    # which a weight update does not make again.
    torch.cpu._is_amx_tile_supported = lambda: False
    _patch_expert_parallel()
    _patch_interleaved_rope()
    support_delta_nets()
    _add_fp8_kernel()


@cache
def _add_fp8_kernel() -> None:
    """Add FP8 linear layers without AMX, which vLLM's kernels need.

    vLLM quantizes weights and activations in blocks as on a GPU, and torch multiplies them with
    float32 sums. This is slow, but lets quantized rollouts be tested without a GPU.

    Shape letters: T tokens, I and O input and output features, G = ceil(I / 128),
    H = ceil(O / 128).
    """
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.platforms.interface import PlatformEnum

    def spread(scales: Tensor, times: int, dim: int, size: int) -> Tensor:
        """Repeat each scale `times` times along `dim`, and cut the result to `size`."""
        return torch.repeat_interleave(scales, times, dim).narrow(dim, 0, size)

    class PlainBlockKernel(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            """Return A_TI @ B_OI.T, with scales As_TG and Bs_HG."""
            rows, columns = self.weight_group_shape.row, self.weight_group_shape.col
            scales_OI = spread(spread(Bs, rows, 0, B.shape[0]), columns, 1, B.shape[1])
            input_TI = A.float() * spread(As, columns, 1, A.shape[1])
            return input_TI @ (B.float() * scales_OI).T

    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(PlainBlockKernel)


def _patch_interleaved_rope() -> None:
    """Use vLLM's torch implementation of interleaved rotary embedding (DeepSeek-V3 without yarn).

    vLLM's CPU kernel (0.32) rotates queries of three dimensions wrongly, with gaps of several nats.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original = RotaryEmbedding.forward_cpu

    def forward(rope: Any, positions: Any, query: Any, key: Any = None) -> Any:
        rotate = original if rope.is_neox_style else RotaryEmbedding.forward_native
        return rotate(rope, positions, query, key)

    RotaryEmbedding.forward_cpu = forward


def _patch_expert_parallel() -> None:
    """Make expert parallelism work with vLLM's CPU experts (vLLM 0.32).

    Their kernel uses global expert indices as local ones and reads beyond its weights. Here indices
    are mapped to local ones. An expert of another rank becomes local expert 0 with weight 0.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply

    def apply(experts: Any, **arguments: Any) -> None:
        expert_map = arguments["expert_map"]
        if expert_map is not None:
            local = expert_map[arguments["topk_ids"].long()]
            weights = arguments["topk_weights"].masked_fill(local < 0, 0.0)
            topk_ids = local.clamp(min=0).to(arguments["topk_ids"].dtype)
            arguments |= {"topk_ids": topk_ids, "topk_weights": weights, "expert_map": None}
        original(experts, **arguments)

    CPUUnquantizedExperts.apply = apply


def _shared_memory_name() -> str:
    """Return the name of an engine's shared memory, and of its lock (cluster/scratch.py)."""
    return f"dapo-{os.geteuid()}-{os.environ[ENGINE]}"


def forget_expert_kernels(model: nn.Module) -> None:
    """Make vLLM on CPU pack the experts again in the next weight update.

    vLLM packs experts when it creates their kernel, and does not create it again in a weight update
    if it exists. The kernel would then read unpacked weights as packed ones.
    """
    if has_cuda():
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def pack_tied_head(model: nn.Module) -> None:
    """Pack a tied output head again on CPU. vLLM packs only the embedding in a weight update."""
    if has_cuda():
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    head = getattr(model, "lm_head", None)
    if isinstance(head, ParallelLMHead) and head.weight is model.model.embed_tokens.weight:
        head.quant_method.process_weights_after_loading(head)
