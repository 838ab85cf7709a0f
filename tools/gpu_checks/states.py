"""State of a policy: recomputed activations, checkpoints, offload to host memory."""

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
from gpu_checks.catalog import Figure, at_most, holds, reported
from gpu_checks.rig import (
    GIB,
    Setting,
    has_gpu,
    has_te,
    join_alone,
    likelihood,
    make_config,
    make_policy,
    random_batch,
    seconds_of,
)
from gpu_checks.steps import DENSE, FUSED, LR, ROW_TOKENS, SHORT, batch_of_steps, ratios, run
from gpu_checks.training import fp8, shipped_fp8

# ---------------------------------------------------------------------------- recomputation


def recompute(setting: Setting) -> Iterator[Figure]:
    """Recompute activations, with the kernels of `auto`: the same steps with less memory."""
    yield from _recomputed(setting, "bfloat16", ("selective", "full"), SHORT)


def recompute_fp8(setting: Setting) -> Iterator[Figure]:
    """Recompute activations in FP8, as shipped and with scales from a history."""
    yield from _recomputed(setting, "shipped", ("selective", "full"), FUSED, SHORT, shipped_fp8())
    yield from _recomputed(setting, "delayed", ("full",), FUSED, SHORT, fp8("delayed"))


def _recomputed(
    setting: Setting, what: str, kinds: tuple[str, ...], *overrides: str
) -> Iterator[Figure]:
    ranks, runs = join_alone(), {}
    for kind in ("none", *kinds):
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
        runs[kind] = run(setting, ranks, *overrides, f"policy.recompute={kind}")
        if has_gpu():
            peak = torch.cuda.max_memory_allocated() / GIB
            yield reported(f"{what}, {kind}: peak of tensors", peak, "GiB")
    kept = runs.pop("none")
    for kind, result in runs.items():
        same = torch.equal(result["logprobs"], kept["logprobs"])
        yield holds(f"{what}, {kind}: log-probs have the same bits", same)
        norm = abs(result["norms"][0] / kept["norms"][0] - 1.0)
        yield at_most(f"{what}, {kind}: gradient norm, relative", norm, 1e-3)
        gap = (result["after"] - kept["after"]).abs().mean()
        yield at_most(f"{what}, {kind}: log-probs after the steps, mean", float(gap), 0.015)
        yield from ratios(result, f"{what}, {kind}: ", moves=what == "delayed")


# ---------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class _Next:
    """Log-probs before and after a policy's next update, and its gradient norm."""

    before_T: Tensor
    after_T: Tensor
    norm: float


def checkpoint(setting: Setting) -> Iterator[Figure]:
    """Save a bfloat16 checkpoint with the AdamW of `auto`, load it, and continue."""
    ranks = join_alone()
    yield from _round_trip(setting, ranks, "auto", SHORT)
    if has_te():
        fused = ("optimizer.kernels=transformer_engine", "optimizer.moments=bfloat16")
        yield from _round_trip(setting, ranks, "bfloat16 moments", SHORT, *fused)


def checkpoint_fp8(setting: Setting) -> Iterator[Figure]:
    """Save, load and continue checkpoints of weights that exist only in FP8."""
    ranks = join_alone()
    for name, settings in (
        ("current", fp8("current", parameters=True)),
        ("shipped", shipped_fp8(parameters=True)),
    ):
        yield from _round_trip(setting, ranks, name, FUSED, SHORT, settings)


def _round_trip(setting: Setting, ranks: Ranks, what: str, *overrides: str) -> Iterator[Figure]:
    """Make two updates, a checkpoint, and one more update. A new policy loads the checkpoint and
    makes the same update."""
    config = make_config(setting, DENSE, *overrides, row_tokens=ROW_TOKENS)
    folders = [setting.workspace / f"checkpoint_{number}" for number in range(2)]
    checksums, nexts = [], []
    for number, folder in enumerate(folders):
        policy = make_policy(config, ranks)
        batch = batch_of_steps(setting, policy.architecture.vocab_size)
        if number:
            ranks.barrier()
            policy.load(folders[0])
        else:
            for _ in range(2):
                policy.update(batch, likelihood, LR)
        checksums.append(_save(policy, ranks, folder))
        nexts.append(_next(policy, batch))
        policy.close()
    ranks.barrier()
    for folder in folders if ranks.rank == 0 else ():
        shutil.rmtree(folder)
    saved, loaded = nexts
    yield holds(
        f"{what}: a loaded checkpoint is saved with the same bits", checksums[0] == checksums[1]
    )
    same = torch.equal(saved.before_T, loaded.before_T)
    yield holds(f"{what}: log-probs after loading have the same bits", same)
    norm = abs(loaded.norm / saved.norm - 1.0)
    yield at_most(f"{what}: next update's gradient norm, relative", norm, 1e-3)
    gap = (loaded.after_T - saved.after_T).abs()
    yield reported(f"{what}: log-probs after the next update, largest", float(gap.max()))
    # Without the moments or their step count, weights would move by the learning rate.
    yield at_most(f"{what}: log-probs after the next update, mean", float(gap.mean()), 0.005)


def _save(policy: Any, ranks: Ranks, folder: Path) -> dict[str, str]:
    """Write a checkpoint. Return the checksums of this rank's file."""
    folder.mkdir(exist_ok=True)
    snapshot = policy.snapshot()
    snapshot.write(folder)
    snapshot.finish(folder, ranks)
    checksums: dict[str, str] = snapshot.checksums
    return checksums


def _next(policy: Any, batch: Any) -> _Next:
    before_T = policy.logprobs(batch).logprobs
    norm = policy.update(batch, likelihood, LR).grad_norm
    return _Next(before_T, policy.logprobs(batch).logprobs, norm)


# ---------------------------------------------------------------------------- memory


def offload(setting: Setting) -> Iterator[Figure]:
    """Move weights and optimizer state to host memory and back, and copy them for a checkpoint."""
    yield from _offloaded(setting, join_alone())


def offload_fp8(setting: Setting) -> Iterator[Figure]:
    """Move FP8 policies to host memory and back, with weights in bfloat16 and only in FP8."""
    ranks = join_alone()
    for parameters in (False, True):
        yield from _offloaded(setting, ranks, FUSED, SHORT, shipped_fp8(parameters=parameters))


def _offloaded(setting: Setting, ranks: Ranks, *overrides: str) -> Iterator[Figure]:
    everything = "policy.offload=[weights, gradients, optimizer]"
    config = make_config(setting, "0.6b", everything, *overrides)
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
    yield holds(
        "log-probs have the same bits", torch.equal(before, policy.logprobs(batch).logprobs)
    )
    yield reported("freed", freed, "GiB")
    yield reported("first offload (pins host memory)", leave[0], "s")
    yield reported("offload", leave[-1], "s")
    yield reported("onload", back[-1], "s")
    if freed > 0:
        yield reported("offload, of what is freed", freed / leave[-1], "GiB/s")
        yield reported("onload, of what is freed", freed / back[-1], "GiB/s")
    yield reported("checkpoint's copy, first", seconds_of(policy.snapshot, 1, 0), "s")
    yield reported("checkpoint's copy", seconds_of(policy.snapshot, 1, 0), "s")
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
