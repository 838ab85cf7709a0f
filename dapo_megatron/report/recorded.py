"""The recorded rollouts of a run's folder as the report reads them: the index of each step, single
groups by their offset, and what the policy said of single groups.

A run may be writing meanwhile, and files may be missing or damaged: whatever cannot be read is None
or left out, and told of by whoever asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_megatron.files import parse_json
from dapo_megatron.report.folder import finite
from dapo_megatron.rollout.serialization import COMPLETION_COLUMNS, GROUP_COLUMNS, SampleIndex

_WHOLE, _NUMBER = frozenset({int}), frozenset({int, float})
_TEXT, _YES_OR_NO = frozenset({str}), frozenset({bool})
_NULL = frozenset({type(None)})
_TYPES: dict[str, frozenset[type]] = {
    **dict.fromkeys(("offset", "group", "sample", "ticket", "num_tokens", "tokens"), _WHOLE),
    **dict.fromkeys(("source", "fate", "finish", "prompt", "truth", "text"), _TEXT),
    **dict.fromkeys(("verdict", "pred"), _TEXT | _NULL),
    **dict.fromkeys(("correct", "parsed"), _YES_OR_NO | _NULL),
    **dict.fromkeys(("score", "logprob_mean", "logprob_min"), _NUMBER | _NULL),
    "age": _WHOLE | _NULL,
    "logprobs": _NUMBER,
}
"""Types of a value, by its name in an index or in the samples."""
_NOT_BELOW_0 = ("offset", "group", "num_tokens", "tokens")
_MAX_WHOLE = 2**63 - 1
_OF_GROUP = ("ticket", "source", "fate", "verdict", "prompt", "truth")
_OF_COMPLETION = ("sample", "text", "finish", "score", "correct", "parsed", "pred")

_STEP = re.compile(r"step_(\d+)\.jsonl?")
_POLICY_BEGIN = re.compile(rb'\{"ticket": ?(\d{1,18}), ?"sample": ?(\d{1,18})\b')
_GAP_MAX = re.compile(rb'"gap_max": ?(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)')
_LINE_BEGIN = 400
"""Bytes of a line of policy values in which its figures stand, before the lists."""


@dataclass(frozen=True)
class StepIndex:
    """One step's completions as columns, as tracking/samples.py writes them."""

    step: int
    groups: dict[str, list[Any]]
    completions: dict[str, list[Any]]

    def __post_init__(self) -> None:
        """Raises ValueError unless the columns are there, as long as each other, and of their
        types: nobody after this looks again."""
        for columns, names in (
            (self.groups, GROUP_COLUMNS),
            (self.completions, COMPLETION_COLUMNS),
        ):
            lengths = {len(columns[name]) if name in columns else -1 for name in names}
            if len(lengths) != 1 or -1 in lengths:
                raise ValueError("columns are missing, or not of one length")
            for name in names:
                _check(columns[name], name)
        places = self.completions["group"]
        if places and not 0 <= min(places) <= max(places) < len(self.groups["ticket"]):
            raise ValueError("a completion is of a group that is not there")


