"""Test the real command line: a short run learns, and a killed run resumes to the same result."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from dapo_megatron.cluster.secret import SECRET
from dapo_megatron.rollout import record
from dapo_megatron.rollout.record import recorded_steps
from dapo_megatron.tracking.policy_files import policy_files, read_policy
from tests.helpers.commands import run, started
from tests.helpers.configs import REPOSITORY, TINY
from tests.helpers.runs import wait_for_row
from tests.helpers.sockets import children, listening

STEPS = 7
OVERRIDES = (
    f"train.rollout_steps={STEPS}",
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=8",
    "rollout.on_policy=false",  # so that carried groups are part of what a resume must restore
    "train.updates_per_step=4",
    "optimizer.lr=2e-4",
    "optimizer.warmup_rollout_steps=1",
    "checkpoint.every=3",
    "tracking.timeline_every=4",
    "evaluation.every=0",
)
UNUSED = ("kl/", "correction/", "router/", "policy/kl_", "policy/entropy_b", "policy/gate")
UNUSED += ("policy/tis_", "groups/resampled", "throughput/overlap", "throughput/mfu", "eval/")
UNUSED += ("turns/", "time/environments", "distill/", "policy/distill_")
"""Beginnings of the names of metrics that this run does not have."""


def promised_metrics() -> set[str]:
    """Return the names of metrics that docs/architecture.md promises."""
    text = (REPOSITORY / "docs/architecture.md").read_text()
    table = text[text.index("## Metrics") :]
    names = set()
    for pattern in re.findall(r"`([a-z_]+/[^`]*)`", table.partition("\n\n## ")[0]):
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        names |= set(map("".join, itertools.product(*parts)))
    assert len(names) > 80
    return {name for name in names if not name.startswith(UNUSED) and "<" not in name}


def command(directory: Path, name: str, *more: str) -> list[str]:
    where = (f"run.directory={directory}", f"run.name={name}")
    return ["train", str(TINY), *OVERRIDES, *where, *more]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times, memory and throughput."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/", "throughput/"))}
        for row in rows
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@dataclass
class Seen:
    """Facts about a run's processes that others on the machine can see."""

    secrets: set[str] = field(default_factory=set)
    addresses: set[str] = field(default_factory=set)
    commands: set[str] = field(default_factory=set)
    inheriting: set[str] = field(default_factory=set)
    """Command lines of children of ranks and engines that inherited the secret."""

    def look(self, pid: int) -> None:
        process = psutil.Process(pid)
        line = " ".join(process.cmdline())
        self.commands.add(line)
        self.addresses |= set(listening([pid]))
        if secret := process.environ().get(SECRET):
            self.secrets.add(secret)
            if "dapo_megatron train" not in line and "dapo_megatron engine" not in line:
                self.inheriting.add(line)


@pytest.fixture(scope="module")
def watched(directory: Path) -> tuple[Path, Seen]:
    """Folder of an uninterrupted run, started with the command that a user types, and what was seen
    of it."""
    program = [sys.executable, "-m", "dapo_megatron", *command(directory, "straight")]
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    seen, output = Seen(), directory / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            program, cwd=REPOSITORY, env=environment, stdout=file, stderr=file
        )
        while process.poll() is None:
            for pid in children(process.pid):
                with suppress(psutil.Error):  # it may have ended
                    seen.look(pid)
            time.sleep(0.25)
    out = output.read_text()
    assert process.returncode == 0, out
    assert "accuracy before" in out
    assert "mlflow ui --backend-store-uri" in out
    assert f"  report           {directory / 'straight' / 'report.html'}\n" in out
    assert "WARNING" not in out
    return directory / "straight", seen


@pytest.fixture(scope="module")
def straight(watched: tuple[Path, Seen]) -> Path:
    return watched[0]


def test_a_run_listens_only_on_loopback_and_its_secret_does_not_leak(
    directory: Path, watched: tuple[Path, Seen]
) -> None:
    seen = watched[1]
    [secret] = seen.secrets
    assert len(secret) == 64
    assert not seen.inheriting, "child processes of a rank inherited the secret"
    hosts = {address.rpartition(":")[0] for address in seen.addresses}
    assert hosts == {"127.0.0.1"}
    assert not [line for line in seen.commands if secret in line]
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_a_short_run_learns(straight: Path) -> None:
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    assert summary["max_gap"] < 1e-4
    assert {"versions", "commit", "seconds", "peak_memory_gib"} <= summary.keys()


