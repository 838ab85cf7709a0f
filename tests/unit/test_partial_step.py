"""An unfinished step in a checkpoint: restored bit for bit, and only with the same batching."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dapo_megatron.data.batch import describe, tokens_of
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.types import ConfigError, StepStats
from tests.helpers.batches import ONE_INDEX
from tests.helpers.configs import tiny_config
from tests.unit.test_batch import RIGHT, WRONG, completion, group, overlong

STATS = StepStats(loss=0.5, grad_norm=2.0, lr=1e-6, num_tokens=6, means={"entropy": 0.75})
GROUP = group(3, completion(0, 4, RIGHT), completion(1, 2, WRONG), completion(4, 1, RIGHT))


def begun() -> PartialStep:
    """Return a step with three sequences of 6, 4 and 3 tokens."""
    step = PartialStep()
    sequences = describe([GROUP], overlong=overlong(), eps=1e-6)
    step.begin(sequences, tokens_of([GROUP], overlong()), {"accuracy/raw": 0.25})
    return step


def saved(step: PartialStep, data_parallel: Any = ONE_INDEX) -> Any:
    return json.loads(json.dumps(step.state(tiny_config(), data_parallel)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_unfinished_step_survives_a_checkpoint_bit_for_bit(dtype: torch.dtype) -> None:
    assert PartialStep().state(tiny_config(), ONE_INDEX) is None
    step = begun()
    # A view that is not contiguous and requires a gradient.
    step.old_logprobs = torch.randn(26, dtype=dtype, requires_grad=True)[::2]
    step.updates = [STATS]
    restored = PartialStep.from_state(saved(step), tiny_config())
    assert restored.sequences == step.sequences
    assert restored.tokens == step.tokens
    assert restored.metrics == {"accuracy/raw": 0.25}
    assert restored.updates == [STATS]
    assert restored.old_logprobs is not None
    assert torch.equal(restored.old_logprobs, step.old_logprobs)
    assert restored.old_logprobs.dtype == dtype
    step.close()
    assert step == PartialStep()


class Others:
    """Data-parallel ranks of which the others have these steps."""

    def __init__(self, *steps: PartialStep) -> None:
        self._steps = steps

    def all_gather(self, value: Any, of: Any) -> list[Any]:
        messages: list[Any] = []

        class Caught:
            @staticmethod
            def all_gather(other: Any, of: Any) -> list[Any]:
                messages.append(other)
                return [value, other]

        for step in self._steps:
            step.state(tiny_config(), Caught())  # type: ignore[arg-type]
        return [value, *messages]


def test_the_checkpoint_has_the_tokens_of_all_ranks_and_each_keeps_its_own() -> None:
    """Sequences are distributed otherwise after the resume."""
    logprobs = torch.arange(13.0)
    first, second = begun(), begun()
    first.old_logprobs = second.old_logprobs = logprobs
    first.keep([0, 2])
    second.keep([1])
    assert first.old_logprobs.tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12]
    assert second.old_logprobs.tolist() == [6, 7, 8, 9]
    restored = PartialStep.from_state(saved(first, Others(second)), tiny_config())
    assert restored.tokens == begun().tokens
    assert restored.old_logprobs is not None
    assert torch.equal(restored.old_logprobs, logprobs)
    restored.keep([1, 2])
    assert list(restored.tokens) == [1, 2]
    assert restored.old_logprobs.tolist() == [6, 7, 8, 9, 10, 11, 12]
    restored.keep([])
    assert (restored.tokens, restored.old_logprobs.tolist()) == ({}, [])


def test_an_unfinished_step_without_old_logprobs_survives_a_checkpoint() -> None:
    step = PartialStep()
    metrics = {"accuracy/raw": 0.25}
    step.begin([], {}, metrics)
    metrics["accuracy/raw"] = 1.0
    restored = PartialStep.from_state(saved(step), tiny_config())
    assert restored == step == PartialStep(sequences=[], metrics={"accuracy/raw": 0.25})
    assert PartialStep.from_state(None, tiny_config()) == PartialStep()
    assert PartialStep.from_state(saved(begun()), tiny_config()) == begun()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.updates_per_step", 1),
        ("loss.aggregation", "prompt"),
        ("loss.advantage_eps", 0.5),
        ("overlong.penalty", False),
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
