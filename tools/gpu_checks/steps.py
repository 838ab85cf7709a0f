"""The same few training steps in two ways, and how far apart they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import LossOutput, MicroTokens, TokenBatch
from gpu_checks.figures import Figure, at_most, holds, told
from gpu_checks.rig import (
    PROMPT_TOKENS,
    Setting,
    has_gpu,
    likelihood,
    make_config,
    make_policy,
    one_rank,
    random_batch,
)

DENSE, EXPERTS = "0.5b", "moe"
NUM_STEPS = 4
LR = 1e-4
# Two rows of 304 tokens at most. No length is a multiple of 16, nor is a row: FP8 has to pad.
LENGTHS, ROW_TOKENS = (97, 61, 131, 45, 83, 89), 304
TINY_LENGTHS = (17, 101, 149)
LOCAL = "policy.kernels=local"
FUSED = "policy.kernels=transformer_engine"
SHORT = "policy.precision=bfloat16"

# Of bfloat16 (8 bits) and FP8 (4 bits of E4M3) against float32, of a model of random weights: mean
# difference of log-probs, and of loss and gradient norm, relative.
Limits = tuple[float, float, float]
BFLOAT16_LIMITS: Limits = (0.015, 0.002, 0.03)
FP8_LIMITS: Limits = (0.05, 0.01, 0.10)


def batch_of_steps(setting: Setting, vocab: int) -> TokenBatch:
    """What every comparison is made on."""
    return random_batch(setting.pick(LENGTHS, TINY_LENGTHS), vocab)


def run(setting: Setting, ranks: Ranks, *overrides: str, model: str = DENSE) -> dict[str, Any]:
    """Log-probs of a fixed batch, then steps on it.

    `ratios`: of the first update, per micro-batch, the largest |log-prob - old log-prob|, old ones
    being those that `logprobs` gave just before. `ratios_prompts`: of one more update, with prompts
    that are not in the loss, so that the head gets fewer rows than it had in `logprobs`."""
    clip = "optimizer.clip_grad=1.0"
    config = make_config(setting, model, clip, *overrides, row_tokens=ROW_TOKENS)
    policy = make_policy(config, ranks)
    batch = batch_of_steps(setting, policy.architecture.vocab_size)
    before = policy.logprobs(batch).logprobs
    watched = Watched()
    stats = [policy.update(replace(batch, old_logprobs=before), watched, LR)]
    stats += [policy.update(batch, likelihood, LR) for _ in range(NUM_STEPS - 1)]
    after = policy.logprobs(batch).logprobs
    lengths = batch.lengths.tolist()
    prompted = random_batch(lengths, policy.architecture.vocab_size, prompt=PROMPT_TOKENS)
    watched_prompts = Watched()
    policy.update(replace(prompted, old_logprobs=after), watched_prompts, LR)
    policy.close()
    return {
        "logprobs": before,
        "after": after,
        "losses": [one.loss for one in stats],
        "norms": [one.grad_norm for one in stats],
        "ratios": watched.gaps,
        "ratios_prompts": watched_prompts.gaps,
    }


class Watched:
    """`likelihood`, and how far each micro-batch's log-probs are from the old ones."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def __call__(self, logp: Tensor, inputs: MicroTokens) -> LossOutput:
        if logp.numel():
            gap = (logp.detach() - inputs.old_logprobs).abs()
            self.gaps.append(float((gap * inputs.mask).max()))
        return likelihood(logp, inputs)


# ---------------------------------------------------------------------------- the reference


def reference(setting: Setting) -> Iterator[Figure]:
    """Not a check: the dense model's reference, made by a process that sees no GPU."""
    yield from _make_reference(setting, DENSE)


def reference_moe(setting: Setting) -> Iterator[Figure]:
    """Not a check: as `reference`, of the mixture of experts."""
    yield from _make_reference(setting, EXPERTS)


_MAKER = {DENSE: "reference", EXPERTS: "reference_moe"}


def _make_reference(setting: Setting, model: str) -> Iterator[Figure]:
    assert not has_gpu()
    exact = (LOCAL, "policy.precision=float32", "optimizer.kernels=torch")
    found = run(setting, one_rank(), *exact, model=model)
    torch.save(found, setting.workspace / f"{_MAKER[model]}.pt")
    yield told("reference loss", found["losses"][0])


def reference_of(setting: Setting, model: str = DENSE) -> dict[str, Any]:
    """The same steps in float32 on the CPU, computed once per workspace."""
    name = _MAKER[model]
    kept = setting.workspace / f"{name}.pt"
    if not kept.exists():
        setting.model(model)  # by this process: a GPU's random numbers are its own
        command = [sys.executable, str(Path(__file__).parents[1] / "gpu_check.py")]
        command += ["--child", name, "--workspace", str(setting.workspace)]
        command += ["--shapes", setting.pick("real", "tiny")]
        blind = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=blind, check=True)
    found: dict[str, Any] = torch.load(kept)
    return found


# ---------------------------------------------------------------------------- figures


def compared(
    found: dict[str, Any], wanted: dict[str, Any], limits: Limits, what: str = ""
) -> Iterator[Figure]:
    """Of steps against the reference; `what` is before each figure's name."""
    mean, loss, norm = limits
    gap_T = (found["logprobs"] - wanted["logprobs"]).abs()
    yield at_most(f"{what}log-probs, mean difference", float(gap_T.mean()), mean)
    yield told(f"{what}log-probs, largest difference", float(gap_T.max()))
    yield at_most(f"{what}loss, relative", _relative(found, wanted, "losses"), loss)
    yield at_most(f"{what}gradient norm, relative", _relative(found, wanted, "norms"), norm)
    gap = found["losses"][-1] - wanted["losses"][-1]
    yield told(f"{what}loss of step {NUM_STEPS}, difference", gap)
    falls = found["losses"] == sorted(found["losses"])[::-1]
    yield holds(f"{what}loss falls at every step", falls)


def ratios(found: dict[str, Any], what: str = "", *, moves: bool = False) -> Iterator[Figure]:
    """Whether the first update sees the old log-probs: its ratios are then exactly 1. `moves`:
    scales change after each micro-batch with gradients, so this holds of the first alone."""
    first, *later = found["ratios"]
    cases = [("micro-batch 1", first, 0.0, True)]
    cases += [(f"micro-batch {number}", gap, 0.0, not moves) for number, gap in enumerate(later, 2)]
    cases.append(("prompts not in the loss", max(found["ratios_prompts"]), 1e-4, not moves))
    for case, gap, limit, is_held in cases:
        name = f"{what}|log ratio| of a first update, {case}"
        yield at_most(name, gap, limit) if is_held else told(name, gap)


def difference(
    name: str, one: dict[str, Any], other: dict[str, Any], limit: float = 0.015
) -> Iterator[Figure]:
    """Between two runs on the same device: log-probs before and after the steps."""
    for moment, key in (("before", "logprobs"), (f"after {NUM_STEPS} steps", "after")):
        gap_T = (one[key] - other[key]).abs()
        yield at_most(f"{name}, log-probs {moment}, mean", float(gap_T.mean()), limit)
        yield told(f"{name}, log-probs {moment}, largest", float(gap_T.max()))


def _relative(found: dict[str, Any], wanted: dict[str, Any], name: str) -> float:
    return float(abs(found[name][0] / wanted[name][0] - 1.0))
