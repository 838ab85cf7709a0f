"""The same few training steps computed in two ways, and their differences."""

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
from gpu_checks.catalog import Figure, at_most, holds, reported
from gpu_checks.rig import (
    PROMPT_TOKENS,
    REPOSITORY,
    Setting,
    has_gpu,
    join_alone,
    likelihood,
    make_config,
    make_policy,
    random_batch,
)
from gpu_checks.shapes import made_once

DENSE, EXPERTS, EXPERTS_TOP_8 = "0.5b", "moe", "moe_top8"
NUM_STEPS = 4
LR = 1e-4
# More than one row. Lengths are not multiples of 16, so FP8 has to pad.
LENGTHS, ROW_TOKENS = (97, 61, 131, 45, 83, 89, 71), 304
TINY_LENGTHS = (17, 101, 149)
LOCAL = "policy.kernels=local"
FUSED = "policy.kernels=transformer_engine"
SHORT = "policy.precision=bfloat16"

# Limits for bfloat16 (8 bits) and FP8 (4 bits of E4M3) against float32, with random weights: mean
# difference of log-probs, relative difference of loss, and relative difference of gradient norm.
Limits = tuple[float, float, float]
BFLOAT16_LIMITS: Limits = (0.015, 0.002, 0.03)
FP8_LIMITS: Limits = (0.05, 0.01, 0.10)


def batch_of_steps(setting: Setting, vocab: int) -> TokenBatch:
    """Return the batch that all comparisons use."""
    return random_batch(setting.pick(LENGTHS, TINY_LENGTHS), vocab)


def run(setting: Setting, ranks: Ranks, *overrides: str, model: str = DENSE) -> dict[str, Any]:
    """Compute log-probs of a fixed batch, then training steps on it.

    `ratios`: the largest |log-prob - old log-prob| of each micro-batch in the first update. The old
    log-probs were computed just before. `ratios_prompts`: the same for one more update, with
    prompts outside the loss, so that the head gets fewer tokens than in the pass for log-probs.
    """
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
        "losses": [step.loss for step in stats],
        "norms": [step.grad_norm for step in stats],
        "ratios": watched.gaps,
        "ratios_prompts": watched_prompts.gaps,
    }


class Watched:
    """`likelihood`, which records each micro-batch's largest |log-prob - old log-prob|."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def __call__(self, logp: Tensor, inputs: MicroTokens) -> LossOutput:
        if logp.numel():
            gap = (logp.detach() - inputs.old_logprobs).abs()
            self.gaps.append(float((gap * inputs.mask).max()))
        return likelihood(logp, inputs)


# ---------------------------------------------------------------------------- the reference


def reference_of(setting: Setting, model: str = DENSE) -> dict[str, Any]:
    """Return the results of the same steps in float32 on the CPU, computed once per workspace in a
    process that sees no GPU."""
    path = setting.workspace / f"reference_{model}.pt"
    setting.model(model)  # made by this process, because random numbers of a GPU are different
    with made_once(path) as is_missing:
        if is_missing:
            folders = map(str, (REPOSITORY, *(REPOSITORY / "tools" / at for at in ("", "bench"))))
            environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(folders)}
            command = [sys.executable, "-m", "gpu_checks.steps", model, str(path)]
            command += ["--tiny"] if setting.tiny else []
            subprocess.run(command, env=os.environ | environment, check=True)
    result: dict[str, Any] = torch.load(path)
    return result


def _make_reference(setting: Setting, model: str, path: Path) -> None:
    assert not has_gpu()
    exact = (LOCAL, "policy.precision=float32", "optimizer.kernels=torch")
    torch.save(run(setting, join_alone(), *exact, model=model), path)


# ---------------------------------------------------------------------------- figures


def compared(
    result: dict[str, Any], wanted: dict[str, Any], limits: Limits, what: str = ""
) -> Iterator[Figure]:
    """Compare steps with the reference. `what` starts each figure's name."""
    mean, loss, norm = limits
    gap_T = (result["logprobs"] - wanted["logprobs"]).abs()
    yield at_most(f"{what}log-probs, mean difference", float(gap_T.mean()), mean)
    yield reported(f"{what}log-probs, largest difference", float(gap_T.max()))
    yield at_most(f"{what}loss, relative", _relative(result, wanted, "losses"), loss)
    yield at_most(f"{what}gradient norm, relative", _relative(result, wanted, "norms"), norm)
    gap = result["losses"][-1] - wanted["losses"][-1]
    yield reported(f"{what}loss of step {NUM_STEPS}, difference", gap)
    falls = result["losses"] == sorted(result["losses"])[::-1]
    yield holds(f"{what}loss falls at every step", falls)


def ratios(result: dict[str, Any], what: str = "", *, moves: bool = False) -> Iterator[Figure]:
    """Check that the first update computes the old log-probs, so that its ratios are exactly 1.

    `moves`: scales change after each micro-batch with gradients. Then only the first micro-batch is
    required to have ratios of 1.
    """
    first, *later = result["ratios"]
    cases = [("micro-batch 1", first, 0.0, True)]
    cases += [(f"micro-batch {number}", gap, 0.0, not moves) for number, gap in enumerate(later, 2)]
    cases.append(("prompts not in the loss", max(result["ratios_prompts"]), 1e-4, not moves))
    for case, gap, limit, is_held in cases:
        name = f"{what}|log ratio| of a first update, {case}"
        yield at_most(name, gap, limit) if is_held else reported(name, gap)


def difference(
    name: str, result: dict[str, Any], other: dict[str, Any], limit: float = 0.015
) -> Iterator[Figure]:
    """Compare two runs on the same device: log-probs before and after the steps."""
    for moment, key in (("before", "logprobs"), (f"after {NUM_STEPS} steps", "after")):
        gap_T = (result[key] - other[key]).abs()
        yield at_most(f"{name}, log-probs {moment}, mean", float(gap_T.mean()), limit)
        yield reported(f"{name}, log-probs {moment}, largest", float(gap_T.max()))


def _relative(result: dict[str, Any], wanted: dict[str, Any], name: str) -> float:
    return float(abs(result[name][0] / wanted[name][0] - 1.0))


if __name__ == "__main__":
    _model, _path, *_options = sys.argv[1:]
    _make_reference(Setting(Path(_path).parent, "--tiny" in _options), _model, Path(_path))
