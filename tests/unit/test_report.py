"""The page of a run, the files that it is made from, and the command. The report is written for any
damaged run folder: unreadable parts are left out and reported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plotly import graph_objects as go

from dapo_megatron.cluster import heartbeat
from dapo_megatron.cluster.attempt import end_attempt, start_attempt
from dapo_megatron.cluster.heartbeat import Heartbeat, RankState
from dapo_megatron.report.charts import PALETTE, all_charts
from dapo_megatron.report.command import report
from dapo_megatron.report.figures import thin
from dapo_megatron.report.page import Contents, Options, contents, packed
from dapo_megatron.report.reading import read_metrics, read_run
from dapo_megatron.report.run_data import StateWord
from dapo_megatron.report.timeline import WAITING, timelines
from dapo_megatron.types import ConfigError
from tests.helpers.commands import run
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

RECORDED = REPOSITORY / "tests" / "browser" / "recorded_run"
A_HEARTBEAT = Heartbeat(
    rank=0,
    world_size=1,
    attempt="7.0",
    host="n1",
    pid=1,
    state=RankState.RUNNING,
    time=0.0,
    phase="generate",
    step=3,
    limit_seconds=60.0,
    silent_seconds=1.0,
    sign="token 5",
)
SLURM = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}


class Elements(HTMLParser):
    """The start tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(target: Path, *folders: Path) -> tuple[str, Elements]:
    report(folders, target, Options(completions=60))
    text = target.read_text(encoding="utf-8")
    return text, Elements(text)


def write_run(folder: Path, lines: list[dict[str, Any]] | None = None, steps: int = 40) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.yaml").write_text(f"run: {{name: mine}}\ntrain: {{rollout_steps: {steps}}}\n")
    lines = [{"step": 1, "accuracy/raw": 0.5}] if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


# ---------------------------------------------------------------------------- the page


def test_the_page_of_a_real_run(tmp_path: Path) -> None:
    text, elements = page_of(tmp_path / "r.html", RECORDED)
    before_scripts = unescape(text[: text.index("<script")])
    for words in (
        "accuracy 0.386 → 0.887 on chain_sum_held_out (40 of 40 steps, 15 min)",
        "Finished: it wrote its summary after step 40.",
        "32 prompts, 16 answers each, of up to 16 tokens",
        "2 processes, AMD EPYC, avx512_bf16",
        "Learning: accuracy 0.410 → 0.872",
        "Evaluation confirms the learning: chain_sum_held_out",
        "Every completion was graded",
        "1,472 issued: 1,280 trained on, 173 all answers right, 19 carried on, open.",
        "Sync verified at 40 of 40 syncs",
        "samples_per_prompt: 16",
    ):
        assert words in before_scripts
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for link in elements.of("a"):
        assert str(link["href"]).removeprefix("#") in ids
    [view] = contents([read_run(RECORDED)], Options(completions=60)).views
    assert view.rollouts is not None and 40 < len(view.rollouts.rows) <= 60
    assert len(view.timelines) == 5


def test_every_chart_draws_what_the_run_measured() -> None:
    lines = map(json.loads, (RECORDED / "metrics.jsonl").read_text().splitlines())
    rows = {line["step"]: line for line in lines}
    figures = contents([read_run(RECORDED)], Options(completions=0)).figures
    num_drawn = 0
    for chart in all_charts():
        labels = {label: metric for metric, label in chart.series.items()}
        for figure in figures.get(chart.id, []):
            go.Figure(figure)  # is what plotly knows
            for trace in figure["data"]:
                metric = labels.get(trace["name"], "")
                if metric in rows[1]:
                    num_drawn += 1
                    assert trace["x"] == list(range(1, 41))
                    recorded = [rows[step].get(metric) for step in trace["x"]]
                    zero = 0 if chart.kind == "stacked" else None
                    wanted = [zero if value is None else value for value in recorded]
                    assert trace["y"] == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert num_drawn > 40
    [accuracy] = figures["accuracy-on-held-out-problems"][0]["data"]
    assert accuracy["x"] == [0, 20, 40]
    assert accuracy["y"][-1] == pytest.approx(rows[40]["eval/chain_sum_held_out/avg@4"])


def test_a_page_loads_nothing_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    hostile = MadeRun(num_steps=3, groups_per_step=2, samples_per_group=2, hostile=True)
    folder = hostile.write(tmp_path / "hostile")
    text, elements = page_of(tmp_path / "r.html", folder)
    [policy] = [str(meta["content"]) for meta in elements.of("meta") if "http-equiv" in meta]
    nonce = re.search(r"default-src 'none'; script-src 'nonce-([\w-]+)'; style-src", policy)
    assert nonce is not None and "unsafe-eval" not in policy and "http" not in policy
    for script in elements.of("script"):
        assert script.get("nonce") == nonce[1] or script.get("type") == "application/octet-stream"
    for tag, attributes in elements.tags:
        assert "src" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes)
        assert str(attributes.get("href") or "#").startswith(("#", "data:,")), tag
    assert "<img" not in text and "<svg onload" not in text
    assert not {"\u202e", "\x1b", "\x00"} & set(text[: text.index("<script nonce")])
    assert nonce[1] not in page_of(tmp_path / "again.html", folder)[0]


