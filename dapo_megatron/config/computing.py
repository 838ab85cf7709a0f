"""Config sections of model, policy, engine and optimizer: layouts, kernels, precision, memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dapo_megatron.config.section import (
    Beta,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Section,
    WholeNumber,
)


class ModelConfig(Section):
    path: str
    """Folder of a checkpoint with config.json and tokenizer, as saved by HF, by
    tools/convert_checkpoint.py, by a run, or by Megatron (docs/conversion.md)."""
    ignore_fields: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Unknown fields of config.json that do not affect the computation. List a field here to accept
    a model that is otherwise refused because of it."""
    drop_mtp: bool = False
    """Leave out the checkpoint's layers for multi-token prediction (speculative decoding). They are
    not trained, and the run's checkpoints and exports do not have them. false: refuse them."""


class Fp8Config(Section):
    """FP8 in the policy's linear layers (Transformer Engine; needs compute capability 9.0 or
    higher). Attention, norms, router, embedding and output head keep policy.precision."""

    recipe: Literal["delayed", "current", "blockwise"]
    """How scales are computed. delayed: from a history of maxima per tensor. current: from the
    tensor itself. blockwise: per block of 128 x 128 weights and of 128 activations (needs CUDA
    12.9). `delayed` is the fastest, but its scales change with every micro-batch, so the ratios of
    a step's first update are not exactly 1. It cannot be combined with the keys below."""
    bf16_first_layers: WholeNumber = 0
    bf16_last_layers: WholeNumber = 0
    """Number of first and last layers that stay in bfloat16."""
    parameters: bool = False
    """Keep the weights of these layers only in FP8 (and as float32 main copies in the optimizer),
    and all-gather them over data-parallel ranks in FP8. This halves memory and traffic."""


class LoraConfig(Section):
    """Low-rank adapters of linear layers, the only weights that are trained (docs/small_teams.md).
    The base model has no gradients, main weights and moments."""

    rank: Count
    """Columns of lora_b and rows of lora_a."""
    alpha: Positive
    """The delta of a weight is alpha / rank * lora_b @ lora_a."""
    dropout: Literal[0] = 0
    """Dropout of the adapters' inputs. Only 0, because dropped values would change the ratios."""
    targets: Annotated[
        tuple[Literal["attention", "mlp", "experts"], ...], Field(strict=False, min_length=1)
    ] = ("attention", "mlp", "experts")
    """Layers that get adapters: projections of the attention, of MLPs (shared experts too), and of
    each routed expert."""


class PolicyConfig(Section):
    tensor_parallel: Count = 1
    sequence_parallel: bool = False
    """Split the activations of norms and residuals by tokens over the tensor-parallel ranks."""
    pipeline_parallel: Count = 1
    virtual_pipeline_parallel: Annotated[int, Field(ge=2, le=65_536)] | None = None
    """Model chunks per pipeline stage (interleaved schedule). null: one chunk, not interleaved."""
    first_stage_layers: Count | None = None
    last_stage_layers: Count | None = None
    """Number of layers of the first and last pipeline stage. null: the same as the other stages."""
    context_parallel: Count = 1
    expert_parallel: Count = 1
    expert_tensor_parallel: Literal[1] | None = None
    """Experts are never split by tensor parallelism, so only 1 or null (the same) is allowed."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes: none, those of attention, or all."""
    moe_aux_loss: NonNegative = 0.0
    """Coefficient of the sequence-wise load-balancing loss of mixture-of-experts layers."""
    router_replay: Literal["off", "policy", "engine"] = "off"
    """Experts of a token in mixture-of-experts layers. off: those that the policy's router chooses
    with the current weights. policy: updates use those that it chose in the pass for the old
    log-probs of the step. engine: that pass and the updates use those with which the engine sampled
    the answer. Weights of the experts are always computed with the current router."""
    kernels: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layer implementation. auto: Transformer Engine if it is installed, for bfloat16 on a GPU;
    otherwise, and for latent attention or gated delta nets, Megatron's own (`kernels_for`)."""
    fused_rope: bool = False
    """Apply rotary embeddings with Transformer Engine's fused kernel. Off by default because it has
    been reported to cause log-prob spikes (NVIDIA-NeMo/RL issue 1801). tools/gpu_check.py compares
    both on your GPU."""
    logprob_head: Literal["torch", "triton"] = "torch"
    """Implementation that reduces tiles of logits to log-probs and entropy: torch operations, or
    Triton kernels (NVIDIA GPU). `tools/gpu_check.py --only head` measures which to set."""
    overlap: bool = True
    """Overlap the reduction of gradients with the backward pass, and the all-gather of updated
    parameters with the next forward pass, if there are several data-parallel ranks."""
    offload: Annotated[
        tuple[Literal["weights", "gradients", "optimizer"], ...], Field(strict=False)
    ] = ()
    """State that is removed from GPU memory while engines generate. Weights and optimizer state are
    copied to host memory; gradients are discarded."""
    fp8: Fp8Config | None = None
    """null: no FP8."""
    lora: LoraConfig | None = None
    """null: all weights are trained."""
    precision: Literal["float32", "bfloat16", "float64"]
    """Precision of weights and activations in policy and engine. Main weights of the optimizer are
    at least float32. float64 is only for `doctor layouts`, because engines do not support it."""


