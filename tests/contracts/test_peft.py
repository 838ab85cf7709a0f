"""PEFT loads the adapter of a checkpoint, and gives the log-probs of the policy.

`make test-contracts` installs it in build/peft; without it these tests are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.peft import FOLDER, write_peft
from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.models import load_hf, make_random_model
from tests.helpers.policies import build_policy
from tests.helpers.ranks import run_ranks
from tests.helpers.updates import save

if importlib.util.find_spec("peft") is None:
    pytest.skip("the package peft is not on PYTHONPATH", allow_module_level=True)

SETTINGS = {
    "policy__lora": "{rank: 4, alpha: 8}",
    "policy__precision": "float64",
    "policy__tensor_parallel": 2,
}
BATCH = random_batch((9, 40, 17), vocab=99)


def train(rank: int, folder: str, target: Path) -> Tensor:
    """Save a policy with an adapter. Return its log-probs."""
    exchange = Ranks(rank, 2, rank)
    policy, _ = build_policy(exchange, folder, SETTINGS)
    assert policy.lora is not None
    policy.lora.reset(seed=1, spread=0.1)
    save(policy, exchange, Path(folder), target)
    return policy.logprobs(BATCH).logprobs


def hf_logprobs(model: Any) -> Tensor:
    sequences = BATCH.tokens.long().split(BATCH.lengths.tolist())
    with torch.no_grad():
        every = [model(tokens[None]).logits[0].log_softmax(-1) for tokens in sequences]
    return torch.cat(
        [
            torch.cat([torch.zeros(1).double(), values[:-1].gather(1, tokens[1:, None])[:, 0]])
            for tokens, values in zip(sequences, every, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("family", "bound"),
    [("qwen3", 1e-6), ("qwen3_5_text", 1e-5)],  # HF computes gated delta nets in float32
)
def test_peft_and_the_merged_weights_give_the_log_probs_of_the_policy(
    family: str, bound: float, tmp_path: Path
) -> None:
    from peft import PeftModel

    folder, target = make_random_model(family, tmp_path / "model"), tmp_path / "step_000001"
    expected, _ = run_ranks(train, 2, str(folder), target)
    write_peft(target, tiny_config(model__path=folder, **SETTINGS))
    base = load_hf(folder).double()
    assert (hf_logprobs(base) - expected).abs().max() > 0.1
    adapted = PeftModel.from_pretrained(base, target / FOLDER, autocast_adapter_dtype=False)
    assert (hf_logprobs(adapted) - expected).abs().max() < bound
    merged = adapted.merge_and_unload().state_dict()
    store = open_store(target)
    for name in store.tensors:
        torch.testing.assert_close(store.read(name), merged[name], rtol=1e-12, atol=1e-12)
