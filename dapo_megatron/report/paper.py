"""The paper's own curves, to lay beside a run's: data/paper_curves.json, read off the vector
graphics of the DAPO paper's figures (arXiv 2503.14476).

Their x is in gradient steps, 16 to a rollout step. Figures 1 and 7 were scaled by the authors to
end at 5,280 gradient steps, 330 rollout steps. The run: Qwen2.5-32B, 512 prompts of 16 answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

GRADIENT_STEPS = 16
"""Of a rollout step, in the paper."""


@dataclass(frozen=True)
class Ghost:
    """One curve: where it is in the file, and what its values are multiplied by."""

    figure: str
    curve: str
    label: str
    source: str
    scale: float = 1.0


_PERCENT = 0.01
_FIRST = "fig1_aime24_accuracy_pct"

GHOSTS = {
    "aime_avg": Ghost(_FIRST, "avg@32", "paper: AIME 2024 avg@32", "figure 1", _PERCENT),
    "aime_pass": Ghost(_FIRST, "pass@32", "paper: AIME 2024 pass@32", "figure 1", _PERCENT),
    "aime_cons": Ghost(_FIRST, "cons@32", "paper: AIME 2024 cons@32", "figure 1", _PERCENT),
    "perfect": Ghost(
        "fig3b_fraction_prompts_acc_1", "acc=1", "paper: groups all right", "figure 3b"
    ),
    "length": Ghost("fig7a_mean_response_length", "DAPO", "paper: mean length", "figure 7a"),
    "reward": Ghost("fig7b_reward_score", "DAPO", "paper: reward", "figure 7b"),
    "entropy": Ghost("fig7c_entropy", "DAPO", "paper: DAPO", "figure 7c"),
    "entropy_collapse": Ghost(
        "fig2b_entropy_clip_higher",
        "w/o Clip-Higher",
        "paper: without clip-higher, the collapse",
        "figure 2b",
    ),
    "probability": Ghost("fig7d_mean_probability", "DAPO", "paper: mean", "figure 7d"),
}


def ghosts(keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{key: {label, source, points: [[rollout step, value], ...]}}."""
    text = resources.files(__package__).joinpath("data/paper_curves.json").read_text("utf-8")
    curves = json.loads(text)["curves"]
    found = {}
    for key in keys:
        ghost = GHOSTS[key]
        points = [
            [round(abs(step) / GRADIENT_STEPS, 2), round(value * ghost.scale, 5)]
            for step, value in curves[ghost.figure][ghost.curve]
        ]
        found[key] = {"label": ghost.label, "source": ghost.source, "points": points}
    return found
