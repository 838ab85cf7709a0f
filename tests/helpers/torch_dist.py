"""Write checkpoints of Megatron-core, and damage them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from dapo_megatron.checkpoints.formats.store import Store, fill
from dapo_megatron.checkpoints.formats.torch_dist.store import MAX_FILE_BYTES, TorchDistWriter


def to_torch_dist(source: Store, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Path:
    """Write a checkpoint as the program does. Return `folder`."""
    folder.mkdir()
    writer = TorchDistWriter(folder, source.arch, source.tensors, max_file_bytes)
    writer.create()
    fill(writer, source, lambda _: None)
    writer.finish(source.model_folder)
    return folder


# ------------------------------------------------------------------------------- damage

QKV = "decoder.layers.self_attention.linear_qkv.weight"
NORM = "decoder.final_layernorm.weight"
HEAD = "output_layer.weight"
_STORAGE_NAME = b"X\x01\x00\x00\x000"
"""The name of a tensor's storage, `0`, in a pickle."""


def set_rows(content: Any, rows: int) -> None:
    """Set the rows of the head in `.metadata`, without changing its elements."""
    content.state_dict_metadata[HEAD].size = torch.Size((rows, 36))


def add_tensor(content: Any, key: str) -> None:
    """Add a tensor to `.metadata`, whose elements are those of the last norm."""
    content.state_dict_metadata[key] = content.state_dict_metadata[NORM]
    index = next(index for index in content.storage_data if index.fqn == NORM)
    content.storage_data[type(index)(key, index.offset)] = content.storage_data[index]


class Runs:
    """An object that runs a program when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def edit_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change `.metadata`. It is unpickled by pickle itself."""
    path = folder / "release" / ".metadata"
    content = pickle.loads(path.read_bytes())
    change(content)
    path.write_bytes(pickle.dumps(content))


def edit_yaml(folder: Path, **fields: Any) -> None:
    """Change fields of the model in `run_config.yaml`."""
    path = folder / "release" / "run_config.yaml"
    content = yaml.safe_load(path.read_text())
    content["model"] |= fields
    path.write_text(yaml.safe_dump(content))


def edit_arguments(folder: Path, **fields: Any) -> None:
    """Change arguments in `common.pt`, and remove `run_config.yaml`, which comes first."""
    (folder / "release" / "run_config.yaml").unlink()
    path = folder / "release" / "common.pt"
    content = torch.load(path, weights_only=False)
    vars(content["args"]).update(fields)
    torch.save(content, path)


def replace_record(folder: Path, key: str, data: bytes) -> None:
    """Append `data` to the file, and let the record of the tensor `key` name it."""
    path = folder / "release" / "__0_0.distcp"
    offset = path.stat().st_size
    with path.open("ab") as file:
        file.write(data)
    _move_record(folder, key, offset, len(data))


def _move_record(folder: Path, key: str, offset: int, length: int) -> None:
    def change(content: Any) -> None:
        for index, info in content.storage_data.items():
            if index.fqn == key:
                info.offset, info.length = offset, length

    edit_metadata(folder, change)


def archive(
    value: Any, *, compression: int = zipfile.ZIP_STORED, replaced: dict[str, bytes] | None = None
) -> bytes:
    """Return what torch.save writes for `value`, with some files replaced, or compressed."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(changed, "w", compression) as target:
        for name in source.namelist():
            data = (replaced or {}).get(name.partition("/")[2], source.read(name))
            target.writestr(name, data)
    return changed.getvalue()


def with_name(tensor: torch.Tensor, pickled: bytes) -> bytes:
    """Return the record of a tensor whose pickle has `pickled` in place of the storage's name."""
    with zipfile.ZipFile(io.BytesIO(archive(tensor))) as file:
        content = file.read("archive/data.pkl")
    assert content.count(_STORAGE_NAME) == 1
    return archive(tensor, replaced={"data.pkl": content.replace(_STORAGE_NAME, pickled)})


def long_directory(folder: Path) -> None:
    """Let the last norm be an archive whose list of files has 256 MiB, all zeros."""
    path, nbytes = folder / "release" / "__0_0.distcp", 2**28
    start = path.stat().st_size
    os.truncate(path, start + nbytes)
    with path.open("ab") as file:
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, nbytes, 0, 0))

    _move_record(folder, NORM, start, nbytes + 22)
