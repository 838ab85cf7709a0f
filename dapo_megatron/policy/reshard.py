"""Reading a training checkpoint into another layout than saved it: other parallel sizes, other
stages, another precision, other kernels.

Weights and optimizer state are found by HF name (checkpoints/formats/moments.py), and each rank
reads the rows that its own ranges lie in. Nothing is rounded on the way, but for model weights
beside main copies that keep the exact ones. RNG states belong to ranks and cannot be carried over:
they stay as in a fresh start from the run's seed. (Nothing of the policy draws from them: there is
no dropout.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.megatron import slots_of
from dapo_megatron.checkpoints.formats.moments import (
    MAIN,
    MOMENTS,
    STEP,
    WEIGHT,
    StateKey,
    TrainingState,
    open_state,
    parse_key,
    read_range,
)
from dapo_megatron.checkpoints.formats.store import Store
from dapo_megatron.model import Architecture, Place, Slot
from dapo_megatron.types import CheckpointError, dtype_name


def reshard(
    folder: Path,
    targets: Mapping[str, Tensor],
    places: Sequence[Place],
    arch: Architecture,
    ignore: Collection[str],
) -> None:
    """Fill this rank's tensors, each under the key that its own checkpoint file would have for it.

    `places` are those of its model chunks. Everything is looked up before anything is read. Raises
    CheckpointError naming file and key, or the tensor, or why the checkpoint does not fit.
    """
    state = open_state(folder, ignore)
    _check_model(state.weights, arch)
    slots = [slots_of(arch, place) for place in places]
    reads = [_reader(state, key, target, slots) for key, target in targets.items()]
    with torch.no_grad():
        for target, read in zip(targets.values(), reads, strict=True):
            target.copy_(read().view(target.shape))


def _reader(
    state: TrainingState, key: str, target: Tensor, slots: Sequence[Mapping[str, Slot]]
) -> Callable[[], Tensor]:
    """What reads one tensor. Raises CheckpointError if it is not there, or would be rounded."""
    about = parse_key(key)
    assert about is not None
    if about.field == STEP:
        return lambda: torch.tensor(state.step)
    slot = slots[about.chunk][about.name]
    for part in slot.parts:
        source = _source(state, about, part.name, target.dtype)
        if part.name not in source.tensors:
            raise CheckpointError(
                f"{source.folder}: no file has optimizer state ({about.field}) of {part.name}"
            )
        stored = source.tensors[part.name].dtype
        is_rounded = about.field == WEIGHT and target.dtype.itemsize < 4
        if not is_rounded and torch.promote_types(stored, target.dtype) != target.dtype:
            key = "optimizer.moments" if about.field in MOMENTS else "policy.precision"
            raise CheckpointError(
                f"{source.folder}: {part.name} ({about.field}) was saved in {dtype_name(stored)}, "
                f"and would be rounded to {dtype_name(target.dtype)}; resume with the {key} "
                "that saved, or train its weights as model.path"
            )
    name = slot.parts[0].name if slot.parts else next(iter(state.weights.tensors))
    source = _source(state, about, name, target.dtype)
    return lambda: read_range(source, slot, about.start, about.stop)


def _source(state: TrainingState, about: StateKey, name: str, dtype: torch.dtype) -> Store:
    """Where to read the HF tensor `name` from. A parameter's tensors are all in the same."""
    if about.field == WEIGHT and state.weights.tensors[name].dtype == dtype:
        return state.weights
    return state.exact(name) if about.field in (WEIGHT, MAIN) else state.fields[about.field]


def _check_model(store: Store, arch: Architecture) -> None:
    wanted, found = asdict(arch), asdict(store.arch)
    if other := [name for name in wanted if wanted[name] != found[name]]:
        raise CheckpointError(
            f"{store.folder}: of another model than model.path: "
            + ", ".join(f"{name} {found[name]}, not {wanted[name]}" for name in other)
        )
