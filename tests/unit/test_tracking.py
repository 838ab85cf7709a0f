"""Tracking: metrics.jsonl, provenance and console. Samples are in test_samples.py, MLflow in
test_mirror.py."""

from __future__ import annotations

import io
import json
import math
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapo_megatron
from dapo_megatron.cluster.versions import versions
from dapo_megatron.config.file import dump_config
from dapo_megatron.run.record import changed_keys, missing_steps
from dapo_megatron.tracking import console
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.provenance import commit
from dapo_megatron.tracking.recorder import RunRecorder, Speedometer
from dapo_megatron.tracking.trackers import CompositeTracker, JsonlTracker, Lines
from dapo_megatron.types import CheckpointError, DapoError
from tests.helpers.configs import tiny_config

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
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(1, 6):
        tracker.log(step, {"reward/mean": step / 8})
    tracker.finish("FINISHED")
    return path


def test_each_step_is_flushed_as_one_json_object(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, METRICS)
    assert json.loads(path.read_text()) == {"step": 1, **METRICS}, "the line must be flushed"


def test_non_finite_values_stay_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path).log(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": 1.0,
    }


@pytest.mark.parametrize("step", [0, 3, 5, 9])
def test_resuming_truncates_metrics_to_the_checkpoint(metrics_file: Path, step: int) -> None:
    tracker = JsonlTracker(metrics_file, step)
    assert steps_in(metrics_file) == list(range(1, min(step, 5) + 1))
    tracker.log(step + 1, {})
    assert steps_in(metrics_file) == [*range(1, min(step, 5) + 1), step + 1]


@pytest.mark.parametrize("tail", [b'{"step": 6, "rew', b'{"step": 6}', b"\x00\x00"])
def test_a_half_written_last_line_is_dropped(metrics_file: Path, tail: bytes) -> None:
    whole = metrics_file.read_bytes()
    metrics_file.write_bytes(whole + tail)
    tracker = JsonlTracker(metrics_file)
    assert metrics_file.read_bytes() == whole
    tracker.log(6, {})
    assert steps_in(metrics_file) == [1, 2, 3, 4, 5, 6]


def test_a_broken_line_in_the_middle_is_refused_and_the_file_kept(metrics_file: Path) -> None:
    content = metrics_file.read_bytes() + b"nonsense\n" + b'{"step": 7}\n'
    metrics_file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl, line 6"):
        JsonlTracker(metrics_file)
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
    texts=st.lists(st.text("abc", max_size=30), min_size=1, max_size=10),
    room=st.integers(0, 120),
    full_for=st.integers(0, 10),
)
def test_a_full_disk_loses_no_line_and_leaves_no_partial_line(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], room: int, full_for: int
) -> None:
    path = tmp_path_factory.mktemp("disk") / "lines"
    messages: list[str] = []
    lines = Lines(path, messages.append)
    whole = [text.encode() + b"\n" for text in texts]
    with disk_with_room(room):
        for text in texts[:full_for]:
            lines.append(text.encode())
    content = path.read_bytes() if path.exists() else b""
    assert content in [b"".join(whole[:number]) for number in range(len(whole) + 1)]
    for text in texts[full_for:]:
        lines.append(text.encode())
    lines.close()
    assert path.read_bytes() == b"".join(whole)
    assert len(messages) <= 2, "one warning, and one message when writing works again"


# ---------------------------------------------------------------------------- speed


