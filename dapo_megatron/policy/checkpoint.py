"""A rank's part of a checkpoint: weights, optimizer state and random states, in Megatron's format.

What a rank owns is written as boxes of whole tensors (policy/boxes.py), so a checkpoint can be read
in any layout, by Megatron-core too. No value is rounded, except for model weights with exact main
copies. Random states belong to ranks. In another layout they start from the run's seed; the policy
does not use them, because it has no dropout.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from dapo_megatron.checkpoints.folder import guarded
from dapo_megatron.checkpoints.formats.torch_dist.boxes import (
    Box,
    Reading,
    StoredBox,
    write_boxes,
    write_metadata,
)
from dapo_megatron.checkpoints.formats.torch_dist.model_config import MARK
from dapo_megatron.checkpoints.formats.torch_dist.reading import COMMON, read_common
from dapo_megatron.checkpoints.formats.torch_dist.store import write_about
from dapo_megatron.cluster.collectives import decode, encode, on_all_ranks, on_rank0
from dapo_megatron.files import read_json
from dapo_megatron.model import Architecture, architecture
from dapo_megatron.policy.boxes import CONTENT, STATE, HostCopies, TrainingState
from dapo_megatron.policy.device import has_cuda
from dapo_megatron.policy.optimizer import (
    MAIN,
    MOMENTS,
    init_state,
    num_updates,
    optimizers_of,
    owned_parts,
    set_num_updates,
)
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import CheckpointError

logger = logging.getLogger(__name__)

RNG = "rng"
_PLAIN = (bool, int, float, str, tuple)
_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "num_steps")
"""Numbers of Megatron-LM's schedule of learning rates, which starts from the beginning."""
_BOX_BYTES = 1500
"""Bytes that a box takes in a file, in addition to its values."""


def snapshot(
    exchange: Exchange,
    models: Sequence[Any],
    optimizer: Any,
    arch: Architecture,
    copies: HostCopies,
) -> PolicySnapshot:
    """Copy what this rank has to write to host memory."""
    init_state(optimizer)
    state = TrainingState(models, list(owned_parts(optimizer)), arch.vocab_size)
    boxes = [*state.to_save(), *_rng_boxes(exchange, rng_tensors())]
    objects = {}
    for key, value in state.objects().items():
        buffer = io.BytesIO()
        torch.save([value], buffer)  # as Megatron does
        objects[key] = buffer.getvalue()
    parts = [part.optimizer.param_groups for part in optimizers_of(optimizer)]
    groups = [
        # Those of Megatron's optimizer for host memory contain classes.
        [{k: v for k, v in group.items() if isinstance(v, _PLAIN)} for group in part]
        for part in parts
    ]
    return PolicySnapshot(
        exchange.rank, copies.copy(boxes), objects, groups, num_updates(optimizer), _layout()
    )


