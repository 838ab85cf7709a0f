"""Write checkpoints of Megatron-core in the layouts of many ranks, in one process, and damage
them."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from dapo_megatron.checkpoints.formats.store import Store, fill
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.torch_dist.metadata import Chunk, Record, write_metadata
from dapo_megatron.checkpoints.formats.torch_dist.names import parameters_of
from dapo_megatron.checkpoints.formats.torch_dist.store import MAX_FILE_BYTES, TorchDistWriter
from dapo_megatron.model import LocalParameter
from dapo_megatron.types import Region

_BY_COLUMNS = (".linear_proj.weight", ".linear_fc2.weight")
_BY_ROWS = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight",
    "embedding.word_embeddings.weight",
    "output_layer.weight",
)


def to_torch_dist(source: Store, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Path:
    """Write a checkpoint as the program does. Return `folder`."""
    folder.mkdir()
    writer = TorchDistWriter(folder, source.arch, source.tensors, max_file_bytes)
    writer.create()
    fill(writer, source, lambda _: None)
    writer.finish(source.model_folder)
    return folder


def save_as_ranks(source: Store, folder: Path, *, tp: int, ep: int, style: str) -> Path:
    """Write a checkpoint as `tp` x `ep` ranks of Megatron do. Return `folder`.

    `style` is "stacked", "by layer" or "singleton" (a key for each layer, expert, gate and up).
    """
    to_torch_dist(source, folder)
    tensors: dict[str, TensorInfo] = {}
    chunks = []
    for number, (key, size, start, value) in enumerate(_pieces(source, tp, ep, style)):
        path = folder / "release" / f"__{number % (tp * ep)}_0.distcp"
        with path.open("ab") as file:
            offset = file.tell()
            torch.save(value, file)
            record = Record(path.name, offset, file.tell() - offset)
        tensors[key] = TensorInfo(size, value.dtype)
        chunks.append(Chunk(key, Region(start, tuple(value.shape)), value.dtype, record))
    write_metadata(folder / "release", tensors, chunks, {})
    return folder


def _pieces(
    source: Store, tp: int, ep: int, style: str
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Yield (key, shape of the whole, start, tensor) of all ranks."""
    arch = source.arch
    values = {local: _value(source, parameter) for local, parameter in parameters_of(arch).items()}
    stacks: dict[str, dict[int, Tensor]] = {}
    for local, value in values.items():
        prefix, _, rest = local.partition("mlp.experts.local_experts.")
        if rest and style != "singleton":
            expert, _, name = rest.partition(".")
            stacks.setdefault(f"{prefix}mlp.experts.experts.{name}", {})[int(expert)] = value
        elif rest:
            yield from _split(f"{prefix}mlp.experts.experts.{rest}", value, 1, style)
        elif style == "stacked" and local.startswith("decoder.layers."):
            _, _, layer, name = local.split(".", 3)
            for key, size, start, part in _split(f"decoder.layers.{name}", value, tp, style):
                at = (int(layer), *start)
                yield key, (arch.num_layers, *size), at, part[None]
        else:
            yield from _split(local, value, tp, style)
    for key, experts in stacks.items():
        # As the experts of a rank in one tensor, and its gate and up in one.
        whole = torch.stack([experts[number] for number in sorted(experts)])
        for rank, part in enumerate(whole.chunk(ep)):
            at = (rank * part.shape[0], 0, 0)
            if style == "stacked":
                _, _, layer, name = key.split(".", 3)
                size = (arch.num_layers, *whole.shape)
                yield f"decoder.layers.{name}", size, (int(layer), *at), part[None].clone()
            else:
                yield key, tuple(whole.shape), at, part.clone()


def _split(
    key: str, value: Tensor, tp: int, style: str
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Yield (key, shape of the whole, start, tensor) of the tensor-parallel ranks."""
    if key.endswith("linear_fc1.weight"):
        halves = value.chunk(2)
        for number, half in enumerate(halves):
            name = f"{key}_{'wv'[number]}" if style == "singleton" else key
            first = 0 if style == "singleton" else number * half.shape[0]
            size = tuple(half.shape if style == "singleton" else value.shape)
            for rank, part in enumerate(half.chunk(tp)):
                yield name, size, (first + rank * part.shape[0], 0), part.clone()
        return
    axis = 1 if key.endswith(_BY_COLUMNS) else 0
    if not key.endswith((*_BY_COLUMNS, *_BY_ROWS)):
        tp = 1
    if padding := -value.shape[axis] % tp:
        value = torch.cat([value, torch.full((padding, *value.shape[1:]), 7.0).to(value.dtype)])
    for rank, part in enumerate(value.chunk(tp, dim=axis)):
        start = [0] * value.dim()
        start[axis] = rank * part.shape[axis]
        yield key, tuple(value.shape), tuple(start), part.clone()


def _value(source: Store, parameter: LocalParameter) -> Tensor:
    value = torch.empty(parameter.shape, dtype=source.info(parameter.parts[0].name).dtype)
    for part in parameter.parts:
        value[part.rows] = source.read(part.name, part.region)
    return value


# ------------------------------------------------------------------------------- damage


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

    def change(content: Any) -> None:
        for index, info in content.storage_data.items():
            if index.fqn == key:
                info.offset, info.length = offset, len(data)

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
