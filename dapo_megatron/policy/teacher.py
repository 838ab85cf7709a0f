"""The teacher of loss.distill: a frozen model in the policy's layout, in host memory except during
a pass. Its sizes differ, so its weights cannot trade places with the policy's, as those of a
reference do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dapo_megatron.config import Config
from dapo_megatron.model import Architecture
from dapo_megatron.policy.device import has_cuda
from dapo_megatron.policy.model import build_model, place
from dapo_megatron.policy.offload import HostMemory, distinct_storages
from dapo_megatron.policy.routes import RouteShape
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.policy.step import Runner
from dapo_megatron.types import Shard


class _Chunk(torch.nn.Module):
    """A chunk as `Runner` expects it, without Megatron's data-parallel wrapper."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.config = module, module.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chunk."""
        return self.module(*args, **kwargs)


class Teacher:
    """A model of which only log-probs are computed. `runner` does it, inside `in_place`."""

    def __init__(
        self,
        arch: Architecture,
        config: Config,
        vocab: int,
        write: Callable[[Sequence[Shard]], None],
    ) -> None:
        """`vocab`: entries of the policy's vocabulary, to which the teacher's is limited."""
        assert config.loss.distill is not None
        top_k = config.loss.distill.top_k
        vocab = min(vocab, arch.vocab_size)
        policy = config.policy.model_copy(update={"fp8": None, "lora": None})
        models = build_model(arch, policy)
        for model in models:
            model.requires_grad_(False).eval()
            write(shards_of(dict(model.named_parameters()), arch, place(model)))
        self.runner = Runner(
            list(map(_Chunk, models)),
            temperature=config.rollout.temperature,
            vocab=vocab,
            head=policy.logprob_head,
            route_shape=RouteShape.of(arch, map(place, models)) if arch.num_experts else None,
            top_k=None if top_k is None else min(top_k, vocab),
        )
        parameters = (parameter for model in models for parameter in model.parameters())
        self._storages = [*distinct_storages(parameters).values()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._host = HostMemory()
        self._host.save(self._storages)
        self._free()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the weights on the accelerator in this block."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self._host.restore(self._storages)
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        if has_cuda():
            torch.cuda.empty_cache()
