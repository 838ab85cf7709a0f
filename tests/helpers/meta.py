"""Models of real size on the meta device, in layouts of any number of ranks: no memory, no GPU, and
no other process (torch's `fake` process groups are of any size and send nothing)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import lcm
from typing import Any
from unittest.mock import patch

from dapo_megatron.config import PolicyConfig

Case = tuple[dict[str, Any], PolicyConfig]
"""config.json of a model, and the policy's section of a config."""
Found = tuple[list[tuple[int, str, tuple[int, ...]]], int]
"""(chunk, name, shape) of parameters that the bridge's table and Megatron do not agree on, and how
many parameters there are."""


def differences(rank: int, cases: list[Case], fused: bool) -> list[dict[int, Found]]:
    """For `run_ranks` with one process: of each case, what some ranks would hold, by rank.

    `fused`: built of Transformer Engine's layers, as if there were a GPU."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dapo_megatron.model import architecture

    dist.destroy_process_group()
    results = []
    for hf, policy in cases:
        arch, size, found = architecture(hf), world_size(policy), {}
        for one in sorted({0, 1, size // 2 - 1, size - 1}):
            store = FakeStore()  # type: ignore[no-untyped-call]
            dist.init_process_group("fake", rank=one, world_size=size, store=store)
            with a_gpu_without_memory() if fused else no_gpu():
                found[one] = _compare(arch, policy, fused)
            dist.destroy_process_group()
        results.append(found)
    return results


def world_size(policy: PolicyConfig) -> int:
    """Of the smallest world that a layout fits into, with two ranks at least for each weight."""
    model = policy.tensor_parallel * policy.context_parallel
    return policy.pipeline_parallel * lcm(2 * model, policy.expert_parallel)


def _compare(arch: Any, policy: PolicyConfig, fused: bool) -> Found:
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
    actual, expected = set(), set()
    for number, chunk in enumerate(build_model(arch, policy, where=torch.device("meta"))):
        assert all(parameter.is_meta for parameter in chunk.parameters())
        local_parameters = layout_of(arch, place(chunk), fused=fused)
        actual |= {(number, name, tuple(p.shape)) for name, p in chunk.named_parameters()}
        expected |= {
            (number, name, local_parameter.shape)
            for name, local_parameter in local_parameters.items()
        }
    parallel_state.destroy_model_parallel()
    return sorted(actual ^ expected), len(actual)


@contextmanager
def no_gpu() -> Iterator[None]:
    """As the policy builds its model on a CPU."""
    from dapo_megatron.policy.device import megatron_device

    with megatron_device():
        yield


@contextmanager
def a_gpu_without_memory() -> Iterator[None]:
    """A machine that says it has a GPU, which is the meta device."""
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
