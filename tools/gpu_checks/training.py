"""Training steps in bfloat16: kernels, rows and optimizers, against float32 on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from gpu_checks.figures import Figure, at_most, told
from gpu_checks.rig import Setting, has_gpu, has_te, one_rank
from gpu_checks.steps import (
    BFLOAT16_LIMITS,
    EXPERTS,
    FUSED,
    LOCAL,
    NUM_STEPS,
    SHORT,
    compared,
    difference,
    ratios,
    reference_of,
    run,
)

HOPPER = (9, 0)


def bfloat16(setting: Setting) -> Iterator[Figure]:
    """Steps in bfloat16, Megatron's own layers, against float32 on CPU."""
    found = run(setting, one_rank(), LOCAL, SHORT)
    yield from compared(found, reference_of(setting), BFLOAT16_LIMITS)
    yield from ratios(found)


def transformer_engine(setting: Setting) -> Iterator[Figure]:
    """Transformer Engine's layers: against float32 on CPU, and against Megatron's own."""
    capability = torch.cuda.get_device_capability()
    if capability < HOPPER:
        what = "not a Hopper GPU: bfloat16 alone, attention by other kernels; compute capability"
        yield told(what, float("{}.{}".format(*capability)))
    ranks = one_rank()
    found = run(setting, ranks, FUSED, SHORT)
    yield from compared(found, reference_of(setting), BFLOAT16_LIMITS)
    yield from ratios(found)
    local = run(setting, ranks, LOCAL, SHORT)
    yield from difference("from local kernels", found, local)


def experts(setting: Setting) -> Iterator[Figure]:
    """A mixture of experts, 2 of 8 per token: local and grouped experts, against float32 on CPU."""
    ranks, wanted = one_rank(), reference_of(setting, EXPERTS)
    local = run(setting, ranks, LOCAL, SHORT, model=EXPERTS)
    yield from compared(local, wanted, BFLOAT16_LIMITS, "local: ")
    yield from ratios(local, "local: ")
    if has_te():
        grouped = run(setting, ranks, FUSED, SHORT, model=EXPERTS)
        yield from compared(grouped, wanted, BFLOAT16_LIMITS, "grouped: ")
        yield from ratios(grouped, "grouped: ")
        yield from difference("grouped from local experts", grouped, local)


def padded(setting: Setting) -> Iterator[Figure]:
    """Padded rows, of every kernel there is, against float32 on CPU (packed)."""
    ranks = one_rank()
    for name, kernels in {"local: ": LOCAL, "fused: ": FUSED}.items():
        if kernels == LOCAL or has_te():
            found = run(setting, ranks, kernels, SHORT, "train.packing=false")
            yield from compared(found, reference_of(setting), BFLOAT16_LIMITS, name)
            yield from ratios(found, name)


def rope(setting: Setting) -> Iterator[Figure]:
    """The fused rotary embedding against the plain one (NVIDIA-NeMo/RL issue 1801)."""
    ranks = one_rank()
    plain = run(setting, ranks, FUSED, SHORT)
    fused = run(setting, ranks, FUSED, SHORT, "policy.fused_rope=true")
    yield from difference("fused from plain", fused, plain)
    yield from compared(fused, reference_of(setting), BFLOAT16_LIMITS)


def optimizers(setting: Setting) -> Iterator[Figure]:
    """AdamW of Transformer Engine and Apex against torch's: the same steps in float32; then what
    bfloat16 moments and host memory change."""
    ranks, exact = one_rank(), (LOCAL, "policy.precision=float32")
    wanted = run(setting, ranks, *exact, "optimizer.kernels=torch")
    packages = [name for name in ("transformer_engine", "apex") if has_gpu() and find_spec(name)]
    for name in packages:
        found = run(setting, ranks, *exact, f"optimizer.kernels={name}")
        gap = (found["after"] - wanted["after"]).abs().max()
        yield at_most(f"{name}, log-probs after {NUM_STEPS} steps", float(gap), 1e-3)
    whole = run(setting, ranks, LOCAL, SHORT, "optimizer.kernels=torch")
    variants = {"state in host memory": ("optimizer.cpu_offload=1.0",)}
    if "transformer_engine" in packages:
        variants["bfloat16 moments"] = ("optimizer.moments=bfloat16",)
    for name, overrides in variants.items():
        found = run(setting, ranks, LOCAL, SHORT, *overrides)
        gap = (found["after"] - whole["after"]).abs().mean()
        yield at_most(f"{name}, log-probs after {NUM_STEPS} steps, mean", float(gap), 0.015)
