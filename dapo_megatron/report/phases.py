"""The section "time": where the seconds of a step go, and what they bring."""

from __future__ import annotations

from typing import Any

from dapo_megatron.report.charts import line, lines
from dapo_megatron.report.folder import RunData, finite
from dapo_megatron.types import STEP_PHASES, Phase

COLORS = {
    Phase.GENERATE: 0,
    "grade": 5,
    Phase.LOGPROBS: 4,
    Phase.UPDATE: 2,
    Phase.SYNC: 1,
    Phase.CHECKPOINT: 3,
    Phase.EVALUATE: 6,
    "rest": 7,
}
"""Slot of the series colours by phase, here and in the timeline."""

LABELS = {
    Phase.GENERATE: "generate",
    "grade": "wait for graders",
    Phase.LOGPROBS: "log-probs",
    "rest": "the rest",
}

GENERATE = "derived/time_generate"
REST = "derived/time_rest"
MOVED = "derived/time_sync_moved"
IDLE = "derived/engine_idle"
_METRICS = {Phase.GENERATE: GENERATE, "rest": REST}


def _stack() -> list[dict[str, Any]]:
    return [
        line(_METRICS.get(phase, f"time/{phase}"), LABELS.get(phase, phase), color=COLORS[phase])
        for phase in (Phase.GENERATE, "grade", *STEP_PHASES[1:], "rest")
    ]


CHARTS: list[dict[str, Any]] = [
    lines(
        "time_phases",
        "Where a step's time goes",
        "Seconds of each phase, on top of each other. Sampling answers (generate) is usually the "
        "most of it; what is in no phase is the rest.",
        "seconds",
        _stack(),
        section="time",
        kind="stacked_area",
        overlay=False,
    ),
    lines(
        "time_tokens",
        "Tokens per second",
        "Prompt and response tokens trained on, over the seconds of the whole step.",
        "tokens per second",
        [line("throughput/tokens_per_second", "all devices", color=0)],
        section="time",
        overlay=False,
        from_zero=True,
    ),
    lines(
        "time_device",
        "Work per device",
        "Tokens for each device, and floating-point operations of the model itself in 1e12 per "
        "second, over the whole step; divide these by the device's peak for its utilisation.",
        "tokens per second",
        [
            line("throughput/tokens_per_second_per_device", "tokens", color=0),
            line(
                "throughput/model_tflops_per_device",
                "model operations",
                axis="y2",
                dash=True,
                color=1,
            ),
        ],
        section="time",
        overlay=False,
        from_zero=True,
        y2="TFLOP/s",
    ),
    lines(
        "time_engines",
        "Engines at work",
        "Share of generation in which engines had nothing to run, and how many of their "
        "sequences (engine.max_sequences) were running on average.",
        "share",
        [
            line(IDLE, "idle", color=1),
            line("throughput/running_mean", "running", color=2),
        ],
        section="time",
        overlay=False,
        y_range=[0, 1.05],
        y_tick_format=".0%",
    ),
    lines(
        "time_sync",
        "Bringing the weights to the engines",
        "Seconds of each sync: moving weights, checking that they arrived (verify), and policy and "
        "engine taking turns in memory; and the bytes that moved between ranks.",
        "seconds",
        [
            line(MOVED, "move", color=1),
            line("time/sync_verify", "verify", color=0),
            line("time/sync_turns", "turns in memory", color=3),
            line("sync/bytes", "bytes moved", axis="y2", color=7, line=True),
        ],
        section="time",
        kind="stacked_area",
        overlay=False,
        y2="bytes",
        y2_tick_format=".3s",
    ),
]


def derived(run: RunData) -> dict[str, list[float | None]]:
    """generate without waiting for graders, what is in no phase, what of sync is moving weights,
    and the idle share of engines, by step. time/grade is a part of time/generate, and
    time/sync_verify and time/sync_turns of time/sync."""
    column = run.metrics.column
    names = ("step", "grade", "sync_verify", "sync_turns", "engine_idle", *STEP_PHASES)
    times = {name: column(f"time/{name}") for name in names}
    found: dict[str, list[float | None]] = {name: [] for name in (GENERATE, REST, MOVED, IDLE)}
    for at in range(len(run.metrics.steps)):
        here = {name: values[at] for name, values in times.items()}
        found[GENERATE].append(_less(here["generate"], here["grade"]))
        found[REST].append(_less(here["step"], *(here[phase] for phase in STEP_PHASES)))
        found[MOVED].append(_less(here["sync"], here["sync_verify"], here["sync_turns"]))
        found[IDLE].append(_share(here["engine_idle"], here["generate"]))
    return found


def _less(whole: float | None, *parts: float | None) -> float | None:
    """A whole without its parts, not below 0: clocks are read one after the other."""
    if whole is None:
        return None
    return finite(max(0.0, whole - sum(part or 0.0 for part in parts)))


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole or whole < 0 else min(1.0, max(0.0, part / whole))