def test_several_runs_are_overlaid_each_in_its_color(tmp_path: Path) -> None:
    folders = [MadeRun(num_steps=n, seed=n).write(tmp_path / str(n)) for n in (3, 5)]
    folders.append(write_run(tmp_path / "empty", []))
    page = contents([read_run(folder) for folder in folders], Options(completions=20))
    assert [view.run.name for view in page.views[:2]] == [
        f"made ({folder})" for folder in folders[:2]
    ]
    [figure] = page.figures["entropy"]
    assert [trace["line"]["color"] for trace in figure["data"]] == list(PALETTE[:2])
    assert [len(trace["x"]) for trace in figure["data"]] == [3, 5]
    stacked = page.figures["what-became-of-the-prompts"]
    assert len(stacked) == 3 and stacked[2]["data"] == []
    text, elements = page_of(tmp_path / "r.html", *folders)
    assert "All 3 runs" in text and len(elements.of("option")) >= 3


def test_long_runs_are_thinned_to_the_last_step_with_their_peaks() -> None:
    frame = pd.DataFrame({"x": range(1, 5001), "gap_max": [0.0] * 4999 + [7.0]}, range(1, 5001))
    thinned = thin(frame)
    assert len(thinned) <= 2000 and thinned.index[-1] == 5000
    assert thinned["gap_max"].max() == 7.0
    assert thinned["x"].is_monotonic_increasing


# ---------------------------------------------------------------------------- timelines


def test_a_timeline_shows_phases_and_requests(tmp_path: Path) -> None:
    folder = MadeRun(num_steps=20, timeline_every=1).write(tmp_path / "run")
    run_data = read_run(folder)
    drawn, note = timelines(run_data)
    assert [drawn[0].step, drawn[-1].step, len(drawn)] == [1, 20, 12]
    assert note == "12 of 20 recorded steps are shown."
    *bars, requests = drawn[0].figure["data"]
    spans = {(bar["name"], y): (at, x) for bar in bars
             for y, at, x in zip(bar["y"], bar["base"], bar["x"], strict=True)}  # fmt: skip
    assert spans["generate", "rank 0"] == (0.0, 12.0)
    assert ("sync", "rank 1") not in spans
    assert requests["y"] == ["replica 0"] and max(requests["z"][0]) > 0
    go.Figure(drawn[0].figure)
    apart = replace(run_data, config={"engine": {"colocated": False}})
    assert timelines(apart)[0][0].phases[0]["label"] == WAITING


# ---------------------------------------------------------------------------- reading a folder


def test_a_repeated_step_replaces_all_later_ones() -> None:
    lines = [{"step": step, "x": float(step)} for step in (0, 1, 2, 3, 4)]
    steps, columns, _ = read_metrics([*lines, {"step": 2, "x": 20.0}, {"step": 3, "x": 30.0}])
    assert (steps, columns["x"]) == ([1, 2, 3], [1.0, 20.0, 30.0])


@settings(max_examples=50)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["step", "x", "eval/a/avg@4", "groups/trained", "time/step"]),
            st.integers(-1, 9) | st.floats() | st.none() | st.text(max_size=2) | st.just(10**400),
        )
    )
)
def test_any_lines_give_finite_values_of_ascending_steps(lines: list[dict[str, Any]]) -> None:
    steps, columns, _ = read_metrics(lines)
    assert steps == sorted({*steps}) and all(step > 0 for step in steps)
    assert all(
        value is None or abs(value) <= 1e100 for column in columns.values() for value in column
    )


@pytest.mark.parametrize("wrong", ["none", "runs", "runs/good/config.yaml"])
def test_a_wrong_folder_is_refused_with_a_suggestion(tmp_path: Path, wrong: str) -> None:
    good = write_run(tmp_path / "runs" / "good")
    with pytest.raises(ConfigError, match="RUN_FOLDER") as raised:
        read_run(tmp_path / wrong)
    assert str(tmp_path / wrong) in str(raised.value)
    assert wrong == "none" or f"such as {good}" in str(raised.value)