class EngineConfig(Section):
    tensor_parallel: Count | None = None
    """Ranks per engine. null: policy.tensor_parallel."""
    colocated: bool = True
    """Whether engines share the GPUs of the policy, which take turns. false: they run on other
    GPUs, and may sample while the policy trains; engine.sleep is then false and policy.offload
    empty."""
    replicas: Count | None = None
    """Number of engines. null: as many as the policy's ranks have room for; required with colocated
    false."""
    min_replicas: Count = 1
    """Number of engines with which a step starts. With fewer, the run waits up to watchdog.start
    for them to connect, then saves and ends."""
    silence_seconds: Positive = 60.0
    """An engine that gives no sign of life for so long is out, and what it was working on is
    sampled again. Longer than its longest step."""
    expert_parallel: bool = False
    """Distribute whole experts over the ranks of an engine, instead of splitting every expert."""
    memory_fraction: Fraction = 0.7
    """Share of each GPU's memory for weights and KV cache. On CPU see kv_cache_gib."""
    kv_cache_gib: Annotated[float, Field(gt=0.0, le=65_536.0)] = 1.0
    """KV cache per rank in GiB if there is no GPU."""
    max_sequences: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Largest number of sequences running at the same time in an engine."""
    max_batched_tokens: Count | None = None
    """Largest number of tokens in one engine step; longer prompts are prefilled in chunks. null:
    vLLM's default."""
    enforce_eager: bool = True
    """Disable CUDA graphs, which have been reported to reduce quality (verl issue 3660)."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the engine quantizes the weights of linear layers at each sync and computes these layers
    in FP8. It then samples from a slightly different distribution than the policy's, so set
    loss.tis_cap and choose a higher sync.max_gap."""
    sleep: bool = True
    """Free the GPU memory of the engine's weights and KV cache while the policy trains."""
    async_scheduling: bool | None = None
    """Schedule the next engine step while the GPU computes the current one. null: vLLM's default
    (on a GPU true). Set false to find the cause of wrong tokens."""
    model_runner: Literal["auto", "v1", "v2"] = "auto"
    """vLLM's model runner. auto: vLLM's default (on a GPU v2). Set v1 to find the cause of wrong
    tokens or log-probs."""


class OptimizerConfig(Section):
    lr: Positive
    warmup_rollout_steps: WholeNumber
    """The learning rate of rollout step k (from 1) is lr * min(1, (k-1)/warmup). 0: no warmup."""
    weight_decay: NonNegative
    beta1: Beta
    beta2: Beta
    eps: Positive
    clip_grad: Positive
    """Largest norm of the global gradient; a larger gradient is scaled down to it."""
    kernels: Literal["auto", "transformer_engine", "apex", "torch"] = "auto"
    """AdamW implementation. auto: on a GPU the first of these that is installed, on CPU torch."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Precision of Adam's two moments. Only Transformer Engine's AdamW supports bfloat16."""
    cpu_offload: Fraction = 0.0
    """Share of the optimizer state that always stays in host memory and is updated on the CPU."""


Kernels = Literal["transformer_engine", "local"]


def kernels_for(
    config: PolicyConfig, *, has_gpu: bool, is_installed: bool, only_local: bool
) -> Kernels:
    """Return the layer implementation that `policy.kernels` selects. An implementation that is
    chosen by name is returned without a check.

    `is_installed`: whether Transformer Engine is installed. `auto` uses it only for bfloat16,
    because its fused attention has no other precision. `only_local`: whether the model is built
    only from Megatron's own layers.
    """
    if config.kernels != "auto":
        return config.kernels
    usable = has_gpu and is_installed and not only_local
    return "transformer_engine" if usable and config.precision == "bfloat16" else "local"