class PolicySnapshot:
    """Copies of a rank's boxes in host memory. Implements protocols.Snapshot.

    groups  settings of the optimizer's parameter groups, by part of the optimizer
    step    number of updates
    """

    def __init__(
        self,
        rank: int,
        boxes: Sequence[Box],
        objects: Mapping[str, bytes],
        groups: Sequence[Sequence[Mapping[str, Any]]],
        step: float,
        layout: Mapping[str, int],
    ) -> None:
        self._rank, self._boxes, self._objects = rank, boxes, objects
        self._groups, self._step, self._layout = groups, step, layout
        self.num_bytes = sum(box.values.nbytes + _BOX_BYTES for box in boxes)
        self.num_bytes += sum(len(value) + _BOX_BYTES for value in objects.values())
        """Bytes of the file, at most."""
        self.checksums: dict[str, str] = {}
        self._stored: list[StoredBox] = []

    def write(self, folder: Path) -> None:
        """See protocols.Snapshot. Writing and hashing release the GIL, so other threads keep
        running."""
        self._stored, self.checksums = write_boxes(folder, self._rank, self._boxes, self._objects)

    def finish(self, folder: Path, exchange: Exchange) -> None:
        """See protocols.Snapshot."""
        messages = exchange.all_gather(encode(self._stored), bytes)
        step = max(exchange.all_gather(self._step, float))  # 0 on a rank that updates nothing

        def write() -> None:
            ranks = enumerate(messages)
            stored = [decode(message, list[StoredBox], f"rank {rank}") for rank, message in ranks]
            boxes = [box for of_rank in stored for box in of_rank]
            write_metadata(folder, [*boxes, *_main_weights(boxes)])
            buffer = io.BytesIO()
            torch.save(self._common(step), buffer)
            (folder / COMMON).write_bytes(buffer.getvalue())
            write_about(folder)

        on_rank0(exchange, guarded, folder, write)

    def _common(self, step: float) -> dict[str, Any]:
        """Return what Megatron expects in common.pt, and the layout of this run."""

        def state(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            with_step = [{**group, "step": step} for group in groups]
            # Megatron-LM has groups of biases and norms, without weight decay, and a minimum of the
            # learning rate.
            with_step += [{**group, "wd_mult": 0.0, "weight_decay": 0.0} for group in with_step]
            with_step += [{**group, "min_lr": 0.0} for group in with_step]
            kind = CONTENT["distrib_optim_sharding_type"]
            return {"optimizer": {"param_groups": with_step}, "param_state_sharding_type": kind}

        states = [state(groups) for groups in self._groups]
        return {
            "optimizer": states[0] if len(states) == 1 else dict(enumerate(states)),
            "iteration": int(step),
            "checkpoint_version": 3.0,
            "content_metadata": CONTENT,
            # Megatron-LM takes its own schedule with --override-opt-param-scheduler.
            "opt_param_scheduler": dict.fromkeys(_SCHEDULE, 0) | {"lr_decay_style": "constant"},
            MARK: self._layout,
        }


def _main_weights(boxes: Sequence[StoredBox]) -> list[StoredBox]:
    """Return the boxes of trained weights under the keys of main weights, if these are not stored
    on their own: weights in full precision are both. Megatron reads both keys."""
    keys = {box.key for box in boxes}
    trained = {key for key in keys if f"{STATE}.{MOMENTS[0]}.{key}" in keys}
    names = {key: f"{STATE}.{MAIN}.{key}" for key in trained}
    return [
        replace(box, key=names[box.key])
        for box in boxes
        if box.key in names and names[box.key] not in keys
    ]


def load(
    folder: Path,
    exchange: Exchange,
    models: Sequence[Any],
    optimizer: Any,
    arch: Architecture,
    ignore: Collection[str] = (),
) -> None:
    """Read a checkpoint back, in any layout. Collective. Raises CheckpointError naming file and
    tensor, on all ranks.

    In the layout of the run that saved it, random states are restored as well, and training
    continues bit by bit.
    """
    init_state(optimizer)
    state = TrainingState(models, list(owned_parts(optimizer)), arch.vocab_size)
    rng = rng_tensors()

    def look_up() -> tuple[Reading, float, bool]:
        _check_model(folder, arch, ignore)
        path, common = read_common(folder)
        is_same = common.get(MARK) == _layout()
        boxes = [*state.to_load(), *(_rng_boxes(exchange, rng) if is_same else ())]
        return Reading(folder, boxes), _num_updates(path, common), is_same

    # In this order, so that a refused checkpoint changes nothing on any rank.
    reading, number, is_same = on_all_ranks(exchange, look_up)
    on_all_ranks(exchange, reading.run)
    state.clear_padding()
    set_num_updates(optimizer, number)
    if is_same:
        set_rng(rng)
    else:
        logger.warning(
            "%s: saved in another layout. Weights and optimizer state are restored. Random states "
            "are not: they start from the seed",
            folder,
        )


def _num_updates(path: Path, common: Mapping[str, Any]) -> float:
    try:
        optimizer = common["optimizer"]
        first = optimizer.get("optimizer") or optimizer[0]["optimizer"]
        return float(first["param_groups"][0]["step"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: has no number of updates of the optimizer ({error!r})"
        ) from error


def _check_model(folder: Path, arch: Architecture, ignore: Collection[str]) -> None:
    path = folder / "config.json"
    if not path.exists():
        return  # of Megatron-core
    wanted, saved = asdict(arch), asdict(architecture(read_json(path), ignore))
    if other := [name for name in wanted if wanted[name] != saved[name]]:
        raise CheckpointError(
            f"{folder}: is of another model than model.path: "
            + ", ".join(f"{name} {saved[name]}, not {wanted[name]}" for name in other)
        )


def _layout() -> dict[str, int]:
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return {
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_parallel": virtual or 1,
        "context_parallel": parallel_state.get_context_parallel_world_size(),
        "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
        "data_parallel": parallel_state.get_data_parallel_world_size(),
    }


# ------------------------------------------------------------------ random states


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of all generators that the policy may use: torch's, and on a GPU those that
    Megatron keeps per kind of layer.

    Prompts are shuffled and completions sampled with separate seeds. Python's and numpy's global
    generators are not used.
    """
    tensors = {"cpu": torch.get_rng_state()}
    if has_cuda():
        tensors["cuda"] = torch.cuda.get_rng_state()
        for name, state in get_cuda_rng_tracker().get_states().items():
            tensors[f"tracked.{name}"] = state
    return tensors


def set_rng(tensors: Mapping[str, Tensor]) -> None:
    """Restore the states that `rng_tensors` returned."""
    torch.set_rng_state(tensors["cpu"])
    if has_cuda():
        torch.cuda.set_rng_state(tensors["cuda"])
        tracked = {key: state for key, state in tensors.items() if key.startswith("tracked.")}
        get_cuda_rng_tracker().set_states(
            {key.removeprefix("tracked."): state for key, state in tracked.items()}
        )


def _rng_boxes(exchange: Exchange, tensors: Mapping[str, Tensor]) -> list[Box]:
    """Return the random states of this rank, as rows of tensors of all ranks."""
    return [
        Box(f"{RNG}.{name}", (exchange.rank, 0), (exchange.world_size, len(state)), state[None])
        for name, state in tensors.items()
    ]
