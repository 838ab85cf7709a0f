"""Rules of the optimizer, the engine, and what shares a GPU's memory by turns."""

from __future__ import annotations

from dapo_megatron.plan.compatibility.rule import LATENT, Machine, Rule, Run, Verdict
from dapo_megatron.plan.compatibility.rules_policy import BFLOAT16, HOPPER, NO_GPU

FUSED_ADAM = ("transformer_engine", "apex")
NO_POOLS = ("expandable_segments:true", "expandable_segments:1", "backend:cudamallocasync")
ENGINE_FP8 = "engine.quantization=fp8"


# ------------------------------------------------------------------ conditions


def _optimizer_lacks(run: Run) -> str:
    kernels = run.config.optimizer.kernels
    if kernels not in FUSED_ADAM or not run.lacks(kernels):
        return ""
    return f"{kernels} is not installed" if run.on_gpu else "there is no GPU"


def _engine_in_fp8(run: Run) -> bool:
    return run.has_engine and run.config.engine.quantization == "fp8"


def _half_moments(run: Run) -> bool:
    return run.config.optimizer.moments == "bfloat16"


def _engine_fp8_lacks(run: Run) -> str:
    if not _engine_in_fp8(run) or run.machine is None:
        return ""
    capability = run.machine.capability
    if capability is None:  # in plain torch, but for experts (engine/device.py)
        return ""
    return "this one has {}.{}".format(*capability) if capability < (8, 9) else ""


def _allocator(run: Run) -> str:
    """The setting of torch's allocator that memory pools of a sleeping engine cannot live in."""
    if run.machine is None or not (run.has_engine and run.config.engine.sleep and run.on_gpu):
        return ""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        for setting in run.machine.environment.get(name, "").replace(" ", "").split(","):
            if setting.lower() in NO_POOLS:
                return f"{name} has {setting}"
    return ""


# ------------------------------------------------------------------ the rules

_OPTIMIZER = (
    Rule(
        "optimizer-float64",
        ("optimizer.kernels", "policy.precision"),
        Verdict.REFUSED,
        lambda run: (
            run.config.optimizer.kernels in FUSED_ADAM and run.config.policy.precision == "float64"
        ),
        "fused AdamW computes in float32",
        "set optimizer.kernels auto or torch",
        ("optimizer.kernels=apex", "policy.precision=float64"),
    ),
    Rule(
        "optimizer-machine",
        ("optimizer.kernels", "machine"),
        Verdict.REFUSED,
        _optimizer_lacks,
        "fused AdamW needs an NVIDIA GPU and the package (requirements.txt, docs/gpu_stack.md)",
        "set optimizer.kernels auto or torch",
        ("optimizer.kernels=apex",),
        example_machine=NO_GPU,
    ),
    Rule(
        "moments-kernels",
        ("optimizer.moments", "optimizer.kernels"),
        Verdict.REFUSED,
        lambda run: (
            _half_moments(run)
            and (run.config.optimizer.kernels in ("apex", "torch") or run.lacks(FUSED_ADAM[0]))
        ),
        "only Transformer Engine's AdamW keeps its moments in bfloat16",
        "set optimizer.kernels auto or transformer_engine on a GPU that has it, or "
        "optimizer.moments float32",
        ("optimizer.moments=bfloat16", "optimizer.kernels=torch", BFLOAT16),
    ),
    Rule(
        "moments-precision",
        ("optimizer.moments", "policy.precision"),
        Verdict.REFUSED,
        lambda run: _half_moments(run) and run.config.policy.precision != "bfloat16",
        "bfloat16 moments of wider weights would be the least precise part by far",
        "set optimizer.moments float32",
        ("optimizer.moments=bfloat16", "policy.precision=float32"),
    ),
    Rule(
        "moments-cpu-offload",
        ("optimizer.moments", "optimizer.cpu_offload"),
        Verdict.REFUSED,
        lambda run: _half_moments(run) and run.config.optimizer.cpu_offload > 0,
        "what lives in host memory is updated by torch's AdamW, in float32",
        "set optimizer.moments float32, or optimizer.cpu_offload 0",
        ("optimizer.moments=bfloat16", BFLOAT16, "optimizer.cpu_offload=0.5"),
    ),
    Rule(
        "cpu-offload-precision",
        ("optimizer.cpu_offload", "policy.precision"),
        Verdict.REFUSED,
        lambda run: (
            run.config.optimizer.cpu_offload > 0 and run.config.policy.precision != "bfloat16"
        ),
        "of wider weights Megatron-core's distributed optimizer has views, which torch's AdamW "
        "does not take",
        "set policy.precision bfloat16, or optimizer.cpu_offload 0",
        ("optimizer.cpu_offload=0.5", "policy.precision=float32"),
    ),
    Rule(
        "cpu-offload-twice",
        ("optimizer.cpu_offload", "policy.offload"),
        Verdict.WARNED,
        lambda run: (
            run.config.optimizer.cpu_offload == 1.0 and "optimizer" in run.config.policy.offload
        ),
        "all of the optimizer's state lives in host memory already; there is nothing to move",
        "take optimizer out of policy.offload, or lower optimizer.cpu_offload",
        ("optimizer.cpu_offload=1.0", "policy.offload=[optimizer]", BFLOAT16),
    ),
    Rule(
        "optimizer-not-run",
        ("optimizer.kernels", "optimizer.moments"),
        Verdict.NOT_RUN,
        lambda run: (
            run.config.optimizer.kernels in FUSED_ADAM
            or _half_moments(run)
            or (run.on_gpu and run.config.optimizer.kernels == "auto")
        ),
        "fused AdamW, of Transformer Engine or Apex",
        "",
        ("optimizer.kernels=apex",),
    ),
    Rule(
        "cpu-offload-not-run",
        ("optimizer.cpu_offload", "policy.offload"),
        Verdict.NOT_RUN,
        lambda run: (
            run.on_gpu
            and (run.config.optimizer.cpu_offload > 0 or len(run.config.policy.offload) > 0)
        ),
        "moving the policy between a GPU's memory and the host's (on CPU it has run)",
        "",
        ("policy.offload=[weights]",),
        example_machine=HOPPER,
    ),
    Rule(
        "overlap-not-run",
        ("policy.overlap",),
        Verdict.NOT_RUN,
        lambda run: run.on_gpu and run.config.policy.overlap,
        "communication while kernels compute (on CPU the same calls have run)",
        "",
        ("policy.overlap=true",),
        example_machine=HOPPER,
    ),
)

