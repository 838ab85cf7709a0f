"""Collecting on rank 0: what a checkpoint keeps of open groups, and recorded steps repeated."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.checkpoints.folder import write_manifest
from dapo_megatron.cluster.instruments import TimelineRecorder
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rollout.collector import EngineCollector, trained_groups
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.delivery import Delivery
from dapo_megatron.rollout.engines import SamplingAhead
from dapo_megatron.rollout.record import (
    COMPLETIONS,
    OPEN,
    RecordedGroup,
    StepRecord,
    check,
    read_groups,
    read_state,
    recorded_steps,
    write_groups,
)
from dapo_megatron.types import CheckpointError, Completion, DataError, Finish, Outcome, Rollouts
from tests.helpers import rollouts
from tests.helpers.batches import ONE_INDEX
from tests.helpers.configs import tiny_config
from tests.helpers.rollouts import MAX_TOKENS, ScriptedDriver, make_coordinator, with_random_tokens

RANKS = Ranks(0, 1, 0)


@pytest.fixture(autouse=True)
def random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make replicas sample random tokens, texts and routes."""
    rng = random.Random(7)
    made = rollouts.completion_of

    def completion_of(*arguments: Any) -> Completion:
        completion = with_random_tokens(made(*arguments), rng)
        routes = array("B", rng.choices(range(256), k=completion.num_tokens + 2))
        return replace(completion, text="".join(rng.choices("abc é", k=5)), routes=routes)

    monkeypatch.setattr(rollouts, "completion_of", completion_of)


