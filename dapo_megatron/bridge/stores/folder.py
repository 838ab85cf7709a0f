"""Folders of weights: what goes along with the weights, and folders that appear whole or not at
all."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dapo_megatron.bridge.stores.file import dtype_name
from dapo_megatron.files import read_json, sync_to_disk
from dapo_megatron.types import CheckpointError

MEGATRON_JSON = "megatron.json"
_RUN_JSON = "state.json"  # a training checkpoint's (run_folder.py)
HF_INDEX = "model.safetensors.index.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
_FOLDERS = ("additional_chat_templates",)  # transformers keeps templates beside the first there
_DTYPE_FIELDS = ("dtype", "torch_dtype")  # transformers 5, and before


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy all that is neither weights nor a run's state: tokenizer, chat template, configs, ...

    config.json is copied byte for byte, or with its dtype alone replaced by `dtype`.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and not _stays(path):
            shutil.copyfile(path, target / path.name)
        elif path.is_dir() and path.name in _FOLDERS:
            shutil.copytree(path, target / path.name)
    if dtype is not None:
        config = read_json(source / "config.json")
        for field in [name for name in _DTYPE_FIELDS if name in config] or [_DTYPE_FIELDS[0]]:
            config[field] = dtype_name(dtype)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (target / "config.json").write_text(text + "\n", encoding="utf-8")


def _stays(path: Path) -> bool:
    name = path.name
    return (
        path.suffix in _WEIGHTS
        or name.endswith((".index.json", ".partial"))
        or name in (MEGATRON_JSON, _RUN_JSON)
    )


@contextmanager
def publish(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A new folder to fill. It becomes `target` when the block ends, and is removed when the block
    raises (an interrupt included).

    Until then it is `<target>.partial`; one that a killed process left behind, with its lock, is
    removed first, and a `target` that it was about to replace is put back.
    Raises CheckpointError if `target` exists (with `overwrite`: if it holds anything but a model),
    if a folder of the other name is somebody else's, or if another process is filling it.
    """
    partial = target.with_name(f"{target.name}.partial")
    lock = target.with_name(f".{target.name}.lock")
    is_left_over = lock.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock):
            _settle(target)
            if target.exists():
                _check_replaceable(target, overwrite)
            if partial.exists():
                if not is_left_over:
                    raise CheckpointError(
                        f"{partial}: in the way, and no killed command left it; move it elsewhere"
                    )
                shutil.rmtree(partial)
            partial.mkdir()
            try:
                yield partial
                for path in [*(path for path in partial.iterdir() if path.is_file()), partial]:
                    sync_to_disk(path)
                _put(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: {error.strerror}") from error


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if not overwrite:
        raise CheckpointError(f"{target}: exists; choose another name, or --overwrite")
    if (target / _RUN_JSON).exists():
        raise CheckpointError(f"{target}: a training checkpoint; --overwrite never replaces one")
    is_model = (target / "config.json").exists()
    if not is_model and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"{target}: holds no model; --overwrite replaces only a model's folder"
        )


def _put(partial: Path, target: Path) -> None:
    try:
        if target.exists():
            target.rename(replaced_by(target))
        partial.rename(target)
        sync_to_disk(target.parent)
    finally:
        _settle(target)


def replaced_by(target: Path) -> Path:
    """Where a folder lies while another takes its name."""
    return target.with_name(f".{target.name}.replaced")


def _settle(target: Path) -> None:
    """After a replacement, or one cut short: the old folder goes if the new one is there, and else
    gets its name back."""
    replaced = replaced_by(target)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    elif replaced.exists():
        replaced.rename(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{path}: another process is writing there") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
