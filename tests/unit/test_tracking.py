"""Tracking: the run's own files, a real MLflow on SQLite, and what the console writes."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron
from dapo_megatron.codec import group_from_json
from dapo_megatron.config import Config
from dapo_megatron.config_file import dump_config, load_config, parse_config
from dapo_megatron.tracking import (
    CompositeTracker,
    JsonlTracker,
    MlflowTracker,
    RunConsole,
    commit,
    console,
    versions,
    write_samples,
)
from dapo_megatron.tracking.mlflow_tracker import flatten, metric_name
from dapo_megatron.types import (
    CheckpointError,
    Completion,
    DapoError,
    Finish,
    Grade,
    Group,
    Prompt,
    Segment,
)

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
    """A file with the steps 1 to 5."""
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(1, 6):
        tracker.log(step, {"reward/mean": step / 8})
    tracker.finish("FINISHED")
    return path


def test_one_object_per_step_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, METRICS)
    assert json.loads(path.read_text()) == {"step": 1, **METRICS}, "not flushed"


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
def test_resume_cuts_back_to_the_checkpoint(metrics_file: Path, step: int) -> None:
    tracker = JsonlTracker(metrics_file)
    tracker.truncate_after(step)
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


def test_a_broken_line_in_the_middle_is_refused_and_left_alone(metrics_file: Path) -> None:
    content = metrics_file.read_bytes() + b"nonsense\n" + b'{"step": 7}\n'
    metrics_file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl, line 6"):
        JsonlTracker(metrics_file)
    assert metrics_file.read_bytes() == content


# ---------------------------------------------------------------------------- samples


def group() -> Group:
    older, newer = Segment(3, 1), Segment(4, 1)
    return Group(
        12,
        Prompt("chain_sum", 17, (12, 9, 3), "4 + 3 =", "7", {"entry": {}}),
        (
            Completion(
                0, (9, 2), (-0.1, -0.7), "7", Finish.STOP, (older, newer), Grade(1.0, True, "7")
            ),
            Completion(1, (8,), (-2.5,), "é", Finish.LENGTH, (older,), None),
        ),
    )


def test_samples_hold_everything_of_a_group(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "samples", 12, [(group(), "trained"), (group(), "expired")])
    assert list((tmp_path / "samples").iterdir()) == [path]
    assert path.name == "step_000012.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "fate": "trained",
        "verdict": "all_correct",
        "versions": [3, 4],
        "ticket": 12,
        "source": "chain_sum",
        "index": 17,
        "prompt": "4 + 3 =",
        "truth": "7",
        "extra": {"entry": {}},
        "prompt_tokens": [12, 9, 3],
        "completions": [
            {
                "sample": 0,
                "text": "7",
                "finish": "stop",
                "score": 1.0,
                "correct": True,
                "pred": "7",
                "parsed": True,
                "segments": [[3, 1], [4, 1]],
                "tokens": [9, 2],
                "logprobs": [-0.1, -0.7],
            },
            {
                "sample": 1,
                "text": "é",
                "finish": "length",
                "score": None,
                "correct": None,
                "pred": None,
                "parsed": None,
                "segments": [[3, 1]],
                "tokens": [8],
                "logprobs": [-2.5],
            },
        ],
    }
    assert second["fate"] == "expired"
    assert group_from_json(first) == group()


@pytest.mark.parametrize(
    ("correct", "verdict"),
    [
        ((True, False), "mixed"),
        ((True, None), "all_correct"),
        ((False, False), "all_wrong"),
        ((None, None), None),
    ],
)
def test_the_verdict_is_readable(
    tmp_path: Path, correct: tuple[bool | None, ...], verdict: str | None
) -> None:
    one = group().completions[0]
    grades = [None if it is None else Grade(1.0, it, "7") for it in correct]
    judged = replace(group(), completions=tuple(replace(one, grade=grade) for grade in grades))
    path = write_samples(tmp_path, 1, [(judged, "abstained")])
    assert json.loads(path.read_text())["verdict"] == verdict


def test_samples_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    old = write_samples(tmp_path, 1, [(group(), "mixed")]).read_bytes()

    def failing() -> Any:
        yield group(), "mixed"
        yield group(), "mixed"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_samples(tmp_path, 1, failing())
    assert (tmp_path / "step_000001.jsonl").read_bytes() == old


# ---------------------------------------------------------------------------- MLflow


def config(folder: Path, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "seed": 1,
        "run": {"name": "tiny", "directory": str(folder / "runs")},
        "model": {"path": "model"},
        "policy": {"precision": "float32"},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_prompt_tokens": 32,
            "max_response_tokens": 16,
            "on_policy": True,
            "dynamic_sampling": True,
        },
        "overlong": {
            "max_tokens": 16,
            "buffer_tokens": 8,
            "penalty": True,
            "filter": False,
            "filtered_in_mean": False,
        },
        "loss": {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 10.0,
            "aggregation": "token",
            "tis_cap": None,
            "advantage_eps": 1e-6,
        },
        "optimizer": {
            "lr": 1e-4,
            "warmup_rollout_steps": 2,
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "clip_grad": 1.0,
        },
        "train": {"rollout_steps": 3, "updates_per_step": 2, "max_tokens_per_microbatch": 256},
        "data": {
            "shuffle": True,
            "train": [
                {
                    "kind": "reasoning_gym",
                    "name": "train",
                    "dataset": "chain_sum",
                    "size": 10,
                    "seed": 1,
                }
            ],
        },
        "sync": {"max_gap": 1e-4},
    }
    return parse_config(tree | changes)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests here: its database takes seconds to make."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def stored(tracker: MlflowTracker) -> Any:
    """The run as another program reads it."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracker.uri).get_run(tracker.run_id)


