"""Measure age against speed for rollout.lookahead, rollout.max_overtake and engine.max_sequences.

More groups in flight keep engines busy, but trained groups are older. A bound on overtaking limits
the age of the oldest group, but makes steps wait. The plot is a plain SVG.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from rollout_policies import CARRYING, POLICIES, Figures, Setting, run
from rollout_workload import Workload

LOOKAHEADS = (1.0, 1.25, 1.5, 1.8, 2.2, 3.0)
MAX_OVERTAKES = (0, 2, 4, 8, 16)
MAX_SEQUENCES = (96, 128, 160, 192, 256)


@dataclass(frozen=True)
class Point:
    """A setting of the coordinator and its results."""

    mean: float
    """Mean length of the workload."""
    keep_rate: float
    line: str
    """The setting that was varied."""
    value: float
    """Its value."""
    lookahead: float
    max_overtake: int
    max_sequences: int
    seconds_per_step: float
    busy: float
    age_mean: float
    age_max: int


Task = tuple[Setting, Workload, float, float, str, float]


def frontier(
    setting: Setting, workloads: Mapping[tuple[float, float], Workload], jobs: int
) -> list[Point]:
    """Vary one setting at a time, starting from `setting`, for each workload."""
    tasks: list[Task] = [
        (changed, workload, mean, keep_rate, line, value)
        for (mean, keep_rate), workload in workloads.items()
        for line, value, changed in variations(setting)
    ]
    with multiprocessing.Pool(jobs) as pool:
        return pool.map(_measure, tasks, chunksize=1)


def variations(setting: Setting) -> Iterable[tuple[str, float, Setting]]:
    """Yield (name of the varied setting, its value, all settings)."""
    for lookahead in LOOKAHEADS:
        yield "lookahead", lookahead, replace(setting, lookahead=lookahead)
    for bound in MAX_OVERTAKES:
        # A large max_age, because expired groups would hide the ages to be measured.
        yield "max_overtake", bound, replace(setting, max_overtake=bound, max_age=1_000)
    for max_sequences in MAX_SEQUENCES:
        engine = replace(setting.engine, max_sequences=max_sequences)
        yield "max_sequences", max_sequences, replace(setting, engine=engine)


def _measure(task: Task) -> Point:
    setting, workload, mean, keep_rate, line, value = task
    figures: Figures = run(POLICIES[CARRYING], setting, workload)
    return Point(
        mean=mean,
        keep_rate=keep_rate,
        line=line,
        value=value,
        lookahead=setting.lookahead,
        max_overtake=setting.max_overtake,
        max_sequences=setting.engine.max_sequences,
        seconds_per_step=figures.seconds_per_step,
        busy=figures.busy,
        age_mean=figures.age_mean,
        age_max=figures.age_max,
    )


# ---------------------------------------------------------------------------- the plot

COLORS = {"lookahead": "#1f6fb4", "max_overtake": "#c44e1c", "max_sequences": "#3a8f4d"}
NAMES = {
    "lookahead": "rollout.lookahead",
    "max_overtake": "rollout.max_overtake",
    "max_sequences": "engine.max_sequences",
}
LABELS = {
    "lookahead": ("start", 6, -7),
    "max_overtake": ("start", 6, 15),
    "max_sequences": ("end", -6, 15),
}
"""Position of a point's label: text anchor, pixels to the right, pixels down."""
CLOSE = 16
"""Points nearer than this, in pixels, share a label."""
WIDTH, HEIGHT, MARGIN = 420, 320, 56


def draw(points: Sequence[Point]) -> str:
    """Return an SVG: a panel per workload, with mean age on x and seconds per step on y."""
    panels = list(dict.fromkeys((point.mean, point.keep_rate) for point in points))
    height = HEIGHT + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH * len(panels)}" height="{height}" fill="white"/>',
    ]
    for place, panel in enumerate(panels):
        of_panel = [point for point in points if (point.mean, point.keep_rate) == panel]
        parts.append(f'<g transform="translate({place * WIDTH},0)">')
        parts += _panel(of_panel, f"mean length {panel[0]:,.0f}, keep rate {panel[1]:g}")
        parts.append("</g>")
    for place, (line, color) in enumerate(COLORS.items()):
        x, y = MARGIN + 190 * place, HEIGHT + 18
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 8}" y="{y + 4}">{escape(NAMES[line])} varied</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(points: Sequence[Point], title: str) -> list[str]:
    max_age = max(point.age_mean for point in points) * 1.08
    low = min(point.seconds_per_step for point in points)
    high = max(point.seconds_per_step for point in points)
    low, high = low - 0.08 * (high - low), high + 0.08 * (high - low)

    def x(age: float) -> float:
        return MARGIN + age / max_age * (WIDTH - MARGIN - 20)

    def y(seconds: float) -> float:
        return HEIGHT - 44 - (seconds - low) / (high - low) * (HEIGHT - 84)

    parts = [
        f'<text x="{WIDTH / 2:.0f}" y="18" text-anchor="middle" font-size="13">'
        f"{escape(title)}</text>",
        f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        "mean age of trained groups, versions</text>",
        f'<text transform="translate(14,{HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
        "seconds per step</text>",
        f'<path d="M{MARGIN},{y(high):.1f} V{y(low):.1f} H{WIDTH - 16}" '
        'fill="none" stroke="#888"/>',
    ]
    for age in _ticks(0, max_age):
        parts.append(
            f'<text x="{x(age):.1f}" y="{y(low) + 15:.1f}" text-anchor="middle">{age:g}</text>'
        )
    for seconds in _ticks(low, high):
        at = y(seconds)
        parts.append(f'<path d="M{MARGIN},{at:.1f} H{WIDTH - 16}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{MARGIN - 6}" y="{at + 4:.1f}" text-anchor="end">{seconds:g}</text>'
        )
    for line, color in COLORS.items():
        places = [(x(p.age_mean), y(p.seconds_per_step), p.value) for p in points if p.line == line]
        parts += _line(places, color, *LABELS[line])
    return parts


def _line(
    places: Sequence[tuple[float, float, float]], color: str, anchor: str, right: int, down: int
) -> list[str]:
    """Return a line through points with their values. Points that are close share a label."""
    path = " ".join(f"{across:.1f},{up:.1f}" for across, up, _ in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}"/>']
    labels: list[tuple[float, float, list[str]]] = []
    for across, up, value in places:
        parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5" fill="{color}"/>')
        if labels and math.dist(labels[-1][:2], (across, up)) < CLOSE:
            labels[-1][2].append(f"{value:g}")
        else:
            labels.append((across, up, [f"{value:g}"]))
    for across, up, values in labels:
        parts.append(
            f'<text x="{across + right:.1f}" y="{up + down:.1f}" text-anchor="{anchor}" '
            f'fill="{color}">{", ".join(values)}</text>'
        )
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between both values."""
    rough = (high - low) / 5
    power = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 0.1
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    first = -(-low // step)
    return [step * (first + place) for place in range(int((high - first * step) // step) + 1)]