def test_the_run_folder_is_complete_and_every_group_is_accounted_for(straight: Path) -> None:
    rows = read_metrics(straight)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[1]["policy/lr"] == 0.0
    for row in rows[1:]:
        ended = ("trained", "all_correct", "all_wrong", "overlong", "abstained", "expired")
        assert row["groups/trained"] == 16
        assert row["groups/age_mean"] <= 2.0  # rollout.lookahead
    issued = sum(row.get("groups/issued", 0) for row in rows)
    closed = sum(row.get(f"groups/{fate}", 0) for row in rows for fate in ended)
    assert issued == closed + rows[-1]["groups/carried"]
    assert [*recorded_steps(straight / "samples")] == [*range(1, STEPS + 1)]
    assert sorted(path.name for path in (straight / "checkpoints").glob("step_*")) == [
        "step_000006",
        "step_000007",
    ]
    assert (straight / "logs" / "rank_1.log").exists()


def test_timelines_agree_with_the_time_metrics(straight: Path) -> None:
    """Timelines exist for step 1 and every fourth step. Their sums equal time/* on rank 0, and
    approximately on other ranks."""
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    paths = sorted((straight / "timeline").iterdir())
    assert [path.name for path in paths] == ["step_000001.json", "step_000004.json"]
    for timeline in (json.loads(path.read_text()) for path in paths):
        row = rows[timeline["step"]]
        assert [rank["rank"] for rank in timeline["ranks"]] == [0, 1]
        for rank in timeline["ranks"]:
            seconds: Counter[str] = Counter()
            for name, begin, end in rank["spans"]:
                seconds[name] += end - begin
            assert set(seconds) >= {"generate", "logprobs", "update", "sync"}
            near = 0.05 if rank["rank"] == 0 else 0.5
            assert seconds == {
                name: pytest.approx(row[f"time/{name}"], abs=near) for name in seconds
            }
        [replica] = timeline["replicas"]
        *_, (last, running) = replica["running"]
        assert running == 0
        generate = timeline["ranks"][0]["spans"][0]
        assert last == pytest.approx(generate[2], abs=0.05)
        assert 0.0 <= row["time/engine_idle"] <= row["time/generate"]
        assert 0.0 < row["throughput/running_mean"] <= 1.0


def test_every_group_that_ended_is_recorded(straight: Path) -> None:
    metrics = {row["step"]: row for row in read_metrics(straight)}
    for step, folder in recorded_steps(straight / "samples").items():
        record.check(folder)
        recorded = list(record.read_groups(folder / record.COMPLETIONS))
        for outcome, number in Counter(group.outcome for group in recorded).items():
            assert number == metrics[step][f"groups/{outcome}"]
        carried = {ticket for ticket, _ in record.read_open(folder)}
        assert not carried & {item.group.ticket for item in recorded}
        assert len(carried) <= metrics[step]["groups/carried"]


def test_policy_log_probs_are_written_for_every_trained_completion(straight: Path) -> None:
    metrics = {row["step"]: row for row in read_metrics(straight)}
    num_fresh = 0
    for step, folder in recorded_steps(straight / "samples").items():
        [path] = policy_files(straight)[step]
        policy_rows = list(read_policy(path))
        logprobs_of = {
            (item.group.ticket, completion.sample): completion.logprobs
            for item in record.read_groups(folder / record.COMPLETIONS)
            if item.outcome == "trained"
            for completion in item.group.completions
        }
        assert [(row.ticket, row.sample) for row in policy_rows] == list(logprobs_of)
        inspected = [row for row in policy_rows if row.logprobs is not None]
        assert len({row.ticket for row in inspected}) == 4  # tracking.inspected_groups
        for row in inspected:
            assert row.logprobs is not None and row.entropy is not None
            engine = logprobs_of[row.ticket, row.sample]
            assert len(row.entropy) == len(row.logprobs) == len(engine)
            gap = max(abs(a - b) for a, b in zip(engine, row.logprobs.tolist(), strict=True))
            assert gap == pytest.approx(row.gap_max, rel=1e-3, abs=1e-6)
        step_metrics = metrics[step]
        if step_metrics["groups/fresh_token_fraction"] == 1:
            num_fresh += 1
            largest = max(row.gap_max for row in policy_rows)
            assert largest == pytest.approx(step_metrics["mismatch/gap_max"], rel=1e-3)
    assert num_fresh


