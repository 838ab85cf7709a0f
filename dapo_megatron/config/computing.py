"""How model, policy, engine and optimizer are computed: layouts, kernels, precision, memory."""

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
    """Folder with a checkpoint: config.json, safetensors, tokenizer; as HF saves it, or as
    tools/convert_checkpoint.py does."""
    ignore_fields: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Fields of config.json, unknown here, that you know to change nothing in the computation."""


class Fp8Config(Section):
    """FP8 in the policy's linear layers (Transformer Engine; GPUs of compute capability 9.0 up).
    Attention, norms, router, embedding and output head stay as policy.precision says."""

    recipe: Literal["delayed", "current", "blockwise"]
    """How scales are found: from a history of maxima per tensor, from the tensor itself, or from
    blocks of 128 x 128 weights and of 128 activations (needs CUDA 12.9). `delayed` is the fastest,
    but its scales move from micro-batch to micro-batch: the ratios of a step's first update are
    then not exactly 1, and it goes with neither of the following keys."""
    bf16_first_layers: WholeNumber = 0
    bf16_last_layers: WholeNumber = 0
    """Layers at either end of the model that stay in bfloat16."""
    parameters: bool = False
    """Keep these layers' weights in FP8 alone (beside their float32 main copies), and gather them
    over data-parallel ranks as FP8: half the memory and traffic."""


class PolicyConfig(Section):
    tensor_parallel: Count = 1
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks by tokens."""
    pipeline_parallel: Count = 1
    virtual_pipeline_parallel: Annotated[int, Field(ge=2, le=65_536)] | None = None
    """Model chunks per pipeline stage (interleaved schedule); null for none."""
    first_stage_layers: Count | None = None
    last_stage_layers: Count | None = None
    """Layers of the first and last pipeline stage where they differ from the others."""
    context_parallel: Count = 1
    expert_parallel: Count = 1
    expert_tensor_parallel: Literal[1] | None = None
    """Experts are never cut by tensor parallelism: 1, or null for the same."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those of attention, all."""
    moe_aux_loss: NonNegative = 0.0
    """Coefficient of the sequence-wise load-balancing loss of mixture-of-experts layers."""
    kernels: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layer implementation; `auto` takes Transformer Engine for bfloat16 on a GPU if installed, and
    Megatron's own layers for latent attention, which has no others (`kernels_for`)."""
    fused_rope: bool = False
    """Rotary embedding by Transformer Engine's kernel. Off: log-prob spikes with it are on record
    (NVIDIA-NeMo/RL issue 1801); tools/gpu_check.py compares both on your GPU."""
    logprob_head: Literal["torch", "triton"] = "torch"
    """What reduces tiles of logits to log-probs and entropy: torch's operations, or Triton kernels
    (NVIDIA GPU; tools/gpu_check.py times both)."""
    overlap: bool = True
    """Reduce gradients while the backward pass runs, and gather updated parameters while the next
    forward pass does, where data-parallel ranks share them."""
    offload: Annotated[
        tuple[Literal["weights", "gradients", "optimizer"], ...], Field(strict=False)
    ] = ()
    """What leaves the GPU's memory while engines generate: weights and optimizer state go to host
    memory, gradients are given up."""
    fp8: Fp8Config | None = None
    """null: none."""
    precision: Literal["float32", "bfloat16", "float64"]
    """Of weights and activations in policy and engine; master weights are float32 at least.
    float64 is for `doctor layouts` alone: no engine has it."""


class EngineConfig(Section):
    tensor_parallel: Count | None = None
    """Ranks per engine; null: as policy.tensor_parallel. The other ranks form more replicas."""
    expert_parallel: bool = False
    """Cut a mixture of experts by expert over the ranks of an engine, not every expert by rows."""
    memory_fraction: Fraction = 0.7
    """Share of each GPU's memory for weights and KV cache. On CPU see kv_cache_gib."""
    kv_cache_gib: Annotated[float, Field(gt=0.0, le=65_536.0)] = 1.0
    """KV cache per rank in GiB when there is no GPU."""
    max_sequences: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Sequences running at once per engine."""
    max_batched_tokens: Count | None = None
    """Tokens of one engine step; longer prompts are prefilled in chunks. null: vLLM chooses."""
    enforce_eager: bool = True
    """No CUDA graphs (a quality loss with them is on record: verl issue 3660)."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the engine quantises the linear layers' weights anew at each sync, and computes them in
    FP8. It then samples from a slightly other distribution than is trained: raise sync.max_gap
    knowingly and set loss.tis_cap."""
    sleep: bool = True
    """Give up the GPU memory of weights and KV cache while the policy trains."""
    async_scheduling: bool | None = None
    """Schedule the next engine step while the GPU computes this one; null: vLLM chooses (on a GPU
    yes). Set false to look for the cause of wrong tokens."""
    model_runner: Literal["auto", "v1", "v2"] = "auto"
    """vLLM's model runner; auto: vLLM chooses (on a GPU v2). Set v1 to look for the cause of wrong
    tokens or log-probs."""


class OptimizerConfig(Section):
    lr: Positive
    warmup_rollout_steps: WholeNumber
    """lr of rollout step k (from 1) is lr * min(1, (k-1)/warmup); 0 for none."""
    weight_decay: NonNegative
    beta1: Beta
    beta2: Beta
    eps: Positive
    clip_grad: Positive
    """Largest norm of the whole gradient."""
    kernels: Literal["auto", "transformer_engine", "apex", "torch"] = "auto"
    """Whose AdamW; `auto` takes on a GPU the first of these that is installed, on CPU torch's."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Of Adam's two moments (Transformer Engine's AdamW alone has bfloat16)."""
    cpu_offload: Fraction = 0.0
    """Share of the optimizer's state that lives in host memory for good, and is updated there."""


Kernels = Literal["transformer_engine", "local"]


def kernels_for(
    config: PolicyConfig, *, has_gpu: bool, is_installed: bool, is_latent: bool
) -> Kernels:
    """Return whose layers `policy.kernels` comes to; a kernel chosen by name is not judged.

    `is_installed`: Transformer Engine; its fused attention has no other precision than bfloat16.
    `is_latent`: the model has multi-head latent attention, which is built of Megatron's own layers
    alone.
    """
    if config.kernels != "auto":
        return config.kernels
    usable = has_gpu and is_installed and not is_latent
    return "transformer_engine" if usable and config.precision == "bfloat16" else "local"
