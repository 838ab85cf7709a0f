"""Texts at the top of a run's report: its headline and key facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from time import localtime, strftime

from dapo_megatron.report.run_data import RunData, StateWord
from dapo_megatron.report.wording import first_few, span, times


def headline(run: RunData) -> str:
    """Return the headline: "accuracy 0.386 → 0.887 on chain_sum_held_out (40 of 40 steps, 4
    min)"."""
    planned = run.count("train.rollout_steps")
    steps = f"{run.last_step:,}{'' if planned is None else f' of {planned:,}'} steps"
    has_ended = run.state.word is not StateWord.RUNNING
    seconds = run.summary.seconds if has_ended else None
    progress = f"{steps}, {span(run.total('time/step') if seconds is None else seconds)}"
    means = [point for point in run.evaluations if point.metric.startswith("avg@")]
    values = [point.value for point in means if point.set == means[0].set]
    where = f"on {means[0].set}" if means else "on its training prompts"
    if not values:
        values = run.values("accuracy/raw")
    if not values:
        return f"nothing measured yet ({progress})"
    change = " → ".join(f"{value:.3f}" for value in dict.fromkeys((values[0], values[-1])))
    return f"accuracy {change} {where} ({progress})"


def facts(run: RunData) -> list[tuple[str, str]]:
    """Return the key facts as (label, text). Unknown facts are omitted."""
    return [(label, text) for label, text in _facts(run) if text]


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    yield "model", run.word("model.path")
    sources = run.setting("data.train")
    sources = sources if isinstance(sources, list) else []
    names = [str(source.get("name", "")) for source in sources if isinstance(source, dict)]
    yield "trained on", first_few([*filter(None, names)])
    keys = ("prompts_per_step", "samples_per_prompt", "max_response_tokens")
    numbers = [run.count(f"rollout.{key}") for key in keys]
    if None not in numbers:
        text = "{} prompts, {} answers each, of up to {} tokens"
        yield "per step", text.format(*numbers)
    lr, updates = run.number("optimizer.lr"), run.count("train.updates_per_step")
    if lr is not None and updates is not None:
        yield "optimizer", f"learning rate {lr:g}, {times(updates, 'update')} per step"
    num = run.provenance.num_processes
    processes = f"{num} process{'' if num == 1 else 'es'}" if num else ""
    yield "on", ", ".join(filter(None, (processes, run.provenance.devices)))
    yield "layout", run.provenance.facts.get("policy", "")
    first = run.attempts[0].time if run.attempts else None
    with suppress(OverflowError, ValueError, OSError):  # year out of range
        yield "started", strftime("%Y-%m-%d %H:%M", localtime(first)) if first else ""
    speed = run.values("throughput/tokens_per_second")[-1:]
    yield "speed", "".join(f"{value:,.0f} tokens/s in the last step" for value in speed)
    peak = run.summary.peak_memory_gib
    yield "host memory", f"peak {peak:.1f} GiB, all processes" if peak is not None else ""
    tags = run.provenance.tags
    commit = tags.get("git.commit") or run.summary.commit or ""
    is_dirty = commit and tags.get("git.dirty") == "true"
    yield "commit", commit[:12] + (", with uncommitted changes" if is_dirty else "")
    versions = [(key.removeprefix("version."), text) for key, text in tags.items()]
    shown = ("torch", "vllm", "megatron-core", "transformers")
    yield "versions", ", ".join(f"{key} {text}" for key, text in versions if key in shown)
    yield "folder", str(run.path)
