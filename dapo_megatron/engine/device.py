"""Everything in which an engine on CUDA differs from one on CPU, and what vLLM needs of, or does
to, the process it shares with the policy.
"""

from __future__ import annotations

import math
import os
import random
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.cluster.imports import disable_compiler
from dapo_megatron.cluster.scratch import clear_abandoned, locked
from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from dapo_megatron.config import Config, EngineConfig
    from dapo_megatron.model import Architecture

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
_CUDA_ENVIRONMENT = {
    # FlashInfer and DeepGEMM compile their kernels with nvcc at the first use: minutes, or an
    # engine that dies in its first all-reduce where a node has no nvcc.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    # DeepGEMM also quantizes FP8 weights a second time, to scales that are powers of two.
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
}
"""Choose kernels that vLLM's wheel ships compiled. They are then the same on every node."""

_SHARED_MEMORY = Path("/dev/shm")

FP8 = "fp8_per_block"
"""How vLLM is to quantise: a scale per 128 x 128 weights and per 128 activations of a token. Unlike
its other ways this takes no maximum over tensor-parallel ranks while weights arrive, which would
be a collective inside another, and could hang a sync that fails."""
FP8_BLOCK = 128

CPU_LATENT_SIZE = 576
"""Of a token in the cache of latent attention: all that vLLM's kernels on CPU are made for."""


def has_cuda() -> bool:
    """Whether engines run on a GPU."""
    return torch.cuda.is_available()


def prepare_environment(rank: int, local_rank: int) -> None:
    """Set what vLLM reads when it is imported. What the user has set stays as it is."""
    variables = _ENVIRONMENT | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    if has_cuda():
        variables |= _CUDA_ENVIRONMENT
    else:
        disable_compiler()
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def import_vllm() -> None:
    """Import vLLM, after `prepare_environment`."""
    import vllm.entrypoints.llm  # noqa: F401


def arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that depend on the device."""
    engine = config.engine
    chosen: dict[str, Any] = {"enforce_eager": engine.enforce_eager}
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
            # Else the output head rounds logits to bfloat16, which the policy's head does not do:
            # a mean gap of about 0.025 nats where the largest logits are about 30.
            chosen["hf_overrides"] = {"head_dtype": "float32"}
        return chosen | {
            "gpu_memory_utilization": engine.memory_fraction,
            "enable_sleep_mode": engine.sleep,
            "enable_chunked_prefill": True,
            # Autotuning is a collective of all ranks that have nvcc. A rank without nvcc never
            # joins it, and the others hang.
            "enable_flashinfer_autotune": False,
        }
    return chosen | {
        # With a size in bytes and eager mode, vLLM takes the size as it is and needs no warm-up.
        "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30),
        # A seeded request whose prompt is cut at the step's token budget fails: vLLM then resets
        # the generator's state, which torch cannot do on CPU.
        "enable_chunked_prefill": False,
    }


def choose_model_runner(config: EngineConfig) -> None:
    """Choose vLLM's model runner for the engines made from now on (engine.model_runner)."""
    if config.model_runner != "auto":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(config.model_runner == "v2"))


def _graphs(max_sequences: int) -> dict[str, Any]:
    """Return the settings of CUDA graphs of whole decoding steps, for up to `max_sequences`.

    The graphs hold the same kernels that run without graphs. torch.compile would make other
    kernels, with other roundings, and take minutes.
    """
    return {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "max_cudagraph_capture_size": _capture_size(max_sequences),
    }


def _capture_size(max_sequences: int) -> int:
    """Round up to a batch size that vLLM captures: 1, 2, 4, multiples of 8, from 256 of 16. It
    rounds down itself, and larger batches would run without a graph."""
    if max_sequences <= 4:
        return 1 << (max_sequences - 1).bit_length()
    multiple = 8 if max_sequences <= 256 else 16
    return math.ceil(max_sequences / multiple) * multiple


