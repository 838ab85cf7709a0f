"""Test passes over micro-batches: the host does not wait for the GPU, padding rows changes no
gradient, and the weight gradient of the log-prob head is added to Megatron's buffer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.batches import random_batch
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.policies import build_policy
from tests.helpers.ranks import run_ranks
from tests.helpers.synchronizations import Synchronizations, policy_tensors
from tests.helpers.tensors import same

LENGTHS = (5, 40, 17, 9, 30, 22, 38, 11)
PREFERRED = 64
ROOM = 200
"""Maximum tokens of a padded micro-batch. The plan makes micro-batches of at most 64."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"tie_word_embeddings": True}),
    "deep": ("qwen3", {"num_hidden_layers": 4}),
    "experts": ("qwen3_moe", {}),
    "latent": ("deepseek_v3", {}),
}
PADDED = {"train__packing": "false"}
ONE_RANK: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("dense", {}),
    "padded": ("dense", PADDED),
    "recomputed": ("deep", {"policy__recompute": "full"}),
    "experts": ("experts", {"policy__moe_aux_loss": 0.01}),
    "latent": ("latent", {}),
    "latent_padded": ("latent", PADDED),
}
TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp2": ("dense", {"policy__context_parallel": 2}),
    "pp2": ("dense", {"policy__pipeline_parallel": 2}),
    "vpp2": ("deep", {"policy__pipeline_parallel": 2, "policy__virtual_pipeline_parallel": 2}),
}


@dataclass
class Observed:
    """Waits, row lengths and gradients of a rank in one case."""

    num_micro: int
    in_logprobs: Counter[str]
    in_update: Counter[str]
    order: str
    """In a pass for log-probs: r for rows made, c for a call of a chunk."""
    lengths: set[int]
    gradients: dict[str, Tensor]
    padded_lengths: set[int]
    padded_gradients: dict[str, Tensor]


def observe(rank: int, world_size: int, folders: dict[str, str], cases: Any) -> dict[str, Observed]:
    """Return the observations of this rank in each case."""
    exchange = Ranks(rank, world_size, rank)
    if world_size == 2:
        for model in ("dense", "deep"):
            check_head(exchange, folders[model], is_tied=model == "dense")
    return {
        name: _observe(exchange, folders[model], overrides)
        for name, (model, overrides) in cases.items()
    }


def check_head(exchange: Ranks, folder: str, *, is_tied: bool) -> None:
    """Check that the gradient of an untied head is added to the buffer, bitwise as autograd's."""
    from dapo_megatron.policy import step

    policy, _ = build_policy(exchange, folder, {})
    batch, loss, chunk = random_batch(LENGTHS, vocab=90), loss_with(), policy._chunks[0]
    weight = chunk.module.head_weight
    group = chunk.param_to_bucket_group[weight]
    fused = policy.gradients(batch, loss)
    assert weight.grad_added_to_main_grad != is_tied
    # Megatron's hook ran for this weight, and expects it before it reduces the bucket.
    assert chunk.ddp_config.overlap_grad_reduce
    assert dict(group.per_param_grad_ready_counts)[weight] == 1
    head = step.linear_logprobs

    def separately(*args: Any, **keys: Any) -> Any:
        return head(*args, **{**keys, "gradient_accumulation_fusion": False})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "linear_logprobs", separately)
        assert same(policy.gradients(batch, loss), fused)
    assert group.golden_per_param_grad_ready_counts[weight] == 1
    assert all(gradient.any() for gradient in fused[1].values())
    policy.close()


