"""Training steps: bfloat16, FP8, kernels and optimizers against the same code in float32 on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dapo_megatron.cluster.ranks import Ranks
from gpu_checks.figures import Figure, at_most, holds, told
from gpu_checks.rig import (
    Setting,
    has_gpu,
    likelihood,
    make_config,
    make_policy,
    one_rank,
    random_batch,
    seconds_of,
)

MODEL = "0.5b"
NUM_STEPS = 4
LR = 1e-4
LENGTHS = (96, 64, 128, 48, 80, 96)  # multiples of 16: FP8 pads no token
LOCAL = "policy.kernels=local"
FUSED = "policy.kernels=transformer_engine"

# Of bfloat16 (8 bits) and FP8 (4 bits of E4M3) against float32, of a model of random weights: mean
# difference of log-probs, and of loss and gradient norm, relative.
BFLOAT16_LIMITS = (0.015, 0.002, 0.03)
FP8_LIMITS = (0.05, 0.01, 0.10)


def run(setting: Setting, ranks: Ranks, *overrides: str) -> dict[str, Any]:
    """Log-probs of a fixed batch, then steps on it: losses and gradient norms."""
    config = make_config(setting, MODEL, "optimizer.clip_grad=1.0", *overrides, row_tokens=512)
    policy = make_policy(config, ranks)
    lengths = setting.pick(LENGTHS, (16, 32))
    batch = random_batch(lengths, policy.architecture.vocab)
    before = policy.logprobs(batch, temperature=1.0).logprobs
    stats = [policy.update(batch, likelihood, LR) for _ in range(NUM_STEPS)]
    after = policy.logprobs(batch, temperature=1.0).logprobs
    policy.close()
    return {
        "logprobs": before,
        "after": after,
        "losses": [one.loss for one in stats],
        "norms": [one.grad_norm for one in stats],
    }


def reference(setting: Setting) -> Iterator[Figure]:
    """Not a check: what `_reference` asks of a process that sees no GPU."""
    assert not has_gpu()
    found = run(setting, one_rank(), LOCAL, "policy.precision=float32", "optimizer.kernels=torch")
    torch.save(found, setting.workspace / "reference.pt")
    yield told("reference loss", found["losses"][0])


def _reference(setting: Setting) -> dict[str, Any]:
    """The same steps in float32 on the CPU, computed once per workspace."""
    kept = setting.workspace / "reference.pt"
    if not kept.exists():
        command = [sys.executable, str(Path(__file__).parents[1] / "gpu_check.py")]
        command += ["--child", "reference", "--workspace", str(setting.workspace)]
        command += ["--shapes", setting.pick("real", "tiny")]
        blind = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=blind, check=True)
    found: dict[str, Any] = torch.load(kept)
    return found


def _compared(
    found: dict[str, Any], wanted: dict[str, Any], limits: tuple[float, float, float]
) -> Iterator[Figure]:
    mean, loss, norm = limits
    gap_T = (found["logprobs"] - wanted["logprobs"]).abs()
    yield at_most("log-probs, mean difference", float(gap_T.mean()), mean)
    yield told("log-probs, largest difference", float(gap_T.max()))
    yield at_most("loss, relative", _relative(found, wanted, "losses"), loss)
    yield at_most("gradient norm, relative", _relative(found, wanted, "norms"), norm)
    gap = found["losses"][-1] - wanted["losses"][-1]
    yield told(f"loss of step {NUM_STEPS}, difference", gap)
    yield holds("loss falls at every step", found["losses"] == sorted(found["losses"])[::-1])


def _relative(found: dict[str, Any], wanted: dict[str, Any], name: str) -> float:
    return float(abs(found[name][0] / wanted[name][0] - 1.0))


def bfloat16(setting: Setting) -> Iterator[Figure]:
    """Steps in bfloat16, Megatron's own layers, against float32 on CPU."""
    found = run(setting, one_rank(), LOCAL, "policy.precision=bfloat16")
    yield from _compared(found, _reference(setting), BFLOAT16_LIMITS)


def transformer_engine(setting: Setting) -> Iterator[Figure]:
    """Transformer Engine's layers: against float32 on CPU, and against Megatron's own."""
    ranks, short = one_rank(), "policy.precision=bfloat16"
    found = run(setting, ranks, FUSED, short)
    yield from _compared(found, _reference(setting), BFLOAT16_LIMITS)
    local = run(setting, ranks, LOCAL, short)
    gap_T = (found["logprobs"] - local["logprobs"]).abs()
    yield at_most("log-probs, mean difference from local kernels", float(gap_T.mean()), 0.015)


