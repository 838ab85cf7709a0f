"""An unfinished step in a checkpoint: restored bit for bit, and only with the same batching."""

from __future__ import annotations

import json

import pytest
import torch

from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.types import ConfigError, StepStats
from tests.helpers.configs import tiny_config
from tests.unit.test_batch import completion, group

STATS = StepStats(loss=0.5, grad_norm=2.0, lr=1e-6, num_tokens=6, means={"entropy": 0.75})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unfinished_step_survives_a_checkpoint_bit_for_bit(dtype: torch.dtype) -> None:
    step = PartialStep()
    assert step.state(tiny_config()) is None
    step.begin([group(3, completion(0, 4, None), completion(1, 2, None))], {"accuracy/raw": 0.25})
    # A view that is not contiguous and requires a gradient.
    step.old_logprobs = torch.randn(14, dtype=dtype, requires_grad=True)[::2]
    step.updates = [STATS]
    config = tiny_config()
    state = json.loads(json.dumps(step.state(config)))
    restored = PartialStep.from_state(state, config)
    assert restored.train == step.train
    assert restored.metrics == {"accuracy/raw": 0.25}
    assert restored.updates == [STATS]
    assert restored.old_logprobs is not None
    assert torch.equal(restored.old_logprobs, step.old_logprobs)
    assert restored.old_logprobs.dtype == dtype
    step.close()
    assert step == PartialStep()


def test_an_unfinished_step_without_old_logprobs_survives_a_checkpoint() -> None:
    step, config = PartialStep(), tiny_config()
    metrics = {"accuracy/raw": 0.25}
    step.begin([], metrics)
    metrics["accuracy/raw"] = 1.0
    restored = PartialStep.from_state(json.loads(json.dumps(step.state(config))), config)
    assert restored == step == PartialStep(train=[], metrics={"accuracy/raw": 0.25})
    assert PartialStep.from_state(None, config) == PartialStep()


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
    step, config = PartialStep(), tiny_config()
    step.begin([], {})
    state = json.loads(json.dumps(step.state(config)))
    section, name = key.split(".")
    saved_value = getattr(getattr(config, section), name)
    message = (
        f"^{key}: the checkpoint is from the middle of a step that started with {saved_value!r};"
    )
    with pytest.raises(ConfigError, match=message):
        PartialStep.from_state(state, tiny_config(**{f"{section}__{name}": value}))
