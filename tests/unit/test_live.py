"""The live panel on a terminal: its content at each width, and the screen after it is closed."""

from __future__ import annotations

import io
import locale
import re
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.live import (
    LEVELS,
    MAX_COLUMNS,
    MAX_ROWS,
    LiveView,
    clock,
    sparkline,
    step_phases,
)
from tests.helpers.screen import Screen, Terminal

METRICS = {
    "accuracy/raw": 0.412,
    "reward/mean": -0.12,
    "response_tokens/mean": 4.2,
    "response_tokens/max": 9.0,
    "groups/keep_rate": 0.62,
    "policy/entropy": 0.512,
    "time/step": 10.0,
    "time/generate": 5.5,
    "time/update": 3.0,
    "time/sync": 1.0,
}


def draw(view: LiveView, width: int, encoding: str = "utf-8") -> list[str]:
    """Return the lines of the panel on a terminal of this width."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, color_system=None, soft_wrap=True)
    console.print(view)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


def view_at(now: float = 114.0) -> LiveView:
    """Return a view in step 12 of 40, by default 14 seconds into the generate phase."""
    times = {"now": 0.0}
    view = LiveView(40, now=lambda: times["now"])
    view.name = "dapo_megatron tiny"
    times["now"] = 90.0
    for step in range(1, 12):
        view.log(step, METRICS | {"accuracy/raw": step / 11 * 0.412}, 784.0)
    times["now"] = 100.0
    view.phase("generate", 12)
    view.groups(21, 32)
    view.ask_requests(lambda: "118 of 128")
    times["now"] = now
    return view


def test_content_of_the_panel() -> None:
    top, *lines, bottom = draw(view_at(), 80)
    assert top.startswith("╭─ dapo_megatron tiny ──")
    assert bottom.startswith("╰──")
    head, groups, accuracy, figures, bar, legend = (line.strip("│ ") for line in lines)
    assert re.fullmatch(r"step 12/40  generate 0:14  left 12:40  done at \d\d:\d\d", head)
    assert re.fullmatch(r"groups +━+ +21/32 requests 118 of 128", groups)
    assert accuracy == "accuracy  0.412  " + sparkline([step / 11 for step in range(1, 12)])
    assert figures == "reward -0.120  tokens 4.2, max 9  keep 0.62  entropy 0.512"
    assert re.fullmatch(r"last step █+▓+▒+░+", bar)
    columns = [bar.count(fill) for fill in "█▓▒░"]
    assert sum(columns) == 66
    assert all(abs(n - 6.6 * s) <= 1.0 for n, s in zip(columns, (5.5, 3.0, 1.0, 0.5), strict=True))
    assert legend == "█ generate 55%  ▓ update 30%  ▒ sync 10%  ░ other 5%"


@pytest.mark.parametrize("width", [20, 60, 80, 140, 300])
def test_the_panel_fits_its_window(width: int) -> None:
    lines = draw(view_at(), width)
    assert len(lines) == MAX_ROWS
    assert {cell_len(line) for line in lines} == {min(width, MAX_COLUMNS)}


def test_a_narrow_window_shows_the_most_important_values() -> None:
    text = "\n".join(draw(view_at(), 60))
    for part in ("step 12/40  generate 0:14  left 12:40", "21/32", "accuracy  0.412", "reward"):
        assert part in text
    assert "entropy 0.512" not in text
    assert "generate 55%  ▓ update 30%  ▒ sync 10%" in text


def test_the_panel_before_the_first_step() -> None:
    view = LiveView(40, now=iter([0.0, 0.0, 75.0, 75.0]).__next__)
    _, line, _ = draw(view, 80)
    assert line.strip("│ ") == "step 0/40  starting 1:15"


def test_a_step_without_a_metric_keeps_its_last_value() -> None:
    view = view_at()
    view.log(12, {"policy/entropy": 0.5, "time/step": 4.0, "time/update": 4.0}, 700.0)
    text = "\n".join(draw(view, 80))
    assert "accuracy  0.412" in text
    assert "reward -0.120" in text
    assert "entropy 0.500" in text
    assert "█ update 100%  " in text, "phases of the last step only"


def test_requests_are_shown_only_in_the_generate_phase() -> None:
    view = view_at()
    view.phase("update", 12)
    assert "requests" not in "\n".join(draw(view, 80))
    view.phase("other", 12)
    assert "update 0:00" in "\n".join(draw(view, 80)), "time between phases is not shown as a phase"


def test_the_time_left_counts_down_to_zero() -> None:
    assert "left 12:40" in draw(view_at(114.0), 80)[1]
    assert "left 12:30" in draw(view_at(124.0), 80)[1]
    assert "left 0:00" in draw(view_at(5000.0), 80)[1]


def test_without_unicode_the_panel_is_ascii() -> None:
    text = "\n".join(draw(view_at(), 80, encoding="ascii"))
    assert "accuracy  0.412  _" in text
    assert text.isascii()


ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.dictionaries(st.sampled_from([*METRICS, "time/logprobs", "time/evaluate"]), ANY_FLOAT),
    ANY_FLOAT,
    st.integers(1, 150),
)
def test_no_metric_value_raises_an_error(
    metrics: Mapping[str, float], seconds_left: float, width: int
) -> None:
    """The panel is drawn with every console line, so an error in it would end the run."""
    view = view_at()
    view.log(12, metrics, seconds_left)
    draw(view, width)


def test_a_sparkline_is_scaled_from_minimum_to_maximum() -> None:
    assert sparkline([0.1, 0.2, 0.8, 0.5]) == "▁▂█▅"
    assert sparkline([0.3, 0.3]) == LEVELS[4] * 2
    assert sparkline([]) == ""


def test_time_between_phases_is_other() -> None:
    assert step_phases(METRICS) == {"generate": 5.5, "update": 3.0, "sync": 1.0, "other": 0.5}
    assert step_phases({"time/step": 5.0, "time/generate": 6.0}) == {"generate": 6.0}
    assert step_phases({}) == {}


def test_clock_format() -> None:
    assert [clock(seconds) for seconds in (0.0, 75.4, 3600.0)] == ["0:00", "1:15", "1:00:00"]


# ---------------------------------------------------------------------------- on a terminal


@pytest.fixture(autouse=True)
def standard_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def screen_after(use: Callable[[RunConsole, Terminal], None], columns: int = 150) -> Screen:
    terminal = Terminal(columns)
    use(RunConsole(num_steps=20, file=terminal.file), terminal)
    screen = Screen()
    screen.feed(terminal.close())
    return screen


def wait_until_drawn(view: LiveView) -> None:
    """Wait until the refresh thread has drawn the view as it is now, in the generate phase."""
    draws: SimpleQueue[None] = SimpleQueue()

    def note_draw() -> str:
        draws.put(None)
        return ""

    view.ask_requests(note_draw)
    # The first may have started before the latest change, and the third starts after the second.
    for _ in range(3):
        draws.get(timeout=60.0)


def visible_lines(screen: Screen) -> list[str]:
    """Return the lines on the screen, without the empty lines at its end."""
    return "\n".join(screen.lines).rstrip("\n").split("\n")


def test_lines_remain_and_the_panel_is_erased() -> None:
    def run(console: RunConsole, terminal: Terminal) -> None:
        console.header("dapo_megatron tiny", {"model": "m"})
        with console.live() as view:
            view._now = lambda: 0.0  # the phase has lasted 0:00, however slow this machine is
            for step in (1, 2, 3):
                view.phase("generate", step)
                with console.rollout_progress(32) as bar:
                    bar.update(7 * step)
                    wait_until_drawn(view)
                console.log(step, METRICS)
        console.note("the end")

    screen = screen_after(run)
    assert [line[:10].rstrip() for line in visible_lines(screen)] == [
        "dapo_megat", "  model  m", "step  1/20", "step  2/20", "step  3/20", "the end",
    ]  # fmt: skip
    frames = ["\n".join(frame) for frame in screen.frames]
    assert any("step 2/20  generate 0:00" in frame and " 14/32" in frame for frame in frames)
    assert all(frame.count("╭") == 1 for frame in frames), "a frame has two panels or none"
    assert screen.shows_cursor


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_a_clean_terminal(error: type[BaseException]) -> None:
    def run(console: RunConsole, terminal: Terminal) -> None:
        with pytest.raises(error), console.live(), console.rollout_progress(32) as bar:
            bar.update(3)
            raise error
        print("error: it broke", file=terminal.file)

    assert visible_lines(screen_after(run)) == ["error: it broke"]


def test_the_cursor_is_never_hidden() -> None:
    def run(console: RunConsole, terminal: Terminal) -> None:
        with console.live():
            terminal.file.flush()

    terminal = Terminal()
    run(RunConsole(num_steps=20, file=terminal.file), terminal)
    assert "\x1b[?25l" not in terminal.close()


def test_a_terminal_of_another_encoding_gets_ascii() -> None:
    def run(console: RunConsole, terminal: Terminal) -> None:
        console.header("a run of Zoë", {})
        with console.live() as view:
            view.groups(1, 2)
            console.log(1, METRICS)

    locale.setlocale(locale.LC_CTYPE, "C")
    terminal = Terminal(150)
    run(RunConsole(num_steps=20, file=terminal.file), terminal)
    text = re.sub(r"\x1b\[[\d;]*m", "", terminal.close())
    assert text.isascii()
    assert "+- a run of Zo? --" in text
    assert re.search(r"groups +-+ -+ 1/2", text)


def test_the_panel_follows_a_resized_window() -> None:
    def run(console: RunConsole, terminal: Terminal) -> None:
        with console.live() as view:
            view.phase("generate", 1)
            wait_until_drawn(view)
            terminal.resize(60, 40)
            wait_until_drawn(view)

    frames = screen_after(run, columns=90).frames
    assert len(frames[0][0]) == 90
    assert len(frames[-1][0]) == 60


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")

    def run(console: RunConsole, terminal: Terminal) -> None:
        with console.live() as view, console.rollout_progress(32) as bar:
            view.phase("generate", 1)
            bar.update(3)
            console.log(1, METRICS)

    terminal = Terminal()
    run(RunConsole(num_steps=20, file=terminal.file), terminal)
    text = terminal.close()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 1
