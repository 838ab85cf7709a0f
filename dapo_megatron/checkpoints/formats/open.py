"""Detects the format of a folder and opens it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dapo_megatron.checkpoints.folder import LAST_READER
from dapo_megatron.checkpoints.formats.hf import open_hf
from dapo_megatron.checkpoints.formats.store import Store
from dapo_megatron.checkpoints.formats.torch_dist.store import find_iteration, open_torch_dist
from dapo_megatron.checkpoints.formats.weights_folder import MEGATRON_JSON, check_links
from dapo_megatron.config.computing import ModelConfig
from dapo_megatron.files import replaced_by
from dapo_megatron.types import CheckpointError


def open_model(model: ModelConfig) -> Store:
    """Open model.path."""
    return open_store(Path(model.path), model.ignore_fields, drop_mtp=model.drop_mtp)


def open_store(
    folder: Path,
    ignore: Collection[str] = (),
    hf: Path | None = None,
    *,
    drop_mtp: bool = False,
) -> Store:
    """Open an HF folder, a checkpoint of Megatron or a run's training checkpoint.

    `ignore` lists fields of config.json to ignore (model.ignore_fields). `hf` is the folder of the
    config.json and the tokenizer of a checkpoint of Megatron without them. `drop_mtp` leaves out
    layers for multi-token prediction (model.drop_mtp). Raises CheckpointError naming the faulty
    file, or ConfigError for an unsupported model.
    """
    if not folder.is_dir():
        replaced = replaced_by(folder)
        hint = f"; a command was killed while replacing it: rename {replaced}"
        raise CheckpointError(f"{folder}: no such folder{hint if replaced.exists() else ''}")
    check_links(folder)
    if any(folder.glob("rank_*.safetensors")) or (folder / MEGATRON_JSON).exists():
        raise CheckpointError(
            f"{folder}: has the format of an earlier version. Export it with commit {LAST_READER}: "
            "python tools/convert_checkpoint.py megatron-to-hf"
        )
    if iteration := find_iteration(folder):
        return open_torch_dist(folder, iteration, ignore, hf, drop_mtp=drop_mtp)
    if not (folder / "config.json").exists():
        patterns = ("iter_*", "step_*", "checkpoints/step_*")
        steps = sorted(path for pattern in patterns for path in folder.glob(pattern))
        hint = f"; did you mean {steps[-1]}?" if steps else ""
        raise CheckpointError(f"{folder}: contains no model (no config.json){hint}")
    return open_hf(folder, ignore, drop_mtp=drop_mtp)
