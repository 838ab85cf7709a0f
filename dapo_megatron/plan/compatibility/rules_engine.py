"""Rules about optimizer, engine, and sharing a GPU's memory between policy and engine."""

from __future__ import annotations

from dapo_megatron.plan.compatibility.rule import (
    LATENT,
    Action,
    CompatibilityRule,
    Machine,
    RunFacts,
)
from dapo_megatron.plan.compatibility.rules_policy import BFLOAT16, HOPPER, NO_GPU

FUSED_ADAM = ("transformer_engine", "apex")
NO_POOLS = ("expandable_segments:true", "expandable_segments:1", "backend:cudamallocasync")
ENGINE_FP8 = "engine.quantization=fp8"


# ------------------------------------------------------------------ conditions


def _optimizer_lacks(run: RunFacts) -> str:
    kernels = run.config.optimizer.kernels
    if kernels not in FUSED_ADAM or not run.lacks(kernels):
        return ""
    return f"{kernels} is not installed" if run.on_gpu else "there is no GPU"


def _engine_in_fp8(run: RunFacts) -> bool:
    return run.has_engine and run.config.engine.quantization == "fp8"


def _half_moments(run: RunFacts) -> bool:
    return run.config.optimizer.moments == "bfloat16"


def _engine_fp8_lacks(run: RunFacts) -> str:
    if not _engine_in_fp8(run) or run.machine is None:
        return ""
    capability = run.machine.capability
    if capability is None:  # on CPU plain torch computes it, except experts (engine/device.py)
        return ""
    return "this GPU has {}.{}".format(*capability) if capability < (8, 9) else ""


def _allocator(run: RunFacts) -> str:
    """Return the setting of torch's allocator that does not work with the memory pools of a
    sleeping engine, or an empty text."""
    if run.machine is None or not (run.has_engine and run.config.engine.sleep and run.on_gpu):
        return ""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        for setting in run.machine.environment.get(name, "").replace(" ", "").split(","):
            if setting.lower() in NO_POOLS:
                return f"{name} has {setting}"
    return ""


# ------------------------------------------------------------------ the rules

_OPTIMIZER = (
    CompatibilityRule(
        "optimizer-float64",
        ("optimizer.kernels", "policy.precision"),
        Action.REFUSED,
        lambda run: (
            run.config.optimizer.kernels in FUSED_ADAM and run.config.policy.precision == "float64"
        ),
        "fused AdamW computes in float32",
        "set optimizer.kernels auto or torch",
        ("optimizer.kernels=apex", "policy.precision=float64"),
    ),
    CompatibilityRule(
        "optimizer-machine",
        ("optimizer.kernels", "machine"),
        Action.REFUSED,
        _optimizer_lacks,
        "fused AdamW needs an NVIDIA GPU and the package (requirements.txt, docs/gpu_stack.md)",
        "set optimizer.kernels auto or torch",
        ("optimizer.kernels=apex",),
        example_machine=NO_GPU,
    ),
    CompatibilityRule(
        "moments-kernels",
        ("optimizer.moments", "optimizer.kernels"),
        Action.REFUSED,
        lambda run: (
            _half_moments(run)
            and (run.config.optimizer.kernels in ("apex", "torch") or run.lacks(FUSED_ADAM[0]))
        ),
        "only Transformer Engine's AdamW keeps its moments in bfloat16",
        "set optimizer.kernels auto or transformer_engine on a GPU that has it, or "
        "optimizer.moments float32",
        ("optimizer.moments=bfloat16", "optimizer.kernels=torch", BFLOAT16),
    ),
    CompatibilityRule(
        "moments-precision",
        ("optimizer.moments", "policy.precision"),
        Action.REFUSED,
        lambda run: _half_moments(run) and run.config.policy.precision != "bfloat16",
        "bfloat16 moments would be far less precise than the float32 or float64 weights",
        "set optimizer.moments float32",
        ("optimizer.moments=bfloat16", "policy.precision=float32"),
    ),
    CompatibilityRule(
        "moments-cpu-offload",
        ("optimizer.moments", "optimizer.cpu_offload"),
        Action.REFUSED,
        lambda run: _half_moments(run) and run.config.optimizer.cpu_offload > 0,
        "optimizer state in host memory is updated by torch's AdamW, which needs float32 moments",
        "set optimizer.moments float32, or optimizer.cpu_offload 0",
        ("optimizer.moments=bfloat16", BFLOAT16, "optimizer.cpu_offload=0.5"),
    ),
    CompatibilityRule(
        "cpu-offload-precision",
        ("optimizer.cpu_offload", "policy.precision"),
        Action.REFUSED,
        lambda run: (
            run.config.optimizer.cpu_offload > 0 and run.config.policy.precision != "bfloat16"
        ),
        "for float32 or float64 weights Megatron-core's distributed optimizer holds views, which "
        "torch's AdamW does not accept",
        "set policy.precision bfloat16, or optimizer.cpu_offload 0",
        ("optimizer.cpu_offload=0.5", "policy.precision=float32"),
    ),
    CompatibilityRule(
        "cpu-offload-twice",
        ("optimizer.cpu_offload", "policy.offload"),
        Action.WARNED,
        lambda run: (
            run.config.optimizer.cpu_offload == 1.0 and "optimizer" in run.config.policy.offload
        ),
        "all optimizer state already stays in host memory, so there is nothing to offload",
        "remove optimizer from policy.offload, or lower optimizer.cpu_offload",
        ("optimizer.cpu_offload=1.0", "policy.offload=[optimizer]", BFLOAT16),
    ),
    CompatibilityRule(
        "optimizer-not-run",
        ("optimizer.kernels", "optimizer.moments"),
        Action.NOT_RUN,
        lambda run: (
            run.config.optimizer.kernels in FUSED_ADAM
            or _half_moments(run)
            or (run.on_gpu and run.config.optimizer.kernels == "auto")
        ),
        "fused AdamW of Transformer Engine or Apex",
        "",
        ("optimizer.kernels=apex",),
    ),
    CompatibilityRule(
        "cpu-offload-not-run",
        ("optimizer.cpu_offload", "policy.offload"),
        Action.NOT_RUN,
        lambda run: (
            run.on_gpu
            and (run.config.optimizer.cpu_offload > 0 or len(run.config.policy.offload) > 0)
        ),
        "moving the policy between GPU memory and host memory (tested on CPU)",
        "",
        ("policy.offload=[weights]",),
        example_machine=HOPPER,
    ),
    CompatibilityRule(
        "overlap-not-run",
        ("policy.overlap",),
        Action.NOT_RUN,
        lambda run: run.on_gpu and run.config.policy.overlap,
        "overlap of communication and computation (the same calls are tested on CPU)",
        "",
        ("policy.overlap=true",),
        example_machine=HOPPER,
    ),
)

