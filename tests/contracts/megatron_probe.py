"""Observe Megatron-core in one of two data-parallel ranks, for test_megatron.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.data.packing import plan_microbatches
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config

LENGTHS = (8, 12)
NUM_MICRO = 3
CLIP = 1.0
DECAY = 0.1


def observe(rank: int, world_size: int, folder: str, probe: str) -> dict[str, Any]:
    """Return the observations of `dense`, `experts` or `latent`, by name."""
    from dapo_megatron.policy.device import megatron_device

    probes: dict[str, Callable[[Any], dict[str, Any]]] = {
        "dense": dense,
        "experts": experts,
        "latent": latent,
    }
    make_policy(rank, world_size, folder).close()
    policy = make_policy(rank, world_size, folder)  # a second policy can be built
    with megatron_device():
        return probes[probe](policy)


def make_policy(rank: int, world_size: int, folder: str) -> Any:
    from dapo_megatron.policy.policy import MegatronPolicy

    config = tiny_config(
        model__path=folder,
        policy__tensor_parallel=1,
        optimizer__clip_grad=CLIP,
        optimizer__weight_decay=DECAY,
    )
    plan = partial(plan_microbatches, max_tokens=64)
    return MegatronPolicy(config, Ranks(rank, world_size, rank), plan)


def dense(policy: Any) -> dict[str, Any]:
    chunk, optimizer = policy._chunks[0], policy._optimizer
    return {
        **shapes(chunk),
        **marks(chunk),
        **gradients(chunk, optimizer),
        **ownership(chunk, optimizer),
        **steps(chunk, optimizer),
    }


def rows_of_two() -> Any:
    """Return both sequences in one packed row."""
    from dapo_megatron.policy.rows import RowShape, make_rows

    shape = RowShape(packed=True, sequence_multiple=1, row_multiple=1, cp_rank=0, cp_size=1)
    return make_rows(random_batch(LENGTHS, vocab=90), [0, 1], shape, torch.device("cpu"))


def given_routes(chunk: Any, rows: Any) -> Tensor:
    """Return routes that the routers do not choose: expert t of token t, and the next ones."""
    topk = chunk.config.moe_router_topk
    layers = len(chunk.module.decoder.layers)
    first = torch.arange(rows.sequences.numel()).view(*rows.sequences.shape, 1, 1)
    experts = (first + torch.arange(topk)) % chunk.config.num_moe_experts
    return experts.expand(-1, -1, layers, -1).to(torch.int16)


def run(chunk: Any, rows: Any) -> Tensor:
    """Return the chunk's output."""
    kwargs = {"attention_mask": None, "packed_seq_params": rows.packed}
    if chunk.config.num_moe_experts:
        from dapo_megatron.policy.routes import router_inputs

        kwargs["padding_mask"] = router_inputs(rows.sequences, given_routes(chunk, rows))
    return chunk(rows.tokens, rows.positions, **kwargs)


