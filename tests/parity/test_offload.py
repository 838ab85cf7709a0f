"""Test offloading of all subsets of the policy's parts, in several layouts.

Offloaded parts take no device memory, onloading restores them bitwise, the other parts are
unchanged, and shards are views of the weights again. A run that offloads at every step gives the
results of a run without offloading. Rewritten weights survive the next update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, UntypedStorage

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import Shard
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same

LOSS = loss_with()
PARTS = ("weights", "gradients", "optimizer")
SUBSETS = list(chain.from_iterable(combinations(PARTS, size) for size in range(len(PARTS) + 1)))
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "interleaved": (
        "qwen3",
        {
            "policy__pipeline_parallel": 2,
            "policy__virtual_pipeline_parallel": 2,
            "policy__precision": "bfloat16",  # float32 copies next to the weights
        },
    ),
    "ep2": ("deepseek_v3", {"policy__expert_parallel": 2}),  # with a bias that is not trained
    "dp2 on the host": ("qwen3", {"optimizer__cpu_offload": 0.5, "policy__precision": "bfloat16"}),
}
CHUNK_BYTES = 2**14
"""Small, so that storages cross the boundaries of chunks of host memory."""


def build(exchange: Ranks, models: Path, layout: str, parts: tuple[str, ...] = ()) -> Any:
    from dapo_megatron.policy import offload
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    offload.CHUNK_BYTES = CHUNK_BYTES
    model, keys = LAYOUTS[layout]
    settings = {"policy__tensor_parallel": 1, "train__max_tokens_per_microbatch": 128, **keys}
    config = tiny_config(
        model__path=models / model, policy__offload="[" + ",".join(parts) + "]", **settings
    )
    return MegatronPolicy(config, exchange, planner(config.policy, config.train))


def batch(seed: int) -> Any:
    return random_batch((5, 40, 17, 9), vocab=90, seed=seed)


def steps(policy: Any) -> list[Any]:
    """Do three steps, offloading the policy between them. Return all results and the weights."""
    results = []
    for seed in range(3):
        policy.offload()
        policy.offload()
        policy.onload()
        policy.onload()
        results += [policy.logprobs(batch(seed)).logprobs, policy.update(batch(seed), LOSS, 1e-3)]
        results.append({name: tensor.clone() for name, tensor in policy.weights()})
    return results


def storages(policy: Any) -> dict[str, list[UntypedStorage]]:
    """Return the storages of each part, collected from Megatron's objects and not by offload.py."""
    by_part: dict[str, list[UntypedStorage]] = {part: [] for part in PARTS}

    def add(part: str, tensor: Tensor) -> None:
        by_part[part].append(tensor.untyped_storage())

    for chunk in policy._chunks:
        for parameter in chunk.module.parameters():
            add("weights", parameter)
            if parameter.requires_grad:
                add("gradients", parameter.main_grad)
    for optimizer in policy._optimizer.chained_optimizers:
        inner = optimizer.optimizer
        for adam in getattr(inner, "sub_optimizers", [inner]):
            if adam in getattr(inner, "cpu_optimizers", ()):
                continue
            for state in adam.state.values():
                for name in ("exp_avg", "exp_avg_sq", "master_param"):
                    if name in state:
                        add("optimizer", state[name])
        for group in optimizer.shard_fp32_from_float16_groups:
            for copy in filter(torch.is_tensor, group):
                add("optimizer", copy)
    return by_part


def contents(policy: Any, parts: tuple[str, ...]) -> list[Tensor]:
    return [
        torch.empty(0, dtype=torch.uint8).set_(storage).clone()
        for part in parts
        for storage in storages(policy)[part]
    ]


def offload_and_onload(policy: Any, parts: tuple[str, ...], seed: int) -> None:
    """Offload and onload `parts` twice, and check memory, contents and refused calls."""
    from dapo_megatron.policy.offload import Offload

    policy._memory = memory = Offload(parts, policy._chunks, policy._optimizer)
    policy.update(batch(seed), LOSS, 1e-3)
    shards = policy.shards()
    policy.onload()
    keeping = tuple(part for part in PARTS if part != "gradients" or part not in parts)
    before, read = contents(policy, keeping), [shard.read().clone() for shard in shards]
    for _ in range(2):
        policy.offload()
        for part, held in storages(policy).items():
            assert bool(held) and all(
                (storage.nbytes() == 0) == (part in parts) for storage in held
            ), part
        if parts:
            with pytest.raises(AssertionError, match="onload"):
                policy.logprobs(batch(seed))
            for call in (policy.snapshot, policy.weights, lambda: policy.load(Path())):
                with pytest.raises(AssertionError, match="onload"):
                    call()
        size = len(memory._host._chunks)
        policy.onload()
        assert all(map(torch.equal, contents(policy, keeping), before))
        assert all(map(torch.equal, (shard.read() for shard in shards), read))
    assert len(memory._host._chunks) == size  # host memory is reused
    assert bool(size) == bool({"weights", "optimizer"} & set(parts))


def double(shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.write(shard.read() * 2)


def double_weights(policy: Any) -> None:
    """Rewrite the weights, and check that the optimizer's copies of them are replaced, too: an
    update with a learning rate of 0 copies them into the model."""
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.rewrite(double)
    for _ in range(2):
        after = dict(policy.weights())
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], 2 * tensor) for name, tensor in before.items())
        policy.update(batch(0), LOSS, 0.0)


def check(rank: int, models: Path) -> None:
    exchange = Ranks(rank, 2, rank)
    for layout in LAYOUTS:
        policy = build(exchange, models, layout)
        staying = steps(policy)
        policy.close()
        policy = build(exchange, models, layout, PARTS)
        assert same(steps(policy), staying), layout
        for seed, subset in enumerate(SUBSETS):
            offload_and_onload(policy, subset, seed)
        double_weights(policy)
        policy.close()


def test_offloading_frees_memory_and_changes_no_result(tmp_path: Path) -> None:
    make_random_model(
        "qwen3", tmp_path / "qwen3", seed=1, tie_word_embeddings=True, num_hidden_layers=4
    )
    make_random_model("deepseek_v3", tmp_path / "deepseek_v3", seed=1, num_hidden_layers=2)
    run_ranks(check, 2, tmp_path, timeout=900.0)


def storages_of(sizes: list[int]) -> Iterator[Tensor]:
    for seed, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        yield torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


@given(st.lists(st.integers(0, 3000), max_size=8), st.sampled_from([512, 1024, 4096]))
def test_host_memory_restores_what_was_saved(sizes: list[int], chunk_bytes: int) -> None:
    from dapo_megatron.policy import offload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "CHUNK_BYTES", chunk_bytes)
        memory = offload.HostMemory()
        for _ in range(2):
            tensors = list(storages_of(sizes))
            memory.save([tensor.untyped_storage() for tensor in tensors])
            expected = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.fill_(7)
            memory.restore([tensor.untyped_storage() for tensor in tensors])
            assert all(map(torch.equal, tensors, expected))
        aligned = sum(-(-size // 512) * 512 for size in sizes)
        assert len(memory._chunks) * chunk_bytes < aligned + chunk_bytes
        memory = offload.HostMemory()
        positions = [memory.reserve(size) for size in sizes]
        for tensor, position in zip(expected, positions, strict=True):
            memory.save([tensor.untyped_storage()], position)
        for tensor, position in reversed([*zip(tensors, positions, strict=True)]):
            memory.load(tensor.fill_(7).untyped_storage(), position)
        assert all(map(torch.equal, tensors, expected))
        assert len(memory._chunks) * chunk_bytes < aligned + chunk_bytes
