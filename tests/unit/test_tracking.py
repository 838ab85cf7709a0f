"""Tracking: metrics.jsonl, provenance and console. Samples are in test_samples.py, MLflow in
test_mlflow.py."""

from __future__ import annotations

import io
import json
import math
import re
import resource
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapo_megatron
from dapo_megatron.config.file import dump_config
from dapo_megatron.model import read_architecture
from dapo_megatron.model.flops import model_flops
from dapo_megatron.run.record import changed_keys
from dapo_megatron.tracking import console
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.provenance import commit
from dapo_megatron.tracking.recorder import RunRecorder, Speedometer
from dapo_megatron.tracking.trackers import JsonlTracker
from dapo_megatron.types import CheckpointError
from tests.helpers.configs import tiny_config
from tests.helpers.console import Console
from tests.helpers.screen import Screen, Terminal

METRICS = {
    "accuracy/raw": 0.41,
    "reward/mean": -0.12,
    "response_tokens/mean": 4.2,
    "policy/entropy": 0.5,
    "policy/grad_norm": 0.8,
    "groups/keep_rate": 0.8,
    "groups/age_mean": 1.53,
    "mismatch/gap_max": 1.2e-6,
    "time/step": 5.0,
    "eval/chain_sum/avg@4": 0.31,
}


# ---------------------------------------------------------------------------- metrics.jsonl


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def metrics_file(tmp_path: Path) -> Path:
    """A metrics file with steps 1 to 5."""
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, Console())
    for step in range(1, 6):
        tracker.log(step, {"reward/mean": step / 8})
    tracker.finish("FINISHED")
    return path


def test_each_step_is_flushed_as_one_json_object(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, Console())
    tracker.log(1, METRICS)
    assert json.loads(path.read_text()) == {"step": 1, **METRICS}, "the line must be flushed"


def test_non_finite_values_stay_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path, Console()).log(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": 1.0,
    }


@pytest.mark.parametrize("step", [0, 3, 5, 9])
def test_resuming_truncates_metrics_to_the_checkpoint(metrics_file: Path, step: int) -> None:
    tracker = JsonlTracker(metrics_file, Console(), step)
    assert steps_in(metrics_file) == list(range(1, min(step, 5) + 1))
    tracker.log(step + 1, {})
    assert steps_in(metrics_file) == [*range(1, min(step, 5) + 1), step + 1]


@pytest.mark.parametrize("tail", [b'{"step": 6, "rew', b'{"step": 6}', b"\x00\x00"])
def test_a_half_written_last_line_is_dropped(metrics_file: Path, tail: bytes) -> None:
    whole = metrics_file.read_bytes()
    metrics_file.write_bytes(whole + tail)
    tracker = JsonlTracker(metrics_file, Console())
    assert metrics_file.read_bytes() == whole
    tracker.log(6, {})
    assert steps_in(metrics_file) == [1, 2, 3, 4, 5, 6]


def test_a_broken_line_in_the_middle_is_refused_and_the_file_kept(metrics_file: Path) -> None:
    content = metrics_file.read_bytes() + b"nonsense\n" + b'{"step": 7}\n'
    metrics_file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: .*nonsense"):
        JsonlTracker(metrics_file, Console())
    assert metrics_file.read_bytes() == content


