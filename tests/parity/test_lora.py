"""Adapters in all layouts: their gradients, the merged weights, the frozen base, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.model import (
    ADAPTER,
    AdapterParts,
    LocalParameter,
    ParameterPart,
    adapter_name,
    shared_inputs,
)
from dapo_megatron.types import CheckpointError, whole
from tests.helpers.batches import random_batch
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.policies import build_policy
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same
from tests.helpers.updates import save

RANK, ALPHA = 3, 6.0
SCALE = ALPHA / RANK
LORA = {"policy__lora": f"{{rank: {RANK}, alpha: {ALPHA}}}"}
LENGTHS = (5, 60, 17, 9, 33, 4, 40, 12, 3)
TP2 = {"policy__tensor_parallel": 2}
SP2 = {**TP2, "policy__sequence_parallel": "true"}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "qwen3": [
        *(TP2, {**SP2, "policy__recompute": "full"}, {"policy__context_parallel": 2}),
        {"policy__pipeline_parallel": 2, "policy__virtual_pipeline_parallel": 2},
    ],
    "qwen3_moe": [SP2, {"policy__expert_parallel": 2}, {"train__packing": "false"}],
    "qwen3_5_text": [SP2, {"policy__context_parallel": 2}],
}
LOSS = loss_with()
Result = tuple[float, dict[str, Tensor], dict[str, Tensor], list[float]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: str(make_random_model(name, folder / name, num_hidden_layers=4)) for name in LAYOUTS
    }


def lora_policy(exchange: Ranks, folder: str, overrides: dict[str, Any]) -> Any:
    policy, _ = build_policy(exchange, folder, {**LORA, **overrides})
    policy.lora.reset(seed=1, spread=0.1)
    return policy


def weights(policy: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def train(rank: int, world: int, folder: str, layouts: list[dict[str, Any]]) -> list[Result]:
    """Return loss and gradients of adapters whose lora_b is not 0, and the weights and norms of two
    updates."""
    results = []
    for overrides in layouts:
        policy = lora_policy(Ranks(rank, world, rank), folder, overrides)
        batch = random_batch(LENGTHS, vocab=99)
        value, gradients = policy.gradients(batch, LOSS)
        norms = [policy.update(batch, LOSS, 1e-3).grad_norm for _ in range(2)]
        results.append((value, gradients, weights(policy), norms))
        policy.close()
    return results


@pytest.mark.parametrize("model", LAYOUTS)
def test_every_layout_trains_the_adapters_of_one_process(
    model: str, models: dict[str, str]
) -> None:
    folder = models[model]
    [expected] = run_ranks(train, 1, 1, folder, [{}])[0]
    for actual in run_ranks(train, 2, 2, folder, LAYOUTS[model])[0]:
        assert actual[0] == pytest.approx(expected[0], abs=1e-12)
        for tensors, right in zip(actual[1:3], expected[1:3], strict=True):
            assert tensors.keys() == right.keys()
            for name in right:
                assert right[name].norm() > 0 or tensors[name].norm() == 0
                assert (tensors[name] - right[name]).norm() <= 1e-9 * right[name].norm(), name
        assert actual[3] == pytest.approx(expected[3], rel=1e-6)


def compare_with_dense(_: int, folder: str) -> None:
    """Compare with the gradients of all weights, of a policy without adapters."""
    exchange, batch = Ranks(0, 1, 0), random_batch(LENGTHS, vocab=99)
    dense, _plan = build_policy(exchange, folder, {})
    base = weights(dense)
    dense.close()
    policy = lora_policy(exchange, folder, {})
    arch, targets = policy.architecture, ("attention", "mlp", "experts")
    halves = {
        s.tensor_slice.name: torch.zeros(s.tensor_slice.global_shape).double()
        for s in policy.lora.shards()
    }
    for shard in policy.lora.shards():
        halves[shard.tensor_slice.name][shard.tensor_slice.region.slices] = shard.read()
    merged, expected = dict(base), {name: torch.zeros_like(v) for name, v in halves.items()}
    for weight, first in shared_inputs(arch, targets).items():
        lora_a, lora_b = adapter_name(first, "lora_A"), adapter_name(weight, "lora_B")
        merged[weight] = base[weight] + SCALE * halves[lora_b] @ halves[lora_a]
    actual = weights(policy)
    for name, right in merged.items():
        torch.testing.assert_close(actual[name], right, rtol=1e-13, atol=1e-14)
    logprobs = policy.logprobs(batch).logprobs
    assert not same(policy.reference_logprobs(batch), logprobs)
    reference = policy.reference_logprobs(batch)
    assert same(policy.logprobs(batch).logprobs, logprobs)  # the adapter is back, bit by bit
    value, gradients = policy.gradients(batch, LOSS)
    parameters = {id(p) for model in policy._models() for p in model.parameters()}
    trained = {id(half) for adapter in policy.lora for _, half, _ in adapter.halves()}
    buffers = [b for c in policy._chunks for b in c.buffers + c.expert_parallel_buffers]
    of_buffers = {id(parameter) for buffer in buffers for parameter in buffer.params}
    assert of_buffers == trained < parameters
    policy.close()

    dense, _plan = build_policy(exchange, folder, {})
    torch.testing.assert_close(dense.logprobs(batch).logprobs, reference, rtol=1e-12, atol=1e-12)
    dense.rewrite(
        lambda shards: (
            [s.write(actual[s.tensor_slice.name][s.tensor_slice.region.slices]) for s in shards]
            and None
        )
    )
    dense_value, of_weights = dense.gradients(batch, LOSS)
    assert value == pytest.approx(dense_value, abs=1e-13)
    for weight, first in shared_inputs(arch, targets).items():
        lora_a, lora_b = adapter_name(first, "lora_A"), adapter_name(weight, "lora_B")
        expected[lora_b] = SCALE * of_weights[weight] @ halves[lora_a].T
        expected[lora_a] += SCALE * halves[lora_b].T @ of_weights[weight]
    assert expected.keys() == gradients.keys()
    for name, right in expected.items():
        assert (gradients[name] - right).norm() <= 1e-12 * right.norm(), name
    dense.close()


@pytest.mark.parametrize("model", LAYOUTS)
def test_merged_weights_and_gradients_are_those_of_the_definition(
    model: str, models: dict[str, str]
) -> None:
    run_ranks(compare_with_dense, 1, models[model])


def save_and_load(rank: int, folder: str, other: str, target: Path) -> None:
    """Save with two tensor-parallel ranks, go on, and do the same from the checkpoint in another
    layout. Another base or scale is refused."""
    exchange, batch = Ranks(rank, 2, rank), random_batch(LENGTHS, vocab=99)
    policy = lora_policy(exchange, folder, SP2)
    policy.update(batch, LOSS, 1e-3)
    save(policy, exchange, Path(folder), target)
    saved = weights(policy)
    policy.update(batch, LOSS, 1e-3)
    expected = weights(policy)
    policy.close()
    policy = lora_policy(exchange, folder, SP2)
    policy.load(target)
    assert same(weights(policy), saved)
    policy.update(batch, LOSS, 1e-3)
    assert same(weights(policy), expected)
    policy.close()
    policy = lora_policy(exchange, folder, {"policy__context_parallel": 2})
    policy.load(target)
    policy.update(batch, LOSS, 1e-3)
    for name, values in weights(policy).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-7, atol=1e-9)
    policy.close()
    for path, more in ((other, {}), (folder, {"policy__lora": "{rank: 3, alpha: 7}"})):
        policy = lora_policy(exchange, path, more)
        with pytest.raises(CheckpointError, match=f"{ADAPTER}model.* model.path to the model"):
            policy.load(target)
        policy.close()


NAME = "model.layers.0.self_attn.o_proj.weight"
SHAPE = (160, 128)
HALVES = [
    LocalParameter(shape, (ParameterPart(adapter_name(NAME, half), shape, whole(shape)),))
    for half, shape in (("lora_A", (RANK, SHAPE[1])), ("lora_B", (SHAPE[0], RANK)))
]
PARTS = AdapterParts(HALVES[0], HALVES[1], splits_inputs=False, is_expert=False)


@pytest.mark.parametrize("size", [5e-3, 1e-4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_merge_tells_another_base_or_scale_from_rounding(dtype: torch.dtype, size: float) -> None:
    """`size`: norm of the delta, as a share of the weight's."""
    from dapo_megatron.policy.lora import Adapter
    from dapo_megatron.policy.offload import HostMemory

    generator = torch.Generator().manual_seed(0)
    values, noise = torch.randn((2, *SHAPE), generator=generator)
    base = values.to(dtype)

    def adapter(base: Tensor, scale: float) -> Any:
        result = Adapter(base.clone(), PARTS, scale, HostMemory(), sequence_parallel=False)
        result.reset(seed=1, spread=5.7 * size)
        return result

    run = adapter(base, SCALE)
    run.merge()
    delta = SCALE * run.lora_b.detach().double() @ run.lora_a.detach().double()
    assert delta.norm() == pytest.approx(size * base.double().norm().item(), rel=0.2)
    other_layout = (base.double() + delta).to(dtype)
    for saved in (run.weight.clone(), other_layout):
        for other_base, factor in [
            *((base, factor) for factor in (1.0, 2.0, 0.5, 33 / 32)),
            ((values + size / 4 * noise).to(dtype), 1.0),
        ]:
            resumed = adapter(other_base, SCALE * factor)
            resumed.weight.copy_(saved)
            if other_base is base and factor == 1.0:
                resumed.check_base(Path("step"))
            else:
                with pytest.raises(CheckpointError, match=adapter_name(NAME, "lora_B")):
                    resumed.check_base(Path("step"))


