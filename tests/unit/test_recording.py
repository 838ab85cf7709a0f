"""Files of a run folder that are written at the start and the end of a run."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dapo_megatron.data.prompts import report_path
from dapo_megatron.run import record
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.tracking import run_report
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.recorder import RunRecorder
from dapo_megatron.tracking.run_report import RunReport
from dapo_megatron.tracking.trackers import CompositeTracker
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
    return RunRecorder(tracker=CompositeTracker(), console=console, num_devices=2, report=report)


# ---------------------------------------------------------------------------- at the start


def test_the_tokenizer_in_the_run_folder_equals_that_of_the_model(tmp_path: Path) -> None:
    this_session = session(tmp_path)
    record.keep_tokenizer(this_session.config, this_session.folder, recorder(io.StringIO()))
    kept = Tokenizer.from_file(str(this_session.folder.path / "tokenizer.json"))
    model = AutoTokenizer.from_pretrained(this_session.config.model.path)
    assert kept.get_vocab() == model.get_vocab()
    for text in TEXTS:
        ids = kept.encode(text).ids
        assert ids == model(text)["input_ids"]
        assert kept.decode(ids, skip_special_tokens=False) == model.decode(ids)


def test_a_model_without_a_tokenizer_is_only_a_warning(tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "empty").mkdir()
    this_session = session(tmp_path)
    this_session.config = this_session.config.model_copy(
        update={
            "model": this_session.config.model.model_copy(update={"path": str(tmp_path / "empty")})
        }
    )
    record.keep_tokenizer(this_session.config, this_session.folder, recorder(out))
    assert not this_session.folder.tokenizer.exists()
    assert "no tokenizer.json: " in out.getvalue()


def test_provenance_is_written_atomically_and_a_full_disk_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    this_session, console = session(tmp_path), RunConsole(num_steps=3, file=out)
    record.keep_provenance(
        this_session.folder.provenance, console, {"model": "m"}, {"git.commit": "c"}, 2
    )
    provenance = json.loads(this_session.folder.provenance.read_text())
    assert provenance.pop("devices")
    assert provenance == {"facts": {"model": "m"}, "tags": {"git.commit": "c"}, "num_processes": 2}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    record.keep_provenance(this_session.folder.provenance, console, {}, {}, 2)
    assert json.loads(this_session.folder.provenance.read_text())["facts"] == {"model": "m"}
    assert "WARNING: no provenance.json: [Errno 28]" in out.getvalue()


def test_the_report_of_a_data_set_named_owner_slash_name_is_kept(tmp_path: Path) -> None:
    data = tmp_path / "dapo.jsonl"
    data.touch()
    report = {"output": {"name": data.name, "bytes": 0}}
    report_path(data).write_text(json.dumps(report))
    source = {"kind": "jsonl", "path": str(data), "grader": "dapo_math"}
    this_session = session(
        tmp_path, data__train=json.dumps([{**source, "name": "BytedTsinghua-SIA/DAPO-Math-17k"}])
    )
    record.keep_reports(this_session.config, this_session.folder)
    [kept] = this_session.folder.data.iterdir()
    assert kept.name == "BytedTsinghua-SIA--DAPO-Math-17k.report.json"
    assert json.loads(kept.read_text()) == report


# ---------------------------------------------------------------------------- at the end


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    small = MadeRun(num_steps=3, groups_per_step=2, samples_per_group=2)
    return small.write(tmp_path_factory.mktemp("runs") / "made")


class KeepingTracker(CompositeTracker):
    """Records calls of `finish`, and whether the report exists by then."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._report = folder / "report.html"

    def finish(self, status: str) -> None:
        self.calls.append(f"finish {status}{', with a report' * self._report.is_file()}")


def test_a_run_writes_its_report_at_the_end_and_names_it(made: Path) -> None:
    out, tracker = io.StringIO(), KeepingTracker(made)
    console = RunConsole(num_steps=3, file=out)
    report = RunReport(made, console.warn)
    ending = RunRecorder(tracker=tracker, console=console, num_devices=1, report=report)
    ending.finish("FINISHED")
    assert tracker.calls == ["finish FINISHED, with a report"]
    assert (made / "report.html").read_text().startswith("<!doctype html>")
    ending.summary({"accuracy_before": 0.1, "accuracy_after": 0.2, "seconds": 3.0}, made)
    assert f"  report           {made / 'report.html'}\n" in out.getvalue()
    assert "WARNING" not in out.getvalue()


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "report.html").mkdir()
    out, tracker = io.StringIO(), KeepingTracker(tmp_path)
    console = RunConsole(num_steps=3, file=out)
    report = RunReport(tmp_path, console.warn)
    RunRecorder(tracker=tracker, console=console, num_devices=1, report=report).finish("FINISHED")
    assert tracker.calls == ["finish FINISHED"]
    [line] = [line for line in out.getvalue().splitlines() if line.startswith("WARNING")]
    assert line.startswith(f"WARNING: no report.html: see {tmp_path / 'logs' / 'report.log'}; ")
    assert "error: " in (tmp_path / "logs" / "report.log").read_text()


