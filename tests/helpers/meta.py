"""Build full-size models on the meta device, in layouts of any number of ranks, in one process.

This needs no memory and no GPU. torch's `fake` process groups have any size and send nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import lcm
from typing import Any
from unittest.mock import patch

from dapo_megatron.config import PolicyConfig

Case = tuple[dict[str, Any], PolicyConfig]
"""The config.json of a model, and the policy section of a config."""
Mismatches = tuple[list[tuple[int, str, tuple[int, ...]]], int, int]
"""(chunk, name, shape) of each parameter on which `layout_of` and Megatron differ, the number of
parameter tensors, and the number of their elements."""


def differences(_: int, cases: list[Case], fused: bool) -> list[dict[int, Mismatches]]:
    """Compare, for each case and some of its ranks, the parameters that the rank would hold.

    Call it by `run_ranks` with one process. With `fused`, models are built of Transformer Engine's
    layers, as if there were a GPU.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dapo_megatron.model import architecture

    dist.destroy_process_group()
    results = []
    for hf, policy in cases:
        arch, size, by_rank = architecture(hf), world_size(policy), {}
        for rank in sorted({0, 1, size // 2 - 1, size - 1}):
            store = FakeStore()  # type: ignore[no-untyped-call]
            dist.init_process_group("fake", rank=rank, world_size=size, store=store)
            with a_gpu_without_memory() if fused else no_gpu():
                by_rank[rank] = _compare(arch, policy, fused)
            dist.destroy_process_group()
        results.append(by_rank)
    return results


def world_size(policy: PolicyConfig) -> int:
    """Return the smallest world size of a layout in which at least two ranks hold each weight."""
    model = policy.tensor_parallel * policy.context_parallel
    return policy.pipeline_parallel * lcm(2 * model, policy.expert_parallel)


def _compare(arch: Any, policy: PolicyConfig, fused: bool) -> Mismatches:
    import torch
    from megatron.core import parallel_state

    from dapo_megatron.model import layout_of
    from dapo_megatron.policy.model import build_model, place

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=policy.tensor_parallel,
        pipeline_model_parallel_size=policy.pipeline_parallel,
        virtual_pipeline_model_parallel_size=policy.virtual_pipeline_parallel,
        context_parallel_size=policy.context_parallel,
        expert_model_parallel_size=policy.expert_parallel,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    actual, expected, num_elements = set(), set(), 0
    for number, chunk in enumerate(build_model(arch, policy, where=torch.device("meta"))):
        assert all(parameter.is_meta for parameter in chunk.parameters())
        local_parameters = layout_of(arch, place(chunk), fused=fused)
        actual |= {(number, name, tuple(p.shape)) for name, p in chunk.named_parameters()}
        num_elements += sum(parameter.numel() for parameter in chunk.parameters())
        expected |= {
            (number, name, local_parameter.shape)
            for name, local_parameter in local_parameters.items()
        }
    parallel_state.destroy_model_parallel()
    return sorted(actual ^ expected), len(actual), num_elements


@contextmanager
def no_gpu() -> Iterator[None]:
    """Build models as the policy does on a CPU."""
    from dapo_megatron.policy.device import megatron_device

    with megatron_device():
        yield


@contextmanager
def a_gpu_without_memory() -> Iterator[None]:
    """Make torch report a GPU whose device is the meta device."""
    import torch

    from dapo_megatron.policy.device import _cpu_answers_for_cuda, _NoRandomness

    with ExitStack() as stack:
        stack.enter_context(_cpu_answers_for_cuda())
        no = patch.object(_NoRandomness, "is_initialized", lambda _: False, create=True)
        stack.enter_context(no)
        for name, answer in (
            ("is_available", True),
            ("current_device", torch.device("meta")),
            ("get_device_capability", (9, 0)),
        ):
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, given=answer: given))
        yield
