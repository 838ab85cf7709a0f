"""Save and load checkpoints with Megatron-core in layouts of any number of ranks, in one process.

torch's `fake` process groups have any size and send nothing. Every rank builds its part of the
model in turn, and Megatron says which boxes of which tensors the rank saves or loads. What needs
messages between ranks is left to tests with real ones (tests/parity/test_torch_dist.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import read_into
from dapo_megatron.checkpoints.formats.torch_dist.boxes import (
    Box,
    StoredBox,
    write_boxes,
    write_metadata,
)
from dapo_megatron.checkpoints.formats.torch_dist.store import write_about
from dapo_megatron.config import PolicyConfig
from dapo_megatron.model import Architecture
from dapo_megatron.types import Shard

STYLES: dict[str, dict[str, bool]] = {
    "stacked": {},
    "by layer": {"non_homogeneous_layers": True},
    "singleton": {"singleton_local_shards": True},
}
"""Megatron's own setting for each way of naming tensors. `stacked` is the default: layers of dense
models in one tensor, and experts of a layer. With `singleton` each layer, each expert, and gate and
up have a name."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a layout."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Smallest number of ranks. Some of them hold the same weights if `ep` > `tp`."""
        return self.pp * lcm(self.tp, self.ep)

    @property
    def policy(self) -> PolicyConfig:
        """The section of a config."""
        return PolicyConfig(
            precision="float32",
            tensor_parallel=self.tp,
            sequence_parallel=self.tp > 1,
            pipeline_parallel=self.pp,
            expert_parallel=self.ep,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A layout in which Megatron saves the model in `hf` into the new folder `saved` / STYLE for
    each style, and then loads the checkpoint `written`, which must have the weights of `hf`."""

    hf: Path
    layout: Layout
    written: Path
    saved: Path
    styles: tuple[str, ...] = tuple(STYLES)


def save_and_load(_: int, cases: list[Case]) -> list[list[str]]:
    """Return for each case the tensors that Megatron loaded with other values.

    Call it by `run_ranks` with one process.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    results = [_save_and_load(case) for case in cases]
    # run_ranks destroys a process group.
    _start_fake_ranks(0, 1)
    return results


def _save_and_load(case: Case) -> list[str]:
    different: list[str] = []
    saved = {style: _Saved(case.saved / style) for style in case.styles}
    for rank in range(case.layout.num_ranks):
        with _model(case.hf, case.layout, rank) as (model, shards):
            for style in case.styles:
                saved[style].add(rank, model.sharded_state_dict(metadata=dict(STYLES[style])))
            before = [shard.read() for shard in shards]
            _load(model, case.written)
            different += [
                f"{shard.tensor_slice.name} of rank {rank}"
                for shard, value in zip(shards, before, strict=True)
                if not torch.equal(shard.read(), value)
            ]
    for checkpoint in saved.values():
        checkpoint.finish()
    return different


class _Saved:
    """A checkpoint to which ranks add what they hold."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._stored: list[StoredBox] = []

    def add(self, rank: int, state: Any) -> None:
        """Write the boxes of tensors that the rank saves."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
        from megatron.core.dist_checkpointing.utils import extract_sharded_tensors

        apply_factories(state)
        boxes = []
        for saved in nested_values(extract_sharded_tensors(state)[0]):
            if is_main_replica(saved.replica_id):
                shape = (*(1,) * saved.prepend_axis_num, *saved.local_shape)
                values = saved.data.detach().reshape(shape)
                boxes.append(Box(saved.key, saved.global_offset, saved.global_shape, values))
        self._stored += write_boxes(self._folder, rank, boxes, {})[0]

    def finish(self) -> None:
        """Write the other files."""
        write_metadata(self._folder, self._stored)
        torch.save({}, self._folder / "common.pt")
        write_about(self._folder)


@torch.no_grad()
def _load(model: Any, written: Path) -> None:
    """Load a checkpoint as Megatron-LM does, as if there were no other rank."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    for value in model.parameters():
        value.fill_(torch.nan)
    metadata = dist_checkpointing.load_content_metadata(str(written))
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    alone = partial(strategy.checkpoint.load_state_dict, no_dist=True)
    no_other = patch.object(strategy.checkpoint, "load_state_dict", alone)
    with no_other, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = dist_checkpointing.load(state, str(written), validate_access_integrity=False)
    model.load_state_dict(loaded["model"])


@contextmanager
def _model(hf: Path, layout: Layout, rank: int) -> Iterator[tuple[Any, list[Shard]]]:
    """Yield a rank's part of the model in `hf`, and the HF tensors in it."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from dapo_megatron.policy import specs
    from dapo_megatron.policy.device import megatron_device
    from dapo_megatron.policy.model import build_model, initialize_parallel, place
    from dapo_megatron.policy.shards import shards_of

    store = open_store(hf)
    _start_fake_ranks(rank, layout.num_ranks)
    try:
        with megatron_device():
            initialize_parallel(layout.policy, seed=0)
            with patch.object(specs, "layer_spec", partial(_layer_spec, specs.layer_spec)):
                [model] = build_model(store.arch, layout.policy)
            if not store.arch.num_dense_layers:
                # Megatron-LM's default, with which it stacks layers with experts. The policy lists
                # which layers have some, and Megatron does not stack listed layers.
                model.config.moe_layer_freq = 1
            shards = shards_of(dict(model.named_parameters()), store.arch, place(model))
            read_into(store, shards)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("out_norm.weight"):  # Megatron multiplies by 1 + weight
                        parameter -= 1
            yield model, shards
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _layer_spec(make: Any, arch: Architecture, config: PolicyConfig, number: int) -> Any:
    """Return the policy's spec of a layer, with Megatron's own gated delta net."""
    from tests.helpers.delta import with_delta_net

    spec = make(arch, config, number)
    return with_delta_net(spec, arch.delta) if arch.delta and arch.has_delta(number) else spec


def _start_fake_ranks(rank: int, num_ranks: int) -> None:
    """Make torch believe that this process is one of many."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=store)
