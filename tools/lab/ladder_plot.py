"""Draw curves with bands as a small SVG for the docs: panels side by side, one legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#7f7f7f", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#d62728")
WIDTH, HEIGHT = 360, 230
"""Size of one panel, in pixels, including its labels."""
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 26, 34
LEGEND = 22
COLUMNS = 2

Point = tuple[float, float, float, float]
"""(x, lowest, mean, highest)."""


@dataclass(frozen=True)
class Panel:
    """One figure: a curve, with the band from lowest to highest, by name."""

    title: str
    curves: Mapping[str, Sequence[Point]]


def svg(panels: Sequence[Panel], names: Sequence[str], x_label: str) -> str:
    """Return all panels in rows of two, under a legend. A name has the same color in each panel."""
    rows = math.ceil(len(panels) / COLUMNS)
    legend_rows = math.ceil(len(names) / 3)
    top = 8 + LEGEND * legend_rows
    width, height = COLUMNS * WIDTH, top + rows * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, name in enumerate(names):
        x, y = 12 + number % 3 * (width - 12) // 3, 18 + number // 3 * LEGEND
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}" stroke="{_color(number)}" '
            f'stroke-width="2.5"/><text x="{x + 28}" y="{y + 4}">{escape(name)}</text>'
        )
    for number, panel in enumerate(panels):
        x, y = number % COLUMNS * WIDTH, top + number // COLUMNS * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel, names, x_label)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, names: Sequence[str], x_label: str) -> str:
    points = [point for curve in panel.curves.values() for point in curve]
    title = f'<text x="{LEFT}" y="16" font-weight="bold">{escape(panel.title)}</text>'
    if not points:
        return title
    x_ticks = _ticks(min(p[0] for p in points), max(p[0] for p in points))
    y_ticks = _ticks(min(p[1] for p in points), max(p[3] for p in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts = [title, *_grid(x_ticks, y_ticks, place), _x_name(x_label)]
    for number, name in enumerate(names):
        curve = panel.curves.get(name, ())
        if not curve:
            continue
        band = [place(x, high) for x, _, _, high in curve]
        band += [place(x, low) for x, low, _, _ in reversed(curve)]
        line = [place(x, mean) for x, _, mean, _ in curve]
        color = _color(number)
        parts.append(f'<polygon points="{_points(band)}" fill="{color}" fill-opacity="0.12"/>')
        parts.append(
            f'<polyline points="{_points(line)}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        )
    return "".join(parts)


def _grid(
    x_ticks: list[float],
    y_ticks: list[float],
    place: Callable[[float, float], tuple[float, float]],
) -> list[str]:
    parts = []
    for tick in y_ticks:
        (x1, y), (x2, _) = place(x_ticks[0], tick), place(x_ticks[-1], tick)
        parts.append(f'<line x1="{x1}" y1="{y}" x2="{x2}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{x1 - 5}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, y = place(tick, y_ticks[0])
        parts.append(f'<text x="{x}" y="{y + 14}" text-anchor="middle">{tick:g}</text>')
    return parts


def _x_name(name: str) -> str:
    return (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle" '
        f'fill="#555">{escape(name)}</text>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return two to nine round numbers that enclose both values."""
    span = max(high - low, 1e-9 * max(abs(low), abs(high), 1.0))
    step = 10.0 ** math.floor(math.log10(span))
    step *= next(factor for factor in (0.2, 0.5, 1.0, 2.0) if span / (step * factor) <= 7)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)
