"""What a run's folder is told of the run at its start and its end, beside its steps."""

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
    return RunRecorder(CompositeTracker(), console, None, num_devices=2, report=report)


# ---------------------------------------------------------------------------- at the start


def test_the_kept_tokenizer_is_the_models(tmp_path: Path) -> None:
    here = session(tmp_path)
    record.keep_tokenizer(here.config, here.folder, recorder(io.StringIO()))
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
    record.keep_tokenizer(here.config, here.folder, recorder(out))
    assert not here.folder.tokenizer.exists()
    assert "no tokenizer.json: " in out.getvalue()


def test_provenance_is_written_whole_and_a_full_disk_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    here, console = session(tmp_path), RunConsole(num_steps=3, file=out)
    record.keep_provenance(here.folder.provenance, console, {"model": "m"}, {"git.commit": "c"}, 2)
    found = json.loads(here.folder.provenance.read_text())
    assert found.pop("devices")
    assert found == {"facts": {"model": "m"}, "tags": {"git.commit": "c"}, "num_processes": 2}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    record.keep_provenance(here.folder.provenance, console, {}, {}, 2)
    assert json.loads(here.folder.provenance.read_text())["facts"] == {"model": "m"}
    assert "WARNING: no provenance.json: [Errno 28]" in out.getvalue()


def test_the_report_of_a_data_set_of_owner_and_name_is_kept(tmp_path: Path) -> None:
    data = tmp_path / "dapo.jsonl"
    data.touch()
    report = {"output": {"name": data.name, "bytes": 0}}
    report_path(data).write_text(json.dumps(report))
    source = {"kind": "jsonl", "path": str(data), "grader": "dapo_math"}
    here = session(
        tmp_path, data__train=json.dumps([{**source, "name": "BytedTsinghua-SIA/DAPO-Math-17k"}])
    )
    record.keep_reports(here.config, here.folder)
    [kept] = here.folder.data.iterdir()
    assert kept.name == "BytedTsinghua-SIA--DAPO-Math-17k.report.json"
    assert json.loads(kept.read_text()) == report


# ---------------------------------------------------------------------------- at the end


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, as a run leaves it."""
    small = MadeRun(num_steps=3, groups_per_step=2, samples_per_group=2)
    return small.write(tmp_path_factory.mktemp("runs") / "made")


class Keeps(CompositeTracker):
    """Notes what it is handed, and whether the report is there by then."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._report = folder / "report.html"

    def finish(self, status: str) -> None:
        self.calls.append(f"finish {status}{', with a report' * self._report.is_file()}")


def test_a_run_ends_with_its_report_and_names_it(made: Path) -> None:
    out, tracker = io.StringIO(), Keeps(made)
    console = RunConsole(num_steps=3, file=out)
    report = RunReport(made, console.warn)
    ending = RunRecorder(tracker, console, None, num_devices=1, report=report)
    ending.finish("FINISHED")
    assert tracker.calls == ["finish FINISHED, with a report"]
    assert (made / "report.html").read_text().startswith("<!doctype html>")
    ending.summary({"accuracy_before": 0.1, "accuracy_after": 0.2, "seconds": 3.0}, made)
    assert f"  report           {made / 'report.html'}\n" in out.getvalue()
    assert "WARNING" not in out.getvalue()


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "report.html").mkdir()
    out, tracker = io.StringIO(), Keeps(tmp_path)
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


