"""The panel under the lines of a run on a terminal: what it is doing now, and how it goes.

    step 12/40  generate 0:14  left 12:40  done at 14:32
    groups    ████████████░░░░░░  21/32  requests 118 of 128
    accuracy  0.412  ▁▂▂▃▄▄▅▆▇█
    reward -0.120  tokens 4.2, max 9  keep 0.62  entropy 0.512
    last step ██████████▓▓▓▓▓▓▒▒
    generate 55%  update 30%  sync 15%

Each line holds what fits into the window; what matters least is left out first. The panel is as
wide as the window, up to MAX_COLUMNS, so that most changes of a window's size leave it whole.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, cycle, pairwise

from rich.box import ASCII, ROUNDED
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dapo_megatron.types import STEP_PHASES, Phase

MAX_COLUMNS = 100
MAX_ROWS = 8
"""Of the panel, with its border."""
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
"""Columns of what stands before a bar."""


class LiveView:
    """What the panel says. Told by the run's thread, drawn by another: what they share is replaced,
    never changed in part."""

    def __init__(self, num_steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self.name = ""
        self._num_steps, self._now = num_steps, now
        self._step = 0
        self._phase = ("starting", now())
        self._eta = (now(), math.nan)
        self._groups: tuple[int, int] | None = None
        self._requests: Callable[[], str] = lambda: ""
        self._metrics: Mapping[str, float] = {}
        self._accuracies: deque[float] = deque(maxlen=MAX_COLUMNS)

    def phase(self, name: str, step: int) -> None:
        """This rank turns to a phase; "other" and "" are what lies between phases."""
        self._step = step or self._step
        if name not in ("", Phase.OTHER):
            self._phase = (name, self._now())

    def log(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        """A step has ended, and so many seconds are left."""
        self._step, self._eta = step, (self._now(), seconds_left)
        # A step that trains on groups decided before has no figures of its own.
        known = {key: value for key, value in self._metrics.items() if not key.startswith("time/")}
        self._metrics = {**known, **metrics}
        accuracy = metrics.get("accuracy/raw", math.nan)
        if math.isfinite(accuracy):
            self._accuracies.append(accuracy)

    def groups(self, done: int, needed: int) -> None:
        """Groups of the step that can be trained on by now."""
        self._groups = (done, needed)

    def ask_requests(self, ask: Callable[[], str]) -> None:
        """Whom to ask, while engines run, how many requests they have: "118 of 128"."""
        self._requests = ask

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_COLUMNS)
        plain = not options.encoding.startswith("utf")
        lines = Group(*self._lines(max(width - 4, 1), plain))
        yield Panel(
            lines,
            title=Text(self.name, style="bold"),
            title_align="left",
            border_style="bright_black",
            box=ASCII if plain else ROUNDED,
            width=width,
        )

    def _lines(self, width: int, plain: bool) -> Iterator[Text]:
        fills = PLAIN_FILLS if plain else FILLS
        yield fitting(self._head(), width)
        if self._groups is not None:
            done, needed = self._groups
            counted = [Text(f"{done}/{needed}"), *self._now_running()]
            yield _bar_line("groups", done / max(needed, 1), counted, width, fills)
        if self._metrics:
            yield self._accuracy(width, PLAIN_LEVELS if plain else LEVELS)
            yield fitting(self._figures(), width)
            yield from _phase_lines(self._metrics, width, fills)

    def _head(self) -> Iterator[Text]:
        yield Text(f"step {self._step}/{self._num_steps}", style="bold")
        phase, since = self._phase
        style = COLOURS.get(phase, "")
        yield Text(f"{phase} {clock(self._now() - since)}", style=style)
        at, seconds = self._eta
        if math.isfinite(seconds):
            left = max(seconds - (self._now() - at), 0.0)
            yield Text(f"left {clock(left)}")
            if left < YEAR_SECONDS:
                yield Text(f"done at {_time_of_day(left)}")

    def _now_running(self) -> Iterator[Text]:
        if self._phase[0] == Phase.GENERATE and (requests := self._requests()):
            yield Text(f"requests {requests}")

    def _accuracy(self, width: int, levels: str) -> Text:
        shown = _number(self._metrics.get("accuracy/raw"), ".3f")
        head = Text(f"{'accuracy':<{_LABEL}} {shown}  ")
        room = max(width - cell_len(head.plain), 0)
        return head + Text(sparkline(list(self._accuracies)[-room:] if room else [], levels))

    def _figures(self) -> Iterator[Text]:
        metrics = self._metrics
        yield Text(f"reward {_number(metrics.get('reward/mean'), '+.3f')}")
        longest = _number(metrics.get("response_tokens/max"), ".0f")
        yield Text(f"tokens {_number(metrics.get('response_tokens/mean'), '.1f')}, max {longest}")
        yield Text(f"keep {_number(metrics.get('groups/keep_rate'), '.2f')}")
        yield Text(f"entropy {_number(metrics.get('policy/entropy'), '.3f')}")


class TerminalConsole(Console):
    """rich's, which never hides the cursor, and has the size of the terminal it writes to: rich
    asks standard input and output for theirs, and a rank's output is its log."""

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        """Columns and rows."""
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return super().size
        return ConsoleDimensions(columns, rows) if columns and rows else super().size

    def show_cursor(self, show: bool = True) -> bool:
        """Nothing."""
        return False