def test_the_folder_explains_the_run(straight: Path) -> None:
    """It has the provenance, the tokenizer, the config, and a report that says how it ended."""
    from tokenizers import Tokenizer

    from dapo_megatron.config.file import load_config

    assert load_config(straight / "config.yaml").train.rollout_steps == STEPS
    text = (straight / "report.html").read_text(encoding="utf-8")
    assert straight.name in text
    assert f"it wrote its summary after step {STEPS}" in text, "the report calls the run unfinished"
    provenance = json.loads((straight / "provenance.json").read_text())
    assert provenance["num_processes"] == 2
    assert provenance["devices"]
    assert provenance["facts"]["folder"] == str(straight)
    assert {"attempt", "host", "version.torch", "chosen.adamw"} <= provenance["tags"].keys()
    tokenizer = Tokenizer.from_file(str(straight / "tokenizer.json"))
    path = straight / "samples" / "step_000001" / record.COMPLETIONS
    prompt = next(record.read_groups(path)).group.prompt
    tokens = list(prompt.tokens)
    assert prompt.text in tokenizer.decode(tokens, skip_special_tokens=False)


def test_mlflow_has_every_metric_and_the_true_status(directory: Path, straight: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    run = client.get_run(json.loads((straight / "mlflow_run.json").read_text())["run_id"])
    assert run.info.status == "FINISHED"
    rows = read_metrics(straight)
    logged = {name.replace("_at_", "@") for name in run.data.metrics}
    lines = (straight / "metrics.jsonl").read_text().splitlines()
    in_file = {name for line in lines for name in json.loads(line)}
    evaluated = {
        f"eval/chain_sum_held_out/{kind}@4{end}"
        for kind in ("avg", "pass", "cons")
        for end in ("", "_low", "_high")
    }
    assert sorted((promised_metrics() | evaluated) - in_file) == []
    assert in_file <= {*logged, "step"}
    for name in ("accuracy/raw", "policy/entropy", "mismatch/gap_max"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(p.step, p.value) for p in history] == [
            (row["step"], row[name]) for row in rows if name in row
        ]
    kept = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"samples", "policy", "report.html"} <= kept
    kept = {item.path for item in client.list_artifacts(run.info.run_id, "samples/step_000001")}
    assert kept == {f"samples/step_000001/{record.COMPLETIONS}"}
    assert "report.html" in run.data.tags["mlflow.note.content"]
    provenance = json.loads((straight / "provenance.json").read_text())
    assert provenance["tags"].items() <= run.data.tags.items()


def test_evaluate_gives_the_result_of_the_final_evaluation(directory: Path, straight: Path) -> None:
    results = directory / "figures.json"
    checkpoint = straight / "checkpoints" / f"step_{STEPS:06d}"
    done = run("evaluate", TINY, *OVERRIDES, f"checkpoint={checkpoint}", "--json", results)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((straight / "summary.json").read_text())
    assert json.loads(results.read_text()) == summary["evaluation_after"]
    assert "avg@4" in done.stdout


@pytest.mark.long
def test_a_run_resumes_in_another_layout(directory: Path, straight: Path) -> None:
    """Repeat the last step from the checkpoint before it, with pipeline instead of tensor
    parallelism and two engines instead of one."""
    checkpoint = straight / "checkpoints" / "step_000006"
    layout = ("policy.tensor_parallel=1", "policy.pipeline_parallel=2", "tracking.mlflow=false")
    more = (f"resume={checkpoint}", *layout, "engine.replicas=2")
    done = run(*command(directory, "moved", *more))
    assert done.returncode == 0, done.stdout + done.stderr
    [moved], original = read_metrics(directory / "moved"), read_metrics(straight)[-1]
    assert moved["step"] == original["step"] == STEPS
    assert moved["groups/trained"] == original["groups/trained"]
    assert moved["policy/lr"] == original["policy/lr"]
    # float32 sums have another order, and engines of other speed may collect other groups.
    assert moved["policy/entropy"] == pytest.approx(original["policy/entropy"], rel=0.2)
    # Missing if all groups were carried.
    assert moved.get("mismatch/gap_max", 0.0) < 1e-4


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    directory: Path, straight: Path
) -> None:
    folder = directory / "killed"
    with started(*command(directory, "killed", "resume=auto"), new_session=True) as running:
        wait_for_row(folder, 4, running)
        os.killpg(running.pid, signal.SIGKILL)
    run_id = (folder / "mlflow_run.json").read_text()
    assert not (folder / "summary.json").exists()
    wait_until_unlocked(folder)

    done = run(*command(directory, "killed", "resume=auto"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("step_00000[36]", done.stdout)
    assert (folder / "mlflow_run.json").read_text() == run_id
    assert read_metrics(folder) == read_metrics(straight)  # exactly
    kept = ("accuracy_before", "accuracy_after", "steps", "max_gap")
    both = [json.loads((run / "summary.json").read_text()) for run in (folder, straight)]
    assert [both[0][key] for key in kept] == [both[1][key] for key in kept]


def wait_until_unlocked(folder: Path) -> None:
    """Wait until the killed ranks are gone, when the kernel releases their lock."""
    import fcntl

    with (folder / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
