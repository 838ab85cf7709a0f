"""Engines: sampling, sleeping, receiving the policy's weights; and a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from dapo_megatron.cluster.instruments import MemoryMeter
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import Config
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import Machine, check
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.run.models import build_models, start_engines
from gpu_checks.catalog import Figure, at_least, at_most, holds, reported
from gpu_checks.rig import (
    ALONE,
    BASE,
    GIB,
    REPOSITORY,
    Setting,
    gaps,
    generate,
    has_gpu,
    is_judged,
    join_alone,
    likelihood,
    make_config,
    memory_gib,
    random_batch,
    used_gib,
)

STEP = 1.0 + 2.0**-6
"""Factor of all weights between syncs. It changes bfloat16 values."""
TARGET_GAP = 0.015
TARGET_ASLEEP_GIB = 2.0
TARGET_SYNC_SECONDS = {"0.6b": 0.1, "4b": 0.5}
PLAN_LIMIT = 0.10
QUICK_STEPS, TINY_STEPS = 20, 2


@contextmanager
def started(config: Config, ranks: Ranks) -> Iterator[Engines]:
    """Start the engines of a check, and end them at the end of the block."""
    engines = start_engines(config, ranks)
    try:
        yield engines
    finally:
        engines.close()


def sync_06b(setting: Setting) -> Iterator[Figure]:
    """Sync the 0.6B model: fingerprints, gap, duration, memory of a sleeping engine."""
    yield from _syncs(setting, "0.6b_sharp")


def sync_4b(setting: Setting) -> Iterator[Figure]:
    """Sync the 4B model, and measure the memory of its sleeping engine."""
    away = "policy.offload=[weights, gradients, optimizer]"
    if has_gpu() and memory_gib() < 100:
        # Main weights and moments of 4 billion parameters are 45 GiB.
        yield from _syncs(
            setting, "4b_sharp", "optimizer.cpu_offload=1.0", "policy.offload=[gradients]"
        )
    else:
        yield from _syncs(setting, "4b_sharp", away)


def engine_fp8(setting: Setting) -> Iterator[Figure]:
    """Sync an FP8 engine, which quantizes at each sync, and measure its gap to the policy."""
    yield from _syncs(setting, "0.6b_sharp", "engine.quantization=fp8", is_exact=False)


def _syncs(
    setting: Setting, model: str, *overrides: str, is_exact: bool = True
) -> Iterator[Figure]:
    ranks = join_alone()
    before = used_gib()
    config = make_config(setting, model, "sync.fingerprint_every=1", *overrides)
    check(config, read_architecture(config), Machine.here())
    with started(config, ranks) as engines:
        engines.await_ready()
        for part in ("weights", "kv_cache"):
            engines.call("wake", part, of=None)
        yield reported("engine awake takes", used_gib() - before, "GiB")
        engines.call("sleep", of=None)
        asleep = used_gib() - before
        on_target = is_judged()
        yield at_most("engine asleep leaves", asleep, TARGET_ASLEEP_GIB, "GiB", binding=on_target)
        models = build_models(config, ranks, engines)
        reports = []
        for version in range(3):
            models.sync.switch_to_policy()
            for shard in models.policy.shards():
                shard.view.mul_(STEP if version else 1.0)
            reports.append(models.sync(version))
            report, name = reports[-1], f"sync {version + 1}"
            yield reported(f"{name}: moved in", report.seconds, "s")
            yield reported(f"{name}: verified in", report.verify_seconds, "s")
            yield reported(f"{name}: turns", report.turn_seconds, "s")
            yield reported(f"{name}: tensors that cannot be read", report.unread_tensors)
        limit = TARGET_SYNC_SECONDS[model.removesuffix("_sharp")]
        best = min(report.seconds for report in reports[1:])
        # The target is stated for the copy. An FP8 engine also quantizes.
        yield at_most("a sync moves weights in", best, limit, "s", binding=on_target and is_exact)
        yield holds("fingerprints agree", all(report.fingerprinted for report in reports))
        yield reported("weights", models.sync.num_bytes / GIB, "GiB")
        vocab = read_architecture(config).vocab_size
        _, sampled = generate(engines, *setting.pick((64, 256), (4, 16)), vocab)
    gap_T = _gaps(models.policy, sampled, vocab)
    if is_exact:
        yield at_most("gap of sampled tokens, mean", float(gap_T.mean()), TARGET_GAP)
    else:
        yield reported("gap of sampled tokens, mean", float(gap_T.mean()))
    yield reported("gap of sampled tokens, largest", float(gap_T.max()))


def _gaps(policy: Any, sampled: Any, vocab: int) -> Any:
    """Measure the gap between engine and policy on completions that the engine, which is closed,
    has sampled."""
    policy.onload()
    return gaps(policy, sampled, vocab)


def tokens_graphs(setting: Setting) -> Iterator[Figure]:
    """Measure tokens per second of the 0.6B engine with CUDA graphs, and its gap."""
    count, length = setting.pick((256, 512), (4, 16))
    options = (f"engine.max_sequences={count}", "engine.enforce_eager=false")
    config = make_config(setting, "0.6b_sharp", *options)
    ranks, vocab = join_alone(), read_architecture(config).vocab_size
    with started(config, ranks) as engines:
        models = build_models(config, ranks, engines)
        models.sync(0)
        generate(engines, count, min(length, 32), vocab)
        seconds, sampled = generate(engines, count, length, vocab)
        tokens = sum(completion.num_tokens for _, completion in sampled)
        yield reported(f"{count} sequences at once", tokens / seconds, "tokens/s")
        seconds, alone = generate(engines, 1, length, vocab)
        yield reported("one sequence", alone[0][1].num_tokens / seconds, "tokens/s")
    gap_T = _gaps(models.policy, sampled, vocab)
    yield at_most("gap of sampled tokens, mean", float(gap_T.mean()), TARGET_GAP)
    yield reported("gap of sampled tokens, largest", float(gap_T.max()))


def plan(setting: Setting) -> Iterator[Figure]:
    """Compare the peak memory of each phase of a 0.6B run with the forecast of `plan`."""
    from dapo_megatron.plan.estimate import NodeSpec, estimate_memory

    ranks = join_alone()
    tokens = 8192
    config = make_config(
        setting, "0.6b", "policy.offload=[weights, gradients, optimizer]", row_tokens=tokens
    )
    total = memory_gib() if has_gpu() else 80.0
    planned = estimate_memory(
        config, ranks.world_size, NodeSpec(ranks.world_size if has_gpu() else 0, total)
    )
    vocab = read_architecture(config).vocab_size
    meter = MemoryMeter(ranks)
    length = setting.pick(2048, 64)
    batch = random_batch([length] * (setting.pick(tokens, 256) // length), vocab)
    with started(config, ranks) as engines:
        models = build_models(config, ranks, engines)
        models.policy.onload()
        models.policy.update(batch, likelihood, 1e-6)  # creates the moments
        with meter.phase("sync"):
            models.sync(0)
        with meter.phase("generate"):
            generate(engines, *setting.pick((64, 256), (4, 16)), vocab)
        models.sync.switch_to_policy()
        with meter.phase("logprobs"):
            models.policy.logprobs(batch)
        with meter.phase("update"):
            models.policy.update(batch, likelihood, 1e-6)
    for name, measured in meter.metrics().items():
        phase = name.removeprefix("memory/").removesuffix("_gib")
        yield reported(f"{phase}, measured", measured, "GiB")
        if phase.endswith("_torch"):
            continue
        forecast = planned.num_bytes(phase) / GIB
        yield reported(f"{phase}, planned", forecast, "GiB")
        error = abs(forecast / measured - 1.0)
        yield at_most(f"{phase}, relative error", error, PLAN_LIMIT, binding=has_gpu())


def quickstart(setting: Setting) -> Iterator[Figure]:
    """Run the first 20 steps of the quickstart in bfloat16. The accuracy must rise."""
    num_steps = setting.pick(QUICK_STEPS, TINY_STEPS)
    precision = "bfloat16" if has_gpu() else "float32"
    command = [
        *(sys.executable, "-m", "dapo_megatron", "train", str(BASE)),
        *ALONE,
        "engine.memory_fraction=0.3",
        f"run.directory={setting.workspace / 'runs'}",
        "run.name=quickstart",
        f"policy.precision={precision}",
        "policy.offload=[weights, gradients, optimizer]",
        "rollout.deterministic=false",
        f"train.rollout_steps={num_steps}",
        "evaluation.every=0",
        "sync.max_gap=1.0",
        "tracking.mlflow=false",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, check=False)  # its output goes to the log
    yield holds("ends without an error", done.returncode == 0)
    lines = (setting.workspace / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
    last = steps[-1]
    yield holds(f"{num_steps} steps", last.get("step") == num_steps)
    yield at_most("mismatch/gap_mean", last["mismatch/gap_mean"], TARGET_GAP)
    for name, value in last.items():
        if name.startswith("memory/") or name in ("mismatch/gap_max", "time/step", "time/sync"):
            yield reported(name, value)
    if num_steps == QUICK_STEPS:
        accuracies = [step["accuracy/raw"] for step in steps if step.get("accuracy/raw")]
        first, rest = fmean(accuracies[:4]), fmean(accuracies[-4:])
        yield reported("accuracy of the first 4 steps", first)
        yield at_least("accuracy of the last 4 steps", rest, first + 0.1)
