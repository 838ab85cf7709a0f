"""Live panel below the lines of a run on a terminal: the current phase and the latest metrics.

    step 12/40  generate 0:14  left 12:40  done at 14:32
    groups    ━━━━━━━━━━━━━━━━━━ 21/32 requests 118 of 128
    accuracy  0.412  ▁▂▂▃▄▄▅▆▇█
    reward -0.120  tokens 4.2, max 9  keep 0.62  entropy 0.512
    last step ██████████▓▓▓▓▓▓▒▒
    generate 55%  update 30%  sync 15%

Each line is cut at the width of the window; the least important value is at its end. The panel is
as wide as the window, up to MAX_COLUMNS, so most resizes do not break its border.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle

from rich.box import ASCII, ROUNDED
from rich.console import (
    Console,
    ConsoleDimensions,
    ConsoleOptions,
    Group,
    RenderableType,
    RenderResult,
)
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.types import STEP_PHASES, Phase

MAX_COLUMNS = 100
MAX_ROWS = 8
"""Maximum height of the panel with its border, in rows."""
FRAMES_PER_SECOND = 3.0
LEVELS = "▁▂▃▄▅▆▇█"
PLAIN_LEVELS = "_.-=+*#@"
FILLS, PLAIN_FILLS = "█▓▒░", "#=-."
COLOURS: dict[str, str] = {
    Phase.GENERATE: "cyan",
    Phase.LOGPROBS: "blue",
    Phase.UPDATE: "green",
    Phase.SYNC: "magenta",
    Phase.CHECKPOINT: "yellow",
    Phase.EVALUATE: "bright_blue",
    Phase.OTHER: "bright_black",
}
YEAR_SECONDS = 365 * 86400.0
_LABEL = 9
"""Width of the label before a bar, in columns."""


class LiveView:
    """Content of the panel. The run's thread updates it and rich's refresh thread draws it, so
    shared attributes are replaced in one assignment and never modified in place."""

    def __init__(self, num_steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self.name = ""
        self._num_steps, self._now = num_steps, now
        self._step = 0
        self._phase = ("starting", now())
        self._eta = (now(), math.nan)
        self._progress = Progress(
            TextColumn(f"{'groups':<{_LABEL}}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[requests]}", table_column=Column(no_wrap=True)),
            expand=True,
        )
        self._groups = self._progress.add_task("", visible=False, requests="")
        self._requests: Callable[[], str] = lambda: ""
        self._metrics: Mapping[str, float] = {}
        self._accuracies: deque[float] = deque(maxlen=MAX_COLUMNS)

    def phase(self, name: str, step: int) -> None:
        """Show that this rank enters phase `name` of `step`. "other" and "" mean that it is between
        phases, and leave the previous phase on display."""
        self._step = step or self._step
        if name not in ("", Phase.OTHER):
            self._phase = (name, self._now())

    def log(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        """Show the metrics of a finished step and the estimated seconds left."""
        self._step, self._eta = step, (self._now(), seconds_left)
        # A step that decides no group has no accuracy or reward: the last known values stay.
        last = {key: value for key, value in self._metrics.items() if not key.startswith("time/")}
        self._metrics = {**last, **metrics}
        accuracy = metrics.get("accuracy/raw", math.nan)
        if math.isfinite(accuracy):
            self._accuracies.append(accuracy)

    def groups(self, done: int, needed: int) -> None:
        """Show how many of the step's `needed` groups are ready to train on."""
        self._progress.update(self._groups, completed=done, total=needed, visible=True)

    def ask_requests(self, ask: Callable[[], str]) -> None:
        """Set the function that returns how many requests the engines run, as "118 of 128". It is
        called only in the generate phase."""
        self._requests = ask

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, plain = min(options.max_width, MAX_COLUMNS), options.ascii_only
        yield Panel(
            Group(*self._lines(max(width - 4, 1), plain)),
            title=Text(self.name, style="bold"),
            title_align="left",
            border_style="bright_black",
            box=ASCII if plain else ROUNDED,
            width=width,
        )

    def _lines(self, width: int, plain: bool) -> Iterator[RenderableType]:
        yield _line(self._head())
        generates = self._phase[0] == Phase.GENERATE
        requests = self._requests() if generates else ""
        self._progress.update(self._groups, requests=requests and f"requests {requests}")
        yield self._progress
        if self._metrics:
            yield self._accuracy(width, PLAIN_LEVELS if plain else LEVELS)
            yield _line(self._metric_cells())
            yield from _phase_lines(self._metrics, PLAIN_FILLS if plain else FILLS)

    def _head(self) -> Iterator[Text]:
        yield Text(f"step {self._step}/{self._num_steps}", style="bold")
        phase, since = self._phase
        style = COLOURS.get(phase, "")
        yield Text(f"{phase} {clock(self._now() - since)}", style=style)
        set_at, seconds = self._eta
        if math.isfinite(seconds):
            seconds_left = max(seconds - (self._now() - set_at), 0.0)
            yield Text(f"left {clock(seconds_left)}")
            if seconds_left < YEAR_SECONDS:
                yield Text(f"done at {_time_of_day(seconds_left)}")

    def _accuracy(self, width: int, levels: str) -> Text:
        head = f"{'accuracy':<{_LABEL}} {_number(self._metrics.get('accuracy/raw'), '.3f')}  "
        newest = list(self._accuracies)[-max(width - len(head), 1) :]
        return _line([Text(head + sparkline(newest, levels))])

    def _metric_cells(self) -> Iterator[Text]:
        metrics = self._metrics
        yield Text(f"reward {_number(metrics.get('reward/mean'), '+.3f')}")
        longest = _number(metrics.get("response_tokens/max"), ".0f")
        yield Text(f"tokens {_number(metrics.get('response_tokens/mean'), '.1f')}, max {longest}")
        yield Text(f"keep {_number(metrics.get('groups/keep_rate'), '.2f')}")
        yield Text(f"entropy {_number(metrics.get('policy/entropy'), '.3f')}")


