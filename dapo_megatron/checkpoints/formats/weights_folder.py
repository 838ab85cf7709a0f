"""Folders of weights: checks of links and names, files that accompany the weights, and atomic
publishing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dapo_megatron.checkpoints.folder import STATE
from dapo_megatron.config import Config
from dapo_megatron.files import (
    open_lock,
    partial_folder,
    publish_folder,
    read_file,
    read_json,
    recover,
    sha256,
    sync_to_disk,
    try_lock,
)
from dapo_megatron.model import text_fields, without_mtp
from dapo_megatron.types import CheckpointError, dtype_name, torch_dtype

MEGATRON_JSON = "megatron.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""File of Megatron that names the newest checkpoint in a folder of them."""
RELEASE = "release"
"""Folder of a checkpoint of Megatron that no step belongs to. Megatron starts from its weights at
step 0."""
_ORIGIN = "dapo_megatron.json"
"""File that marks such a checkpoint as written here. It has the SHA-256 of its `.metadata`."""
_METADATA = ".metadata"
_LEGACY = "mp_rank_*"
_MEGATRON_NAMES = (_METADATA, _LEGACY, "iter_*")
"""Names in checkpoints of Megatron itself, and in none of ours."""
HF_INDEX = "model.safetensors.index.json"
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",  # SentencePiece and tiktoken
    "*.tiktoken",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
)
"""Files of a model that accompany its weights. Others (logs of a training, samples, code, ...) are
not copied."""
_NEVER = (".py", ".safetensors", ".bin", ".pt", ".pth", ".partial", ".lock")
"""Suffixes of files that are not copied under any name: code, weights and incomplete files."""
_FOLDERS = ("additional_chat_templates",)  # where transformers keeps further chat templates
_MAX_NAME_BYTES = 255  # in the usual file systems
_DTYPE_FIELDS = ("dtype", "torch_dtype")  # the names in transformers 5 and before


def check_links(folder: Path) -> None:
    """Raise CheckpointError if a model folder contains a link out of the folder.

    A downloaded model could link to any file of the user this way, and a copy of the model would
    publish that file. Links of the Hugging Face cache to ../../blobs are allowed. The error names
    the link.
    """
    inside = folder.resolve()
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else None
    copied = (path for name in _FOLDERS for path in (folder / name).rglob("*"))
    for path in filter(Path.is_symlink, chain(folder.iterdir(), copied)):
        target = Path(os.path.realpath(path))  # unlike resolve(), it does not fail on a loop
        is_inside = target.is_relative_to(inside) or target.parent == blobs
        if not is_inside or target.is_dir():
            raise CheckpointError(
                f"{path}: a link to {target}, which is "
                f"{'a folder' if is_inside else f'outside of {inside}'}. If it belongs to the "
                f"model, make a copy without links: cp -rL {folder} OTHER_FOLDER"
            )


def check_file_name(name: str, owner: Path | str) -> None:
    """Raise CheckpointError if `name`, which the file `owner` lists, is not the name of a file in
    the same folder."""
    length = len(name.encode(errors="replace"))
    if name in ("", ".", "..") or "/" in name or "\0" in name or length > _MAX_NAME_BYTES:
        raise CheckpointError(
            f"{owner}: names the file {name!r:.80}; weights must be in the same folder. Download "
            "the folder again"
        )


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy the files of a model besides its weights: config.json, tokenizer, chat template, ...

    config.json is copied byte for byte; if `dtype` is given, only its dtype is replaced. That of a
    model for images and text becomes that of its text model. Raises CheckpointError for a link out
    of `source`.
    """
    check_links(source)
    for path in sorted(source.iterdir()):
        if path.is_file() and _is_companion(path.name):
            shutil.copyfile(path, target / path.name)
        elif path.is_dir() and path.name in _FOLDERS:
            shutil.copytree(path, target / path.name)
    config = text_fields(copied := read_json(source / "config.json"))
    if dtype is not None:
        for field in [name for name in _DTYPE_FIELDS if name in config] or [_DTYPE_FIELDS[0]]:
            config[field] = dtype_name(dtype)
    if config != copied or dtype is not None:
        _write_config(target, config)


def declare_without_mtp(folder: Path) -> None:
    """Make the folder's config.json one of a model without layers for multi-token prediction."""
    config = read_json(folder / "config.json")
    if (fields := without_mtp(config)) != config:
        _write_config(folder, fields)