@contextmanager
def disk_with_room(num_bytes: int) -> Iterator[None]:
    """Limit files of this process to `num_bytes`: a write is cut short there, then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=10),
    room=st.integers(0, 200),
    full_for=st.integers(0, 10),
)
def test_a_full_disk_loses_no_line_and_leaves_no_partial_line(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], room: int, full_for: int
) -> None:
    path, console = tmp_path_factory.mktemp("disk") / "metrics.jsonl", Console()
    tracker = JsonlTracker(path, console)
    with disk_with_room(room):
        for step, size in enumerate(sizes[:full_for]):
            tracker.log(step, {"a" * size: 0.5})
    content = path.read_bytes() if path.exists() else b""
    assert content == b"" or content.endswith(b"\n")
    for step, size in list(enumerate(sizes))[full_for:]:
        tracker.log(step, {"a" * size: 0.5})
    tracker.finish("FINISHED")
    assert steps_in(path) == list(range(len(sizes)))
    assert len(console.warnings) <= 2, "one when lines wait, and one when all are written"


# ---------------------------------------------------------------------------- speed


def test_throughput_is_measured_over_the_update_phase_of_each_step() -> None:
    """FLOPs of a step per second of its update phase and per device."""
    arch = read_architecture(tiny_config())

    class Keeping(Console):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            logged.append(dict(metrics))

    logged: list[dict[str, float]] = []
    recorder = RunRecorder(
        trackers=[Keeping()],
        console=Console(),
        num_devices=4,
        speedometer=Speedometer(arch, 4, peak_flops=20e12),
    )
    recorder.trained([30, 40], 50)
    recorder.trained([80], 40)
    recorder.log(1, {"time/update": 6.0, "throughput/tokens_per_second": 8.0})
    recorder.log(2, {"time/update": 0.5})  # nothing to train on
    flops = model_flops(arch, [30, 40], backward=True, num_scored=50)
    flops += model_flops(arch, [80], backward=True, num_scored=40)
    assert logged[0]["throughput/model_tflops_per_device"] == pytest.approx(flops / 6 / 4 / 1e12)
    assert logged[0]["throughput/mfu"] == pytest.approx(flops / 6 / 4 / 20e12)
    assert logged[0]["throughput/tokens_per_second_per_device"] == 2.0
    assert logged[1] == {"time/update": 0.5}


# ---------------------------------------------------------------------------- provenance


def test_the_recorded_commit_is_only_that_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "dapo_megatron"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(dapo_megatron, "__file__", str(source))
    assert commit() is None, "no repository"
    git("init")
    git("commit", "--allow-empty", "-m", "of another project")
    assert commit() is None, "inside a repository that does not contain the package"
    git("add", ".")
    git("commit", "-m", "m")
    assert commit() == git("rev-parse", "HEAD")
    source.write_text("changed")
    assert commit() == git("rev-parse", "HEAD") + "-dirty"


# ---------------------------------------------------------------------------- console


GOLDEN = """\
dapo_megatron tiny
  model             [bold]m⟨U+001B⟩[31m[/bold]
  a very long fact  {long}
  eval a  avg@4 0.500 [0.410, 0.590]  pass@2 0.750
  eval b  avg@4 0.250  ungraded 3
rollout 34/64 groups
step  2/20  accuracy 0.410  reward -0.120  tokens 4.2  entropy 0.500  keep 0.80  age 1.5  gap \
1.2e-06  grad 0.800  5.0 s  left 1:30
  eval chain_sum  avg@4 0.310
step  3/20  accuracy -  reward -  tokens -  entropy -  keep -  age -  gap -  grad -  30.0 s  \
left 4:58
WARNING: training took 29 s in this step, and run.stop_seconds is 20: after a signal the run may \
end without a new checkpoint; raise run.stop_seconds, and with it the time between Slurm's signal \
and its limit
done
  accuracy before  0.310
  accuracy after   0.820 (+0.510)
  time             312.0 s
  run folder       runs/tiny
  look at it       mlflow ui --backend-store-uri sqlite:///x
run KILLED
""".format(long="x" * 300)
"""Lines are never wrapped, and texts of others are literal."""


def show_everything(console: RunConsole) -> None:
    facts = {"model": "[bold]m\x1b[31m[/bold]", "a very long fact": "x" * 300}
    console.header("dapo_megatron tiny", facts)
    with console.live():
        interval = {"eval/a/avg@4_low": 0.41, "eval/a/avg@4_high": 0.5904}
        others = {"eval/a/pass@2": 0.75, "eval/a/ungraded": 0.0}
        no_interval = {"eval/b/avg@4": 0.25, "eval/b/ungraded": 3.0}
        console.log(0, {"eval/a/avg@4": 0.5, **interval, **others, **no_interval})
        console.phase("generate", 2)
        console.groups(34)
        console.log(2, METRICS)
        console.live().refresh()
        console.log(3, {"time/step": 30.0, "time/update": 29.0})
        console.log(3, {"time/update": 29.0})  # one warning is enough
    console.summary(
        {"accuracy_before": 0.31, "accuracy_after": 0.82, "seconds": 312.0},
        {"run folder": "runs/tiny", "look at it": "mlflow ui --backend-store-uri sqlite:///x"},
    )
    console.finish("FINISHED")
    console.finish("KILLED")


def test_the_output_without_a_terminal_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.0)
    out = io.StringIO()
    show_everything(RunConsole(num_steps=20, num_groups=64, file=out, stop_seconds=20.0))
    assert out.getvalue() == GOLDEN


def test_a_terminal_shows_the_same_lines_and_a_bar_that_is_erased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(columns=120)
    show_everything(RunConsole(num_steps=20, num_groups=64, file=terminal.file, stop_seconds=20.0))
    written = terminal.close()
    assert "\x1b[?25l" not in written, "a killed run could not show the cursor again"
    screen = Screen()
    screen.feed(written)
    plain = GOLDEN.replace("rollout 34/64 groups\n", "")
    assert "\n".join(screen.lines).rstrip("\n") == plain.rstrip("\n")
    bars = [frame[-1] for frame in screen.frames]
    assert any(re.match(r"step 2/20 generate 0:00:\d\d .* 34/64 left 1:30", bar) for bar in bars)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seed": 7}, "seed: 0 -> 7. The prompts are shuffled anew"),
        ({"optimizer__lr": 0.5}, "optimizer.lr: 0.0001 -> 0.5"),
        ({"data__shuffle": False}, "data.shuffle: True -> False. The run continues at its old"),
        (
            {"data__train": "[{kind: jsonl, name: m, path: x, grader: dapo_math}]"},
            "data.train.0.kind",
        ),
    ],
)
def test_keys_that_changed_since_the_last_start_are_named(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    last = tmp_path / "config.yaml"
    last.write_text(dump_config(tiny_config()))
    assert changed_keys(tiny_config(resume="auto"), last) == []
    lines = changed_keys(tiny_config(**change), last)
    assert any(re.match(f"changed since the last start: {line}", text) for text in lines)
    last.unlink()
    assert "missing" in changed_keys(tiny_config(), last)[0]
    last.write_text("seed: {}")
    assert "not shown" in changed_keys(tiny_config(), last)[0]


@pytest.mark.parametrize("text", [None, b'{"step": "x"}\n', b'{"step": null}\n', b"[]\n", b"\0\n"])
def test_a_metrics_file_that_is_none_is_refused(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir() if text is None else path.write_bytes(text)
    with pytest.raises(CheckpointError, match=str(path)):
        JsonlTracker(path, Console(), 4)