def save_and_load_experts(_: int, folder: str, target: Path) -> None:
    """Save adapters of experts alone, and load them."""
    exchange = Ranks(0, 1, 0)
    overrides = {"policy__lora": f"{{rank: {RANK}, alpha: {ALPHA}, targets: [experts]}}"}
    policy = lora_policy(exchange, folder, overrides)
    policy.update(random_batch(LENGTHS, vocab=99), LOSS, 1e-3)
    save(policy, exchange, Path(folder), target)
    saved = weights(policy)
    policy.close()
    policy = lora_policy(exchange, folder, overrides)
    policy.load(target)
    assert same(weights(policy), saved)
    policy.close()


def test_adapters_of_experts_alone_are_saved(models: dict[str, str], tmp_path: Path) -> None:
    run_ranks(save_and_load_experts, 1, models["qwen3_moe"], tmp_path / "step_000001")


@pytest.mark.parametrize("model", ["qwen3", "qwen3_5_text"])
def test_a_checkpoint_holds_the_adapter_and_knows_its_base(
    model: str, models: dict[str, str], tmp_path: Path
) -> None:
    other = make_random_model(model, tmp_path / "other", seed=5, num_hidden_layers=4)
    run_ranks(save_and_load, 2, models[model], str(other), tmp_path / "step_000001")