@dataclass(frozen=True)
class Companions:
    """The files of a trained model besides its weights, which come from the original's folder."""

    source: Path
    dtype: torch.dtype | None
    """The dtype that config.json names; None to leave it."""
    drop_mtp: bool = False
    """Whether the model has no layers for multi-token prediction, although the original does."""

    @classmethod
    def of(cls, config: Config) -> Companions:
        """Return the files of the model that a config trains."""
        model = config.model
        return cls(Path(model.path), torch_dtype(config.policy.precision), model.drop_mtp)

    def copy(self, target: Path) -> None:
        """Copy the files. Raises CheckpointError for a link out of the folder, and OSError."""
        copy_companions(self.source, target, self.dtype)
        if self.drop_mtp:
            declare_without_mtp(target)


def _write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    text = json.dumps(fields, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _is_companion(name: str) -> bool:
    is_named = any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)
    return is_named and not name.endswith(_NEVER)


@contextmanager
def publish(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder to fill, and rename it to `target` when the block ends.

    The folder is `<target>.partial` until then. It is deleted if the block raises, also on an
    interrupt. A partial folder of a killed process, recognized by its lock file, is deleted first,
    and a `target` that this process was about to replace is restored.
    Raises CheckpointError if `target` exists (with `overwrite`: if it is not a model folder), if
    `<target>.partial` is not from a killed process, or if another process is writing there.
    """
    partial = target.with_name(f"{target.name}.partial")
    lock = target.with_name(f".{target.name}.lock")
    is_left_over = lock.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock):
            recover(target)
            if target.exists():
                _check_replaceable(target, overwrite)
            if partial.exists() and not is_left_over:
                raise CheckpointError(
                    f"{partial}: in the way, and not left by a killed command; move it elsewhere"
                )
            with partial_folder(partial):
                yield partial
                for path in filter(Path.is_file, partial.rglob("*")):
                    sync_to_disk(path)
                publish_folder(partial, target)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: {error.strerror}") from error


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if not overwrite:
        raise CheckpointError(f"{target}: exists; choose another name, or use --overwrite")
    if (target / STATE).exists():
        raise CheckpointError(f"{target}: a training checkpoint; --overwrite never replaces one")
    if foreign := _of_megatron(target):
        raise CheckpointError(
            f"{foreign}: a checkpoint of Megatron, which --overwrite never replaces, except those "
            f"written here, as their {_ORIGIN} shows; choose another name"
        )
    is_model = (target / "config.json").exists()
    if not is_model and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"{target}: holds no model, and --overwrite replaces only model folders"
        )


def _of_megatron(folder: Path) -> Path | None:
    """Return a file or folder of a checkpoint of Megatron that was not written here, or None."""
    tracker, release = folder / TRACKER, folder / RELEASE
    if tracker.exists() and (not tracker.is_file() or read_file(tracker).strip() != b"release"):
        return tracker
    if (tracker.exists() or release.exists()) and not _is_written_here(release):
        return release if release.exists() else tracker
    return next((path for name in _MEGATRON_NAMES for path in sorted(folder.glob(name))), None)


def declare_written_here(release: Path) -> None:
    """Mark a complete checkpoint of Megatron as written by this program, so that --overwrite may
    replace it. Another `.metadata` makes the mark invalid."""
    (release / _ORIGIN).write_bytes(_origin(release))


def _is_written_here(release: Path) -> bool:
    if any(release.glob(_LEGACY)):
        return False
    mark, metadata = release / _ORIGIN, release / _METADATA
    return mark.is_file() and metadata.is_file() and read_file(mark) == _origin(release)


def _origin(release: Path) -> bytes:
    about = {"written_by": "dapo_megatron", "metadata_sha256": sha256(release / _METADATA)}
    return json.dumps(about).encode()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open_lock(path) as file:
        if not try_lock(file, path):
            raise CheckpointError(f"{path}: another process is writing there")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