def test_throughput_is_measured_over_the_update_phase_of_each_step(tmp_path: Path) -> None:
    """FLOPs of a step per second of its update phase and per device."""
    logged: list[dict[str, float]] = []

    class KeepingTracker(CompositeTracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            logged.append(dict(metrics))

    speedometer = Speedometer(
        4, lambda lengths, scored: 1e12 * (sum(lengths) + scored), peak_flops=20e12
    )
    console = RunConsole(num_steps=3, file=io.StringIO())
    recorder = RunRecorder(
        tracker=KeepingTracker(), console=console, num_devices=4, speedometer=speedometer
    )
    recorder.trained([30, 40], 50)
    recorder.trained([80], 40)
    recorder.log(1, {"time/update": 6.0, "time/step": 60.0})
    recorder.trained([60], 60)
    recorder.log(2, {"time/update": 6.0})
    recorder.log(3, {"time/update": 0.5})  # nothing to train on
    assert logged[0]["throughput/model_tflops_per_device"] == pytest.approx(10.0)
    assert logged[0]["throughput/mfu"] == pytest.approx(0.5)
    assert logged[1]["throughput/model_tflops_per_device"] == pytest.approx(5.0)
    assert "throughput/mfu" not in logged[2]
    unknown = Speedometer(1, lambda lengths, scored: 1e12, peak_flops=None)
    unknown.trained([1], 1)
    assert unknown.metrics({"time/update": 1.0}) == {"throughput/model_tflops_per_device": 1.0}


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


def test_versions_include_the_main_packages() -> None:
    installed = versions()
    assert {"dapo_megatron", "torch", "vllm", "megatron-core", "transformers"} <= set(installed)


# ---------------------------------------------------------------------------- composite


class Recorder:
    def __init__(self, name: str, calls: list[str], broken: bool = False) -> None:
        self.name, self.calls, self.broken = name, calls, broken

    def _call(self, call: str) -> None:
        self.calls.append(f"{self.name} {call}")
        if self.broken:
            raise DapoError(self.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(f"log {step}")

    def finish(self, status: str) -> None:
        self._call(f"finish {status}")


def test_a_composite_calls_every_tracker_in_order() -> None:
    calls: list[str] = []
    both = CompositeTracker(Recorder("a", calls), Recorder("b", calls))
    both.log(3, {})
    both.finish("KILLED")
    expected = ["log 3", "finish KILLED"]
    assert calls == [f"{name} {call}" for call in expected for name in "ab"]


def test_a_failing_server_does_not_prevent_local_files(tmp_path: Path) -> None:
    calls: list[str] = []
    local = JsonlTracker(tmp_path / "metrics.jsonl")
    trackers = CompositeTracker(local, Recorder("server", calls, True), Recorder("last", calls))
    with pytest.raises(DapoError, match="server"):
        trackers.log(1, {"reward/mean": 0.5})
    assert steps_in(tmp_path / "metrics.jsonl") == [1]
    with pytest.raises(DapoError, match="server"):
        trackers.finish("FAILED")
    assert calls[-1] == "last finish FAILED", "finish must reach every tracker"


# ---------------------------------------------------------------------------- console


def shown(use: Callable[[RunConsole], None], num_steps: int = 20) -> str:
    out = io.StringIO()
    use(RunConsole(num_steps=num_steps, file=out))
    return out.getvalue()


def test_a_step_is_printed_as_one_line() -> None:
    text = shown(lambda console: console.log(2, METRICS))
    line, evaluation = text.splitlines()
    assert line == (
        "step  2/20  accuracy 0.410  reward -0.120  tokens 4.2  entropy 0.500  keep 0.80  age 1.5  "
        "gap 1.2e-06  grad 0.800  5.0 s  left 1:30"
    )
    assert evaluation == "  eval chain_sum  avg@4 0.310"


def test_an_evaluation_before_the_first_step_has_no_step_line() -> None:
    text = shown(lambda console: console.log(0, {"eval/a/avg@4": 0.5, "eval/b/pass@4": 1.0}))
    assert text.splitlines() == ["  eval a  avg@4 0.500", "  eval b  pass@4 1.000"]


def test_an_evaluation_is_shown_with_its_intervals() -> None:
    metrics = {
        "eval/a/avg@4": 0.5,
        "eval/a/avg@4_low": 0.41,
        "eval/a/avg@4_high": 0.5904,
        "eval/a/pass@2": 0.75,
        "eval/a/ungraded": 0.0,
        "eval/b/avg@4": 0.25,
        "eval/b/ungraded": 3.0,
    }
    assert shown(lambda console: console.log(0, metrics)).splitlines() == [
        "  eval a  avg@4 0.500 [0.410, 0.590]  pass@2 0.750",
        "  eval b  avg@4 0.250  ungraded 3",
    ]


def test_a_missing_metric_is_shown_as_a_dash() -> None:
    assert "accuracy -  reward -" in shown(lambda console: console.log(1, {"time/step": 3.0}))


def test_output_without_a_terminal_has_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")

    def everything(console: RunConsole) -> None:
        console.header("dapo_megatron", {"model": "[bold]m[/bold]", "a very long fact": "x" * 300})
        with console.rollout_progress(3) as progress:
            progress.update(1, issued=4)
        console.log(1, METRICS)
        console.note("a note")
        console.summary(
            accuracy_before=0.31,
            accuracy_after=0.82,
            seconds=312.0,
            folder=Path("runs/tiny"),
            ui="mlflow ui --backend-store-uri sqlite:///x",
        )
        console.finish("KILLED")

    text = shown(everything)
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    assert "[bold]m[/bold]" in text
    assert "x" * 300 + "\n" in text, "a long line must not be wrapped"
    for needed in (
        "accuracy before  0.310\n",
        "accuracy after   0.820 (+0.510)\n",
        "312.0 s",
        "runs/tiny",
        "mlflow ui --backend-store-uri sqlite:///x",
        "run KILLED",
    ):
        assert needed in text


def test_long_rollouts_print_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.0)

    def roll(console: RunConsole) -> None:
        with console.rollout_progress(64) as progress:
            progress.update(34, issued=80)

    assert shown(roll) == "rollout 34/64 groups  issued 80\n"


def test_a_terminal_shows_a_progress_bar() -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        run_console = RunConsole(num_steps=20, file=terminal)
        with run_console.rollout_progress(64) as progress:
            progress.update(34, issued=80)
    text = ""
    with suppress(OSError):  # EIO at the end of a closed terminal
        while chunk := os.read(reader, 100_000):
            text += chunk.decode()
    os.close(reader)
    assert "\x1b[" in text
    assert "34/64" in text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seed": 7}, "seed: 0 -> 7. The prompts are shuffled anew"),
        ({"optimizer__lr": 0.5}, "optimizer.lr: 0.0001 -> 0.5"),
        ({"rollout__prompts_per_step": 3}, "rollout.prompts_per_step: .* -> 3"),
        ({"rollout__samples_per_prompt": 3}, "rollout.samples_per_prompt: .* -> 3"),
        ({"train__rollout_steps": 99}, "train.rollout_steps: .* -> 99"),
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


LINES = b"".join(b'{"step": %d, "a": 1.5}\n' % step for step in range(1, 5))


@pytest.mark.parametrize(
    ("left", "missing"),
    [
        (LINES, ""),
        (LINES[:-5], "1 of the 4 .*(4)"),
        (LINES[:-5] + bytes(5), "1 of the 4 .*(4)"),
        (LINES[:25], "3 of the 4 .*(2 to 4)"),
        (b"", "4 of the 4 .*(1 to 4)"),
        (bytes(30), "4 of the 4 .*(1 to 4)"),
        (None, "4 of the 4 .*(1 to 4)"),
        (LINES[len(LINES) // 2 :], ""),  # continues another run
        (LINES[: len(LINES) // 4] + LINES[len(LINES) // 2 :], "1 of the 4 .*(2)"),
        (LINES + b'{"step": 5}\n', ""),
    ],
)
def test_steps_that_a_metrics_file_lost_are_named(
    tmp_path: Path, left: bytes | None, missing: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    if left is not None:
        path.write_bytes(left)
    lines = missing_steps(path, JsonlTracker(path, 4).steps, 4)
    assert bool(lines) == bool(missing)
    if missing:
        assert re.search(missing.replace("(", r"\(").replace(")", r"\)"), lines[0])


@pytest.mark.parametrize("text", [None, b'{"step": "x"}\n', b'{"step": null}\n', b"[]\n", b"\0\n"])
def test_a_metrics_file_that_is_none_is_refused(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir() if text is None else path.write_bytes(text)
    with pytest.raises(CheckpointError, match=str(path)):
        JsonlTracker(path, 4)
