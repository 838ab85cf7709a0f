"""Console output of a run: a header, a line per step, a summary.

On a terminal, lines are colored and a progress bar of the current phase stays below them. Elsewhere
the output is plain lines without control characters.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.types import Phase

PLAIN_SECONDS = 60.0
"""Minimum time between two lines of rollout progress where there is no bar."""


class RunConsole:
    """Console on `file` (standard output by default). As a tracker it prints a line per step.

    num_groups    groups that a step trains on
    stop_seconds  time that a signal to stop leaves; a step that trains for longer is warned of
    """

    def __init__(
        self,
        *,
        num_steps: int = 0,
        num_groups: int = 0,
        file: TextIO | None = None,
        stop_seconds: float = math.inf,
    ) -> None:
        out = sys.stdout if file is None else file
        self._is_terminal = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        # soft_wrap: a line is never split, so grep works and narrow windows can wrap it.
        self._console = _Console(
            file=out,
            force_terminal=self._is_terminal,
            color_system="auto" if self._is_terminal else None,
            highlight=False,
            soft_wrap=True,
        )
        self._num_steps, self._num_groups = num_steps, num_groups
        self._stop_seconds = stop_seconds
        self._step_seconds: list[float] = []
        self._bar = Progress(
            TextColumn("step {task.fields[step]}/" + str(num_steps)),
            TextColumn("{task.fields[phase]}", style="cyan"),
            TimeElapsedColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            refresh_per_second=2,
            redirect_stdout=False,  # output of other libraries belongs in the rank's log
            redirect_stderr=False,
            disable=not self._is_terminal,
        )
        self._left = ""
        self._task = self._bar.add_task("", total=None, step=0, phase="starting", left="")
        self._printed_at = time.monotonic()

    def header(self, title: str, facts: Mapping[str, Any]) -> None:
        """Print the run's name and its main settings."""
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
            self._left = f"left {clock(self._eta(step))}"
            self._bar.update(self._task, left=self._left)
            self._print(f"{_step_line(step, self._num_steps, metrics)}  {self._left}")
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

    def live(self) -> Progress:
        """Return a context manager that shows the bar, if the output is a terminal."""
        return self._bar

    def phase(self, name: str, step: int) -> None:
        """Show that this rank enters phase `name` of `step`. "other" and "" mean that it is between
        phases, and leave the previous phase on display."""
        if name not in ("", Phase.OTHER):
            self._bar.reset(self._task, total=None, phase=name, step=step, left=self._left)

    def groups(self, done: int) -> None:
        """Show how many of the step's groups are ready to train on: in the bar on a terminal, else
        as a line if PLAIN_SECONDS passed since the last one."""
        self._bar.update(self._task, completed=done, total=self._num_groups)
        now = time.monotonic()
        if not self._is_terminal and now - self._printed_at >= PLAIN_SECONDS:
            self.note(f"rollout {done}/{self._num_groups} groups")

    def summary(self, metrics: Mapping[str, Any], pages: Mapping[str, str]) -> None:
        """Print the end of a run: `metrics` as in summary.json, `pages` where to look."""
        self._print("done", style="bold green")
        before, after = metrics["accuracy_before"], metrics["accuracy_after"]
        change = "" if before is None or after is None else f" ({after - before:+.3f})"
        self._facts(
            {
                "accuracy before": _number(before, ".3f"),
                "accuracy after": _number(after, ".3f") + change,
                "time": f"{metrics['seconds']:.1f} s",
                **pages,
            }
        )

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
        self._printed_at = time.monotonic()
        with suppress(OSError):  # full disk, or closed terminal
            self._console.print(text, style=style)


class _Console(LiteralConsole):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor visible, because a killed run could not restore it."""
        return False


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


def _step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    cells = [f"{label} {_number(metrics.get(name), spec)}" for label, name, spec in _COLUMNS]
    counter = f"step {step:>{len(str(num_steps))}}/{num_steps}"
    return "  ".join([counter, *cells, f"{metrics['time/step']:.1f} s"])


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


def clock(seconds: float) -> str:
    """Return seconds as "12:40" (minutes:seconds) or "1:12:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
