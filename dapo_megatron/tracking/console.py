"""Console output of a run: a header, a line per step, a summary.

On a terminal, lines are colored and a live panel (live.py) stays below them. Elsewhere, the output
is plain lines without control characters.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.table import Table

from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.tracking.live import LivePanel, LiveView, TerminalConsole, clock

PLAIN_SECONDS = 60.0
"""Minimum time between two lines of rollout progress where there is no live panel."""


class RolloutProgress(Protocol):
    """Progress display of one rollout."""

    def update(self, done_groups: int, **metrics: float) -> None:
        """Show `done_groups`. Plain lines also show `metrics`; the panel does not."""
        ...


class RunConsole:
    """Console on `file` (standard output by default). As a tracker it prints a line per step.

    stop_seconds  time that a signal to stop leaves; a step that trains for longer is warned of
    """

    def __init__(
        self, *, num_steps: int, file: TextIO | None = None, stop_seconds: float = math.inf
    ) -> None:
        out = sys.stdout if file is None else file
        terminal = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        # soft_wrap: a line is never split, so grep works and narrow windows can wrap it.
        self._console = TerminalConsole(
            file=out,
            force_terminal=terminal,
            color_system="auto" if terminal else None,
            highlight=False,
            soft_wrap=True,
        )
        self._num_steps = num_steps
        self._stop_seconds = stop_seconds
        self._step_seconds: list[float] = []
        self._view = LiveView(num_steps)
        self._is_live = False

    def header(self, title: str, facts: Mapping[str, Any]) -> None:
        """Print the run's name and its main settings."""
        self._view.name = title
        self._print(title, style="bold")
        self._facts(facts)

    def note(self, text: str) -> None:
        """Print one line."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Print one line in bold red, prefixed with WARNING."""
        self._print(f"WARNING: {text}", style="bold red")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step, and one line per evaluation set."""
        if "time/step" in metrics:
            self._step_seconds.append(metrics["time/step"])
            self._view.log(step, metrics, self._eta(step))
            self._print(_step_line(step, self._num_steps, metrics, self._eta(step)))
            self._warn_of_long_training(metrics)
        for line in _evaluation_lines(metrics):
            self._print(line, style="cyan")

    def _warn_of_long_training(self, metrics: Mapping[str, float]) -> None:
        """Warn once if a signal to stop could end the run before the end of a step."""
        seconds = metrics.get("time/logprobs", 0.0) + metrics.get("time/update", 0.0)
        if seconds > self._stop_seconds:
            self.warn(
                f"training took {seconds:.0f} s in this step, and run.stop_seconds is "
                f"{self._stop_seconds:g}: after a signal the run may end without a new checkpoint; "
                "raise run.stop_seconds, and with it the time between Slurm's signal and its limit"
            )
            self._stop_seconds = math.inf

    def finish(self, status: str) -> None:
        """Print how the run ended, unless it is FINISHED."""
        if status != "FINISHED":
            self._print(f"run {status}", style="bold red")

    @contextmanager
    def rollout_progress(self, total: int) -> Iterator[RolloutProgress]:
        """Show progress towards `total` groups: in the panel on a terminal, else as a plain line
        every PLAIN_SECONDS."""
        if not self._console.is_terminal:
            yield _PlainProgress(self, total)
            return
        with self.live() as view:
            yield _Bar(view, total)

    def ask_requests(self, ask: Callable[[], str]) -> None:
        """Set the function that returns how many requests the engines run, as "118 of 128"."""
        self._view.ask_requests(ask)

    @contextmanager
    def live(self) -> Iterator[LiveView]:
        """Show the live panel while the context is open, if the output is a terminal. Yield the
        view that holds its content."""
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
        """Print the summary at the end of a run.

        report   path of the HTML report, None if it was not written
        ui       URL of the run in MLflow, or the command that starts MLflow's UI
        """
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
        """Return the estimated seconds left, from the mean step time of this process. Steps before
        a resume do not count."""
        mean_seconds = sum(self._step_seconds) / len(self._step_seconds)
        return mean_seconds * max(self._num_steps - step, 0)

    def _print(self, text: str, style: str | None = None) -> None:
        with suppress(OSError):  # full disk, or closed terminal
            self._console.print(text, style=style)


class _Bar:
    def __init__(self, view: LiveView, total: int) -> None:
        self._view, self._total = view, total
        view.groups(0, total)

    def update(self, done_groups: int, **metrics: float) -> None:
        self._view.groups(done_groups, self._total)


class _PlainProgress:
    def __init__(self, console: RunConsole, total: int) -> None:
        self._console, self._total = console, total
        self._last = time.monotonic()

    def update(self, done_groups: int, **metrics: float) -> None:
        now = time.monotonic()
        if now - self._last >= PLAIN_SECONDS:
            self._last = now
            self._console.note(
                f"rollout {done_groups}/{self._total} groups  {_format_metrics(metrics)}".rstrip()
            )


def _format_metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:g}" for name, value in metrics.items())


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
"""(label, metric, format) of each value in a step's line."""


def _step_line(step: int, num_steps: int, metrics: Mapping[str, float], eta: float) -> str:
    cells = [f"{label} {_number(metrics.get(name), spec)}" for label, name, spec in _COLUMNS]
    counter = f"step {step:>{len(str(num_steps))}}/{num_steps}"
    return "  ".join([counter, *cells, f"{metrics['time/step']:.1f} s", f"left {clock(eta)}"])


def print_evaluation(metrics: Mapping[str, float]) -> None:
    """Print a table of the metrics of each evaluation set."""
    table = Table("set", "metric", "value, 95% interval")
    for row in evaluation_rows(metrics):
        table.add_row(*row)
    LiteralConsole().print(table)


def evaluation_rows(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """Yield (set, metric, value) of each eval/<set>/<metric>. The value includes its 95% interval,
    if there is one: "0.512 [0.480, 0.544]"."""
    for name, value in metrics.items():
        set_name, _, metric = name.removeprefix("eval/").rpartition("/")
        if not name.startswith("eval/") or metric.endswith(("_low", "_high")):
            continue
        if metric == "ungraded":
            yield set_name, metric, f"{value:.0f}"
            continue
        low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
        yield set_name, metric, f"{value:.3f}{interval}"


def _evaluation_lines(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield a line per set: "eval chain_sum  avg@4 0.512 [0.480, 0.544]  pass@4 ..."."""
    sets: dict[str, list[str]] = {}
    for set_name, metric, value in evaluation_rows(metrics):
        if (metric, value) != ("ungraded", "0"):
            sets.setdefault(set_name, []).append(f"{metric} {value}")
    for set_name, values in sets.items():
        yield "  ".join([f"  eval {set_name}", *values])


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