def rope(setting: Setting) -> Iterator[Figure]:
    """The fused rotary embedding against the plain one (NVIDIA-NeMo/RL issue 1801)."""
    ranks, short = one_rank(), "policy.precision=bfloat16"
    plain = run(setting, ranks, FUSED, short)
    fused = run(setting, ranks, FUSED, short, "policy.fused_rope=true")
    for name, moment in (("before", "logprobs"), (f"after {NUM_STEPS} steps", "after")):
        gap_T = (fused[moment] - plain[moment]).abs()
        yield at_most(f"log-probs {name}, mean difference", float(gap_T.mean()), 0.015)
        yield told(f"log-probs {name}, largest difference", float(gap_T.max()))
    yield from _compared(fused, _reference(setting), BFLOAT16_LIMITS)


def fp8_current(setting: Setting) -> Iterator[Figure]:
    """Steps in FP8, scales from each tensor, against float32 on CPU."""
    yield from _fp8(setting, "current")


def fp8_delayed(setting: Setting) -> Iterator[Figure]:
    """Steps in FP8, scales from a history, against float32 on CPU."""
    yield from _fp8(setting, "delayed")


def fp8_blockwise(setting: Setting) -> Iterator[Figure]:
    """Steps in FP8, scales of blocks, against float32 on CPU."""
    yield from _fp8(setting, "blockwise")


def fp8_ends(setting: Setting) -> Iterator[Figure]:
    """FP8 with two layers at either end in bfloat16."""
    yield from _fp8(setting, "current", "bf16_first_layers: 2, bf16_last_layers: 2")


def fp8_parameters(setting: Setting) -> Iterator[Figure]:
    """Weights in FP8 alone, beside their float32 copies."""
    yield from _fp8(setting, "current", "parameters: true")


def _fp8(setting: Setting, recipe: str, more: str = "") -> Iterator[Figure]:
    recipe = f"policy.fp8={{recipe: {recipe}{', ' if more else ''}{more}}}"
    found = run(setting, one_rank(), FUSED, "policy.precision=bfloat16", recipe)
    yield from _compared(found, _reference(setting), FP8_LIMITS)


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
    short = (LOCAL, "policy.precision=bfloat16")
    whole = run(setting, ranks, *short, "optimizer.kernels=torch")
    variants = {"state in host memory": ("optimizer.cpu_offload=1.0",)}
    if "transformer_engine" in packages:
        variants["bfloat16 moments"] = ("optimizer.moments=bfloat16",)
    for name, overrides in variants.items():
        found = run(setting, ranks, *short, *overrides)
        gap = (found["after"] - whole["after"]).abs().mean()
        yield at_most(f"{name}, log-probs after {NUM_STEPS} steps, mean", float(gap), 0.015)


def offload(setting: Setting) -> Iterator[Figure]:
    """Weights and optimizer state to host memory and back; a checkpoint's copy."""
    model = "0.6b" if setting.quick else setting.pick("0.6b", "tiny")
    everything = "policy.offload=[weights, gradients, optimizer]"
    config = make_config(setting, model, everything)
    policy = make_policy(config, one_rank())
    batch = random_batch((32, 32), policy.architecture.vocab)
    policy.update(batch, likelihood, LR)
    policy.onload()
    before = policy.logprobs(batch).logprobs
    full = _used()
    leave, back = [], []
    for _ in range(3):
        leave.append(seconds_of(policy.offload, repeats=1, warm_ups=0))
        freed = full - _used()
        back.append(seconds_of(policy.onload, repeats=1, warm_ups=0))
    yield holds("log-probs are the same bits", torch.equal(before, policy.logprobs(batch).logprobs))
    yield told("freed", freed, "GiB")
    yield told("first offload (pins host memory)", leave[0], "s")
    yield told("offload", leave[-1], "s")
    yield told("onload", back[-1], "s")
    if freed > 0:
        yield told("offload, of what is freed", freed / leave[-1], "GiB/s")
        yield told("onload, of what is freed", freed / back[-1], "GiB/s")
    yield told("checkpoint's copy, first", seconds_of(policy.snapshot, 1, 0), "s")
    yield told("checkpoint's copy", seconds_of(policy.snapshot, 1, 0), "s")


def _used() -> float:
    return torch.cuda.memory_allocated() / 2**30 if has_gpu() else 0.0