_ENGINE = (
    CompatibilityRule(
        "engine-float64",
        ("policy.precision",),
        Action.REFUSED,
        lambda run: run.has_engine and run.config.policy.precision == "float64",
        "float64 is only for `doctor layouts`; engines do not support it",
        "use float32 or bfloat16",
        ("policy.precision=float64",),
    ),
    CompatibilityRule(
        "engine-fp8-precision",
        ("engine.quantization", "policy.precision"),
        Action.REFUSED,
        lambda run: _engine_in_fp8(run) and run.config.policy.precision != "bfloat16",
        "vLLM's FP8 layers need bfloat16 activations",
        "set policy.precision bfloat16, or engine.quantization none",
        (ENGINE_FP8, "policy.precision=float32"),
    ),
    CompatibilityRule(
        "engine-fp8-latent",
        ("engine.quantization", "model"),
        Action.REFUSED,
        _engine_in_fp8,
        "vLLM merges the projections of latent attention when it loads them, and the merged FP8 "
        "weights cannot be compared with the policy's weights",
        "set engine.quantization none",
        (ENGINE_FP8, BFLOAT16),
        families=LATENT,
    ),
    CompatibilityRule(
        "engine-fp8-machine",
        ("engine.quantization", "machine"),
        Action.REFUSED,
        _engine_fp8_lacks,
        "on a GPU, FP8 in the engine needs compute capability 8.9 or higher",
        "set engine.quantization none",
        (ENGINE_FP8, BFLOAT16),
        example_machine=Machine((8, 0), (13, 0)),
    ),
    CompatibilityRule(
        "engine-fp8-uncorrected",
        ("engine.quantization", "loss.tis_cap"),
        Action.WARNED,
        lambda run: (
            _engine_in_fp8(run)
            and run.config.loss.old_logprobs == "policy"
            and run.config.loss.tis_cap is None
            and not run.config.loss.correction.corrects
        ),
        "an FP8 engine samples from a slightly different distribution than the policy's, and "
        "nothing corrects for the difference",
        "set loss.tis_cap (2.0) or a key of loss.correction, and watch mismatch/gap_mean and "
        "mismatch/kl",
        (ENGINE_FP8, BFLOAT16, "loss.tis_cap=null"),
    ),
    CompatibilityRule(
        "engine-graphs",
        ("engine.enforce_eager",),
        Action.WARNED,
        lambda run: run.on_gpu and run.has_engine and not run.config.engine.enforce_eager,
        "CUDA graphs in the engine have been reported to reduce quality (verl issue 3660)",
        "watch mismatch/gap_mean and gap_max; set engine.enforce_eager true if they grow",
        ("engine.enforce_eager=false",),
        example_machine=HOPPER,
    ),
    CompatibilityRule(
        "engine-sleep-allocator",
        ("engine.sleep", "machine"),
        Action.REFUSED,
        _allocator,
        "the memory pools of a sleeping engine need torch's default allocator, without expandable "
        "segments (pytorch issue 147851)",
        "unset the variable, or set engine.sleep false",
        ("engine.sleep=true",),
        example_machine=Machine(
            (9, 0), (13, 0), environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        ),
    ),
    CompatibilityRule(
        "engine-not-run",
        ("engine.sleep", "engine.memory_fraction"),
        Action.NOT_RUN,
        lambda run: run.on_gpu and run.has_engine and run.config.engine.colocated,
        "vLLM's engine on a GPU of the policy: sleep, wake-up by tags, KV cache",
        "",
        ("engine.sleep=true",),
        example_machine=HOPPER,
    ),
    CompatibilityRule(
        "separate-engines-not-run",
        ("engine.colocated", "engine.replicas"),
        Action.NOT_RUN,
        lambda run: run.on_gpu and run.has_engine and not run.config.engine.colocated,
        "engines on other GPUs than the policy's: weights sent over NCCL",
        "",
        ("engine.colocated=false", "engine.replicas=1"),
        example_machine=HOPPER,
    ),
    CompatibilityRule(
        "engine-fp8-not-run",
        ("engine.quantization",),
        Action.NOT_RUN,
        _engine_in_fp8,
        "FP8 in the engine, quantized again at each sync",
        "",
        (ENGINE_FP8, BFLOAT16),
    ),
)

ENGINE_RULES: tuple[CompatibilityRule, ...] = (*_OPTIMIZER, *_ENGINE)
