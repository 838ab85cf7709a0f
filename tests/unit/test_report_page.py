"""The report as a file: its content, escaping of a run's texts, that it loads nothing, and when it
is written."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects

from dapo_megatron.cluster import heartbeat
from dapo_megatron.report import command, page
from dapo_megatron.report.chart import chart_of, charts_with_data
from dapo_megatron.report.charts import CHARTS
from dapo_megatron.report.command import parse_steps, report, watch
from dapo_megatron.report.curves import GHOSTS, PALETTE, ghost, run_styles
from dapo_megatron.report.page import Options, make_payload
from dapo_megatron.report.provenance import headline
from dapo_megatron.report.run_data import read_run
from dapo_megatron.report.wording import span
from dapo_megatron.text import visible
from dapo_megatron.types import ConfigError
from tests.helpers.made_run import MadeRun
from tests.unit.test_files import room_for
from tests.unit.test_report_folder import A_HEARTBEAT, write_run

HOSTILE = "</script><script>bad()</script><img src=x onerror=bad()>{{ 7*7 }}"


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


def html_of(folders: list[Path], target: Path, **options: Any) -> str:
    report(folders, target, Options(**options))
    return target.read_text(encoding="utf-8")


def data_of(text: str) -> Any:
    match = re.search(r'id="data">([^<]*)<', text)
    assert match is not None
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeRun(num_steps=6).write(tmp_path_factory.mktemp("runs") / "made")


def test_the_page_has_all_sections_and_charts_and_no_dangling_links(
    made: Path, tmp_path: Path
) -> None:
    text = html_of([made], tmp_path / "r.html")
    elements = Elements(text)
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name in ("health", "training", "groups", "time", "rollouts", "provenance", "timeline"):
        assert name in ids
    data = data_of(text)
    drawn = [div["data-chart"] for div in elements.of("div") if "data-chart" in div]
    assert set(drawn) == {*data["charts"], *data["timelines"]} and len(drawn) == len(set(drawn))
    for name, [figure] in data["charts"].items():
        for trace in figure["data"]:
            is_paper = "paper" in trace["meta"]
            assert trace["x"] == [1, 2, 3, 4, 5, 6] or is_paper or name.startswith("evaluation")
            assert len(trace["y"]) == len(trace["x"])
    targets = {link["href"] for link in elements.of("a") if link.get("class") == "see"}
    assert targets and targets <= {f"#chart-{name}" for name in data["charts"]}
    assert "<noscript>" in text
    assert len(text) < 8e6


def test_findings_and_provenance_are_readable_without_scripts(made: Path, tmp_path: Path) -> None:
    text = html_of([made], tmp_path / "r.html")
    run = read_run(made)
    before = unescape(text[: text.index("<script")])
    for words in (run.name, run.state.word, headline(run), "Findings", "Provenance"):
        assert words in before
    assert re.search(r"Written \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, up to step 6;", before)


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(made: Path, tmp_path: Path) -> None:
    text = html_of([made], tmp_path / "r.html")
    elements = Elements(text)
    (policy,) = [
        str(meta["content"])
        for meta in elements.of("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe-eval" not in policy and "http" not in policy
    nonce = re.search(r"nonce-([\w-]+)", policy)
    assert nonce is not None
    for script in elements.of("script"):
        assert script.get("nonce") == nonce[1] or script.get("type") == "application/octet-stream"
    for tag, attributes in elements.tags:
        assert "src" not in attributes, tag
        for name in ("href", "action", "data", "poster", "srcset"):
            assert str(attributes.get(name) or "#").startswith(("#", "data:,")), tag
    assert "@import" not in text[: text.index("<script")]
    assert "url(" not in text[: text.index("<script")]
    assert nonce[1] not in html_of([made], tmp_path / "again.html")


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "r", [{"step": 0, f"eval/{HOSTILE}/avg@4": 0.5}, {"step": 1, HOSTILE: 1}]
    )
    config = {"run": {"name": HOSTILE}, "model": {"path": HOSTILE}, HOSTILE: HOSTILE}
    (folder / "config.yaml").write_text(json.dumps(config))
    facts = {"facts": {HOSTILE: HOSTILE, "lone": "\ud800"}, "tags": {"git.commit": HOSTILE}}
    (folder / "provenance.json").write_text(json.dumps(facts))
    attempt = {"attempt": HOSTILE, "job": HOSTILE, "step": HOSTILE, "time": 0, "end": "crashed"}
    (folder / "attempts.jsonl").write_text(json.dumps(attempt))
    (folder / "data").mkdir()
    (folder / "data" / "<b>.report.json").write_text(json.dumps({"output": {HOSTILE: [HOSTILE]}}))
    plain = Elements(html_of([write_run(tmp_path / "plain")], tmp_path / "plain.html"))
    text = html_of([folder], tmp_path / "r.html")
    elements = Elements(text)
    assert "<img" not in text and "<script>bad" not in text
    assert len(elements.of("script")) == len(plain.of("script"))
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    assert HOSTILE in unescape(text)  # with its braces
    assert data_of(text)["runs"][0]["name"] == HOSTILE


def test_a_script_that_contains_its_own_end_tag_is_refused() -> None:
    with pytest.raises(ValueError, match="its own element"):
        page._script("const a = '</SCRIPT>';")


def test_a_report_of_several_runs_shows_one_at_a_time(made: Path, tmp_path: Path) -> None:
    second = write_run(tmp_path / "b")
    third = write_run(tmp_path / "c")
    text = html_of([made, second, third], tmp_path / "r.html", completions=30)
    data = data_of(text)
    names = [run["name"] for run in data["runs"]]
    assert names == ["made", f"mine ({second})", f"mine ({third})"]
    elements = Elements(text)
    assert [option["value"] for option in elements.of("option")[:3]] == ["0", "1", "2"]
    of_runs = [div for div in elements.of("div") if div.get("data-run") is not None]
    assert {div["data-run"] for div in of_runs} == {"0", "1", "2"}
    assert all(("hidden" in div) == (div["data-run"] != "0") for div in of_runs)
    assert len([chip for chip in elements.of("input") if "data-chip" in chip]) == 3


def test_invisible_characters_are_shown_as_code_points(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "eval/a\u200bb/avg@4": 0.5}])
    (run / "config.yaml").write_text(
        'run: {name: "a\\u202Egpj.exe"}\nx: "\\u2067"\n# \u202e\tend\n', encoding="utf-8"
    )
    provenance = {"facts": {"model": "tiny\u2066"}, "tags": {}}
    (run / "provenance.json").write_text(json.dumps(provenance), encoding="utf-8")
    text = html_of([run], tmp_path / "out.html")
    assert "<title>a⟨U+202E⟩gpj.exe · run report</title>" in text
    assert "<h1>a⟨U+202E⟩gpj.exe</h1>" in text
    assert "tiny⟨U+2066⟩" in text
    assert "# ⟨U+202E⟩\tend\n" in text
    assert not set("\u200b\u202e\u2066\u2067") & set(re.sub(r"(?s)<script.*?</script>", "", text))
    data = data_of(text)
    assert data["runs"][0]["name"] == "a⟨U+202E⟩gpj.exe"
    assert data["charts"]["evaluation"][0]["data"][0]["name"] == "a⟨U+200B⟩b avg@4"


def test_tabs_line_ends_and_joiners_are_not_replaced() -> None:
    assert visible("a\tb\nc é\u200d") == "a\tb\nc é\u200d"


def test_a_finding_shows_config_keys_as_code(tmp_path: Path) -> None:
    lines = [{"step": step, "response_tokens/clipped_fraction": 0.5} for step in range(1, 11)]
    text = html_of([write_run(tmp_path / "run", lines)], tmp_path / "out.html")
    assert (
        "Look at <code>rollout.max_response_tokens</code>: higher; "
        "<code>overlong.penalty</code>: on; <code>overlong.filter</code>: on</p>"
    ) in text


def test_each_run_has_its_own_notes(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("on", "off")]
    (runs[1] / "config.yaml").write_text("rollout: {dynamic_sampling: false}\n", encoding="utf-8")
    (runs[0] / "plan.json").write_text('{"phases": {}, "note": "Not on CPU."}', encoding="utf-8")
    text = html_of(runs, tmp_path / "out.html")
    assert '<p class="muted" data-run="0" >Memory plan: Not on CPU.</p>' in text
    assert '<p class="muted" data-run="1" hidden>rollout.dynamic_sampling is off' in text
    assert text.count("rollout.dynamic_sampling is off") == 1


def test_the_memory_chart_of_several_runs_has_the_plan_of_each(tmp_path: Path) -> None:
    line = {"step": 1, "memory/update_gib": 5, "memory/generate_gib": 6}
    runs = [write_run(tmp_path / name, [line]) for name in "abc"]
    for run, phase in zip(runs, ("update", "generate"), strict=False):
        (run / "plan.json").write_text(json.dumps({"phases": {phase: 7}}), encoding="utf-8")
    payload = make_payload([read_run(run) for run in runs], Options())
    figures = payload.data["charts"]["memory"]
    drawn = [{trace["name"] for trace in figure["data"]} for figure in figures]
    planned = [{name for name in names if "planned" in name} for names in drawn]
    assert planned == [{"update, planned"}, {"generate, planned"}, set()]


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    text = html_of([folder], tmp_path / "r.html")
    assert data_of(text)["charts"] == {}
    assert "Not recorded:" in text
    assert "None recorded" in text


# ------------------------------------------------------------------ charts


def test_charts_are_well_formed() -> None:
    assert len({chart.id for chart in CHARTS}) == len(CHARTS)
    for chart in CHARTS:
        assert re.fullmatch(r"[a-z_]+", chart.id)
        assert chart.help.endswith(".")
        named_for, _, _ = chart.id.partition("_")
        section = {"groups": "groups", "time": "time", "memory": "time"}.get(named_for, "dynamics")
        assert chart.section == section
        assert set(chart.ghosts) <= set(GHOSTS)


@pytest.mark.parametrize("num_runs", [1, 3, 12])
def test_plotly_accepts_all_figures(made: Path, num_runs: int) -> None:
    data = make_payload([read_run(made)] * num_runs, Options(completions=0)).data
    for template in data["templates"].values():
        graph_objects.layout.Template(template)
    figures = [*data["charts"].values(), *data["timelines"].values()]
    assert len(figures) > 25
    for figure in chain.from_iterable(figures):
        graph_objects.Figure(figure["data"], figure["layout"])


def test_names_of_runs_and_sets_are_escaped_in_figures(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", [{"step": 1, f"eval/{HOSTILE}/avg@4": 0.5}]))
    runs = [replace(run, name="<b>a</b>"), replace(run, name="<a href='x'>b</a>")]
    figures = make_payload(runs, Options()).data["charts"]["evaluation"]
    traces = [trace for figure in figures for trace in figure["data"]]
    names = [trace["name"] for trace in traces if "paper" not in trace["meta"]]
    assert names and not any("<" in name for name in names)
    assert all(unescape(name).endswith(f"{HOSTILE} avg@4") for name in names)


def test_host_names_are_escaped_in_timelines(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    spans = [["<b>", 0, 1]]
    ranks = [{"rank": rank, "host": HOSTILE, "spans": spans} for rank in range(90)]
    (folder / "timeline").mkdir()
    text = json.dumps({"step": 1, "ranks": ranks, "replicas": []})
    (folder / "timeline" / "step_000001.json").write_text(text, encoding="utf-8")
    [[figure]] = make_payload([read_run(folder)], Options()).data["timelines"].values()
    text = json.dumps([figure["data"], figure["layout"]])
    assert "&lt;script&gt;" in text and "<" not in text


def test_charts_and_series_without_values_are_left_out() -> None:
    shown = charts_with_data(CHARTS, {"policy/clip_fraction_low"}, {"pass@4"})
    assert [chart.id for chart in shown] == ["evaluation_best_and_vote", "clipping"]
    assert list(shown[1].series.values()) == ["down"]
    assert chart_of("policy/clip_fraction_low", shown) == "clipping"
    assert chart_of("eval/some/set/pass@4", shown) == "evaluation_best_and_vote"
    assert chart_of("policy/entropy", shown) is chart_of(None, shown) is None


def test_curves_of_the_paper_are_in_rollout_steps_and_fractions() -> None:
    curves = {key: ghost(key)[1] for key in GHOSTS}
    accuracy = curves["aime_avg"]
    assert accuracy[0] == (0.0, 0.01042) and accuracy[-1] == (330.0, 0.49583)
    assert curves["entropy_collapse"][-1] == (146.0, 0.00564)
    assert curves["length"][0][1] == pytest.approx(743, abs=1)
    for points in curves.values():
        steps = [step for step, _ in points]
        assert steps == sorted(steps)


def test_the_headline_states_accuracy_and_progress(made: Path, tmp_path: Path) -> None:
    lines = [
        {"step": 0, "eval/a/avg@4": 0.25, "eval/b/avg@4": 0.5},
        {"step": 1, "time/step": 100.0, "accuracy/raw": 0.5},
    ]
    folder = write_run(tmp_path / "r", lines)
    sentence = headline(read_run(folder))
    assert sentence == "accuracy 0.250 at step 0 on a and 1 more (1 of 40 steps, 2 min)"
    write_run(folder, [*lines, {"step": 2, "eval/a/avg@4": 0.75}])
    assert "accuracy 0.250 → 0.750 on a" in headline(read_run(folder))
    write_run(folder, lines[1:])
    assert "0.500 on its training prompts" in headline(read_run(folder))
    write_run(folder, [])
    assert headline(read_run(folder)) == "nothing measured yet (0 of 40 steps, 0 s)"
    assert [span(n) for n in (12, 240, 7200, 200_000)] == ["12 s", "4 min", "2.0 h", "2.3 d"]


def test_the_password_of_the_mlflow_server_is_removed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    server = {"server": "https://me:secret@host:5000/x", "run_id": "17"}
    (folder / "mlflow_run.json").write_text(json.dumps(server))
    text = html_of([folder], tmp_path / "r.html")
    assert "https://host:5000/x" in text
    assert "secret" not in text[: text.index("<script")]


@pytest.mark.parametrize("server", ["https://ml.example.com/x/", "http://me:secret@host:5000"])
def test_the_mlflow_page_of_the_run_is_linked(tmp_path: Path, server: str) -> None:
    links = _links(tmp_path, server, "3/..")
    assert [link["rel"] for link in links] == ["noreferrer"] * 2
    plain = server.replace("me:secret@", "")
    page_of_run = plain.rstrip("/") + "/#/experiments/3%2F../runs/17"
    assert [link["href"] for link in links] == [page_of_run, plain]


@pytest.mark.parametrize("server", ["javascript:alert(1)//x", "sqlite:////m.db", "https:", "//["])
def test_addresses_other_than_http_are_not_linked(tmp_path: Path, server: str) -> None:
    assert _links(tmp_path, server, "3") == []


def _links(parent: Path, server: str, experiment: str) -> list[dict[str, str | None]]:
    folder = write_run(parent / "r")
    known = {"server": server, "run_id": "17", "experiment_id": experiment}
    (folder / "mlflow_run.json").write_text(json.dumps(known))
    anchors = Elements(html_of([folder], parent / "r.html")).of("a")
    return [anchor for anchor in anchors if not str(anchor["href"]).startswith("#")]


def test_ten_thousand_steps_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    names = ("accuracy/raw", "policy/entropy", "policy/loss", "time/step", "time/update")
    lines = [
        {"step": step, **{name: 1 / (step + at) for at, name in enumerate(names)}}
        for step in range(1, 10_001)
    ]
    run = read_run(write_run(tmp_path / "long", lines))
    data = make_payload([run], Options()).data
    lengths = {len(trace["y"]) for [figure] in data["charts"].values() for trace in figure["data"]}
    assert max(lengths) == 2000
    assert len(page.packed(data)) < 1e6


# ------------------------------------------------------------------ several runs


def _run_styles(parent: Path, *names: str, **config: Any) -> list[tuple[str, list[int]]]:
    runs = [
        replace(read_run(write_run(parent / str(at))), name=name, config=config)
        for at, name in enumerate(names)
    ]
    return [(look.label, look.runs) for look in run_styles(runs)]


def test_runs_that_differ_only_in_their_seed_share_a_color(tmp_path: Path) -> None:
    curves = _run_styles(tmp_path, "1_a_seed0", "2_b_seed0", "1_a_seed1", "2_b.1", "c")
    assert curves == [("1_a, 2 runs", [0, 2]), ("2_b, 2 runs", [1, 3]), ("c", [4])]
    assert _run_styles(tmp_path, "a_seed0", "a_seed1") == [("a_seed0", [0]), ("a_seed1", [1])]
    assert _run_styles(tmp_path, "a", "b") == [("a", [0]), ("b", [1])]


def test_runs_that_differ_in_a_setting_do_not_share_a_color(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r"))
    runs = [
        replace(run, name=f"batch_{size}", config={"seed": at, "run": {"name": at}, "batch": size})
        for at, size in enumerate((8, 8, 16))
    ]
    assert [look.runs for look in run_styles(runs)] == [[0, 1], [2]]


def test_many_runs_all_look_different(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r"))
    run_looks = run_styles([replace(run, name=chr(97 + at)) for at in range(24)])
    assert len({(look.color, look.width) for look in run_looks}) == 24
    assert {look.color for look in run_looks} == set(PALETTE)


# ------------------------------------------------------------------ writing


def test_a_failed_write_keeps_the_previous_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    report([folder], None, Options())
    kept = (folder / "report.html").read_bytes()
    with room_for(100_000), pytest.raises(ConfigError, match=r"--output: .*html: File too large"):
        report([folder], None, Options())
    assert (folder / "report.html").read_bytes() == kept
    assert not list(folder.glob(".*partial"))


def test_partial_files_of_killed_reports_are_removed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    abandoned, written_now = folder / ".report.html.7.partial", folder / ".report.html.8.partial"
    abandoned.touch()
    written_now.touch()
    os.utime(abandoned, (0, time.time() - command.LIMIT_SECONDS - 5))
    report([folder], None, Options())
    assert list(folder.glob(".*partial")) == [written_now]


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    for output in (tmp_path / "no" / "r.html", tmp_path):
        with pytest.raises(ConfigError, match="--output"):
            report([folder], output, Options())


@pytest.mark.parametrize("text", ["5", "a:b", ":", "9:3", ""])
def test_bad_step_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--steps"):
        parse_steps(text)


def test_step_ranges_are_parsed() -> None:
    assert parse_steps(None) is None
    assert [parse_steps(text) for text in ("3:9", "3:", ":9")] == [(3, 9), (3, None), (None, 9)]


def test_the_command_writes_a_report_and_names_its_errors(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    arguments = [sys.executable, "-m", "dapo_megatron", "report", str(folder), "--completions", "5"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"report  \S+report.html  \([\d.]+ MB, [\d.]+ s\)\n", done.stdout)
    wrong = subprocess.run([*arguments[:4], str(tmp_path)], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: RUN_FOLDER: ")
    assert str(folder) in wrong.stderr


def test_the_report_imports_neither_torch_nor_transformers_nor_mlflow() -> None:
    code = (
        "import sys, dapo_megatron.report.command; "
        "sys.exit(str(sorted({'torch', 'transformers', 'mlflow'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


# ------------------------------------------------------------------ --watch


def test_watch_writes_on_changes_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "r")
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=time.time()))
    num_sleeps = 0
    pages: list[tuple[int, float | None]] = []

    def sleep(seconds: float) -> None:
        nonlocal num_sleeps
        num_sleeps += 1
        text = (folder / "report.html").read_text()
        last = int(re.findall(r"up to step (\d+);", text)[0])
        pages.append((last, data_of(text)["refresh_seconds"]))
        assert num_sleeps < 9
        if num_sleeps < 4:
            heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=time.time()))
        if num_sleeps == 2:
            write_run(folder, [{"step": 1}, {"step": 2}])
        if num_sleeps == 4:
            (folder / "summary.json").write_text('{"steps": 40}')
            heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, state=heartbeat.RankState.ENDED))

    monkeypatch.setattr(command.time, "sleep", sleep)
    watch([folder], None, Options(), every=7.0)
    assert pages[:4] == [(1, 7.0), (1, 7.0), (2, 7.0), (2, 7.0)]
    assert num_sleeps == 5
    assert data_of((folder / "report.html").read_text())["refresh_seconds"] is None
    assert capsys.readouterr().out.count("report  ") == 4  # the first, step 2, and the end twice


def test_watch_of_an_ended_run_writes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "r")
    thread = threading.Thread(target=watch, args=([folder], None, Options(), 30.0), daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert capsys.readouterr().out.count("report  ") == 1


def test_payload_keeps_rollouts_of_each_run_apart(made: Path) -> None:
    run = read_run(made)
    payload = make_payload([run, run], Options(completions=40))
    kept = [view.rollouts for view in payload.views]
    assert all(rollouts is not None and rollouts.blobs for rollouts in kept)
    ids = {
        f"{number}-{ticket}"
        for number, rollouts in enumerate(kept)
        if rollouts
        for ticket in rollouts.blobs
    }
    assert payload.blobs.keys() == ids
