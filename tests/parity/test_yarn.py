"""Log-probs and entropy of every family with yarn (arXiv 2309.00071): HF = Megatron, in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.model import FAMILIES
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.models import KIMI_YARN, ROPE, load_hf, make_random_model
from tests.helpers.ranks import run_ranks
from tests.parity.test_policy import hf_logprobs

LENGTHS = (60, 17, 40)
ROPES: dict[str, dict[str, Any]] = {
    "plain": ROPE["yarn"],
    # By how much cosines and sines are multiplied.
    "mscales": ROPE["yarn"] | {"mscale": 0.9, "mscale_all_dim": 0.7},
    "factor": ROPE["yarn"] | {"attention_factor": 1.3},
    "kimi": KIMI_YARN,  # no frequency is interpolated
}
MODELS = [
    (family, rope)
    for family, rules in FAMILIES.items()
    for rope in ROPES
    # Refused, because HF and vLLM compute it differently.
    if not (rules.has_latent and rope == "factor")
]


def make_model(family: str, name: str, folder: Path) -> Path:
    """Write a model whose weights depend only on the family."""
    partial_rotary = {"partial_rotary_factor": 0.5} if FAMILIES[family].has_partial_rotary else {}
    rope = ROPES[name] | partial_rotary
    return make_random_model(family, folder, seed=1, rope_parameters=rope)


def logprobs(rank: int, folders: dict[tuple[str, str], Path]) -> dict[tuple[str, str], Any]:
    """Return log-probs and entropy of each model in Megatron."""
    from dapo_megatron.data.packing import plan_microbatches
    from dapo_megatron.policy.policy import MegatronPolicy

    torch.set_num_threads(1)
    batch = random_batch(LENGTHS, vocab=99)
    results = {}
    for name, folder in folders.items():
        config = tiny_config(model__path=folder, policy__tensor_parallel=1)
        policy = MegatronPolicy(
            config, Ranks(rank, 1, rank), partial(plan_microbatches, max_tokens=128)
        )
        computed = policy.logprobs(batch, temperature=1.0)
        results[name] = computed.logprobs, computed.entropy
        policy.close()
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("yarn")
    return {name: make_model(*name, root / "_".join(name)) for name in MODELS}


@pytest.fixture(scope="module")
def computed(folders: dict[tuple[str, str], Path]) -> dict[tuple[str, str], Any]:
    return dict(run_ranks(logprobs, 1, folders)[0])


def difference(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", MODELS, ids="-".join)
def test_megatron_equals_hf(name: tuple[str, str], folders: Any, computed: Any) -> None:
    with torch.no_grad():
        expected = hf_logprobs(load_hf(folders[name]), random_batch(LENGTHS, vocab=99), 1.0)
    assert difference(computed[name], expected) < 1e-5
    if name[1] != "plain":
        assert difference(computed[name[0], "plain"], expected) > 1e-2  # the fields take effect
