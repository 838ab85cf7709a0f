"""What is said of a run before anything is drawn: the sentence at the top, and a few facts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from dapo_megatron.report.folder import Evaluation, RunData, clock, finite

_PROMPTS = ("prompts_per_step", "samples_per_prompt")


def headline(run: RunData) -> str:
    """accuracy 0.386 → 0.887 on chain_sum_held_out (40 of 40 steps, 4 min)."""
    progress = _progress(run)
    means = [one for one in run.evaluations if one.figure.startswith("avg@")]
    if means:
        sets = list(dict.fromkeys(one.set for one in means))
        values = [one for one in means if one.set == sets[0]]
        more = f" and {len(sets) - 1} more" if len(sets) > 1 else ""
        return f"accuracy {_change(values)} on {sets[0]}{more} ({progress})"
    raw = [value for value in run.metrics.column("accuracy/raw") if value is not None]
    if raw:
        return f"accuracy {raw[0]:.3f} → {raw[-1]:.3f} on its training prompts ({progress})"
    return f"nothing measured yet ({progress})"


def facts(run: RunData) -> list[tuple[str, str]]:
    """(label, text), the ones that name the run; what its folder does not say is left out."""
    return [(label, text) for label, text in _facts(run) if text]


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    yield "model", run.word("model.path") or ""
    yield "trained on", _named(run.entries("data.train"))
    prompts, samples = (run.count(f"rollout.{one}") for one in _PROMPTS)
    limit = run.count("rollout.max_response_tokens")
    if prompts is not None and samples is not None and limit is not None:
        yield "a step", f"{prompts} prompts, {samples} answers each, of up to {limit} tokens"
    yield "optimizer", _optimizer(run)
    given = run.provenance or {}
    recorded = given.get("facts")
    recorded = recorded if isinstance(recorded, dict) else {}
    processes = given.get("num_processes") or (run.summary or {}).get("num_processes")
    processes = processes or run.count("run.processes")
    device = given.get("devices")
    counted = f"{processes} process{'' if processes == 1 else 'es'}" if processes else ""
    yield "on", ", ".join(str(one) for one in (counted, device) if one)
    yield "layout", str(recorded.get("policy", ""))
    began = clock(run.attempts[0].get("time"), "%Y-%m-%d %H:%M") if run.attempts else None
    if began is not None:
        starts = f", {len(run.attempts)} starts" if len(run.attempts) > 1 else ""
        yield "started", began + starts
    speed = run.metrics.last("throughput/tokens_per_second")
    yield "speed", f"{speed:,.0f} tokens/s in the last step" if speed is not None else ""
    peak = finite((run.summary or {}).get("peak_memory_gib"))
    yield "host memory", f"{peak:.1f} GiB at most, all processes" if peak is not None else ""


def _progress(run: RunData) -> str:
    done = run.metrics.steps[-1] if run.metrics.steps else 0
    planned = run.count("train.rollout_steps")
    steps = f"{done:,} of {planned:,} steps" if planned is not None else f"{done:,} steps"
    seconds = finite((run.summary or {}).get("seconds"))
    if seconds is None or not run.state.has_ended:
        seconds = sum(value or 0.0 for value in run.metrics.column("time/step"))
    return f"{steps}, {span(seconds)}"


def span(seconds: float) -> str:
    """12 s, 4 min, 5.0 h, 2.1 d."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 129600 else f"{seconds / 86400:.1f} d"


def _change(values: list[Evaluation]) -> str:
    first, last = values[0], values[-1]
    if first is last:
        return f"{first.value:.3f} at step {first.step}"
    return f"{first.value:.3f} → {last.value:.3f}"


def _named(sources: list[dict[str, Any]]) -> str:
    names = [str(one["name"]) for one in sources if one.get("name")]
    return ", ".join(islice(names, 4)) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _optimizer(run: RunData) -> str:
    lr, updates = run.number("optimizer.lr"), run.count("train.updates_per_step")
    if lr is None or updates is None:
        return ""
    low, high = run.number("loss.clip_low"), run.number("loss.clip_high")
    clip = f", clip {low:g} / {high:g}" if low is not None and high is not None else ""
    return f"learning rate {lr:g}, {updates:,} updates a step{clip}"