class LivePanel:
    """A `LiveView` on a terminal; it goes without a trace when it is closed. The cursor stays
    visible (TerminalConsole): a run that is killed could not show it again.

    Nothing is drawn while nobody reads the terminal (Ctrl-S, a stalled connection).
    """

    def __init__(self, view: LiveView, console: Console) -> None:
        self._console = console
        self._live = Live(
            view,
            console=console,
            transient=True,
            auto_refresh=False,  # rich's thread writes whether the terminal takes it or not
            redirect_stdout=False,  # what others print belongs in the rank's log
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> None:
        self._live.start(refresh=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._live.stop()

    def _draw(self) -> None:
        taking = select.poll()
        taking.register(self._console.file, select.POLLOUT)
        while not self._ended.wait(1 / FRAMES_PER_SECOND):
            if taking.poll(0):
                self._live.refresh()


def fitting(cells: Iterable[Text], width: int, gap: str = "  ") -> Text:
    """The first of the cells, as many as fit; of the first itself what fits."""
    line = Text(no_wrap=True)
    for cell in cells:
        longer = line + Text(gap) + cell if line.plain else cell.copy()
        if line.plain and cell_len(longer.plain) > width:
            break
        line = longer
    line.truncate(width)
    return line


def sparkline(values: Sequence[float], levels: str = LEVELS) -> str:
    """A character per finite value, from the least to the greatest of them; the middle one if all
    are the same."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return levels[len(levels) // 2] * len(values)
    top = len(levels) - 1
    return "".join(levels[round((value - low) / (high - low) * top)] for value in values)


def shares(seconds: Sequence[float], width: int) -> list[int]:
    """`width` columns divided as the seconds are: each end is where its sum is, rounded."""
    total = sum(seconds)
    if total <= 0:
        return [0] * len(seconds)
    ends = [round(width * (part / total)) for part in accumulate(seconds)]
    return [end - begin for begin, end in pairwise([0, *ends])]


def step_phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase of a step, and what lies between them as `Phase.OTHER`."""
    found = {
        phase: seconds
        for phase in STEP_PHASES
        if 0 < (seconds := metrics.get(f"time/{phase}", 0.0)) < YEAR_SECONDS
    }
    rest = metrics.get("time/step", 0.0) - sum(found.values())
    return found | ({Phase.OTHER: rest} if 0 < rest < YEAR_SECONDS else {})


def clock(seconds: float) -> str:
    """12:40, or 1:12:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _phase_lines(metrics: Mapping[str, float], width: int, fills: str) -> Iterator[Text]:
    phases = step_phases(metrics)
    head = Text(f"{'last step':<{_LABEL}} ")
    columns = shares(list(phases.values()), max(width - cell_len(head.plain), 0))
    legend: dict[str, Text] = {}
    for (phase, seconds), num, fill in zip(phases.items(), columns, cycle(fills), strict=False):
        head.append(fill * num, style=COLOURS[phase])
        share = seconds / sum(phases.values())
        legend[phase] = Text(f"{fill} ", style=COLOURS[phase]) + Text(f"{phase} {share:.0%}")
    if phases:
        head.truncate(width)
        yield head
        longest_first = sorted(phases, key=phases.__getitem__, reverse=True)
        yield fitting((legend[phase] for phase in longest_first), width)


def _bar_line(label: str, share: float, cells: Iterable[Text], width: int, fills: str) -> Text:
    """A bar, and the cells beside it."""
    head = f"{label:<{_LABEL}} "
    beside = fitting(cells, max(width - len(head) - 12, 1))
    room = max(width - len(head) - cell_len(beside.plain) - 2, 0)
    filled = round(room * min(max(share, 0.0), 1.0))
    line = Text(head, no_wrap=True)
    line.append(fills[0] * filled, style="cyan").append(fills[-1] * (room - filled), style="dim")
    line.append("  ").append_text(beside)
    line.truncate(width)
    return line


def _time_of_day(seconds_left: float) -> str:
    form = "%H:%M" if seconds_left < 20 * 3600 else "%a %d %b %H:%M"
    return time.strftime(form, time.localtime(time.time() + seconds_left))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
