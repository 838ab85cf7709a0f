"""The machine, and complete commands on it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

from gpu_checks.figures import Figure, at_least, at_most, holds, reported
from gpu_checks.rig import BASE, REPOSITORY, Setting, has_gpu, layout

TINY_STEPS = 2
QUICK_STEPS = 20


def smi(setting: Setting) -> Iterator[Figure]:
    """Read nvidia-smi as preflight does."""
    from dapo_megatron.doctor.gpus import check_gpus, read_gpus

    gpus = read_gpus(30.0)
    yield reported("GPUs", len(gpus))
    checks = list(check_gpus(gpus, setting.tensor_parallel, is_used=True))
    for check in checks:
        print(check, flush=True)
    yield holds("no GPU has a fault", all(check.status != "fail" for check in checks))


def preflight(setting: Setting) -> Iterator[Figure]:
    """Run `doctor nodes`, the checks before a run."""
    report = setting.workspace / "preflight"
    seconds, done = _command(
        setting, "doctor", "nodes", BASE, "--report", report, *_layout(setting)
    )
    yield reported("took", seconds, "s")
    yield holds("passes", done.returncode == 0)


def end_to_end(setting: Setting) -> Iterator[Figure]:
    """Run two steps of `train` on the tiny model in bfloat16."""
    yield from _train(setting, "end_to_end", TINY_STEPS)


def quickstart(setting: Setting) -> Iterator[Figure]:
    """Run the first 20 steps of the quickstart in bfloat16. The accuracy must rise."""
    steps = yield from _train(setting, "quickstart", setting.pick(QUICK_STEPS, TINY_STEPS))
    if len(steps) > QUICK_STEPS:
        first, last = (
            sum(step["accuracy/raw"] for step in part if "accuracy/raw" in step)
            / max(sum("accuracy/raw" in step for step in part), 1)
            for part in (steps[1:5], steps[-4:])
        )
        yield reported("accuracy of steps 1 to 4", first)
        yield at_least("accuracy of the last 4 steps", last, first + 0.1)


def _train(
    setting: Setting, name: str, num_steps: int
) -> Generator[Figure, None, list[dict[str, Any]]]:
    """Run `train` on the tiny model. Return its rows of metrics."""
    precision = "bfloat16" if has_gpu() else "float32"
    seconds, done = _command(
        setting,
        "train",
        BASE,
        *_layout(setting),
        f"run.directory={setting.workspace / 'runs'}",
        f"run.name={name}",
        f"policy.precision={precision}",
        "policy.offload=[weights, gradients, optimizer]",
        "rollout.deterministic=false",
        f"train.rollout_steps={num_steps}",
        "evaluation.every=0",
        "sync.max_gap=1.0",
        "tracking.mlflow=false",
    )
    yield reported("took", seconds, "s")
    yield holds("ends without an error", done.returncode == 0)
    lines = (setting.workspace / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
    last = steps[-1]
    yield holds(f"{num_steps} steps", last.get("step") == num_steps)
    for name in ("mismatch/gap_mean", "mismatch/gap_max", "time/step", "time/sync"):
        if name == "mismatch/gap_mean":
            yield at_most(name, last[name], 0.015)
        elif name in last:
            yield reported(name, last[name])
    for name, value in last.items():
        if name.startswith("memory/"):
            yield reported(name, value, "GiB")
    return steps


def _layout(setting: Setting) -> list[str]:
    return [*layout(setting), "engine.memory_fraction=0.3"]


def _command(setting: Setting, *words: object) -> tuple[float, subprocess.CompletedProcess[bytes]]:
    """Run `python -m dapo_megatron`. Its output goes to this check's log."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "dapo_megatron", *map(str, words)]
    done = subprocess.run(command, cwd=REPOSITORY, check=False)
    return time.perf_counter() - started, done
