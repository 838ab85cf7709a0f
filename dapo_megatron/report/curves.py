"""Curves of the charts: those of runs (thinned), those of the DAPO paper, and the line styles of
runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd

from dapo_megatron.report.run_data import Evaluation, RunData

MAX_POINTS = 2000
"""Maximum number of points of a curve. Longer curves are thinned."""

PALETTE = (
    *("#2f8fd0", "#e0702b", "#1fa37a", "#c56aa2"),
    *("#b8920a", "#808080", "#7d70d8", "#58b4e0"),
)
"""Colors that are legible on light and dark backgrounds."""


def stride_of(num_steps: int) -> int:
    """Return the number of steps per drawn point."""
    return max(1, -(-num_steps // MAX_POINTS))


def thin(frame: pd.DataFrame) -> pd.DataFrame:
    """Aggregate the steps into buckets, one row per bucket at its last step. Values are means, but
    maxima for metrics that are maxima (gap_max, tokens/max), so that no peak is lost."""
    stride = stride_of(len(frame))
    if stride == 1:
        return frame
    functions = {name: "max" if re.search(r"(\b|_)max$", name) else "mean" for name in frame}
    thinned = frame.groupby(np.arange(len(frame)) // stride).agg(functions)
    lasts = frame.index[np.minimum(np.arange(1, len(thinned) + 1) * stride, len(frame)) - 1]
    return thinned.set_axis(lasts)


def evaluation_curves(evaluations: Sequence[Evaluation]) -> dict[tuple[str, str], pd.DataFrame]:
    """Return (set, figure) -> table of value, low and high by step. Of pass@1, pass@2, pass@4 only
    the figure with the most samples is returned. Counts (`ungraded`) are omitted."""
    curves: dict[tuple[str, str], dict[str, list[Evaluation]]] = {}
    for point in evaluations:
        kind, _, samples = point.metric.partition("@")
        if samples.isdigit():
            curves.setdefault((point.set, kind), {}).setdefault(point.metric, []).append(point)
    chosen = {}
    for (name, _), by_figure in curves.items():
        figure = max(by_figure, key=lambda figure: int(figure.partition("@")[2]))
        points = pd.DataFrame(by_figure[figure]).set_index("step")[["value", "low", "high"]]
        chosen[name, figure] = points.astype("float64")
    return chosen


GRADIENT_STEPS = 16
"""Gradient steps per rollout step in the paper."""
GHOSTS = {
    "aime_avg": ("fig1_aime24_accuracy_pct", "avg@32", "paper: AIME 2024 avg@32"),
    "aime_pass": ("fig1_aime24_accuracy_pct", "pass@32", "paper: AIME 2024 pass@32"),
    "aime_cons": ("fig1_aime24_accuracy_pct", "cons@32", "paper: AIME 2024 cons@32"),
    "perfect": ("fig3b_fraction_prompts_acc_1", "acc=1", "paper: groups all right"),
    "length": ("fig7a_mean_response_length", "DAPO", "paper: mean length"),
    "reward": ("fig7b_reward_score", "DAPO", "paper: reward"),
    "entropy": ("fig7c_entropy", "DAPO", "paper: DAPO"),
    "entropy_collapse": ("fig2b_entropy_clip_higher", "w/o Clip-Higher", "paper: no clip-higher"),
    "probability": ("fig7d_mean_probability", "DAPO", "paper: mean"),
}
"""Key -> (figure and curve in data/paper_curves.json, label)."""


def ghost(key: str) -> tuple[str, list[tuple[float, float]]]:
    """Return (label, [(rollout step, value), ...]) of a curve of the DAPO paper.

    data/paper_curves.json was extracted from the vector graphics of the paper's figures (arXiv
    2503.14476). Its x values are gradient steps. The authors scaled figures 1 and 7 to end at 5,280
    gradient steps, which are 330 rollout steps. The run trains Qwen2.5-32B with 512 prompts per
    step and 16 answers per prompt.
    """
    figure, curve, label = GHOSTS[key]
    scale = 0.01 if figure.endswith("_pct") else 1.0
    points = _paper()[figure][curve]
    source = figure.partition("_")[0].replace("fig", "figure ")
    return f"{label} ({source})", [
        (round(abs(step) / GRADIENT_STEPS, 2), round(value * scale, 5)) for step, value in points
    ]


@cache
def _paper() -> Any:
    text = resources.files(__package__).joinpath("data/paper_curves.json").read_text("utf-8")
    return json.loads(text)["curves"]


WIDTHS = (1.8, 3.4, 1.0)
"""Line widths in pixels of the first eight runs, the next eight, and so on."""

_NUMBER = re.compile(r"[-_. ]*(?:seed|[-_. ])[-_. ]*\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class RunStyle:
    """Line style shared by one run or by repeats of a run."""

    label: str
    color: str
    width: float
    runs: list[int]
    """Indices of the runs."""


def run_styles(runs: Sequence[RunData]) -> list[RunStyle]:
    """Return a style per run, or per set of repeats if there are several sets.

    Repeats have equal names except for a number at the end (_seed0, .1), and their configs differ
    only in `seed` and `run`.
    """
    sets: dict[tuple[str, str], list[int]] = {}
    for number, run in enumerate(runs):
        rest = [item for item in run.config.items() if item[0] not in ("run", "seed")]
        sets.setdefault((_NUMBER.sub("", run.name), str(sorted(rest, key=str))), []).append(number)
    members = list(sets.values()) if len(sets) > 1 else [[number] for number in range(len(runs))]
    result = []
    for index, numbers in enumerate(members):
        name = runs[numbers[0]].name
        if len(numbers) > 1:
            name = f"{_NUMBER.sub('', name)}, {len(numbers)} runs"
        width = WIDTHS[index // len(PALETTE) % len(WIDTHS)]
        result.append(RunStyle(name, PALETTE[index % len(PALETTE)], width, numbers))
    return result
