"""Training steps in bfloat16 and FP8, compared to float32 on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch
import yaml

from dapo_megatron.cluster.ranks import Ranks
from gpu_checks.catalog import Figure, at_most, reported
from gpu_checks.rig import (
    REPOSITORY,
    Setting,
    has_gpu,
    has_te,
    join_alone,
    likelihood,
    make_config,
    make_policy,
)
from gpu_checks.steps import (
    BFLOAT16_LIMITS,
    DENSE,
    EXPERTS,
    EXPERTS_TOP_8,
    FP8_LIMITS,
    FUSED,
    LOCAL,
    NUM_STEPS,
    ROW_TOKENS,
    SHORT,
    batch_of_steps,
    compared,
    difference,
    ratios,
    reference_of,
    run,
)

HOPPER = (9, 0)
SHIPPED = REPOSITORY / "model_configs" / "qwen3_8b_fp8.yaml"


def bfloat16(setting: Setting) -> Iterator[Figure]:
    """Compare bfloat16 steps with Megatron's own layers to float32 on CPU."""
    result = run(setting, join_alone(), LOCAL, SHORT)
    yield from compared(result, reference_of(setting), BFLOAT16_LIMITS)
    yield from ratios(result)


def transformer_engine(setting: Setting) -> Iterator[Figure]:
    """Compare Transformer Engine's layers to float32 on CPU, and to Megatron's own layers."""
    ranks = join_alone()
    capability = torch.cuda.get_device_capability()
    if capability < HOPPER:
        what = "not a Hopper GPU: only bfloat16, other attention kernels. Compute capability"
        yield reported(what, float("{}.{}".format(*capability)))
    result = run(setting, ranks, FUSED, SHORT)
    yield from compared(result, reference_of(setting), BFLOAT16_LIMITS)
    yield from ratios(result)
    local = run(setting, ranks, LOCAL, SHORT)
    yield from difference("from local kernels", result, local)


def experts(setting: Setting) -> Iterator[Figure]:
    """Compare a mixture of experts (2 of 8 per token), local and grouped, to float32 on CPU."""
    ranks, wanted = join_alone(), reference_of(setting, EXPERTS)
    local = run(setting, ranks, LOCAL, SHORT, model=EXPERTS)
    yield from compared(local, wanted, BFLOAT16_LIMITS, "local: ")
    yield from ratios(local, "local: ")
    if has_te():
        grouped = run(setting, ranks, FUSED, SHORT, model=EXPERTS)
        yield from compared(grouped, wanted, BFLOAT16_LIMITS, "grouped: ")
        yield from ratios(grouped, "grouped: ")
        yield from difference("grouped from local experts", grouped, local)


def experts_repeat(setting: Setting) -> Iterator[Figure]:
    """Compute log-probs and gradients with 8 experts per token twice. The bits must be the same."""
    ranks = join_alone()
    for name, kernels in {"local": LOCAL, "grouped": FUSED}.items():
        if kernels == LOCAL or has_te():
            # Megatron's own unpermute adds a token's experts by atomics on a GPU.
            is_held = kernels == FUSED or not has_gpu()
            yield from _repeated(setting, ranks, name, kernels, is_held=is_held)


def _repeated(
    setting: Setting, ranks: Ranks, name: str, kernels: str, *, is_held: bool
) -> Iterator[Figure]:
    config = make_config(setting, EXPERTS_TOP_8, kernels, SHORT, row_tokens=ROW_TOKENS)
    policy = make_policy(config, ranks)
    arch = policy.architecture
    batch = batch_of_steps(setting, arch.vocab_size)
    batch = replace(batch, old_logprobs=policy.logprobs(batch).logprobs)
    log_probs = policy.logprobs(batch).logprobs
    gradients = [policy.gradients(batch, likelihood)[1] for _ in range(2)]
    policy.close()
    gap = float((log_probs - batch.old_logprobs).abs().max())
    yield _zero(f"{name}: log-probs, largest difference of two passes", gap, is_held)
    gaps = {
        key: float((value - gradients[1][key]).abs().max()) for key, value in gradients[0].items()
    }
    # The backward kernels of attention may use atomics on a GPU. The gradients of the last layer's
    # experts and router, and of what follows, are computed before them.
    last = (f"model.layers.{arch.num_layers - 1}.mlp.", "model.norm.", "lm_head.")
    before = [gap for key, gap in gaps.items() if key.startswith(last)]
    figure = f"{name}: gradients of {len(before)} tensors after the last attention"
    yield _zero(f"{figure}, largest difference", max(before), is_held)
    yield _zero(f"{name}: all gradients, largest difference", max(gaps.values()), not has_gpu())