def history(tracker: MlflowTracker, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    points = MlflowClient(tracking_uri=tracker.uri).get_metric_history(tracker.run_id, name)
    return [(point.step, point.value) for point in points]


def test_mlflow_holds_parameters_metrics_tags_and_status(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    tracker = MlflowTracker(config(home))
    assert stored(tracker).info.status == "RUNNING"
    for step in (1, 2, 3):
        tracker.log(step, {name: value * step for name, value in METRICS.items()})
    tracker.finish("FINISHED")

    run = stored(tracker)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tiny"
    params = run.data.params
    assert params["loss.clip_high"] == "0.28"
    assert params["loss.tis_cap"] == "null"
    assert params["data.train.0.dataset"] == "chain_sum"
    assert params["optimizer.eps"] == "1e-08"
    for name, value in METRICS.items():
        points = history(tracker, metric_name(name))
        assert points == [(step, value * step) for step in (1, 2, 3)], name
    tags = run.data.tags
    assert tags["slurm.job_id"] == "4711"
    assert tags["host"]
    assert {f"version.{name}" for name in versions()} <= set(tags)
    assert tags.get("commit") == commit()


def test_mlflow_keeps_config_and_files(home: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    made = config(home)
    tracker = MlflowTracker(made)
    tracker.artifact(write_samples(tmp_path, 2, [(group(), "mixed")]), "samples")
    (tmp_path / "summary.json").write_text("{}")
    tracker.artifact(tmp_path / "summary.json")
    client = MlflowClient(tracking_uri=tracker.uri)
    names = [item.path for item in client.list_artifacts(tracker.run_id)]
    assert sorted(names) == ["config.yaml", "samples", "summary.json"]
    samples = client.list_artifacts(tracker.run_id, "samples")
    assert [item.path for item in samples] == ["samples/step_000002.jsonl"]
    copy = client.download_artifacts(tracker.run_id, "config.yaml", str(tmp_path))
    assert load_config(copy) == made
    assert (home / "runs" / "mlartifacts").is_dir()


def test_a_resumed_run_is_the_same_run(home: Path) -> None:
    first = MlflowTracker(config(home))
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": float(step)})
    first.finish("KILLED")
    assert stored(first).info.status == "KILLED"

    longer = {"rollout_steps": 9, "updates_per_step": 2, "max_tokens_per_microbatch": 256}
    again = MlflowTracker(config(home, train=longer, resume="auto"), run_id=first.run_id)
    assert again.run_id == first.run_id
    run = stored(again)
    assert run.info.status == "RUNNING"
    assert run.data.params["train.rollout_steps"] == "3"
    assert run.data.tags["resumed.train.rollout_steps"] == "9"
    assert "resumed.loss.clip_high" not in run.data.tags
    again.log(3, {"reward/mean": 30.0})
    again.log(4, {"reward/mean": 4.0})
    again.finish("FAILED")
    assert stored(again).info.status == "FAILED"
    assert history(again, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 4.0)]


def test_an_unknown_run_or_status_is_refused(home: Path) -> None:
    with pytest.raises(DapoError, match=r"sqlite:.*mlflow.db: .*0123456789.*MLFLOW_TRACKING_URI"):
        MlflowTracker(config(home), run_id="0123456789")
    tracker = MlflowTracker(config(home))
    with pytest.raises(ValueError, match="'DONE': must be one of FINISHED, FAILED, KILLED"):
        tracker.finish("DONE")


def test_the_tracking_uri_of_the_environment_is_respected(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = f"sqlite:///{home / 'runs' / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    tracker = MlflowTracker(config(tmp_path))
    assert tracker.uri == elsewhere
    assert not (tmp_path / "runs" / "mlflow.db").exists()
    assert tracker.ui.endswith(f"mlflow ui --backend-store-uri {elsewhere}")


def test_an_mlflow_that_cannot_be_used_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://server")
    with pytest.raises(DapoError, match=r"nonsense://server.*tracking.mlflow=false"):
        MlflowTracker(config(home))


def test_runs_that_start_together_share_a_new_database(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(config(tmp_path)))
    start = (
        "from dapo_megatron.config_file import load_config\n"
        "from dapo_megatron.tracking import MlflowTracker\n"
        f"MlflowTracker(load_config({str(tmp_path / 'config.yaml')!r})).finish('FINISHED')\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", start]) for _ in range(2)]
    assert [process.wait() for process in started] == [0, 0]


def test_logging_a_step_takes_little_time(home: Path) -> None:
    tracker = MlflowTracker(config(home))
    metrics = {f"policy/m{number}": 0.5 for number in range(50)}
    tracker.log(0, metrics)
    seconds = []
    for step in range(1, 8):
        start = time.perf_counter()
        tracker.log(step, metrics)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05  # the best of several: other processes share these cores


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("eval/aime/avg@32", "eval/aime/avg_at_32"),
        ("response_tokens/clipped_fraction", "response_tokens/clipped_fraction"),
        ("eval/AIME (2024)/cons@4", "eval/AIME _2024_/cons_at_4"),
    ],
)
def test_metric_names_mlflow_takes(name: str, taken: str) -> None:
    assert metric_name(name) == taken


