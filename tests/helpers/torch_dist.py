"""Write checkpoints of Megatron-core, and damage them."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from dapo_megatron.checkpoints.formats.store import Store
from dapo_megatron.checkpoints.formats.torch_dist.store import write_torch_dist
from dapo_megatron.checkpoints.formats.weights_folder import copy_companions


def to_torch_dist(source: Store, folder: Path) -> Path:
    """Write a checkpoint as the program does. Return `folder`."""
    folder.mkdir(parents=True)
    write_torch_dist(source, folder, source.tensors, lambda _: None)
    copy_companions(source.model_folder, folder)
    return folder


# ------------------------------------------------------------------------------- damage

QKV = "decoder.layers.self_attention.linear_qkv.weight"
NORM = "decoder.final_layernorm.weight"
HEAD = "output_layer.weight"


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
    """Append `data` to the file, and let the record of the tensor or object `key` name it."""
    path = folder / "release" / "__0_0.distcp"
    offset = path.stat().st_size
    with path.open("ab") as file:
        file.write(data)

    def change(content: Any) -> None:
        place = _StorageInfo(path.name, offset, len(data))
        indices = [index for index in content.storage_data if index.fqn == key]
        content.storage_data |= dict.fromkeys(indices or [MetadataIndex(key)], place)

    edit_metadata(folder, change)


def archive(value: Any, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return what torch.save writes for `value`, perhaps compressed."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(changed, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return changed.getvalue()
