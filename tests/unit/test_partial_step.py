"""An unfinished step in a checkpoint: restored bit for bit, and only with the same batching."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron.data.owners import owners
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.rollout.completion_files import read_completions, write_completions
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.types import CheckpointError, ConfigError, DataError, Rollouts, StepStats
from tests.helpers.batches import described, tokens_of
from tests.helpers.configs import tiny_config
from tests.unit.test_batch import RIGHT, WRONG, completion, group, overlong

STATS = StepStats(loss=0.5, grad_norm=2.0, lr=1e-6, num_tokens=6, means={"entropy": 0.75})
GROUPS = [
    group(3, completion(0, 4, RIGHT), completion(1, 2, WRONG), completion(4, 1, RIGHT)),
    group(9, completion(0, 3, WRONG), completion(1, 0, RIGHT), num_prompt_tokens=5),
    group(11, completion(2, 7, WRONG), completion(3, 7, RIGHT)),
]
LENGTHS = [sequence.num_tokens for sequence in described(GROUPS, overlong())]
PLAN = partial(plan_microbatches, max_tokens=16)


@dataclass(frozen=True)
class Index:
    """Data-parallel ranks, as seen by a rank of one index."""

    index: int
    size: int
    is_first: bool = True

    def owners(self, sequences: Any) -> list[int]:
        return owners([sequence.num_tokens for sequence in sequences], 2, PLAN, self.size)


ONE = Index(0, 1)


def begun(
    data_parallel: Index = ONE,
    logprobs: torch.Tensor | None = None,
    *,
    has_reference: bool = False,
) -> PartialStep:
    """Return a step with the sequences of GROUPS, on a rank of this index. `logprobs` are of all
    tokens; those of the reference are twice as large."""
    sequences, tokens = described(GROUPS, overlong()), tokens_of(GROUPS, overlong())
    owner = data_parallel.owners(sequences)
    own = {index: tokens[index] for index in tokens if owner[index] == data_parallel.index}
    step = PartialStep()
    step.begin(Rollouts(sequences, own, {"accuracy/raw": 0.25}))
    if logprobs is not None:
        parts = logprobs.split(LENGTHS)
        step.old_logprobs = torch.cat([logprobs[:0], *(parts[index] for index in own)])
        step.reference_logprobs = 2.0 * step.old_logprobs if has_reference else None
    return step


def saved(step: PartialStep) -> Any:
    return json.loads(json.dumps(step.state(tiny_config())))


def resumed(step: PartialStep, folder: Path, data_parallel: Index = ONE) -> PartialStep:
    """Return the step that the checkpoint in `folder` describes."""
    restored = PartialStep.from_state(saved(step), tiny_config())
    restored.load(folder, data_parallel)  # type: ignore[arg-type]
    return restored


def response_of(step: PartialStep) -> list[torch.Tensor]:
    """Return the old and reference log-probs of each held response. Those of prompts are not
    saved."""
    assert step.sequences is not None
    held = [step.sequences[index] for index in step.tokens]
    return [
        part[sequence.prompt_tokens :]
        for logprobs in (step.old_logprobs, step.reference_logprobs)
        if logprobs is not None
        for sequence, part in zip(
            held, logprobs.split([sequence.num_tokens for sequence in held]), strict=True
        )
    ]


def check_equal(step: PartialStep, expected: PartialStep) -> None:
    assert step.sequences == expected.sequences
    assert step.metrics == expected.metrics
    assert step.updates == expected.updates
    assert list(step.tokens) == list(expected.tokens)
    for index, tokens in expected.tokens.items():
        for name in ("prompt", "response", "logprobs"):
            values = getattr(step.tokens[index], name)
            assert values.dtype == getattr(tokens, name).dtype
            assert values.tobytes() == getattr(tokens, name).tobytes()


@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_written", "num_read"), [(1, 1), (2, 1), (2, 2), (2, 4), (1, 3)])
def test_an_unfinished_step_survives_a_checkpoint_bit_for_bit(
    dtype: torch.dtype, num_written: int, num_read: int, has_reference: bool, tmp_path: Path
) -> None:
    """Another number of data-parallel indices may continue it."""
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(sum(LENGTHS), dtype=dtype, generator=generator)
    # A tensor that is not contiguous and requires a gradient.
    logprobs = torch.stack([logprobs, logprobs], dim=1).requires_grad_()[:, 1].detach()
    for index in range(num_written):
        written = Index(index, num_written)
        step = begun(written, logprobs, has_reference=has_reference)
        step.updates = [STATS]
        step.snapshot(written).write(tmp_path)  # type: ignore[arg-type]
        step.snapshot(replace(written, is_first=False)).write(tmp_path)  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == num_written
    seen: list[int] = []
    for index in range(num_read):
        expected = begun(Index(index, num_read), logprobs, has_reference=has_reference)
        expected.updates = [STATS]
        restored = resumed(step, tmp_path, Index(index, num_read))
        check_equal(restored, expected)
        seen += restored.tokens
        pairs = zip(response_of(restored), response_of(expected), strict=True)
        assert all(torch.equal(values, other) for values, other in pairs)
        assert restored.old_logprobs is not None
        assert restored.old_logprobs.dtype == dtype or not restored.tokens
        assert (restored.reference_logprobs is not None) == has_reference
    assert sorted(seen) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize(("num_written", "num_read"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_routes_of_an_unfinished_step_survive_a_checkpoint(
    dtype: torch.dtype, num_written: int, num_read: int, tmp_path: Path
) -> None:
    """Those of prompts too. Another number of data-parallel indices may continue the step."""
    config = tiny_config(policy__router_replay="policy")
    generator = torch.Generator().manual_seed(0)
    shape = (sum(LENGTHS), 6)
    routes = torch.randint(0, 200, shape, generator=generator).to(dtype)
    parts = routes.split(LENGTHS)

    def expected(data_parallel: Index) -> PartialStep:
        step = begun(data_parallel, torch.zeros(sum(LENGTHS)))
        step.routes = torch.cat([routes[:0], *(parts[index] for index in step.tokens)])
        return step

    for index in range(num_written):
        step = expected(Index(index, num_written))
        step.snapshot(Index(index, num_written)).write(tmp_path)  # type: ignore[arg-type]
    state = json.loads(json.dumps(step.state(config)))
    for index in range(num_read):
        restored = PartialStep.from_state(state, config)
        restored.load(tmp_path, Index(index, num_read))  # type: ignore[arg-type]
        assert restored.routes is not None
        own = expected(Index(index, num_read)).routes
        assert own is not None and restored.routes.shape == own.shape
        assert not own.numel() or torch.equal(restored.routes, own)
        assert not own.numel() or restored.routes.dtype == dtype


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_routes_of_engines_survive_a_checkpoint_with_the_tokens(
    has_logprobs: bool, tmp_path: Path
) -> None:
    config = tiny_config(policy__router_replay="engine")
    step = begun(logprobs=torch.zeros(sum(LENGTHS)) if has_logprobs else None)
    for index, values in step.tokens.items():
        experts = np.arange(6 * (LENGTHS[index] - 1), dtype=np.int16) + index
        step.tokens[index] = replace(values, routes=experts)
    step.snapshot(ONE).write(tmp_path)  # type: ignore[arg-type]
    restored = PartialStep.from_state(json.loads(json.dumps(step.state(config))), config)
    restored.load(tmp_path, ONE)  # type: ignore[arg-type]
    assert restored.routes is None
    for index, values in step.tokens.items():
        np.testing.assert_array_equal(restored.tokens[index].routes, values.routes, strict=True)


def test_a_step_from_before_router_replay_existed_counts_as_off() -> None:
    state = saved(begun(logprobs=torch.zeros(sum(LENGTHS))))
    del state["cut_by"]["policy.router_replay"], state["routes"]
    assert PartialStep.from_state(state, tiny_config()).routes is None
    with pytest.raises(ConfigError, match=r"^policy\.router_replay: .* started with 'off';"):
        PartialStep.from_state(state, tiny_config(policy__router_replay="policy"))


def test_closing_a_step_clears_it() -> None:
    assert PartialStep().state(tiny_config()) is None
    step = begun(logprobs=torch.zeros(sum(LENGTHS)), has_reference=True)
    step.updates = [STATS]
    step.close()
    assert step == PartialStep()


def test_an_unfinished_step_without_old_logprobs_survives_a_checkpoint(tmp_path: Path) -> None:
    step = begun()
    step.snapshot(ONE).write(tmp_path)  # type: ignore[arg-type]
    restored = resumed(step, tmp_path)
    assert restored.old_logprobs is None
    check_equal(restored, step)


def test_a_step_without_sequences_survives_a_checkpoint(tmp_path: Path) -> None:
    step, metrics = PartialStep(), {"accuracy/raw": 0.25}
    step.begin(Rollouts([], {}, metrics))
    metrics["accuracy/raw"] = 1.0
    step.snapshot(ONE).write(tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert resumed(step, tmp_path) == step == PartialStep(
        sequences=[], metrics={"accuracy/raw": 0.25}
    )  # fmt: skip
    assert PartialStep.from_state(None, tiny_config()) == PartialStep()
    restored = PartialStep()
    restored.load(tmp_path, ONE)  # type: ignore[arg-type]
    assert restored == PartialStep()


def damage(path: Path, kind: str) -> None:
    rows = list(read_completions(path))
    first = rows[0]
    if kind == "no file":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    elif kind == "a row is missing":
        write_completions(path, rows[1:])
    elif kind == "no old log-probs":
        write_completions(path, [replace(first, old_logprobs=None), *rows[1:]])
    elif kind == "no reference log-probs":
        write_completions(path, [replace(row, reference_logprobs=None) for row in rows])
    elif kind == "no routes":
        none = replace(first.completion, routes=None)
        write_completions(path, [replace(first, completion=none), *rows[1:]])
    elif kind == "fewer routes":
        fewer = replace(first.completion, routes=first.completion.routes[1:])  # type: ignore[index]
        write_completions(path, [replace(first, completion=fewer), *rows[1:]])
    elif kind == "fewer tokens":
        fewer = replace(
            first.completion,
            tokens=first.completion.tokens[1:],
            logprobs=first.completion.logprobs[1:],
        )
        old, reference = (
            np.asarray(values)[1:] for values in (first.old_logprobs, first.reference_logprobs)
        )
        shorter = replace(first, completion=fewer, old_logprobs=old, reference_logprobs=reference)
        write_completions(path, [shorter, *rows[1:]])
    else:
        prompt = replace(first.prompt, tokens=(*first.prompt.tokens, 1))
        write_completions(path, [replace(first, prompt=prompt), *rows[1:]])


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("no file", CheckpointError, r"ticket 3, sample 0 is missing from open_step_\*\.parquet"),
        ("truncated", DataError, r"open_step_00000\.parquet"),
        ("a row is missing", CheckpointError, "ticket 3, sample 0 is missing from"),
        ("no old log-probs", CheckpointError, "ticket 3, sample 0 is missing from"),
        ("no reference log-probs", CheckpointError, "ticket 3, sample 0 is missing from"),
        ("no routes", CheckpointError, "ticket 3, sample 0 has 0 experts in its routes, but 6"),
        ("fewer routes", CheckpointError, "ticket 3, sample 0 has 35 experts in its routes, but 6"),
        ("fewer tokens", CheckpointError, "ticket 3, sample 0 has 2 prompt tokens and 3 response"),
        ("a longer prompt", CheckpointError, "ticket 3, sample 0 has 3 prompt tokens and 4"),
    ],
)
def test_files_that_do_not_match_the_state_are_refused(
    kind: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    step = begun(logprobs=torch.zeros(sum(LENGTHS)), has_reference=True)
    step.routes = torch.zeros(sum(LENGTHS), 6, dtype=torch.uint8)
    step.snapshot(ONE).write(tmp_path)  # type: ignore[arg-type]
    damage(tmp_path / "open_step_00000.parquet", kind)
    with pytest.raises(error, match=message) as raised:
        resumed(step, tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.updates_per_step", 1),
        ("loss.aggregation", "prompt"),
        ("loss.advantage_eps", 0.5),
        ("overlong.penalty", False),
        ("policy.router_replay", "policy"),
    ],
)
def test_an_unfinished_step_with_another_batching_is_refused_by_key(
    key: str, value: object
) -> None:
    """With another batching, some sequences would be trained on twice."""
    state, config = saved(begun()), tiny_config()
    section, name = key.split(".")
    saved_value = getattr(getattr(config, section), name)
    message = (
        f"^{key}: the checkpoint is from the middle of a step that started with {saved_value!r};"
    )
    with pytest.raises(ConfigError, match=message):
        PartialStep.from_state(state, tiny_config(**{f"{section}__{name}": value}))