def test_parameters_are_flat_and_bounded() -> None:
    tree = {"a": {"b": None, "c": [1, {"d": "x"}]}, "e": [], "f": True}
    flat = [("a.b", "null"), ("a.c.0", "1"), ("a.c.1.d", "x"), ("e", "[]"), ("f", "True")]
    assert list(flatten(tree)) == flat


def test_mlflow_is_imported_only_when_used() -> None:
    check = "import dapo_megatron.tracking, sys; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# ---------------------------------------------------------------------------- provenance


def test_commit_is_of_the_checkout_of_this_package_alone(
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
    assert commit() is None, "inside a repository that does not hold the package"
    git("add", ".")
    git("commit", "-m", "m")
    assert commit() == git("rev-parse", "HEAD")
    source.write_text("changed")
    assert commit() == git("rev-parse", "HEAD") + "-dirty"


def test_versions_name_the_parts_that_are_installed() -> None:
    found = versions()
    assert {"dapo_megatron", "torch", "vllm", "megatron-core", "transformers"} <= set(found)


# ---------------------------------------------------------------------------- composite


class Recorder:
    def __init__(self, name: str, calls: list[str], broken: bool = False) -> None:
        self.name, self.calls, self.broken = name, calls, broken

    def _call(self, what: str) -> None:
        self.calls.append(f"{self.name} {what}")
        if self.broken:
            raise DapoError(self.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(f"log {step}")

    def artifact(self, path: Path, folder: str = "") -> None:
        self._call(f"artifact {path} {folder}")

    def finish(self, status: str) -> None:
        self._call(f"finish {status}")


def test_a_composite_reaches_every_tracker_in_order() -> None:
    calls: list[str] = []
    both = CompositeTracker(Recorder("a", calls), Recorder("b", calls))
    both.log(3, {})
    both.artifact(Path("f"), "samples")
    both.finish("KILLED")
    expected = ["log 3", "artifact f samples", "finish KILLED"]
    assert calls == [f"{name} {call}" for call in expected for name in "ab"]


def test_a_failing_server_does_not_cost_local_files(tmp_path: Path) -> None:
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


def test_a_step_is_one_plain_line() -> None:
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


def test_what_was_not_measured_is_a_dash() -> None:
    assert "accuracy -  reward -" in shown(lambda console: console.log(1, {"time/step": 3.0}))


def test_no_control_characters_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_long_rollouts_show_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.0)

    def roll(console: RunConsole) -> None:
        with console.rollout_progress(64) as progress:
            progress.update(34, issued=80)

    assert shown(roll) == "rollout 34/64 groups  issued 80\n"


def test_a_terminal_gets_a_bar() -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        run_console = RunConsole(num_steps=20, file=terminal)
        with run_console.rollout_progress(64) as progress:
            progress.update(34, issued=80)
    text = ""
    with suppress(OSError):  # the end of a terminal nobody writes to any more
        while chunk := os.read(reader, 100_000):
            text += chunk.decode()
    os.close(reader)
    assert "\x1b[" in text
    assert "34/64" in text
