"""Curves of the charts: a run's (thinned, rounded), the DAPO paper's curves, and the colours
that tell runs apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean
from typing import Any

from dapo_megatron.report.folder import Evaluation, RunData

MAX_POINTS = 2000
"""Longest curve that is not thinned."""

Column = Sequence[float | None]


def stride_of(num_steps: int) -> int:
    """Return the steps per drawn point."""
    return max(1, -(-num_steps // MAX_POINTS))


def thin_steps(steps: Sequence[int], stride: int) -> list[int]:
    """Return the last step of each bucket."""
    return [steps[min(at + stride, len(steps)) - 1] for at in range(0, len(steps), stride)]


def thin(name: str, column: Column, stride: int) -> list[float | None]:
    """Return a value for each bucket of `stride` steps: the mean, or the maximum of a maximum
    (gap_max, tokens/max) so that no peak is lost. Six digits."""
    reduce = max if re.search(r"(\b|_)max$", name) else fmean
    points: list[float | None] = []
    for at in range(0, len(column), stride):
        values = [value for value in column[at : at + stride] if value is not None]
        points.append(short(reduce(values)) if values else None)
    return points


def short(value: float) -> float:
    """Six digits: more than a screen shows, and half the bytes."""
    return float(f"{value:.6g}")


def evaluation_curves(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """[{set, figure, points: [[step, value, low, high], ...]}]. Among pass@1, pass@2, pass@4 only
    the one with the most samples, which has an interval. Counts (`ungraded`) are left out."""
    largest: dict[tuple[str, str], int] = {}
    curves: dict[tuple[str, str, str, int], list[list[float | None]]] = {}
    for point in evaluations:
        kind, _, samples = point.figure.partition("@")
        if samples.isdigit():
            num = int(samples)
            largest[point.set, kind] = max(num, largest.get((point.set, kind), 0))
            interval = (point.value, point.low, point.high)
            values = [None if value is None else short(value) for value in interval]
            curve = curves.setdefault((point.set, point.figure, kind, num), [])
            curve.append([point.step, *values])
    return [
        {"set": of_set, "figure": figure, "points": points}
        for (of_set, figure, kind, num), points in curves.items()
        if num == largest[of_set, kind]
    ]


# ---------------------------------------------------------------------------- the paper's curves

GRADIENT_STEPS = 16
"""Gradient steps per rollout step, in the paper."""

GHOSTS = {
    "aime_avg": ("fig1_aime24_accuracy_pct", "avg@32", "paper: AIME 2024 avg@32"),
    "aime_pass": ("fig1_aime24_accuracy_pct", "pass@32", "paper: AIME 2024 pass@32"),
    "aime_cons": ("fig1_aime24_accuracy_pct", "cons@32", "paper: AIME 2024 cons@32"),
    "perfect": ("fig3b_fraction_prompts_acc_1", "acc=1", "paper: groups all right"),
    "length": ("fig7a_mean_response_length", "DAPO", "paper: mean length"),
    "reward": ("fig7b_reward_score", "DAPO", "paper: reward"),
    "entropy": ("fig7c_entropy", "DAPO", "paper: DAPO"),
    "entropy_collapse": (
        "fig2b_entropy_clip_higher",
        "w/o Clip-Higher",
        "paper: without clip-higher, the collapse",
    ),
    "probability": ("fig7d_mean_probability", "DAPO", "paper: mean"),
}
"""Key -> (figure and curve in data/paper_curves.json, label)."""


def ghosts(keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the DAPO paper's own curves, to lay next to a run's: {key: {label, source, points:
    [[rollout step, value], ...]}}.

    data/paper_curves.json was read off the vector graphics of the paper's figures (arXiv
    2503.14476). Its x is in gradient steps. Figures 1 and 7 were scaled by the authors to end at
    5,280 gradient steps, 330 rollout steps. The run: Qwen2.5-32B, 512 prompts of 16 answers.
    """
    text = resources.files(__package__).joinpath("data/paper_curves.json").read_text("utf-8")
    curves = json.loads(text)["curves"]
    by_key = {}
    for key in keys:
        figure, curve, label = GHOSTS[key]
        scale = 0.01 if figure.endswith("_pct") else 1.0
        points = [
            [round(abs(step) / GRADIENT_STEPS, 2), round(value * scale, 5)]
            for step, value in curves[figure][curve]
        ]
        source = figure.partition("_")[0].replace("fig", "figure ")
        by_key[key] = {"label": label, "source": source, "points": points}
    return by_key


# ---------------------------------------------------------------------------- runs in one chart

COLORS = 8
"""--series-0 to --series-7 of page/style.css."""
WIDTHS = (1.8, 3.4, 1.0)
"""Line widths in pixels of the first eight runs, the next eight, and so on. The dash is taken: it
tells the metric."""
WIDTH_OF_REPEATS = 0.7
"""Relative to the width of one run."""

_NUMBER = re.compile(r"[-_. ]*(?:seed|[-_. ])[-_. ]*\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Look:
    """Runs drawn alike."""

    label: str
    color: int
    width: float
    runs: list[int]
    """Positions of the runs."""


def looks(runs: Sequence[RunData]) -> list[Look]:
    """Return a look for each run, or for each set of repeats if there are several sets.

    Repeats go by one name except for a number at its end (_seed0, .1), and their configurations
    differ in `seed` and `run` only.
    """
    sets: dict[tuple[str, str], list[int]] = {}
    for number, run in enumerate(runs):
        rest = [item for item in run.config.items() if item[0] not in ("run", "seed")]
        sets.setdefault((_NUMBER.sub("", run.name), str(sorted(rest, key=str))), []).append(number)
    members = list(sets.values()) if len(sets) > 1 else [[number] for number in range(len(runs))]
    drawn = []
    for place, numbers in enumerate(members):
        width = WIDTHS[place // COLORS % len(WIDTHS)]
        name = runs[numbers[0]].name
        if len(numbers) > 1:
            name, width = f"{_NUMBER.sub('', name)}, {len(numbers)} runs", width * WIDTH_OF_REPEATS
        drawn.append(Look(name, place % COLORS, round(width, 2), numbers))
    return drawn
