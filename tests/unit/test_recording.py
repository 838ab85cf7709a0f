"""What a run's folder is told of the run at its start and its end, beside its steps."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dapo_megatron import recording
from dapo_megatron.run_folder import RunFolder
from dapo_megatron.tracking import (
    CompositeTracker,
    RunConsole,
    RunRecorder,
    RunReport,
    run_report,
)
from tests.helpers.configs import tiny_config
from tests.helpers.made_run import MadeRun

TEXTS = ("12 + 30 = 42", "<|endoftext|>", "é 🙂", "")


def session(tmp_path: Path, rank: int = 0, **changes: Any) -> Any:
    config = tiny_config(run__directory=tmp_path, **changes)
    config.folder.mkdir(exist_ok=True)
    ranks = SimpleNamespace(rank=rank, world_size=2)
    return SimpleNamespace(config=config, ranks=ranks, folder=RunFolder(config.folder))


def recorder(out: io.StringIO, report: RunReport | None = None) -> RunRecorder:
    console = RunConsole(num_steps=3, file=out)
    return RunRecorder(CompositeTracker(), console, None, num_devices=2, report=report)


# ---------------------------------------------------------------------------- at the start


def test_the_kept_tokenizer_is_the_models(tmp_path: Path) -> None:
    here = session(tmp_path)
    recording.keep_tokenizer(here, recorder(io.StringIO()))
    kept = Tokenizer.from_file(str(here.folder.path / "tokenizer.json"))
    model = AutoTokenizer.from_pretrained(here.config.model.path)
    assert kept.get_vocab() == model.get_vocab()
    for text in TEXTS:
        ids = kept.encode(text).ids
        assert ids == model(text)["input_ids"]
        assert kept.decode(ids, skip_special_tokens=False) == model.decode(ids)


def test_a_model_without_a_tokenizer_is_left_to_those_who_need_it(tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "empty").mkdir()
    here = session(tmp_path)
    here.config = here.config.model_copy(
        update={"model": here.config.model.model_copy(update={"path": str(tmp_path / "empty")})}
    )
    recording.keep_tokenizer(here, recorder(out))
    assert not here.folder.tokenizer.exists()
    assert "no tokenizer.json: " in out.getvalue()


def test_other_ranks_keep_no_tokenizer(tmp_path: Path) -> None:
    here = session(tmp_path, rank=1)
    recording.keep_tokenizer(here, recorder(io.StringIO()))
    assert list(here.folder.path.iterdir()) == []


def test_provenance_is_written_whole_and_a_full_disk_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    here, console = session(tmp_path), RunConsole(num_steps=3, file=out)
    recording._keep_provenance(here, console, {"model": "m"}, {"git.commit": "c"})
    found = json.loads(here.folder.provenance.read_text())
    assert found.pop("devices")
    assert found == {"facts": {"model": "m"}, "tags": {"git.commit": "c"}, "num_processes": 2}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    recording._keep_provenance(here, console, {}, {})
    assert json.loads(here.folder.provenance.read_text())["facts"] == {"model": "m"}
    assert "WARNING: no provenance.json: [Errno 28]" in out.getvalue()


# ---------------------------------------------------------------------------- at the end


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, as a run leaves it."""
    small = MadeRun(num_steps=3, groups_per_step=2, samples_per_group=2)
    return small.write(tmp_path_factory.mktemp("runs") / "made")


class Keeps(CompositeTracker):
    """Notes what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def artifact(self, path: Path, folder: str = "") -> None:
        self.calls.append(f"artifact {path.name}")

    def finish(self, status: str) -> None:
        self.calls.append(f"finish {status}")


def test_a_run_ends_with_its_report_and_names_it(made: Path) -> None:
    out, tracker = io.StringIO(), Keeps()
    console = RunConsole(num_steps=3, file=out)
    report = RunReport(made, console.warn)
    ending = RunRecorder(tracker, console, None, num_devices=1, report=report)
    ending.finish("FINISHED")
    assert tracker.calls == ["artifact report.html", "finish FINISHED"]
    assert (made / "report.html").read_text().startswith("<!doctype html>")
    ending.summary({"accuracy_before": 0.1, "accuracy_after": 0.2, "seconds": 3.0}, made)
    assert f"  report           {made / 'report.html'}\n" in out.getvalue()
    assert "WARNING" not in out.getvalue()


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "report.html").mkdir()
    out, tracker = io.StringIO(), Keeps()
    console = RunConsole(num_steps=3, file=out)
    report = RunReport(tmp_path, console.warn)
    RunRecorder(tracker, console, None, num_devices=1, report=report).finish("FINISHED")
    assert tracker.calls == ["finish FINISHED"]
    [line] = [line for line in out.getvalue().splitlines() if line.startswith("WARNING")]
    assert line.startswith(f"WARNING: no report.html: see {tmp_path / 'logs' / 'report.log'}; ")
    assert "error: " in (tmp_path / "logs" / "report.log").read_text()


def test_a_run_that_came_to_nothing_has_no_report(tmp_path: Path) -> None:
    assert not RunReport(tmp_path, pytest.fail).write("FAILED")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_gives_a_slow_report_up(made: Path) -> None:
    (made / "report.html").unlink(missing_ok=True)
    said: list[str] = []
    assert not RunReport(made, said.append, wait_seconds=0.01).write("FINISHED")
    [line] = said
    assert line == (
        f"report.html was given up after 0.01 s; `python -m dapo_megatron report {made}` writes it"
    )
    time.sleep(5)
    assert not (made / "report.html").exists()


def test_a_stopped_run_leaves_a_slow_report_to_itself(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "SHORT_WAIT_SECONDS", 0.01)
    (made / "report.html").unlink(missing_ok=True)
    said: list[str] = []
    began = time.monotonic()
    assert not RunReport(made, said.append).write("KILLED")
    assert time.monotonic() - began < 1.0
    assert "is not ready, and is not waited for after 0.01 s" in said[0]
    while not (made / "report.html").exists():
        assert time.monotonic() - began < 60
        time.sleep(0.1)


def test_the_report_is_made_by_no_rank(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    given: list[dict[str, str]] = []
    start = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        given.append(options["env"])
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert RunReport(made, pytest.fail).write("FINISHED")
    assert not {name for name in given[0] if run_report.OF_A_RANK.match(name)}
    assert {"PATH", "PYTHONPATH"} <= set(given[0])