@torch.no_grad()
def shapes(chunk: Any) -> dict[str, Any]:
    from dapo_megatron.policy.attention import CausalAttention

    observed: dict[str, Any] = {}

    def look(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        observed["query_shape"] = tuple(args[0].shape)
        observed["bounds"] = kwargs["packed_seq_params"].cu_seqlens_q.tolist()

    attention = next(module for module in chunk.modules() if isinstance(module, CausalAttention))
    handle = attention.register_forward_pre_hook(look, with_kwargs=True)
    rows = rows_of_two()
    before = run(chunk, rows)
    handle.remove()
    return observed | {"hidden_shape": tuple(before.shape), **rotated(chunk, rows)}


@torch.no_grad()
def rotated(chunk: Any, rows: Any) -> dict[str, Any]:
    """Return how far outputs change if the frequencies of the rotary embedding are halved."""
    before, frequencies = run(chunk, rows), chunk.module.rope_frequencies
    chunk.module.rope_frequencies = frequencies / 2
    after = run(chunk, rows)
    chunk.module.rope_frequencies = frequencies
    return {"turned_otherwise": float((after - before).abs().max())}


def marks(chunk: Any) -> dict[str, Any]:
    names = (name for name, p in parameters(chunk) if getattr(p, "tensor_model_parallel", False))
    return {"marked": {name.split(".")[-2] for name in names}}


def gradients(chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Run one step of the schedule with a loss whose gradient is 1 for each weight element."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    observed: dict[str, Any] = {"finalizer_calls": 0}
    finalize = chunk.config.finalize_model_grads_func

    def counted(*args: Any, **kwargs: Any) -> None:
        observed["finalizer_calls"] += 1
        finalize(*args, **kwargs)

    def forward(numbers: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        return run(chunk, rows_of_two()), partial(loss, next(numbers), chunk)

    def loss(number: int, chunk: Any, hidden: Tensor) -> tuple[Tensor, Tensor, int]:
        ones = sum(weight.sum() for _, weight in parameters(chunk))
        return hidden.sum() * 0 + ones, torch.zeros((), dtype=torch.int), number

    chunk.config.finalize_model_grads_func = counted
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    observed["collected"] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(range(NUM_MICRO)),
        model=[chunk],
        num_microbatches=NUM_MICRO,
        seq_length=sum(LENGTHS),
        micro_batch_size=1,
        forward_only=False,
    )
    chunk.config.finalize_model_grads_func = finalize
    weights = dict(parameters(chunk))
    values: set[float] = set()
    for name, (start, end) in ranges(chunk, optimizer).items():
        values |= set(weights[name].main_grad.flatten()[start:end].tolist())
    (observed["gradient_of_one_each"],) = values
    optimizer.prepare_grads()
    observed["norm"] = float(optimizer.get_grad_norm())
    count = sum(weight.numel() for weight in weights.values())
    observed["norm_by_hand"] = observed["gradient_of_one_each"] * count**0.5
    return observed


def ownership(chunk: Any, optimizer: Any) -> dict[str, Any]:
    buckets = [
        bucket.grad_data
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
        for bucket in buffer.buckets
    ]
    _, weight = next(parameters(chunk))
    return {
        "ranges": ranges(chunk, optimizer),
        "sizes": {name: weight.numel() for name, weight in parameters(chunk)},
        "bucket_elements": sum(bucket.numel() for bucket in buckets),
        "main_grad_is_in_a_bucket": weight.main_grad.untyped_storage().data_ptr()
        in {bucket.untyped_storage().data_ptr() for bucket in buckets},
    }


def ranges(chunk: Any, optimizer: Any) -> dict[str, tuple[int, int]]:
    """Return the flat range of each parameter that this rank's optimizer owns, if any."""
    names = {id(weight): name for name, weight in parameters(chunk)}
    owned = {}
    for chained in optimizer.chained_optimizers:
        for weight, (group, order) in chained.model_param_group_index_map.items():
            param_range = chained._get_model_param_range_map(weight)["param"]
            assert (
                chained.optimizer.param_groups[group]["params"][order].numel() == param_range.size
            )
            if param_range.size:
                owned[names[id(weight)]] = (param_range.start, param_range.end)
    return owned


def steps(chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Take two optimizer steps with the current gradients."""
    mains = [main for chained in optimizer.chained_optimizers for main in chained.get_parameters()]
    observed: dict[str, Any] = {
        "decays": sorted({group["weight_decay"] for group in optimizer.param_groups}),
        "main_norm_before": norm(mains),
    }
    for name, rate in (("moved_at_zero_rate", 0.0), ("moved_at_some_rate", 1e-3)):
        before = [weight.detach().clone() for _, weight in parameters(chunk)]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step_with_ready_grads()
        after = [weight.detach() for _, weight in parameters(chunk)]
        observed[name] = max(float((a - b).abs().max()) for a, b in zip(after, before))
    return observed | {"main_norm_after": norm(mains)}


def norm(mains: Sequence[Any]) -> float:
    return float(torch.stack([main.grad.norm() for main in mains if main.numel()]).norm())


@torch.no_grad()
def experts(policy: Any) -> dict[str, Any]:
    chunk = policy._chunks[0]
    from dapo_megatron.policy.moe import ExpertLayer

    layer = next(module for module in chunk.modules() if isinstance(module, ExpertLayer))
    answers = []
    layer.router.register_forward_hook(lambda *hook_args: answers.append(hook_args[-1]))
    run(chunk, rows_of_two())
    weights, taken = answers[0]
    assert weights.shape == taken.shape
    buffered = {id(weight) for buffer in chunk.expert_parallel_buffers for weight in buffer.params}
    return {
        "sequences": layer.router.sequences.tolist(),
        "first_experts": layer.router.routes[:, 0].tolist(),
        "taken": taken.nonzero()[:, 1].view(len(taken), -1).tolist(),
        "router": (type(layer.router).__name__, tuple(weights.shape)),
        "num_expert_buffers": len(chunk.expert_parallel_buffers),
        "only_experts_in_them": buffered
        == {id(weight) for name, weight in parameters(chunk) if ".experts." in name},
    }


@torch.no_grad()
def latent(policy: Any) -> dict[str, Any]:
    attention = policy._chunks[0].module.decoder.layers[0].self_attention
    down = (attention.linear_q_down_proj, attention.linear_kv_down_proj)
    observed = rotated(policy._chunks[0], rows_of_two())
    return observed | {"down_projections": [type(projection).__name__ for projection in down]}


def parameters(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Yield the trained parameters of the model inside Megatron's wrapper."""
    for name, weight in chunk.module.named_parameters():
        if weight.requires_grad:
            yield name, weight