class TerminalConsole(LiteralConsole):
    """Console that never hides the cursor, and takes its size from the terminal it writes to.

    rich takes the size from standard input and output, but those of a rank are not its terminal:
    its standard output is its log.
    """

    @property  # type: ignore[misc]  # read-only here, settable in rich
    def size(self) -> ConsoleDimensions:
        """Size of the terminal in columns and rows."""
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return super().size
        return ConsoleDimensions(columns, rows) if columns and rows else super().size

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing and report failure: the cursor stays visible."""
        return False


class LivePanel(Live):
    """`LiveView` drawn on a terminal, erased when it is closed. The cursor stays visible
    (TerminalConsole), because a killed run could not restore it.

    Drawing pauses while the terminal accepts no output (Ctrl-S, a stalled connection), because a
    blocked write would block the run.
    """

    def __init__(self, view: LiveView, console: Console) -> None:
        super().__init__(
            view,
            console=console,
            transient=True,
            refresh_per_second=FRAMES_PER_SECOND,
            redirect_stdout=False,  # output of other libraries belongs in the rank's log
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._terminal = select.poll()
        self._terminal.register(console.file, select.POLLOUT)

    def refresh(self) -> None:
        """Draw, unless a write to the terminal would block."""
        if self._terminal.poll(0):
            super().refresh()


def sparkline(values: Sequence[float], levels: str = LEVELS) -> str:
    """Return one character of `levels` per value, scaled from the minimum to the maximum. If all
    values are equal, each gets the middle level. Values must be finite."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return levels[len(levels) // 2] * len(values)
    top = len(levels) - 1
    return "".join(levels[round((value - low) / (high - low) * top)] for value in values)


def step_phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a step. Time outside all phases is `Phase.OTHER`."""
    seconds_of = {
        phase: seconds
        for phase in STEP_PHASES
        if 0 < (seconds := metrics.get(f"time/{phase}", 0.0)) < YEAR_SECONDS
    }
    rest = metrics.get("time/step", 0.0) - sum(seconds_of.values())
    return seconds_of | ({Phase.OTHER: rest} if 0 < rest < YEAR_SECONDS else {})


def clock(seconds: float) -> str:
    """Return seconds as "12:40" (minutes:seconds) or "1:12:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _phase_lines(metrics: Mapping[str, float], fills: str) -> Iterator[RenderableType]:
    """Yield a bar divided in proportion to the phases of the last step, and its legend."""
    phases = step_phases(metrics)
    if not phases:
        return
    total = sum(phases.values())
    fill_of = dict(zip(phases, cycle(fills), strict=False))
    bar = Table.grid(Column(width=_LABEL + 1), expand=True)
    for seconds in phases.values():
        bar.add_column(ratio=round(1000 * seconds / total) or 1)
    parts = (Rule(characters=fill, style=COLOURS[phase]) for phase, fill in fill_of.items())
    bar.add_row("last step", *parts)
    yield bar
    yield _line(
        Text(f"{fill_of[phase]} {phase} {phases[phase] / total:.0%}", style=COLOURS[phase])
        for phase in sorted(phases, key=phases.__getitem__, reverse=True)
    )


def _line(cells: Iterable[Text]) -> Text:
    """Return the cells joined into one line, cut at the window's width."""
    line = Text("  ").join(cells)
    line.no_wrap, line.overflow = True, "crop"
    return line


def _time_of_day(seconds_left: float) -> str:
    time_format = "%H:%M" if seconds_left < 20 * 3600 else "%a %d %b %H:%M"
    return time.strftime(time_format, time.localtime(time.time() + seconds_left))


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
