"""Detects the format of a folder and opens it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dapo_megatron.checkpoints.formats.hf import open_hf
from dapo_megatron.checkpoints.formats.megatron import open_megatron, open_training
from dapo_megatron.checkpoints.formats.store import Store
from dapo_megatron.checkpoints.formats.weights_folder import MEGATRON_JSON, check_links
from dapo_megatron.files import replaced_by
from dapo_megatron.types import CheckpointError


def open_store(folder: Path, ignore: Collection[str] = ()) -> Store:
    """Open an HF folder, a Megatron folder or a run's training checkpoint.

    `ignore` lists fields of config.json to ignore (model.ignore_fields). Raises CheckpointError
    naming the faulty file, or ConfigError for an unsupported model.
    """
    if not folder.is_dir():
        replaced = replaced_by(folder)
        hint = f"; a command was killed while replacing it: rename {replaced}"
        raise CheckpointError(f"{folder}: no such folder{hint if replaced.exists() else ''}")
    check_links(folder)
    if (folder / MEGATRON_JSON).exists():
        return open_megatron(folder, ignore)
    if any(folder.glob("rank_*.safetensors")):
        return open_training(folder, ignore)
    if any(folder.glob("stage_*.safetensors")):
        raise CheckpointError(f"{folder}: {MEGATRON_JSON} is missing next to the stage files")
    if not (folder / "config.json").exists():
        steps = sorted([*folder.glob("step_*"), *folder.glob("checkpoints/step_*")])
        hint = f"; did you mean {steps[-1]}?" if steps else ""
        raise CheckpointError(f"{folder}: contains no model (no config.json){hint}")
    return open_hf(folder, ignore)
