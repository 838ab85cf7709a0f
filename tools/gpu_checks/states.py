"""What a policy keeps and gives back: activations, checkpoints, memory while others compute."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import Shard
from gpu_checks.figures import Figure, at_most, holds, told
from gpu_checks.fp8 import fp8, shipped_settings
from gpu_checks.rig import (
    GIB,
    Setting,
    has_gpu,
    has_te,
    likelihood,
    make_config,
    make_policy,
    one_rank,
    random_batch,
    seconds_of,
)
from gpu_checks.steps import DENSE, FUSED, LR, ROW_TOKENS, SHORT, batch_of_steps, ratios, run

# ---------------------------------------------------------------------------- recomputation


def recompute(setting: Setting) -> Iterator[Figure]:
    """Activations computed again, the kernels that `auto` takes: the same steps, less memory."""
    yield from _recomputed(setting, "bfloat16", ("selective", "full"), SHORT)


def recompute_fp8(setting: Setting) -> Iterator[Figure]:
    """Activations computed again in FP8: scales of each tensor, from a history, and as shipped."""
    for recipe in ("current", "delayed"):
        yield from _recomputed(setting, recipe, ("full",), FUSED, SHORT, fp8(recipe))
    shipped = fp8(**shipped_settings())  # type: ignore[arg-type]
    yield from _recomputed(setting, "shipped", ("selective", "full"), FUSED, SHORT, shipped)


def _recomputed(
    setting: Setting, what: str, kinds: tuple[str, ...], *overrides: str
) -> Iterator[Figure]:
    ranks, runs = one_rank(), {}
    for kind in ("none", *kinds):
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
        runs[kind] = run(setting, ranks, *overrides, f"policy.recompute={kind}")
        if has_gpu():
            peak = torch.cuda.max_memory_allocated() / GIB
            yield told(f"{what}, {kind}: peak of tensors", peak, "GiB")
    kept = runs.pop("none")
    for kind, found in runs.items():
        same = torch.equal(found["logprobs"], kept["logprobs"])
        yield holds(f"{what}, {kind}: log-probs are the same bits", same)
        norm = abs(found["norms"][0] / kept["norms"][0] - 1.0)
        yield at_most(f"{what}, {kind}: gradient norm, relative", norm, 1e-3)
        gap = (found["after"] - kept["after"]).abs().mean()
        yield at_most(f"{what}, {kind}: log-probs after the steps, mean", float(gap), 0.015)
        yield from ratios(found, f"{what}, {kind}: ", moves=what == "delayed")


# ---------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class _Next:
    """What a policy does next."""

    before_T: Tensor
    after_T: Tensor
    norm: float


def checkpoint(setting: Setting) -> Iterator[Figure]:
    """A checkpoint in bfloat16, by the AdamW that `auto` takes: saved, loaded, gone on with."""
    ranks = one_rank()
    yield from _round_trip(setting, ranks, "auto", SHORT)
    if has_te():
        fused = ("optimizer.kernels=transformer_engine", "optimizer.moments=bfloat16")
        yield from _round_trip(setting, ranks, "bfloat16 moments", SHORT, *fused)


def checkpoint_fp8(setting: Setting) -> Iterator[Figure]:
    """Checkpoints of weights that are in FP8 alone."""
    ranks = one_rank()
    recipes: dict[str, dict[str, Any]] = {
        "current": {"recipe": "current"},
        "shipped": shipped_settings(),
    }
    for name, settings in recipes.items():
        override = fp8(**(settings | {"parameters": True}))
        yield from _round_trip(setting, ranks, name, FUSED, SHORT, override)


def _round_trip(setting: Setting, ranks: Ranks, what: str, *overrides: str) -> Iterator[Figure]:
    """Two updates, a checkpoint, one more; a new policy loads it and does that one too."""
    config = make_config(setting, DENSE, *overrides, row_tokens=ROW_TOKENS)
    folders = [setting.workspace / f"checkpoint_{number}" for number in range(2)]
    checksums, nexts = [], []
    for number, folder in enumerate(folders):
        policy = make_policy(config, ranks)
        batch = batch_of_steps(setting, policy.architecture.vocab_size)
        if number:
            policy.load(folders[0])
        else:
            for _ in range(2):
                policy.update(batch, likelihood, LR)
        checksums.append(_save(policy, folder))
        nexts.append(_next(policy, batch))
        policy.close()
    for folder in folders:
        shutil.rmtree(folder)
    saved, loaded = nexts
    yield holds(
        f"{what}: what was loaded, saved again, is the same bits", checksums[0] == checksums[1]
    )
    same = torch.equal(saved.before_T, loaded.before_T)
    yield holds(f"{what}: log-probs after loading are the same bits", same)
    norm = abs(loaded.norm / saved.norm - 1.0)
    yield at_most(f"{what}: next update's gradient norm, relative", norm, 1e-3)
    gap = (loaded.after_T - saved.after_T).abs()
    yield told(f"{what}: log-probs after the next update, largest", float(gap.max()))
    # A loss of moments or of their step would move the weights by the learning rate.
    yield at_most(f"{what}: log-probs after the next update, mean", float(gap.mean()), 0.005)


def _save(policy: Any, folder: Path) -> dict[str, str]:
    """A checkpoint's file in this folder; its sums."""
    folder.mkdir()
    snapshot = policy.snapshot()
    snapshot.write(folder)
    checksums: dict[str, str] = snapshot.checksums
    return checksums


def _next(policy: Any, batch: Any) -> _Next:
    before_T = policy.logprobs(batch).logprobs
    norm = policy.update(batch, likelihood, LR).grad_norm
    return _Next(before_T, policy.logprobs(batch).logprobs, norm)


# ---------------------------------------------------------------------------- memory


def offload(setting: Setting) -> Iterator[Figure]:
    """Weights and optimizer state to host memory and back; a checkpoint's copy."""
    yield from _offloaded(setting, one_rank())


def offload_fp8(setting: Setting) -> Iterator[Figure]:
    """The same in FP8 as shipped, its weights in bfloat16 and in FP8 alone; weights replaced."""
    ranks = one_rank()
    for parameters in (False, True):
        settings = fp8(**{**shipped_settings(), "parameters": parameters})  # type: ignore[arg-type]
        yield from _offloaded(setting, ranks, FUSED, SHORT, settings)


def _offloaded(setting: Setting, ranks: Ranks, *overrides: str) -> Iterator[Figure]:
    model = "0.6b" if setting.quick else setting.pick("0.6b", "tiny")
    everything = "policy.offload=[weights, gradients, optimizer]"
    config = make_config(setting, model, everything, *overrides)
    policy = make_policy(config, ranks)
    batch = random_batch((32, 32), policy.architecture.vocab_size)
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
    policy.rewrite(_raise)
    after = policy.logprobs(batch).logprobs
    replaced = bool(after.isfinite().all()) and not torch.equal(before, after)
    yield holds("weights can be replaced", replaced)
    policy.close()


def _raise(shards: Iterable[Shard]) -> None:
    for shard in shards:
        shard.write(shard.read() * 1.125)


def _used() -> float:
    return torch.cuda.memory_allocated() / 2**30 if has_gpu() else 0.0
