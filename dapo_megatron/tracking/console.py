"""What a person sees of a run: a header, a line per step, a summary.

On a terminal with colour, and a panel under the lines (live.py); elsewhere plain lines without
control characters.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.table import Table

from dapo_megatron.tracking.live import LivePanel, LiveView, TerminalConsole, clock

PLAIN_SECONDS = 60.0
"""Least time between two lines of progress where there is no panel."""


class RolloutProgress(Protocol):
    """How far a rollout is."""

    def update(self, done_groups: int, **figures: float) -> None:
        """`done_groups` so far; lines, not the panel, show `figures` beside them."""
        ...


class RunConsole:
    """Writes to `file` (standard output by default); as a tracker, a line per step."""

    def __init__(self, *, num_steps: int, file: TextIO | None = None) -> None:
        out = sys.stdout if file is None else file
        terminal = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        # soft_wrap: a line stays one line, for grep and for narrow windows alike.
        self._console = TerminalConsole(
            file=out,
            force_terminal=terminal,
            color_system="auto" if terminal else None,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=True,
        )
        self._num_steps = num_steps
        self._step_seconds: list[float] = []
        self._view = LiveView(num_steps)
        self._is_live = False

    def header(self, title: str, facts: Mapping[str, Any]) -> None:
        """What is about to run."""
        self._view.name = title
        self._print(title, style="bold")
        self._facts(facts)

    def note(self, text: str) -> None:
        """One line of text."""
        self._print(text)

    def warn(self, text: str) -> None:
        """One line that must not be missed."""
        self._print(f"WARNING: {text}", style="bold red")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step, and one per evaluated set."""
        if "time/step" in metrics:
            self._step_seconds.append(metrics["time/step"])
            self._view.log(step, metrics, self._eta(step))
            self._print(_step_line(step, self._num_steps, metrics, self._eta(step)))
        for line in _evaluation_lines(metrics):
            self._print(line, style="cyan")

    def finish(self, status: str) -> None:
        """Says how the run ended, unless it is a matter of course."""
        if status != "FINISHED":
            self._print(f"run {status}", style="bold red")

    @contextmanager
    def rollout_progress(self, total: int) -> Iterator[RolloutProgress]:
        """While rolling out: of `total` groups in the panel, or a plain line once in a while."""
        if not self._console.is_terminal:
            yield _PlainProgress(self, total)
            return
        with self.live() as view:
            yield _Bar(view, total)

    def ask_requests(self, ask: Callable[[], str]) -> None:
        """Whom the panel asks how many requests engines run: "118 of 128"."""
        self._view.ask_requests(ask)

    @contextmanager
    def live(self) -> Iterator[LiveView]:
        """On a terminal the panel, as long as this lasts; what it is told is shown in it."""
        if self._is_live or not self._console.is_terminal:
            yield self._view
            return
        self._is_live = True
        try:
            with LivePanel(self._view, self._console):
                yield self._view
        finally:
            self._is_live = False

    def summary(
        self,
        *,
        accuracy_before: float | None,
        accuracy_after: float | None,
        seconds: float,
        folder: Path,
        report: Path | None = None,
        ui: str | None = None,
    ) -> None:
        """The block at the end. `report` is the page that shows the run, `ui` what to type (or
        where to go) to look at it in MLflow."""
        self._print("done", style="bold green")
        change = ""
        if accuracy_before is not None and accuracy_after is not None:
            change = f" ({accuracy_after - accuracy_before:+.3f})"
        facts = {
            "accuracy before": _number(accuracy_before, ".3f"),
            "accuracy after": _number(accuracy_after, ".3f") + change,
            "time": f"{seconds:.1f} s",
            "run folder": str(folder),
        }
        if report is not None:
            facts["report"] = str(report)
        if ui is not None:
            facts["look at it"] = ui
        self._facts(facts)

    def _facts(self, facts: Mapping[str, Any]) -> None:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self._print(f"  {name:<{width}}  {value}")

    def _eta(self, step: int) -> float:
        """Seconds left, at the mean pace of this process: a resumed one measures anew."""
        pace = sum(self._step_seconds) / len(self._step_seconds)
        return pace * max(self._num_steps - step, 0)

    def _print(self, text: str, style: str | None = None) -> None:
        with suppress(OSError):  # a full disk, or a terminal that is gone
            self._console.print(text, style=style)


class _Bar:
    def __init__(self, view: LiveView, total: int) -> None:
        self._view, self._total = view, total
        view.groups(0, total)

    def update(self, done_groups: int, **figures: float) -> None:
        self._view.groups(done_groups, self._total)


class _PlainProgress:
    def __init__(self, console: RunConsole, total: int) -> None:
        self._console, self._total = console, total
        self._last = time.monotonic()

    def update(self, done_groups: int, **figures: float) -> None:
        now = time.monotonic()
        if now - self._last >= PLAIN_SECONDS:
            self._last = now
            self._console.note(
                f"rollout {done_groups}/{self._total} groups  {_figures(figures)}".rstrip()
            )


def _figures(figures: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:g}" for name, value in figures.items())


_COLUMNS = (
    ("accuracy", "accuracy/raw", ".3f"),
    ("reward", "reward/mean", "+.3f"),
    ("tokens", "response_tokens/mean", ".1f"),
    ("entropy", "policy/entropy", ".3f"),
    ("keep", "groups/keep_rate", ".2f"),
    ("age", "groups/age_mean", ".1f"),
    ("gap", "mismatch/gap_max", ".1e"),
    ("grad", "policy/grad_norm", ".3f"),
)
"""(label, metric, format) of a step's line."""


def _step_line(step: int, num_steps: int, metrics: Mapping[str, float], eta: float) -> str:
    cells = [f"{label} {_number(metrics.get(name), form)}" for label, name, form in _COLUMNS]
    counter = f"step {step:>{len(str(num_steps))}}/{num_steps}"
    return "  ".join([counter, *cells, f"{metrics['time/step']:.1f} s", f"left {clock(eta)}"])


def print_evaluation(metrics: Mapping[str, float]) -> None:
    """Print a table of the figures of each evaluation set."""
    table = Table("set", "figure", "value, 95% interval")
    for row in evaluation_rows(metrics):
        table.add_row(*row)
    Console().print(table)


def evaluation_rows(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """(set, figure, value) of each eval/<set>/<figure>, its interval beside the value: "0.512
    [0.480, 0.544]"."""
    for name, value in metrics.items():
        of_set, _, figure = name.removeprefix("eval/").rpartition("/")
        if not name.startswith("eval/") or figure.endswith(("_low", "_high")):
            continue
        if figure == "ungraded":
            yield of_set, figure, f"{value:.0f}"
            continue
        low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
        yield of_set, figure, f"{value:.3f}{interval}"


def _evaluation_lines(metrics: Mapping[str, float]) -> Iterator[str]:
    """One line per set: "eval chain_sum  avg@4 0.512 [0.480, 0.544]  pass@4 ..."."""
    sets: dict[str, list[str]] = {}
    for of_set, figure, value in evaluation_rows(metrics):
        if (figure, value) != ("ungraded", "0"):
            sets.setdefault(of_set, []).append(f"{figure} {value}")
    for of_set, figures in sets.items():
        yield "  ".join([f"  eval {of_set}", *figures])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
