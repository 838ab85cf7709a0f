"""Files of a run folder that are written at the start and the end of a run."""

from __future__ import annotations

import errno
import json
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
from dapo_megatron.tracking.recorder import RankRecorder
from dapo_megatron.tracking.run_report import RunReport
from tests.helpers.configs import tiny_config
from tests.helpers.console import Console
from tests.helpers.made_run import MadeRun

TEXTS = ("12 + 30 = 42", "<|endoftext|>", "é 🙂", "")


def session(tmp_path: Path, **changes: Any) -> Any:
    config = tiny_config(run__directory=tmp_path, **changes)
    config.folder.mkdir(exist_ok=True)
    return SimpleNamespace(config=config, folder=RunFolder(config.folder))


# ---------------------------------------------------------------------------- at the start


def test_the_tokenizer_in_the_run_folder_equals_that_of_the_model(tmp_path: Path) -> None:
    this_session = session(tmp_path)
    record.keep_tokenizer(this_session.config, this_session.folder, RankRecorder(console=Console()))
    kept = Tokenizer.from_file(str(this_session.folder.path / "tokenizer.json"))
    model = AutoTokenizer.from_pretrained(this_session.config.model.path)
    assert kept.get_vocab() == model.get_vocab()
    for text in TEXTS:
        ids = kept.encode(text).ids
        assert ids == model(text)["input_ids"]
        assert kept.decode(ids, skip_special_tokens=False) == model.decode(ids)


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


def test_a_report_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console()
    RunReport(tmp_path, console).write("FAILED")
    assert list(tmp_path.iterdir()) == [], "a run without metrics gets no report"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "report.html").mkdir()
    RunReport(tmp_path, console).write("FINISHED")
    [line] = console.warnings
    assert line.startswith(f"no report.html: see {tmp_path / 'logs' / 'report.log'}; ")
    assert "error: " in (tmp_path / "logs" / "report.log").read_text()

    def stale(_: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "exists", stale)
    RunReport(tmp_path, console).write("FAILED")
    assert "Stale file handle" in console.warnings[1]


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


@pytest.mark.parametrize("status", ["FINISHED", "KILLED"])
def test_a_run_does_not_wait_long_for_a_slow_report(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_writers: list[subprocess.Popen[bytes]],
    status: str,
) -> None:
    made = MadeRun(num_steps=3, groups_per_step=2, samples_per_group=2).write(tmp_path / "made")
    (made / "report.html").unlink(missing_ok=True)
    console, seconds = Console(), 0.01 if status == "FINISHED" else 1000.0
    monkeypatch.setattr(run_report, "SHORT_WAIT_SECONDS", 0.01)
    RunReport(made, console, seconds).write(status)
    assert console.warnings == [
        f"report.html is not ready after 0.01 s; `python -m dapo_megatron report {made}` writes it"
    ]
    [writer] = slow_writers
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(300) == 0
    assert (made / "report.html").exists()


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