def step_files(folder: Path, ending: str) -> dict[int, Path]:
    """The files of steps in `folder`, in step order; empty without a folder."""
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ending]
    except OSError:
        return {}
    found = {int(m[1]): path for path in paths if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read_index(path: Path, step: int) -> StepIndex | None:
    """The index of a step, or None if it is not to be read."""
    try:
        value = parse_json(path.read_bytes())
        return StepIndex(step, value["groups"], value["completions"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def index_of_samples(path: Path, step: int) -> StepIndex | None:
    """The index of a run that recorded none, made by reading all of a step's groups."""
    index, offset = SampleIndex(step), 0
    try:
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError):  # one line is damaged; the others are not
                    index.add(_group(line), offset)
                offset += len(line)
    except OSError:
        return None
    columns = index.columns()
    return StepIndex(step, columns["groups"], columns["completions"])


def read_group(path: Path, offset: int, ticket: int) -> dict[str, Any] | None:
    """The group whose line begins at byte `offset`, if it is that of `ticket`."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            group = _group(file.readline())
    except (OSError, ValueError):
        return None
    return group if group["ticket"] == ticket else None


def policy_of(path: Path, ticket: int) -> dict[int, dict[str, Any]]:
    """Return, by sample, the policy's values of a group before the step's first update.

    Reads as far as the group's last line alone: the lists of a step may be tens of megabytes.
    """
    found: dict[int, dict[str, Any]] = {}
    for line, of_ticket, sample in _policy_lines(path):
        if of_ticket == ticket:
            try:
                found[sample] = _policy_values(parse_json(line))
            except ValueError:
                continue
        elif found:
            break
    return found


def largest_gaps(paths: Iterable[Path], max_bytes: int, num: int) -> list[tuple[float, int, int]]:
    """The largest gaps of sequences, at most one a group, as (gap, ticket, sample), largest first.

    Reads the files in their order, until it has read `max_bytes`.
    """
    best: dict[int, tuple[float, int, int]] = {}
    num_bytes = 0
    for path in paths:
        if num_bytes >= max_bytes:
            break
        for line, ticket, sample in _policy_lines(path):
            num_bytes += len(line)
            found = _GAP_MAX.search(line, 0, _LINE_BEGIN)
            if found and math.isfinite(gap := float(found[1])):
                one = (gap, ticket, sample)
                best[ticket] = max(best.get(ticket, one), one)
    return sorted(best.values(), reverse=True)[:num]


def _policy_lines(path: Path) -> Iterator[tuple[bytes, int, int]]:
    try:
        with path.open("rb") as file:
            for line in file:
                if begin := _POLICY_BEGIN.match(line):
                    yield line, int(begin[1]), int(begin[2])
    except OSError:
        return


def _group(line: bytes) -> dict[str, Any]:
    """A line of the samples. Raises ValueError for what is no group, or one that lacks something
    or has it in another form: then nothing can be said of it."""
    group = parse_json(line)
    try:
        for name in _OF_GROUP:
            _check([group[name]], name)
        if not isinstance(group["completions"], list) or not isinstance(
            group.get("extra", {}), dict
        ):
            raise ValueError("not a group")
        for one in group["completions"]:
            for name in _OF_COMPLETION:
                _check([one[name]], name)
            for name in ("tokens", "logprobs"):
                _check(one[name], name)
            if len(one["tokens"]) != len(one["logprobs"]):
                raise ValueError("not a log-prob for each token")
            for segment in one["segments"]:
                _check(segment, "tokens")
                if len(segment) != 2:
                    raise ValueError("not a version and its number of tokens")
    except (KeyError, TypeError) as error:
        raise ValueError("not a group") from error
    found: dict[str, Any] = group
    return found


def _check(values: Any, name: str) -> None:
    """Raises ValueError unless `values` is a list of what `name` stands for."""
    if not isinstance(values, list) or not set(map(type, values)) <= _TYPES[name]:
        raise ValueError(f"{name}: of another type")
    if name == "logprobs":
        return  # the run itself recorded what is not finite
    numbers = [one for one in values if isinstance(one, int | float)]
    if numbers and not -_MAX_WHOLE <= min(numbers) <= max(numbers) <= _MAX_WHOLE:
        raise ValueError(f"{name}: too large")
    if name in _NOT_BELOW_0 and min(values, default=0) < 0:
        raise ValueError(f"{name}: below 0")


def _policy_values(value: Any) -> dict[str, Any]:
    """Keep what is valid in a line of policy values, as if the rest had not been recorded."""
    found = dict(value) if isinstance(value, dict) else {}
    for name in ("advantage", "gap_mean", "gap_max"):
        found[name] = finite(found.get(name))
    for name in ("logprobs", "entropy"):
        values = found.get(name)
        if not isinstance(values, list) or not set(map(type, values)) <= _NUMBER | _NULL:
            found[name] = None
    return found