@pytest.fixture
def slow_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that write a report. They are stopped at their start, until SIGCONT."""
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


def finishes_report(writers: Writers, path: Path) -> None:
    """Let the writer of the report go on, and wait for it."""
    assert not path.exists()
    [writer] = writers
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(300) == 0
    assert path.exists()


def test_a_finished_run_gives_a_slow_report_up(made: Path, slow_writers: Writers) -> None:
    (made / "report.html").unlink(missing_ok=True)
    said: list[str] = []
    assert not RunReport(made, said.append, wait_seconds=0.01).write("FINISHED")
    [line] = said
    assert line == (
        f"report.html was abandoned after 0.01 s; `python -m dapo_megatron report {made}` writes it"
    )
    [writer] = slow_writers
    assert writer.wait(60) == -signal.SIGKILL
    assert not (made / "report.html").exists()


def test_a_stopped_run_leaves_a_slow_report_to_itself(
    made: Path, monkeypatch: pytest.MonkeyPatch, slow_writers: Writers
) -> None:
    monkeypatch.setattr(run_report, "SHORT_WAIT_SECONDS", 0.01)
    (made / "report.html").unlink(missing_ok=True)
    said: list[str] = []
    assert not RunReport(made, said.append).write("KILLED")
    assert "is not ready after 0.01 s" in said[0]
    finishes_report(slow_writers, made / "report.html")


def test_a_finished_run_that_is_asked_to_stop_waits_no_longer(
    made: Path, monkeypatch: pytest.MonkeyPatch, slow_writers: Writers
) -> None:
    monkeypatch.setattr(run_report, "SHORT_WAIT_SECONDS", 0.01)
    (made / "report.html").unlink(missing_ok=True)
    said: list[str] = []
    looks = iter((False, True))  # the signal comes while it waits
    assert not RunReport(made, said.append, is_asked=lambda: next(looks)).write("FINISHED")
    assert "is not ready after 0.01 s" in said[0]
    finishes_report(slow_writers, made / "report.html")


def test_other_ranks_never_wait_so_long_that_the_watchdog_ends_them(tmp_path: Path) -> None:
    here = session(tmp_path, watchdog__start=60)
    stop = SimpleNamespace(signal=None)
    console = RunConsole(num_steps=3, file=io.StringIO())
    report = record.run_report(here.config, here.folder, console, lambda: stop.signal is not None)
    assert report is not None
    assert report._wait_seconds == 30.0
    assert report._attempt == here.folder.attempt
    assert not report._is_asked()
    stop.signal = "SIGTERM"
    assert report._is_asked()


def test_a_folder_that_is_away_hides_no_error_of_the_run(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "exists", stale)
    said: list[str] = []
    assert not RunReport(made, said.append).write("FAILED")
    assert "no report.html: " in said[0] and "Stale file handle" in said[0]


def test_a_report_that_does_not_die_holds_no_run_up(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unkillable:
        """A process that the kernel lets wait for a dead file system."""

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
    said: list[str] = []
    assert not RunReport(made, said.append, wait_seconds=0.01).write("FINISHED")
    assert "was abandoned" in said[0]


@pytest.mark.parametrize("owner", ["1.0", "1.1"])
def test_a_report_goes_into_the_folder_of_its_own_start_alone(made: Path, owner: str) -> None:
    page, said = made / "report.html", list[str]()
    page.write_text("of another start")
    (made / ".owner").write_text(json.dumps({"attempt": owner}))
    try:
        is_written = RunReport(made, said.append, attempt="1.0").write("FINISHED")
    finally:
        (made / ".owner").unlink()
    assert is_written == (owner == "1.0")
    assert (page.read_text() == "of another start") == (not is_written)
    if not is_written:
        assert said[0].startswith("no report.html: see ")
        assert "was taken by attempt 1.1" in (made / "logs" / "report.log").read_text()


def test_a_report_left_to_itself_ends_itself(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from dapo_megatron.report import command\n"
        "command.LIMIT_SECONDS, command.read_run = 0.2, lambda _: time.sleep(1000)\n"
        f"command.report_of_ending(Path({str(tmp_path)!r}), '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (0:00:00.2")
    assert "in report_of_ending" in done.stderr


def test_the_report_is_made_by_no_rank(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_rank = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
    of_a_rank |= {"ROLE_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_JOB_ID"}
    of_a_rank |= {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"}
    for name in of_a_rank:
        monkeypatch.setenv(name, "1")
    given: list[dict[str, str]] = []
    start = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        given.append(options["env"])
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert RunReport(made, pytest.fail).write("FINISHED")
    assert not of_a_rank & set(given[0])
    assert {"PATH", "PYTHONPATH"} <= set(given[0])
