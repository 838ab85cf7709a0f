"""Weights of another checkpoint than model.path: to evaluate, as the reference of loss.kl, and as
the teacher of loss.distill."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from dapo_megatron.checkpoints.folder import check_folder
from dapo_megatron.checkpoints.formats.hf import VISION
from dapo_megatron.checkpoints.formats.open import open_model, open_store
from dapo_megatron.checkpoints.formats.store import Store, read_into
from dapo_megatron.cluster.collectives import on_all_ranks
from dapo_megatron.config import Config
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.model import read_architecture
from dapo_megatron.protocols import Exchange, Policy
from dapo_megatron.types import CheckpointError, ConfigError


def dropped_layers(config: Config) -> list[str]:
    """Return notes about tensors of model.path that are left out. Raises CheckpointError if there
    are layers for multi-token prediction and model.drop_mtp is not set, or if the weights cannot be
    read."""
    dropped = open_model(config.model).dropped
    vision = [name for name in dropped if name.startswith(VISION)]
    kinds = {
        "model.drop_mtp": ("layers for multi-token prediction", dropped[: -len(vision) or None]),
        "model.path": ("the encoder of images", vision),
    }
    return [
        f"{key}: {len(names):,} tensors of {what} are left out ({names[0]}, ...). They are not "
        "trained and not saved"
        for key, (what, names) in kinds.items()
        if names
    ]


def open_checkpoint(config: Config, checkpoint: Path, key: str = "checkpoint") -> Store:
    """Open the weights of the checkpoint that `key` names. Raises ConfigError if its architecture
    differs from model.path's: a different rope, for example, would load without an error and
    compute wrong values."""
    store = open_store(checkpoint, config.model.ignore_fields, drop_mtp=config.model.drop_mtp)
    expected, actual = (asdict(arch) for arch in (read_architecture(config), store.arch))
    if differing := [name for name in expected if expected[name] != actual[name]]:
        raise ConfigError(
            f"{key}: {checkpoint} is of another model than model.path: "
            + ", ".join(f"{name} {actual[name]}, not {expected[name]}" for name in differing)
        )
    return store


def open_reference(config: Config) -> Store | None:
    """Open the weights of loss.kl.reference; None if it is not set or not used. Raises ConfigError
    naming the key if they cannot be read or are of another model."""
    kl, key = config.loss.kl, "loss.kl.reference"
    if not kl.is_on or kl.reference is None:
        return None
    try:
        return open_checkpoint(config, Path(kl.reference), key)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from error


def keep_reference(config: Config, ranks: Exchange, policy: Policy) -> None:
    """Let `policy`, which still has the weights of model.path, keep loss.kl's reference.
    Without a KL penalty nothing is kept. Collective."""
    if config.loss.kl.is_on:
        if config.loss.kl.reference is not None:
            check_folder(Path(config.loss.kl.reference), ranks)
        store = open_reference(config)
        write = None if store is None else partial(read_into, store)
        on_all_ranks(ranks, policy.keep_reference, write)


def keep_teacher(config: Config, ranks: Exchange, policy: Policy) -> None:
    """Let `policy` keep loss.distill's teacher, if there is one. Collective. Raises ConfigError
    naming the key, as `open_teacher` does."""
    if config.loss.distill is not None:
        check_folder(Path(config.loss.distill.teacher), ranks)
        store = open_teacher(config)
        on_all_ranks(ranks, policy.keep_teacher, store.arch, partial(read_into, store))


def open_teacher(config: Config) -> Store:
    """Open the weights of loss.distill's teacher. Raises ConfigError naming the key if they cannot
    be read, or its tokens are not those of model.path."""
    assert config.loss.distill is not None
    folder, key = Path(config.loss.distill.teacher), "loss.distill.teacher"
    try:
        store = open_store(folder, config.model.ignore_fields, drop_mtp=config.model.drop_mtp)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{key}: {error}") from error
    own = load_tokenizer(Path(config.model.path), "model.path").get_vocab()
    vocabulary = load_tokenizer(folder, key).get_vocab()
    for token in sorted(own.keys() | vocabulary.keys()):
        number, other = own.get(token), vocabulary.get(token)
        if number != other:
            raise ConfigError(
                f"{key}: {folder} has another tokenizer than model.path: the id of {token!r:.40} "
                f"is {other}, not {number}; take a teacher with the same tokenizer"
            )
    return store