def test_a_run_without_metrics_gets_no_report(tmp_path: Path) -> None:
    assert not RunReport(tmp_path, pytest.fail).write("FAILED")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def slow_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that write a report. Each is stopped when it starts, until SIGCONT."""
    start = subprocess.Popen
    writers: list[subprocess.Popen[bytes]] = []

    def start_stopped(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        writers.append(start(*arguments, **options))
        writers[-1].send_signal(signal.SIGSTOP)
        return writers[-1]

    monkeypatch.setattr(subprocess, "Popen", start_stopped)
    yield writers
    for writer in writers:
        writer.kill()
        writer.wait()


Writers = list[subprocess.Popen[bytes]]


def finish_report(writers: Writers, path: Path) -> None:
    """Let the writer of the report continue, and wait for it."""
    assert not path.exists()
    [writer] = writers
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(300) == 0
    assert path.exists()


def test_a_finished_run_kills_a_report_that_takes_too_long(
    made: Path, slow_writers: Writers
) -> None:
    (made / "report.html").unlink(missing_ok=True)
    warnings: list[str] = []
    assert not RunReport(made, warnings.append, wait_seconds=0.01).write("FINISHED")
    [line] = warnings
    assert line == (
        f"report.html was abandoned after 0.01 s; `python -m dapo_megatron report {made}` writes it"
    )
    [writer] = slow_writers
    assert writer.wait(60) == -signal.SIGKILL
    assert not (made / "report.html").exists()


def test_a_stopped_run_leaves_a_slow_report_running(
    made: Path, monkeypatch: pytest.MonkeyPatch, slow_writers: Writers
) -> None:
    monkeypatch.setattr(run_report, "SHORT_WAIT_SECONDS", 0.01)
    (made / "report.html").unlink(missing_ok=True)
    warnings: list[str] = []
    assert not RunReport(made, warnings.append).write("KILLED")
    assert "is not ready after 0.01 s" in warnings[0]
    finish_report(slow_writers, made / "report.html")


def test_a_finished_run_that_gets_a_signal_stops_waiting_for_its_report(
    made: Path, monkeypatch: pytest.MonkeyPatch, slow_writers: Writers
) -> None:
    monkeypatch.setattr(run_report, "SHORT_WAIT_SECONDS", 0.01)
    (made / "report.html").unlink(missing_ok=True)
    warnings: list[str] = []
    answers = iter((False, True))  # the signal arrives during the wait
    assert not RunReport(made, warnings.append, is_asked=lambda: next(answers)).write("FINISHED")
    assert "is not ready after 0.01 s" in warnings[0]
    finish_report(slow_writers, made / "report.html")


def test_the_wait_for_a_report_is_half_the_limit_of_the_watchdog(tmp_path: Path) -> None:
    this_session = session(tmp_path, watchdog__start=60)
    stop = SimpleNamespace(signal=None)
    console = RunConsole(num_steps=3, file=io.StringIO())
    report = record.run_report(
        this_session.config, this_session.folder, console, lambda: stop.signal is not None
    )
    assert report is not None
    assert report._wait_seconds == 30.0
    assert not report._is_asked()
    stop.signal = "SIGTERM"
    assert report._is_asked()


def test_a_stale_run_folder_is_only_a_warning(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "exists", stale)
    warnings: list[str] = []
    assert not RunReport(made, warnings.append).write("FAILED")
    assert "no report.html: " in warnings[0] and "Stale file handle" in warnings[0]


def test_a_report_process_that_cannot_be_killed_does_not_block_the_run(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unkillable:
        """A process that is blocked in the kernel by a dead file system."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def poll(self) -> None:
            return None

        def kill(self) -> None:
            pass

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None
            raise subprocess.TimeoutExpired("report", timeout)

    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    warnings: list[str] = []
    assert not RunReport(made, warnings.append, wait_seconds=0.01).write("FINISHED")
    assert "was abandoned" in warnings[0]


def test_a_report_process_left_running_ends_at_its_own_limit(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from dapo_megatron.report import command\n"
        "command.LIMIT_SECONDS, command.read_run = 0.2, lambda _: time.sleep(1000)\n"
        f"command.report_of_ending(Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (0:00:00.2")
    assert "in report_of_ending" in done.stderr


def test_the_report_process_gets_no_variables_of_a_rank(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_variables = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_RANK",
    }
    rank_variables |= {"ROLE_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_JOB_ID"}
    rank_variables |= {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"}
    for name in rank_variables:
        monkeypatch.setenv(name, "1")
    environments: list[dict[str, str]] = []
    start = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        environments.append(options["env"])
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert RunReport(made, pytest.fail).write("FINISHED")
    assert not rank_variables & set(environments[0])
    assert {"PATH", "PYTHONPATH"} <= set(environments[0])