def test_the_state_of_a_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    def state() -> str:
        return read_run(folder).state.word

    folder = write_run(tmp_path / "r")
    attempts = folder / "attempts.jsonl"
    assert state() == StateWord.UNKNOWN
    start_attempt(attempts, 0, SLURM)
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=time.time() + 60))
    assert state() == StateWord.RUNNING
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=time.time() - 1000))
    assert state() == StateWord.CRASHED
    # A run records its end, then writes its report, and only then exits.
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=time.time() + 60))
    for end in ("stopped", "crashed", "hung"):
        end_attempt(attempts, SLURM, end=end)
        assert state() == end
    (folder / "summary.json").write_text(json.dumps({"steps": 30}))  # of a shorter run
    assert state() == "hung"
    (folder / "summary.json").write_text(json.dumps({"steps": 40}))
    assert state() == StateWord.FINISHED


# ---------------------------------------------------------------------------- the command


def test_the_command_writes_a_report_and_names_its_errors(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    done = run("report", folder, "--steps", "1:3", "--ticket", "0")
    assert done.returncode == 0 and str(folder / "report.html") in done.stdout
    assert "None recorded" in (folder / "report.html").read_text()
    done = run("report", folder, "--output", tmp_path / "none" / "r.html")
    assert done.returncode == 2 and "--output" in done.stderr
    done = run("report", tmp_path)
    assert done.returncode == 2 and f"such as {folder}" in done.stderr


def test_the_report_imports_neither_torch_nor_transformers_nor_mlflow() -> None:
    code = (
        "import sys, dapo_megatron.report.command; "
        "print({'torch', 'transformers', 'mlflow', 'vllm'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---------------------------------------------------------------------------- damaged folders

FILES = sorted(path.relative_to(RECORDED) for path in RECORDED.rglob("*") if path.is_file())

NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]
ODD = st.sampled_from(
    [*(None, True, "", "x", "1e-5", "\ud800", "\u202e", "a\0b", -1, 0, 5, 0.5, 2**40, 10**400),
     *(1e308, -1e308, float("nan"), float("inf"), [], {}, [None], [1, "x"], {"a": 1}, NESTED)]
)  # fmt: skip
"""Values that damage puts in place of others."""


def report_of(folder: Path) -> Contents:
    """Make the report up to the parts that do not depend on the folder's content."""
    page = contents([read_run(folder)], Options(completions=60, tickets=(0,)))
    packed(page.figures)
    return page


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (dict or list, key or index) for every item inside a value."""
    keys = value if isinstance(value, dict) else range(len(value))
    return [
        place
        for key in list(keys)
        for place in (
            (value, key),
            *(places(value[key]) if isinstance(value[key], dict | list) else ()),
        )
    ]


def damaged(path: Path, data: st.DataObject) -> bytes:
    """Return the bytes of a file with one value replaced, or with bytes cut, changed or added."""
    raw = path.read_bytes()
    if raw and path.suffix != ".parquet" and data.draw(st.integers(0, 4)):
        *before, last = raw.splitlines() if path.suffix == ".jsonl" else [raw]
        value = yaml.safe_load(last) if path.suffix == ".yaml" else json.loads(last)
        inside, key = data.draw(st.sampled_from(places(value)))
        inside[key] = data.draw(ODD)
        text = yaml.safe_dump(value) if path.suffix == ".yaml" else json.dumps(value)
        return b"\n".join([*before, text.encode(errors="replace"), b""])
    first, last = (data.draw(st.integers(0, len(raw))) for _ in range(2))
    added = data.draw(st.sampled_from([b"", b"\0" * 9, b"[" * 5000, b"\xff{"]))
    return raw[:first] + added + raw[last:]


@settings(max_examples=30, suppress_health_check=[HealthCheck.large_base_example])
@given(data=st.data())
def test_no_damage_stops_a_report(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(RECORDED, Path(temporary) / "run"))
        for name in data.draw(st.sets(st.sampled_from(FILES), min_size=1, max_size=3)):
            (folder / name).write_bytes(damaged(RECORDED / name, data))
        report_of(folder)


def test_unreadable_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    samples = folder / "samples" / "step_000001" / "completions.parquet"
    samples.write_bytes(samples.read_bytes()[:500])
    timelines = folder / "timeline"
    (timelines / "step_000020.json").write_text("{")
    first = (timelines / "step_000001.json").read_text()
    (timelines / "step_000001.json").write_text(first.replace('"update"', r'"\ud800"'))
    (folder / "config.yaml").write_text("a: &a [*a]\n")
    (folder / "summary.json").write_text("[" * 2000)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = [*lines[:20], "broken\n", *lines[20:], '{"step": 41, "groups']
    (folder / "metrics.jsonl").write_text("".join(half))
    [view] = report_of(folder).views
    named = [re.split("[,:]", warning)[0] for warning in view.warnings]
    assert named == ["config.yaml", "metrics.jsonl", "summary.json", "samples"]
    assert "step_000020.json" in view.timeline_note and len(view.timelines) == 4
    assert "?" in [phase["label"] for phase in view.timelines[0].phases]
    assert view.run.last_step == 40
    assert view.rollouts is not None
    assert {row["step"] for row in view.rollouts.rows} <= {20, 39, 40}
