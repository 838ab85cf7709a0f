"""Environments of the package verifiers, as agents: two games that it publishes, and a taskset
written as its documentation says. `make build/verifiers/.ready` installs the packages."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dapo_megatron.config import OverlongConfig, TasksSource
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.environments.verifiers import load_episodes, read_tasks
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.types import Collected, Completion, ConfigError, Finish, Outcome, Prompt
from tests.helpers import talking
from tests.helpers.configs import tiny_config
from tests.helpers.talking import TalkingDriver, rollout_config
from tests.unit.test_docs import blocks

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "build" / "verifiers"
if not (FOLDER / ".ready").exists() and importlib.util.find_spec("verifiers") is None:
    pytest.skip("the package verifiers is not in build/verifiers", allow_module_level=True)

PAGE = REPOSITORY / "docs" / "environments.md"
(EXAMPLE,) = (block for block in blocks(PAGE, "yaml") if "verifiers:" in block)
MAX_TOKENS = 20_000
OVERLONG = OverlongConfig(
    max_tokens=MAX_TOKENS, buffer_tokens=10, penalty=False, filter=False, filtered_in_mean=False
)
LADDER = ["cold", "cord", "card", "ward", "warm", "harm"]
WORDS = [*LADDER, "cat", "apple", "orange"]
SUMS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def is_right(self, task: SumData, trace: vf.Trace) -> float:
        return float(str(task.answer) in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        if "!" in trace.last_reply:
            raise RuntimeError("a fault of the metric")
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(5):
            yield SumTask(SumData(prompt=f"{i} + {i} = ?", answer=2 * i), self.config.task)


__all__ = ["Sums"]
"""
BROKEN_HARNESS = """
import verifiers.v1 as vf
from verifiers.v1.harnesses.dapo_chat import ChatHarness


class Broken(ChatHarness):
    async def setup(self, runtime):
        raise RuntimeError("no index")


__all__ = ["Broken"]
"""


def source_of(text: str) -> TasksSource:
    """Return the source of a config's text, as a run reads it."""
    value = yaml.safe_load(text)["data"]["train"]
    (source,) = tiny_config(data__train=json.dumps(value)).data.train
    assert isinstance(source, TasksSource)
    return source


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TasksSource]]:
    """Two games of the example, and a taskset of one's own."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "sums_of_a_test.py").write_text(SUMS)
    (folder / "broken_harness.py").write_text(BROKEN_HARNESS)
    (folder / "corpora" / "words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / "corpora" / "words" / name).write_text("\n".join(WORDS))
    own = EXAMPLE.replace("textarena", "sums_of_a_test").replace("player:", "agent:")
    texts = {
        "Hangman": EXAMPLE,
        "WordLadder": EXAMPLE.replace("Hangman", "WordLadder"),
        "sums": re.sub("taskset: .*", "", own),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(FOLDER), str(folder)])
        patch.setenv("NLTK_DATA", str(folder))
        yield {name: source_of(text) for name, text in texts.items()}


@pytest.fixture(scope="module")
def pool(sources: dict[str, TasksSource]) -> Iterator[EnvironmentPool]:
    names = {source.environment for source in sources.values()}
    with EnvironmentPool(names, 20.0, 4096, ["NLTK_DATA"]) as started:
        yield started


def best_turn(name: str, kind: str, number: int, seen: str) -> str:
    """Return what the model says: the best move, or something else."""
    if random.Random(f"{name}/{number}").random() < 0.2:
        return "hm!"
    if sum_ := re.search(r"(\d+) \+ \d+ = \?", seen):
        return str(2 * int(sum_[1]) + random.Random(name).randrange(2))
    if target := re.search(r"Target word: \*\*(\w+)\*\*", seen):
        moves = re.findall(r"assistant\n\[(\w+)\]", seen)
        last = LADDER.index(moves[-1] if moves else re.search(r"Start word:  \*\*(\w+)", seen)[1])
        return f"[{LADDER[last + (1 if LADDER.index(target[1]) > last else -1)]}]"
    length = len(re.search(r"C00[C\d ]*", seen)[0].split())
    return f"[{random.Random(name).choice([word for word in WORDS if len(word) == length])}]"


def collect(
    pool: EnvironmentPool, source: TasksSource, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[Prompt, Completion]], Collected]:
    """Return the completions of a step that samples tasks of a source."""
    monkeypatch.setattr(talking, "turn_of", best_turn)
    tasks = read_tasks(source.environment, 4, ["NLTK_DATA"])
    prompts = [
        Prompt("sums", i, (), text, "", {"task": data}, source.environment)
        for i, (text, data) in enumerate(tasks)
    ]
    driver = TalkingDriver([pool], random.Random(1), rewards={"sums": "environment"})
    stream = PromptStream(prompts, seed=0, shuffle=False)
    config = rollout_config(max_response_tokens=MAX_TOKENS)
    collected = Coordinator(config, OVERLONG, stream, driver, seed=3).collect(0, lambda done: None)
    driver.close()
    ended = [(g.prompt, c) for g, _ in collected.ended for c in g.completions]
    assert {outcome for _, outcome in collected.ended} == {Outcome.TRAINED}
    return ended, collected


@pytest.mark.parametrize("game", ["Hangman", "WordLadder"])
def test_a_published_game_gives_the_reward(
    game: str,
    sources: dict[str, TasksSource],
    pool: EnvironmentPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, collected = collect(pool, sources[game], monkeypatch)
    assert not [name for name in collected.turn_counts if name.startswith("failed")]
    for _, completion in ended:
        assert completion.finish in (Finish.DONE, Finish.TURNS)
        is_won = completion.finish is Finish.DONE and completion.text.endswith("]")
        assert completion.grade is not None and completion.grade.score == is_won
    scores = {completion.grade.score for _, completion in ended if completion.grade}
    assert scores == {0.0, 1.0}
    assert collected.turn_counts["agent/game_reward"] > 0


def test_a_taskset_gives_its_reward_and_metrics(
    sources: dict[str, TasksSource], pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of a metric is a failure of the environment, not a reward of 0."""
    ended, collected = collect(pool, sources["sums"], monkeypatch)
    for prompt, completion in ended:
        is_right = completion.text == str(prompt.extra["task"]["answer"])
        assert completion.grade is not None and completion.grade.score == 2.0 * is_right
    assert not any("!" in completion.text for _, completion in ended)
    counts = collected.turn_counts
    assert counts["failed/error"] and counts["agent/is_right"] < counts["agent/length"]


def test_what_cannot_run_is_refused_before_the_run(sources: dict[str, TasksSource]) -> None:
    for old, new, refusal in (
        ("textarena", "no_such_tasks", "no_such_tasks.*its package is installed"),
        ("Hangman-v0", "Chess", "game.*'Hangman-v0'"),
        ("player", "players", "players Extra inputs"),
        ("dapo_chat", "no_such_harness", "harness 'no_such_harness' not found"),
        ("dapo_chat", "broken_harness", "its harness cannot be installed: .*no index"),
    ):
        with pytest.raises(ConfigError, match=rf"environment {{verifiers: .*{refusal}"):
            load_episodes(source_of(EXAMPLE.replace(old, new)).environment)
    with pytest.raises(ConfigError, match="no end of tasks; set limit"):
        read_tasks(sources["Hangman"].environment, None, ["NLTK_DATA"])
    with pytest.raises(ConfigError, match="brings its own tasks, and no other does"):
        source_of(EXAMPLE.replace("limit: 1000", "path: a.jsonl"))