def check_config(config: Config, arch: Architecture) -> None:
    """Raise ConfigError naming the key of what vLLM would only fail on later, or get wrong."""
    engine = config.engine
    if not has_cuda() and (engine.max_batched_tokens or math.inf) < config.max_sequence_tokens:
        raise ConfigError(
            f"engine.max_batched_tokens: {engine.max_batched_tokens} is less than prompt and "
            f"response together ({config.max_sequence_tokens}); on CPU a prompt is never prefilled "
            "in chunks. Leave it null"
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
    if arch.num_experts and config.engine.sleep:
        # At each reload vLLM makes new scales for experts, outside the memory that sleeps.
        raise ConfigError(f"{key}: not for experts in an engine that sleeps. Set it to none")
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
    for what, size, over in inputs:
        if size % (FP8_BLOCK * over):
            raise ConfigError(
                f"{key}: {what} = {size}, over {over} of engine.tensor_parallel = {ranks} ranks, "
                f"is no whole number of blocks of {FP8_BLOCK}. Use fewer ranks per engine, "
                "engine.expert_parallel for experts, or none"
            )


def _check_model(arch: Architecture) -> None:
    if arch.latent and arch.tie_word_embeddings:
        raise ConfigError("model.path: tie_word_embeddings; vLLM does not tie a DeepSeek-V3 head")
    if has_cuda():
        return
    if arch.latent:
        if (size := arch.latent.down_rows) != CPU_LATENT_SIZE:
            raise ConfigError(
                f"model.path: kv_lora_rank + qk_rope_head_dim = {size}; vLLM on CPU takes "
                f"{CPU_LATENT_SIZE} (512 + 64)"
            )
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if arch.head_dim not in sizes:
        raise ConfigError(
            f"model.path: attention heads of {arch.head_dim}; vLLM on CPU takes "
            f"{', '.join(map(str, sizes))}"
        )


@contextmanager
def construction() -> Iterator[None]:
    """Around the making of an engine: the process's global state is afterwards as it was.

    vLLM seeds every generator, and on CPU replaces `torch.set_num_threads` by a function that
    only warns and sets environment variables that processes started later would inherit. (That it
    makes `torch.accelerator.synchronize` and `empty_cache` do nothing stays: it needs that.)
    """
    names = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
    environment = {name: os.environ.get(name) for name in names}
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with random_state(cuda=has_cuda()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            with _shared_memory():
                if not has_cuda():
                    _adapt_cpu_platform()
                _keep_process_groups()
                yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _shared_memory() -> Iterator[None]:
    """Name and lock the memory that ranks of an engine share. The last rank that has the memory
    deletes the names, so that a later kill leaves nothing. What an earlier kill left is deleted
    first."""
    clear_abandoned(_SHARED_MEMORY)
    plain = shared_memory.SharedMemory
    shared_memory.SharedMemory = _NamedMemory  # type: ignore[misc]
    try:
        with locked(_SHARED_MEMORY / _shared_memory_name()):
            yield
    finally:
        shared_memory.SharedMemory = plain  # type: ignore[misc]


class _NamedMemory(shared_memory.SharedMemory):
    """Shared memory whose name says whose it is, and may be deleted while it is in use.

    Python's own resource tracker would warn of a name that is gone, and is killed with the ranks.
    """

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        is_new = create and name is None
        name = f"{_shared_memory_name()}-{secrets.token_hex(4)}" if is_new else name
        super().__init__(name, create, size)
        if create:
            resource_tracker.unregister(f"/{self.name}", "shared_memory")

    def unlink(self) -> None:
        """Delete the name, if nobody has."""
        (_SHARED_MEMORY / self.name).unlink(missing_ok=True)


@contextmanager
def random_state(cuda: bool = False) -> Iterator[None]:
    """Around vLLM's use of the global generators: the policy draws as if there were no engine.

    On CPU each sampling step draws from torch's global generator even when every request has its
    own seed, so that the ranks' generators would drift apart with the work of their engines.
    (`cuda`: the device's generator, too; reading it waits for the device.)
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if cuda else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _keep_process_groups() -> None:
    """An engine that is dropped, or ends with the process, leaves torch.distributed alone: vLLM
    would destroy every process group, the policy's too, and fail if they are gone already."""
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    def cleanup() -> None:
        if parallel_state._TP is not None:
            parallel_state._TP.mq_broadcaster = None

    core.cleanup_dist_env_and_memory = cleanup


def _adapt_cpu_platform() -> None:
    """Mend what vLLM gets wrong on CPU, before it is used.

    Under `external_launcher` it names the memory that the ranks of an engine share after the ranks
    alone, so that two jobs on one machine would open each other's: user and port go into the name.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    plain = _CPUSHMDistributed.make_group_name
    name = _shared_memory_name()
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"/{name}-{plain(communicator).replace('/', '')}"
    )
    _mend_expert_parallel()
    _mend_paired_rope()
    _add_fp8_kernel()


@cache
def _add_fp8_kernel() -> None:
    """Add FP8 linear layers for a CPU without AMX, which vLLM's kernels need.

    vLLM quantises weights and activations in blocks as on a GPU, and plain torch multiplies them
    with float32 sums. This is slow, and lets all of a quantised rollout be tested without a GPU.

    Shape letters: T tokens, I and O input and output features, G = ceil(I / 128),
    H = ceil(O / 128).
    """
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.platforms.interface import PlatformEnum

    def spread(scales: Tensor, times: int, dim: int, size: int) -> Tensor:
        """Repeat each scale over the `times` elements that it belongs to, `size` in all."""
        return torch.repeat_interleave(scales, times, dim).narrow(dim, 0, size)

    class PlainBlockKernel(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            """Return A_TI times B_OI transposed, with scales As_TG and Bs_HG."""
            rows, columns = self.weight_group_shape.row, self.weight_group_shape.col
            scales_OI = spread(spread(Bs, rows, 0, B.shape[0]), columns, 1, B.shape[1])
            input_TI = A.float() * spread(As, columns, 1, A.shape[1])
            return input_TI @ (B.float() * scales_OI).T

    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(PlainBlockKernel)


def _mend_paired_rope() -> None:
    """Turn neighbouring columns (DeepSeek-V3 without yarn) as vLLM does in plain torch: its CPU
    kernel (0.32) gets them wrong for queries of three dimensions, by nats."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    plain = RotaryEmbedding.forward_cpu

    def forward(rope: Any, positions: Any, query: Any, key: Any = None) -> Any:
        turn = plain if rope.is_neox_style else RotaryEmbedding.forward_native
        return turn(rope, positions, query, key)

    RotaryEmbedding.forward_cpu = forward


def _mend_expert_parallel() -> None:
    """Let vLLM's CPU experts be spread over ranks (vLLM 0.32): they take global numbers of experts
    for local ones and read past their weights. A choice that lies on another rank becomes local
    expert 0 with weight 0."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    plain = CPUUnquantizedExperts.apply

    def apply(experts: Any, **given: Any) -> None:
        here = given["expert_map"]
        if here is not None:
            local = here[given["topk_ids"].long()]
            weights = given["topk_weights"].masked_fill(local < 0, 0.0)
            chosen = local.clamp(min=0).to(given["topk_ids"].dtype)
            given |= {"topk_ids": chosen, "topk_weights": weights, "expert_map": None}
        plain(experts, **given)

    CPUUnquantizedExperts.apply = apply


def _shared_memory_name() -> str:
    """Name of this start's shared memory, and of the folder that is its lock
    (cluster/scratch.py). All ranks have the same MASTER_PORT."""
    return f"dapo-{os.geteuid()}-{os.environ['MASTER_PORT']}"


def forget_expert_kernels(model: nn.Module) -> None:
    """Make vLLM on CPU pack the experts again: it does so where it sets up their kernel, which it
    leaves out of a weight update if there is one, and unpacked weights would be taken for packed.
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
    """Make vLLM on CPU pack a tied output head again: it does so for the embedding alone."""
    if has_cuda():
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    head = getattr(model, "lm_head", None)
    if isinstance(head, ParallelLMHead) and head.weight is model.model.embed_tokens.weight:
        head.quant_method.process_weights_after_loading(head)