@dataclass
class Attempt:
    """An attempt of a run with a collector on rank 0. It records its steps in `samples`."""

    samples: Path
    seed: int = 4
    keys: dict[str, Any] = field(default_factory=dict)
    repeated: dict[int, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.driver = ScriptedDriver(
            lambda ticket, sample: None if ticket == 4 else sample == 0 and ticket % 4 > 0,
            lambda ticket, sample: 1 + (3 * ticket + 5 * sample) % MAX_TOKENS,
            rng=random.Random(self.seed),
            grade_at_once=False,
        )
        self.coordinator = make_coordinator(self.driver, lookahead=4.0)
        engines: Any = SimpleNamespace(exchange=RANKS, run=lambda task, of: task(None))
        self.collector = EngineCollector(
            config=tiny_config(**{"overlong__penalty": "true", **self.keys}),
            coordinator=self.coordinator,
            engines=engines,
            delivery=Delivery(ONE_INDEX, RANKS),
            recorder=self,  # type: ignore[arg-type]
            facts={"ranks": 1},
            repeated=self.repeated,
        )

    def record(self, step: int, record: StepRecord) -> None:
        record.write(self.samples, step)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def groups(self, done: int) -> None:
        """Show no progress."""

    def collect(self, step: int) -> Rollouts:
        self.driver.version = step - 1
        self.driver.reported = {
            key: completion.segments for key, completion in self.coordinator.completions().items()
        }
        return self.collector.collect(step - 1)

    def state(self) -> tuple[str, dict[tuple[int, int], Completion]]:
        return json.dumps(self.collector.state()), self.coordinator.completions()

    def again(self, state: str, folder: Path, **changes: Any) -> Attempt:
        """Return a later attempt that starts at a checkpoint."""
        other = Attempt(self.samples, self.seed + 1, **changes)
        other.collector.restore(json.loads(state), folder)
        return other


def check_equal(rollouts: Rollouts, expected: Rollouts) -> None:
    assert rollouts.sequences == expected.sequences
    without = {"time/exchange": 0.0}
    assert rollouts.metrics | without == expected.metrics | without
    assert rollouts.tokens.keys() == expected.tokens.keys() != set()
    for index, tokens in expected.tokens.items():
        for name in ("prompt", "response", "logprobs"):
            values, others = getattr(rollouts.tokens[index], name), getattr(tokens, name)
            np.testing.assert_array_equal(values, others, strict=True)


def check_rewards(samples: Path, step: int, collected: Rollouts) -> None:
    """Check that the record has the rewards of what is trained, and other groups that ended."""
    groups = list(read_groups(recorded_steps(samples)[step] / COMPLETIONS))
    for item in groups:
        others = (Outcome.ABSTAINED, [None, None]), (Outcome.ALL_WRONG, [-1.0, -1.0])
        assert item.outcome == Outcome.TRAINED or (item.outcome, item.rewards) in others
    rewards = {
        (item.group.ticket, completion.sample): reward
        for item in groups
        if item.outcome == Outcome.TRAINED
        for completion, reward in zip(item.group.completions, item.rewards, strict=True)
    }
    assert rewards == {(s.ticket, s.sample): s.reward for s in collected.sequences}


def without_routes(
    state: tuple[str, dict[tuple[int, int], Completion]],
) -> tuple[str, dict[tuple[int, int], Completion]]:
    return state[0], {key: replace(value, routes=None) for key, value in state[1].items()}


# ---------------------------------------------------------------------------- recorded steps


@settings(max_examples=12)
@given(seed=st.integers(0, 2**20), num_steps=st.integers(1, 5), data=st.data())
def test_a_run_repeats_what_it_recorded_and_goes_on(
    seed: int, num_steps: int, data: st.DataObject
) -> None:
    saved_step = data.draw(st.integers(0, num_steps - 1))
    with TemporaryDirectory() as name:
        folder, samples = Path(name), Path(name) / "samples"
        first, expected, states = Attempt(samples, seed), {}, {}
        for step in range(1, num_steps + 1):
            if step == saved_step + 1:
                first.collector.snapshot().write(folder)
                state, _ = first.state()
            expected[step] = first.collect(step)
            check_rewards(samples, step, expected[step])
            states[step] = without_routes(first.state())
        assert list(recorded_steps(samples)) == list(expected)
        assert read_state(recorded_steps(samples)[1])["facts"] == {"ranks": 1}
        before = {path: path.stat().st_mtime_ns for path in samples.rglob("*")}
        steps = {step: path for step, path in recorded_steps(samples).items() if step > saved_step}
        again = first.again(state, folder, repeated=dict(steps))
        for step in steps:
            check_equal(again.collect(step), expected[step])
            assert again.state() == states[step]
        assert again.driver.requests == [] and again.notes == [] and again.repeated == {}
        assert before == {path: path.stat().st_mtime_ns for path in samples.rglob("*")}
        assert again.collect(num_steps + 1).sequences
        assert max(recorded_steps(samples)) == num_steps + 1


@pytest.mark.parametrize("name", [OPEN, "manifest.json", "state.json"])
def test_a_damaged_step_and_those_after_it_are_sampled_again(tmp_path: Path, name: str) -> None:
    """Or one whose state is whole, but cannot be restored."""
    first = Attempt(tmp_path)
    start, _ = first.state()
    expected = [first.collect(step) for step in range(1, 5)]
    folder = recorded_steps(tmp_path)[2]
    if name == "state.json":
        state = read_state(folder)
        del state["coordinator"]["fates"]
        (folder / name).write_text(json.dumps(state))
        (folder / "manifest.json").unlink()
        write_manifest(folder, {})
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    again = first.again(start, tmp_path, repeated=recorded_steps(tmp_path))
    check_equal(again.collect(1), expected[0])
    assert list(recorded_steps(tmp_path)) == [1, 2, 3, 4]
    before, at_start = again.state(), list[object]()
    again.driver.on_start = lambda: at_start.append(again.state())
    again.collect(2)
    assert at_start == [before]
    assert again.driver.requests and list(recorded_steps(tmp_path)) == [1, 2]
    check(recorded_steps(tmp_path)[2])
    assert again.collect(3).sequences != expected[2].sequences
    [note] = again.notes
    assert note.startswith(f"  step 2 is sampled again: {folder}")
    assert ("its state cannot be restored" in note) == (name == "state.json")


def test_engines_do_not_sample_ahead_of_a_repeated_step() -> None:
    """The record would replace what they sampled."""
    versions, repeated = list[int](), {2: Path()}
    coordinator: Any = SimpleNamespace(sample_ahead=lambda version, _: versions.append(version))
    engines: Any = SimpleNamespace(exchange=RANKS)
    ahead = SamplingAhead(engines, coordinator, TimelineRecorder(RANKS, every=0), repeated)
    for version in (1, 2):
        with ahead.sampling(version):
            repeated.clear()
    assert versions == [2]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_routes_are_recorded_on_demand_and_needed_to_repeat_a_step(
    tmp_path: Path, is_recorded: bool
) -> None:
    """They are always in a checkpoint."""
    samples, replays = tmp_path / "samples", {"policy__router_replay": "engine"}
    recording = replays | {"tracking__record_routes": str(is_recorded).lower()}
    first = Attempt(samples, keys=recording)
    start, _ = first.state()
    first.collect(1)
    folder = recorded_steps(samples)[1]
    for name in (COMPLETIONS, OPEN):
        for item in read_groups(folder / name):
            assert all((c.routes is not None) == is_recorded for c in item.group.completions)
    ended = list(read_groups(folder / COMPLETIONS))
    for group in trained_groups(tiny_config(), ended, folder):
        assert all(completion.routes is None for completion in group.completions)
    if not is_recorded:
        with pytest.raises(DataError, match=f"^{folder}: recorded without routes"):
            trained_groups(first.collector.config, ended, folder)
    first.collector.snapshot().write(tmp_path)
    state, completions = first.state()
    assert first.again(state, tmp_path, keys=replays).coordinator.completions() == completions
    assert all(c.routes is None for c in first.again(state, tmp_path).state()[1].values())
    again = first.again(start, samples, keys=replays, repeated=recorded_steps(samples))
    again.collect(1)
    assert bool(again.driver.requests) == (not is_recorded)
    assert is_recorded == (again.coordinator.completions() == completions)
    assert not again.notes or "recorded without routes" in again.notes[0]


# ---------------------------------------------------------------------------- checkpoints


def save(folder: Path) -> tuple[Attempt, str, dict[tuple[int, int], Completion]]:
    """Write a checkpoint of a run with open and ended groups. Return its state and completions."""
    attempt = Attempt(folder / "samples")
    for step in range(1, 4):
        attempt.collect(step)
    coordinator = attempt.coordinator
    # Groups that ended while the policy trained are recorded with the next step.
    coordinator._end(next(group for group in coordinator.groups.values() if group.completions),
                     Outcome.EXPIRED)  # fmt: skip
    attempt.collector.snapshot().write(folder)
    state, completions = without_routes(attempt.state())
    finishes = {completion.finish for completion in completions.values()}
    assert Finish.UNFINISHED in finishes and len(finishes) > 1
    assert any(completion.grade for completion in completions.values())
    return attempt, state, completions


def test_rank_0_restores_completions_exactly_and_others_write_none(tmp_path: Path) -> None:
    attempt, state, completions = save(tmp_path)
    coordinator: Coordinator = attempt.again(state, tmp_path).coordinator
    assert coordinator.completions() == completions
    assert len(coordinator._ended) == 1
    assert json.loads(json.dumps(coordinator.state())) == json.loads(state)
    attempt.collector.coordinator = None
    attempt.collector.snapshot().write(other := tmp_path / "other")
    assert not other.exists() and attempt.collector.state() == {}


def drop_row(path: Path, groups: list[RecordedGroup]) -> None:
    write_groups(path, groups[1:])


def drop_token(path: Path, groups: list[RecordedGroup]) -> None:
    first, *rest = groups[0].group.completions
    shorter = replace(first, tokens=first.tokens[1:], logprobs=first.logprobs[1:])
    group = replace(groups[0].group, completions=(shorter, *rest))
    write_groups(path, [RecordedGroup(group), *groups[1:]])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda path, groups: path.unlink(), CheckpointError, "and 0 in"),
        (drop_row, CheckpointError, "and 0 in"),
        (drop_token, CheckpointError, r"has \d+ tokens in state.json, and \d+ in"),
        (lambda path, groups: path.write_bytes(path.read_bytes()[:-9]), DataError, "open.parquet"),
        (lambda path, groups: path.write_bytes(b"PAR1"), DataError, "open.parquet"),
    ],
    ids=["no file", "a row is missing", "a token is missing", "truncated", "not Parquet"],
)
def test_files_that_do_not_match_the_state_are_refused(
    damage: Callable[[Path, list[RecordedGroup]], None],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    attempt, state, _ = save(tmp_path)
    damage(tmp_path / OPEN, list(read_groups(tmp_path / OPEN)))
    with pytest.raises(error, match=message) as raised:
        attempt.again(state, tmp_path)
    if error is CheckpointError:
        assert "ticket " in str(raised.value) and "resume from another" in str(raised.value)
    else:
        assert str(tmp_path) in str(raised.value)
