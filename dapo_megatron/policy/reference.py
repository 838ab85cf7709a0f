"""Weights of the reference model of loss.kl: in host memory, except during a pass.

For a pass they trade places with the policy's weights, byte by byte, so the accelerator never holds
both. Each rank keeps its shards, in the layout and precision of the policy. Main
copies, moments and gradients do not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dapo_megatron.policy import fp8
from dapo_megatron.policy.offload import HostMemory, weight_storages


class Reference:
    """Weights in host memory; at first a copy of the current ones."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._host = HostMemory()
        storages = self._storages()
        self._sizes = [storage.nbytes() for storage in storages]
        self._host.save(storages)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the policy's weights by the reference's in this block. They are restored bit by
        bit at its end. No gather of weights may be in flight."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the policy and those in host memory."""
        storages = self._storages()
        assert [storage.nbytes() for storage in storages] == self._sizes
        self._host.swap(storages)

    def _storages(self) -> list[Any]:
        # Copies that Transformer Engine makes of its weights would belong to the other model.
        fp8.drop_cached_weights(chunk.module for chunk in self._chunks)
        return weight_storages(self._chunks)