def _zero(name: str, value: float, is_held: bool) -> Figure:
    return at_most(name, value, 0.0) if is_held else reported(name, value)


def padded(setting: Setting) -> Iterator[Figure]:
    """Compare padded rows, with all layer implementations, to float32 on CPU with packed rows."""
    ranks = join_alone()
    for name, kernels in {"local: ": LOCAL, "fused: ": FUSED}.items():
        if kernels == LOCAL or has_te():
            result = run(setting, ranks, kernels, SHORT, "train.packing=false")
            yield from compared(result, reference_of(setting), BFLOAT16_LIMITS, name)
            yield from ratios(result, name)


def rope(setting: Setting) -> Iterator[Figure]:
    """Compare the fused rotary embedding to the plain one (NVIDIA-NeMo/RL issue 1801)."""
    ranks = join_alone()
    plain = run(setting, ranks, FUSED, SHORT)
    fused = run(setting, ranks, FUSED, SHORT, "policy.fused_rope=true")
    yield from difference("fused from plain", fused, plain)
    yield from compared(fused, reference_of(setting), BFLOAT16_LIMITS)


def optimizers(setting: Setting) -> Iterator[Figure]:
    """Compare AdamW of Transformer Engine and Apex to torch's, with float32 steps. Then compare
    bfloat16 moments and state in host memory."""
    ranks, exact = join_alone(), (LOCAL, "policy.precision=float32")
    wanted = run(setting, ranks, *exact, "optimizer.kernels=torch")
    packages = [name for name in ("transformer_engine", "apex") if has_gpu() and find_spec(name)]
    for name in packages:
        result = run(setting, ranks, *exact, f"optimizer.kernels={name}")
        gap = (result["after"] - wanted["after"]).abs().max()
        yield at_most(f"{name}, log-probs after {NUM_STEPS} steps", float(gap), 1e-3)
    whole = run(setting, ranks, LOCAL, SHORT, "optimizer.kernels=torch")
    variants = {"state in host memory": ("optimizer.cpu_offload=1.0",)}
    if "transformer_engine" in packages:
        variants["bfloat16 moments"] = ("optimizer.moments=bfloat16",)
    for name, overrides in variants.items():
        result = run(setting, ranks, LOCAL, SHORT, *overrides)
        gap = (result["after"] - whole["after"]).abs().mean()
        yield at_most(f"{name}, log-probs after {NUM_STEPS} steps, mean", float(gap), 0.015)


# ---------------------------------------------------------------------------- FP8


def fp8(recipe: str, **more: object) -> str:
    """Return an override that selects this recipe."""
    return f"policy.fp8={yaml.safe_dump({'recipe': recipe, **more}, default_flow_style=True)}"


def shipped_fp8(**more: object) -> str:
    """Return an override with the FP8 settings of the shipped config."""
    return fp8(**{**yaml.safe_load(SHIPPED.read_text("utf-8"))["policy"]["fp8"], **more})


def fp8_shipped(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 as in model_configs/qwen3_8b_fp8.yaml to float32 on CPU, also with FP8 weights
    and float32 main copies."""
    ranks = join_alone()
    for name, settings in {"": shipped_fp8(), "parameters: ": shipped_fp8(parameters=True)}.items():
        yield from _fp8_steps(setting, ranks, name, settings)


def fp8_recipes(setting: Setting) -> Iterator[Figure]:
    """Compare the other FP8 recipes, FP8 weights and padded rows to float32 on CPU."""
    ranks = join_alone()
    for recipe in ("current", "delayed", "blockwise"):
        moves = recipe == "delayed"
        yield from _fp8_steps(setting, ranks, f"{recipe}: ", fp8(recipe), moves=moves)
    parameters = fp8("current", parameters=True)
    yield from _fp8_steps(setting, ranks, "current, parameters: ", parameters)
    padded_rows = (fp8("current"), "train.packing=false")
    yield from _fp8_steps(setting, ranks, "current, padded: ", *padded_rows)


def fp8_experts(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 in a mixture of experts, which pads per expert, to float32 on CPU."""
    ranks = join_alone()
    for recipe in ("current", "blockwise"):
        yield from _fp8_steps(setting, ranks, f"{recipe}: ", fp8(recipe), model=EXPERTS)


def _fp8_steps(
    setting: Setting,
    ranks: Ranks,
    name: str,
    *overrides: str,
    model: str = DENSE,
    moves: bool = False,
) -> Iterator[Figure]:
    result = run(setting, ranks, FUSED, SHORT, *overrides, model=model)
    yield from compared(result, reference_of(setting, model), FP8_LIMITS, name)
    yield from ratios(result, name, moves=moves)
