"""The journal of rollouts: what a run that was killed trains on again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron.config import Config
from dapo_megatron.rollout.checkpoint_files import CARRIED, CompletionsSnapshot
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.run.journal import Journal, add_journal, find_entries
from dapo_megatron.types import Rollouts
from tests.helpers.batches import described, tokens_of
from tests.helpers.configs import tiny_config
from tests.helpers.saving import ALONE, Run
from tests.unit.test_batch import overlong
from tests.unit.test_partial_step import GROUPS, ONE


@dataclass
class Live:
    """Collector that collects other rollouts each time, as engines do."""

    number: int = 0
    restored: list[tuple[Any, Path]] = field(default_factory=list)

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Rollouts:
        self.number += 1
        first, *rest = described(GROUPS, overlong())
        sequences = [replace(first, advantage=float(self.number)), *rest]
        return Rollouts(sequences, tokens_of(GROUPS, overlong()), {"accuracy/raw": self.number})

    def state(self) -> dict[str, Any]:
        return {"position": self.number}

    def snapshot(self) -> CompletionsSnapshot:
        return CompletionsSnapshot(CARRIED, 0, [])

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        self.restored.append((state, folder))


@dataclass
class Attempt:
    """An attempt of a run, from its start until it is killed."""

    journal: Journal
    live: Live
    entries: dict[int, Path]
    notes: list[str]

    def collect(self, *steps: int) -> list[float]:
        """Collect steps. Return which of the calls of `Live.collect` each comes from."""
        rollouts = [self.journal.collect(step - 1, lambda done: None) for step in steps]
        self.journal.snapshot()  # waits for the last entry
        for collected in rollouts:
            assert collected.metrics["accuracy/raw"] == collected.sequences[0].advantage
            expected = tokens_of(GROUPS, overlong())
            assert collected.tokens.keys() == expected.keys()
            for index, tokens in collected.tokens.items():
                assert tokens.response.tolist() == expected[index].response.tolist()
                assert tokens.logprobs.tobytes() == expected[index].logprobs.tobytes()
        return [collected.metrics["accuracy/raw"] for collected in rollouts]


def start(path: Path, source: Path | None = None, first: int = 0, **keys: Any) -> Attempt:
    """Start an attempt whose live rollouts are numbered from `first`."""
    config: Config = tiny_config(**{"checkpoint__rollouts": True, "resume": "auto", **keys})
    folder = RunFolder(path)
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    context: Any = SimpleNamespace(config=config, ranks=ALONE, folder=folder, resume_from=source)
    entries, notes = find_entries(context)
    live = Live(first)
    parts: Any = SimpleNamespace(collector=live, data_parallel=ONE, sampling_ahead=None)
    recorder: Any = SimpleNamespace(note=notes.append, flush=lambda: None)
    add_journal(context, recorder, parts, dict(entries))
    return Attempt(parts.collector, live, entries, notes)


def checkpoint(path: Path, step: int, *, is_open: bool = False) -> Path:
    """Return the folder of a checkpoint."""
    folder = path / "checkpoints" / f"step_{step:06d}{'_open' if is_open else ''}"
    folder.mkdir(parents=True)
    return folder


def test_a_killed_run_gets_the_same_rollouts_again_and_then_goes_on(tmp_path: Path) -> None:
    assert start(tmp_path).collect(1, 2, 3, 4) == [1, 2, 3, 4]
    again = start(tmp_path, checkpoint(tmp_path, 2), first=10)
    assert list(again.entries) == [3, 4]
    assert again.notes == ["repeats steps 3 to 4 with their journaled rollouts"]
    assert again.collect(3, 4, 5) == [3, 4, 11]
    states = [state for state, _ in again.live.restored]
    assert states == [{"position": 3}, {"position": 4}]
    # Killed again: step 5 is that of the second attempt.
    assert start(tmp_path, tmp_path / "checkpoints/step_000002").collect(3, 4, 5) == [3, 4, 11]


def test_a_run_without_a_checkpoint_starts_with_the_journal(tmp_path: Path) -> None:
    start(tmp_path).collect(1, 2)
    assert start(tmp_path, first=10).collect(1, 2, 3) == [1, 2, 11]


def test_a_checkpoint_within_a_step_has_the_rollouts_of_that_step(tmp_path: Path) -> None:
    start(tmp_path).collect(1, 2, 3, 4)
    again = start(tmp_path, checkpoint(tmp_path, 2, is_open=True), first=10)
    assert again.collect(4, 5) == [4, 11]


def test_entries_until_the_oldest_checkpoint_are_deleted(tmp_path: Path) -> None:
    attempt = start(tmp_path)
    attempt.collect(1, 2)
    checkpoint(tmp_path, 2)
    attempt.collect(3)
    assert [path.name for path in sorted((tmp_path / "journal").glob("step*"))] == ["step_000003"]


def test_checkpoints_that_are_kept_for_ever_keep_no_entries(tmp_path: Path) -> None:
    attempt = start(tmp_path, checkpoint__keep=2)
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 6, is_open=True)
    attempt.collect(*range(1, 8))
    names = [path.name for path in sorted((tmp_path / "journal").glob("step*"))]
    assert names == ["step_000005", "step_000006", "step_000007"]


def damage(path: Path) -> None:
    (path / "state.json").write_text("{}")


@pytest.mark.parametrize("how", ["missing", "damaged", "half deleted"])
def test_the_journal_ends_before_an_entry_that_cannot_be_read(how: str, tmp_path: Path) -> None:
    start(tmp_path).collect(1, 2, 3)
    entry = tmp_path / "journal" / "step_000002"
    if how == "missing":
        entry.rename(tmp_path / "elsewhere")
    elif how == "damaged":
        damage(entry)
    else:
        (entry / "state.json").unlink()
    again = start(tmp_path, first=10)
    assert list(again.entries) == [1]
    assert not (tmp_path / "journal" / "step_000003").exists()
    is_named = any("JOURNAL NOT USED after step 1" in note for note in again.notes)
    assert is_named == (how != "missing")
    assert again.collect(1, 2, 3) == [1, 11, 12]


@pytest.mark.parametrize(
    ("keys", "is_used"),
    [
        ({"optimizer__lr": 0.5}, False),
        ({"rollout__temperature": 0.5}, False),
        ({"train__rollout_steps": 77, "tracking__mlflow": False}, True),
        ({"checkpoint__rollouts": False}, False),
        ({"resume": "runs/x/checkpoints/step_000000"}, False),
    ],
)
def test_a_changed_config_samples_again(
    keys: dict[str, Any], is_used: bool, tmp_path: Path
) -> None:
    start(tmp_path).collect(1, 2)
    assert list(start(tmp_path, **keys).entries) == ([1, 2] if is_used else [])
    assert any((tmp_path / "journal").glob("step*")) == is_used


def test_a_half_written_entry_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    partial = tmp_path / "journal" / ".partial" / "0" / "step_000001"
    partial.mkdir(parents=True)
    Run(tmp_path)
    assert not partial.exists()