_ENGINE = (
    Rule(
        "engine-float64",
        ("policy.precision",),
        Verdict.REFUSED,
        lambda run: run.has_engine and run.config.policy.precision == "float64",
        "float64 is for `doctor layouts` alone, no engine has it",
        "use float32 or bfloat16",
        ("policy.precision=float64",),
    ),
    Rule(
        "engine-fp8-precision",
        ("engine.quantization", "policy.precision"),
        Verdict.REFUSED,
        lambda run: _engine_in_fp8(run) and run.config.policy.precision != "bfloat16",
        "vLLM's FP8 layers take bfloat16 activations",
        "set policy.precision bfloat16, or engine.quantization none",
        (ENGINE_FP8, "policy.precision=float32"),
    ),
    Rule(
        "engine-fp8-latent",
        ("engine.quantization", "model"),
        Verdict.REFUSED,
        _engine_in_fp8,
        "vLLM folds the projections of latent attention when it loads them, and what it then "
        "computes with cannot be compared with the policy's weights",
        "set engine.quantization none",
        (ENGINE_FP8, BFLOAT16),
        families=LATENT,
    ),
    Rule(
        "engine-fp8-machine",
        ("engine.quantization", "machine"),
        Verdict.REFUSED,
        _engine_fp8_lacks,
        "on a GPU, FP8 in the engine needs compute capability 8.9 up",
        "set engine.quantization none",
        (ENGINE_FP8, BFLOAT16),
        example_machine=Machine((8, 0), (13, 0)),
    ),
    Rule(
        "engine-fp8-uncorrected",
        ("engine.quantization", "loss.tis_cap"),
        Verdict.WARNED,
        lambda run: _engine_in_fp8(run) and run.config.loss.tis_cap is None,
        "an FP8 engine samples from a slightly other distribution than is trained, and nothing "
        "corrects for it",
        "set loss.tis_cap (2.0), and watch mismatch/gap_mean and mismatch/kl",
        (ENGINE_FP8, BFLOAT16, "loss.tis_cap=null"),
    ),
    Rule(
        "engine-graphs",
        ("engine.enforce_eager",),
        Verdict.WARNED,
        lambda run: run.on_gpu and run.has_engine and not run.config.engine.enforce_eager,
        "a loss of quality with CUDA graphs in the engine is on record (verl issue 3660)",
        "watch mismatch/gap_mean and gap_max; set engine.enforce_eager true if they grow",
        ("engine.enforce_eager=false",),
        example_machine=HOPPER,
    ),
    Rule(
        "engine-sleep-allocator",
        ("engine.sleep", "machine"),
        Verdict.REFUSED,
        _allocator,
        "the memory pools of a sleeping engine need torch's own allocator, without expandable "
        "segments (pytorch issue 147851)",
        "unset it, or set engine.sleep false",
        ("engine.sleep=true",),
        example_machine=Machine(
            (9, 0), (13, 0), environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        ),
    ),
    Rule(
        "engine-not-run",
        ("engine.sleep", "engine.memory_fraction"),
        Verdict.NOT_RUN,
        lambda run: run.on_gpu and run.has_engine,
        "vLLM's engine on a GPU in this program: its sleep, its waking by tags, its cache",
        "",
        ("engine.sleep=true",),
        example_machine=HOPPER,
    ),
    Rule(
        "engine-fp8-not-run",
        ("engine.quantization",),
        Verdict.NOT_RUN,
        _engine_in_fp8,
        "FP8 in the engine, quantised anew at each sync",
        "",
        (ENGINE_FP8, BFLOAT16),
    ),
)

ENGINE_RULES: tuple[Rule, ...] = (*_OPTIMIZER, *_ENGINE)
