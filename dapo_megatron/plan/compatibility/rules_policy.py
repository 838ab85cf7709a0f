"""Rules about the policy's computation: kernels, rotary embedding, FP8, log-prob head.

Combinations that Megatron itself refuses (0.16.1: TransformerConfig, OptimizerConfig,
fp8_utils.get_fp8_context) are refused here before anything starts, with messages that name our
config keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dapo_megatron.model import FAMILIES
from dapo_megatron.plan.compatibility.rule import (
    LATENT,
    NOT_LATENT,
    Action,
    CompatibilityRule,
    Machine,
    RunFacts,
)

BFLOAT16 = "policy.precision=bfloat16"
TE = "policy.kernels=transformer_engine"
GROUPED_EXPERTS = tuple(name for name in NOT_LATENT if FAMILIES[name].expert)
"""Families whose experts Transformer Engine computes."""
SPARSE = tuple(name for name, family in FAMILIES.items() if family.expert)
"""Families with mixtures of experts."""
HOPPER = Machine((9, 0), (13, 0), frozenset({"transformer_engine", "apex", "triton"}))
NO_GPU = Machine()


def _fp8(recipe: str, more: str = "") -> str:
    return "policy.fp8={recipe: " + recipe + (f", {more}" if more else "") + "}"


# ------------------------------------------------------------------ conditions


def _asks_te(run: RunFacts) -> bool:
    return run.config.policy.kernels == "transformer_engine"


def _asks_triton(run: RunFacts) -> bool:
    return run.config.policy.logprob_head == "triton"


def _replays(run: RunFacts) -> bool:
    return run.config.policy.router_replay != "off"


def _fp8_on(run: RunFacts) -> bool:
    return run.config.policy.fp8 is not None


def _uneven_for_fp8(run: RunFacts) -> str:
    """Return the weight dimensions on a tensor-parallel rank that FP8 matmuls do not support."""
    fp8 = run.config.policy.fp8
    if fp8 is None:
        return ""
    multiple = 128 if fp8.recipe == "blockwise" else 16
    wrong = [f"{name} {size}" for name, size in _dimensions(run) if size % multiple]
    return f"{', '.join(wrong)} of a rank, not multiples of {multiple}" if wrong else ""


def _dimensions(run: RunFacts) -> Iterator[tuple[str, int]]:
    arch, size = run.arch, run.config.policy.tensor_parallel
    yield "hidden_size", arch.hidden_size
    yield "query columns", arch.query_rows // size
    heads = arch.num_heads + 2 * max(arch.num_kv_heads, size)
    yield "query, key and value rows", heads * arch.head_dim // size
    for name, columns in arch.mlp_columns(whole_experts=True).items():
        yield name, columns // size
    if arch.num_experts:
        yield "moe_intermediate_size", arch.moe_intermediate_size


def _too_many_in_bfloat16(run: RunFacts) -> str:
    fp8, policy = run.config.policy.fp8, run.config.policy
    if fp8 is None:
        return ""
    per_stage = run.arch.num_layers // policy.pipeline_parallel
    most = max(fp8.bf16_first_layers, fp8.bf16_last_layers)
    return f"{most}, and a stage has {per_stage} layers" if most > per_stage else ""


def _no_fp8_here(run: RunFacts) -> str:
    machine, fp8 = run.machine, run.config.policy.fp8
    if fp8 is None or machine is None:
        return ""
    if machine.capability is None:
        return "there is no GPU"
    if "transformer_engine" not in machine.packages:
        return "transformer_engine is not installed"
    if machine.capability < (9, 0):
        return "this GPU has {}.{}".format(*machine.capability)
    if fp8.recipe == "blockwise" and machine.cuda < (12, 9):
        return f"torch is built with CUDA {'.'.join(map(str, machine.cuda))}"
    return ""


# ------------------------------------------------------------------ the rules

_KERNELS = (
    CompatibilityRule(
        "kernels-precision",
        ("policy.kernels", "policy.precision"),
        Action.REFUSED,
        lambda run: _asks_te(run) and run.config.policy.precision != "bfloat16",
        "transformer_engine needs policy.precision bfloat16, the only one of its fused attention",
        "set policy.precision bfloat16, or policy.kernels auto or local",
        (TE, "policy.precision=float32"),
    ),
    CompatibilityRule(
        "kernels-latent",
        ("policy.kernels", "model"),
        Action.REFUSED,
        _asks_te,
        "latent attention runs only in Megatron's own layers",
        "set policy.kernels auto or local",
        (TE, BFLOAT16),
        families=LATENT,
    ),
    CompatibilityRule(
        "kernels-machine",
        ("policy.kernels", "machine"),
        Action.REFUSED,
        lambda run: _asks_te(run) and run.lacks("transformer_engine"),
        "transformer_engine needs an NVIDIA GPU and the package (requirements.txt)",
        "set policy.kernels auto or local",
        (TE, BFLOAT16),
        example_machine=NO_GPU,
    ),
    CompatibilityRule(
        "kernels-padded-context",
        ("policy.kernels", "policy.context_parallel", "train.packing"),
        Action.REFUSED,
        lambda run: (
            run.fused and run.config.policy.context_parallel > 1 and not run.config.train.packing
        ),
        "with context parallelism Transformer Engine's attention supports only packed rows",
        "set train.packing true, or policy.kernels local",
        (TE, BFLOAT16, "policy.context_parallel=2", "train.packing=false"),
    ),
    CompatibilityRule(
        "kernels-selective-recompute",
        ("policy.kernels", "policy.recompute"),
        Action.WARNED,
        lambda run: run.fused and run.config.policy.recompute == "selective",
        "fused attention stores no scores, so selective recomputation frees nothing and costs a "
        "second forward pass of attention",
        "set policy.recompute none, or full if memory is short",
        (TE, BFLOAT16, "policy.recompute=selective"),
    ),
    CompatibilityRule(
        "kernels-not-run",
        ("policy.kernels",),
        Action.NOT_RUN,
        lambda run: run.fused and (_asks_te(run) or run.on_gpu),
        "the layers of Transformer Engine",
        "",
        (TE, BFLOAT16),
    ),
    CompatibilityRule(
        "experts-not-run",
        ("policy.kernels", "policy.expert_parallel"),
        Action.NOT_RUN,
        lambda run: run.fused and (_asks_te(run) or run.on_gpu),
        "grouped matmuls of experts",
        "",
        (TE, BFLOAT16),
        families=GROUPED_EXPERTS,
    ),
    CompatibilityRule(
        "rope-kernels",
        ("policy.fused_rope", "policy.kernels"),
        Action.REFUSED,
        lambda run: run.config.policy.fused_rope and not run.fused,
        "the fused rotary embedding is one of Transformer Engine's kernels, which this run does "
        "not use (policy.kernels, policy.precision, or no GPU)",
        "set policy.fused_rope false",
        ("policy.fused_rope=true", "policy.kernels=local", BFLOAT16),
        families=NOT_LATENT,
    ),
    CompatibilityRule(
        "rope-latent",
        ("policy.fused_rope", "model"),
        Action.REFUSED,
        lambda run: run.config.policy.fused_rope,
        "latent attention applies rotary embeddings itself, in its own order of columns",
        "set policy.fused_rope false",
        ("policy.fused_rope=true", BFLOAT16),
        families=LATENT,
    ),
    CompatibilityRule(
        "rope-yarn",
        ("policy.fused_rope", "model"),
        Action.REFUSED,
        lambda run: run.config.policy.fused_rope and run.arch.rope.attention_scaling != 1.0,
        "the fused rotary embedding cannot scale cosines and sines, as yarn requires",
        "set policy.fused_rope false",
        ("policy.fused_rope=true", TE, BFLOAT16),
        families=NOT_LATENT,
    ),
    CompatibilityRule(
        "rope-spikes",
        ("policy.fused_rope",),
        Action.WARNED,
        lambda run: run.config.policy.fused_rope,
        "it has been reported to cause log-prob spikes (NVIDIA-NeMo/RL issue 1801)",
        "compare with tools/gpu_check.py --only rope on your GPU, and watch mismatch/gap_max",
        ("policy.fused_rope=true", TE, BFLOAT16),
    ),
)

_FP8 = (
    CompatibilityRule(
        "fp8-kernels",
        ("policy.fp8", "policy.kernels"),
        Action.REFUSED,
        lambda run: _fp8_on(run) and run.config.policy.kernels == "local",
        "only Transformer Engine's layers compute in FP8",
        "set policy.kernels auto or transformer_engine, or policy.fp8 null",
        (_fp8("current"), "policy.kernels=local", BFLOAT16),
    ),
    CompatibilityRule(
        "fp8-precision",
        ("policy.fp8", "policy.precision"),
        Action.REFUSED,
        lambda run: _fp8_on(run) and run.config.policy.precision != "bfloat16",
        "FP8 layers need bfloat16 inputs and outputs",
        "set policy.precision bfloat16, or policy.fp8 null",
        (_fp8("current"), "policy.precision=float32"),
    ),
    CompatibilityRule(
        "fp8-latent",
        ("policy.fp8", "model"),
        Action.REFUSED,
        _fp8_on,
        "latent attention runs only in Megatron's own layers, which do not support FP8",
        "set policy.fp8 null",
        (_fp8("current"), BFLOAT16),
        families=LATENT,
    ),
    CompatibilityRule(
        "fp8-dimensions",
        ("policy.fp8", "policy.tensor_parallel", "model"),
        Action.REFUSED,
        _uneven_for_fp8,
        "FP8 matmuls need dimensions that are multiples of 16 (blockwise: of 128) on each "
        "tensor-parallel rank",
        "lower policy.tensor_parallel, use another policy.fp8.recipe, or set policy.fp8 null",
        (_fp8("blockwise"), BFLOAT16, "policy.tensor_parallel=16"),
        families=NOT_LATENT,
    ),
    CompatibilityRule(
        "fp8-delayed-ends",
        ("policy.fp8.recipe", "policy.fp8.bf16_first_layers", "policy.fp8.bf16_last_layers"),
        Action.REFUSED,
        lambda run: (
            (fp8 := run.config.policy.fp8) is not None
            and fp8.recipe == "delayed"
            and fp8.bf16_first_layers + fp8.bf16_last_layers > 0
        ),
        "with delayed scaling Megatron-core cannot keep layers in bfloat16 (maxima are reduced "
        "once for all layers)",
        "set both to 0, or policy.fp8.recipe current",
        (_fp8("delayed", "bf16_first_layers: 1"), BFLOAT16),
    ),
    CompatibilityRule(
        "fp8-ends-per-stage",
        ("policy.fp8.bf16_first_layers", "policy.fp8.bf16_last_layers", "policy.pipeline_parallel"),
        Action.REFUSED,
        _too_many_in_bfloat16,
        "at each end of the model at most the layers of one pipeline stage can stay in bfloat16",
        "lower these keys, or policy.pipeline_parallel",
        (_fp8("current", "bf16_last_layers: 999"), BFLOAT16),
    ),
    CompatibilityRule(
        "fp8-machine",
        ("policy.fp8", "machine"),
        Action.REFUSED,
        _no_fp8_here,
        "FP8 needs Transformer Engine and compute capability 9.0 or higher; blockwise also needs "
        "CUDA 12.9",
        "set policy.fp8 null",
        (_fp8("blockwise"), BFLOAT16),
        example_machine=replace(HOPPER, cuda=(12, 8)),
    ),
    CompatibilityRule(
        "fp8-delayed-moves",
        ("policy.fp8.recipe",),
        Action.WARNED,
        lambda run: (fp8 := run.config.policy.fp8) is not None and fp8.recipe == "delayed",
        "delayed scales change with every micro-batch that has gradients, so the ratios of a "
        "step's first update are 1 only in its first micro-batch. The first scales come from the "
        "random canary tokens of the first sync",
        "set policy.fp8.recipe current or blockwise, or watch policy/approx_kl",
        (_fp8("delayed"), BFLOAT16),
    ),
    CompatibilityRule(
        "fp8-parameters-delayed",
        ("policy.fp8.parameters", "policy.fp8.recipe"),
        Action.REFUSED,
        lambda run: (
            (fp8 := run.config.policy.fp8) is not None
            and fp8.parameters
            and fp8.recipe == "delayed"
        ),
        "weights are loaded from the checkpoint before there is a scale to quantize them with",
        "set policy.fp8.recipe current or blockwise, or policy.fp8.parameters false",
        (_fp8("delayed", "parameters: true"), BFLOAT16),
    ),
    CompatibilityRule(
        "fp8-parameters-cpu-offload",
        ("policy.fp8.parameters", "optimizer.cpu_offload"),
        Action.REFUSED,
        lambda run: (
            (fp8 := run.config.policy.fp8) is not None
            and fp8.parameters
            and run.config.optimizer.cpu_offload > 0
        ),
        "Megatron-core's optimizer in host memory cannot read weights that exist only in FP8",
        "set policy.fp8.parameters false, or optimizer.cpu_offload 0",
        (_fp8("current", "parameters: true"), BFLOAT16, "optimizer.cpu_offload=0.5"),
    ),
    CompatibilityRule(
        "fp8-not-run",
        ("policy.fp8",),
        Action.NOT_RUN,
        _fp8_on,
        "FP8 training, with any recipe, layers kept in bfloat16, and FP8 parameters",
        "",
        (_fp8("current"), BFLOAT16),
    ),
    CompatibilityRule(
        "fp8-experts-not-run",
        ("policy.fp8", "policy.expert_parallel"),
        Action.NOT_RUN,
        _fp8_on,
        "FP8 in experts, with the tokens of each expert padded to multiples of 16",
        "",
        (_fp8("current"), BFLOAT16),
        families=GROUPED_EXPERTS,
    ),
)

_HEAD = (
    CompatibilityRule(
        "head-float64",
        ("policy.logprob_head", "policy.precision"),
        Action.REFUSED,
        lambda run: _asks_triton(run) and run.config.policy.precision == "float64",
        "the Triton kernels reduce in float32",
        "set policy.logprob_head torch",
        ("policy.logprob_head=triton", "policy.precision=float64"),
    ),
    CompatibilityRule(
        "head-entropy",
        ("policy.logprob_head", "loss.entropy_coefficient"),
        Action.REFUSED,
        lambda run: _asks_triton(run) and run.config.loss.entropy_coefficient > 0.0,
        "the Triton kernels do not compute the gradient of the entropy",
        "set policy.logprob_head torch, or loss.entropy_coefficient 0",
        ("policy.logprob_head=triton", "loss.entropy_coefficient=0.001"),
    ),
    CompatibilityRule(
        "head-machine",
        ("policy.logprob_head", "machine"),
        Action.REFUSED,
        lambda run: (
            _asks_triton(run)
            and run.lacks("triton")
            and run.machine is not None
            and run.machine.environment.get("TRITON_INTERPRET") != "1"
        ),
        "triton needs an NVIDIA GPU and the package (torch for CUDA brings it)",
        "set policy.logprob_head torch",
        ("policy.logprob_head=triton",),
        example_machine=NO_GPU,
    ),
    CompatibilityRule(
        "head-not-run",
        ("policy.logprob_head",),
        Action.NOT_RUN,
        _asks_triton,
        "the Triton kernels of the log-prob head (tested on CPU with Triton's interpreter)",
        "",
        ("policy.logprob_head=triton",),
    ),
)

_ROUTERS = (
    CompatibilityRule(
        "router-replay-dense",
        ("policy.router_replay", "model"),
        Action.REFUSED,
        lambda run: (
            _replays(run) and not any(map(run.arch.has_experts, range(run.arch.num_layers)))
        ),
        "the model has no experts to choose",
        "set policy.router_replay off",
        ("policy.router_replay=policy",),
    ),
    CompatibilityRule(
        "router-replay-not-run",
        ("policy.router_replay",),
        Action.NOT_RUN,
        lambda run: _replays(run) and (run.machine is None or run.on_gpu),
        "recording the choice of experts in engine or policy, and replaying it",
        "",
        ("policy.router_replay=engine",),
        families=SPARSE,
    ),
)

POLICY_RULES: tuple[CompatibilityRule, ...] = (*_KERNELS, *_FP8, *_HEAD, *_ROUTERS)