def _observe(exchange: Ranks, folder: str, overrides: dict[str, Any]) -> Observed:
    from dapo_megatron.policy import rows

    make_rows = rows.make_rows
    policy, _ = build_policy(exchange, folder, overrides)
    batch, loss = random_batch(LENGTHS, vocab=99), loss_with()

    def lengths() -> set[int]:
        made = policy._microbatches(batch, policy._share(batch))
        return {each.tokens.shape[1] for each in made}

    not_padded = lengths(), policy.gradients(batch, loss)[1]
    shape = policy._rows
    policy._rows = replace(shape, preferred_multiple=PREFERRED, max_tokens=ROOM)
    padded = lengths(), policy.gradients(batch, loss)[1]
    policy._rows = shape
    synchronizations = Synchronizations(policy_tensors(policy))
    with synchronizations.counted() as places:
        policy.logprobs(batch)
        in_logprobs = Counter(places)
    with synchronizations.counted() as places:
        policy.update(batch, loss, 1e-3)
        in_update = Counter(places)
    order: list[str] = []
    for chunk in policy._chunks:
        chunk.register_forward_pre_hook(lambda *_: order.append("c"))
    with pytest.MonkeyPatch.context() as patch:

        def made(*args: Any, **keys: Any) -> rows.Rows:
            order.append("r")
            return make_rows(*args, **keys)

        patch.setattr(rows, "make_rows", made)
        policy.logprobs(batch)
    num_micro = len(policy._microbatches(batch, policy._share(batch)))
    policy.close()
    return Observed(num_micro, in_logprobs, in_update, "".join(order), *not_padded, *padded)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Observed]]:
    folder = tmp_path_factory.mktemp("models")
    folders = {
        name: str(make_random_model(family, Path(folder) / name, **overrides))
        for name, (family, overrides) in MODELS.items()
    }
    ranks: dict[str, list[Observed]] = {}
    for world_size, cases in ((1, ONE_RANK), (2, TWO_RANKS)):
        for rank in run_ranks(observe, world_size, world_size, folders, cases):
            for name, result in rank.items():
                ranks.setdefault(name, []).append(result)
    return ranks


# ------------------------------------------------------------------ waiting for the device

EVERY_LOGPROBS = {"policy.py:_gather_values cpu": 1}
EVERY_UPDATE = {
    "clip_grads.py:get_grad_norm_fp32 _local_scalar_dense": 1,
    "policy.py:_means tolist": 1,
}
"""Waits per call, for any number of micro-batches."""
EXPERTS = ("experts.py:", "moe_utils.py:")
"""Files of Megatron's own expert layers. Transformer Engine's, on a GPU, have other code there."""


@pytest.mark.parametrize("case", [*ONE_RANK, *TWO_RANKS])
def test_the_host_waits_only_where_it_must(case: str, observed: dict[str, list[Observed]]) -> None:
    """It never waits per layer, nor per micro-batch."""
    for rank in observed[case]:
        assert rank.num_micro >= 2
        for places, allowed in (
            (rank.in_logprobs, EVERY_LOGPROBS),
            (rank.in_update, EVERY_UPDATE),
        ):
            excess = places - Counter(allowed)
            assert not [place for place in excess if not place.startswith(EXPERTS)]


def test_rows_are_made_one_micro_batch_before_they_are_needed(
    observed: dict[str, list[Observed]],
) -> None:
    for case in ONE_RANK:
        [rank] = observed[case]
        assert rank.order == "rc" * rank.num_micro


def test_waits_are_counted(observed: dict[str, list[Observed]]) -> None:
    assert observed["packed"][0].in_logprobs["policy.py:_gather_values cpu"] == 1
    assert observed["packed"][0].in_update["policy.py:_means tolist"] == 1
    assert sum(observed["experts"][0].in_update.values()) > sum(
        observed["packed"][0].in_update.values()
    )


# ------------------------------------------------------------------ padding


@pytest.mark.parametrize("case", [*ONE_RANK, *TWO_RANKS])
def test_padding_rows_changes_no_gradient(case: str, observed: dict[str, list[Observed]]) -> None:
    for rank in observed[case]:
        assert len(rank.padded_lengths) < len(rank.lengths)
        assert min(rank.padded_lengths) > min(rank.lengths)
        for name, gradient in rank.gradients.items():
            torch.testing.assert_close(
                rank.padded_gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name
            )
