"""HF checkpoints: each rank reads just the slices it holds; writing streams whole tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dapo_megatron.bridge.shards import Shard
from dapo_megatron.types import CheckpointError

FILE_BYTES = 4 * 2**30
"""A safetensors file is closed when it has at least this much."""


def find_tensors(folder: Path) -> dict[str, Path]:
    """HF tensor name -> the safetensors file that holds it.

    Raises CheckpointError naming what is missing or unreadable.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{single}: cannot be read ({error}); model.path must name a folder with safetensors"
        ) from error


def read_into(folder: Path, shards: Sequence[Shard]) -> None:
    """Fill the shards from an HF checkpoint.

    Raises CheckpointError naming a tensor that is missing or misshapen.
    """
    places = find_tensors(folder)
    by_file: dict[Path, list[Shard]] = defaultdict(list)
    for shard in shards:
        if shard.name not in places:
            raise CheckpointError(f"{folder}: the tensor {shard.name} is missing")
        by_file[places[shard.name]].append(shard)
    for path, wanted in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for shard in wanted:
                    piece = file.get_slice(shard.name)
                    if tuple(piece.get_shape()) != shard.global_shape:
                        raise CheckpointError(
                            f"{path}: {shard.name} has shape {tuple(piece.get_shape())}, "
                            f"the model in config.json needs {shard.global_shape}"
                        )
                    shard.write(piece[shard.region.slices])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error


def write_checkpoint(
    folder: Path, weights: Iterable[tuple[str, Tensor]], source: Path, *, is_writer: bool
) -> None:
    """Write `weights` as an HF checkpoint, with all that is not weights copied from `source`.

    Every rank iterates (the weights are gathered from all); the one with `is_writer` writes.
    """
    files: dict[str, list[str]] = {}
    held: dict[str, Tensor] = {}
    num_bytes = 0

    def close() -> None:
        name = f"model-{len(files) + 1:05d}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
        files[name] = list(held)
        held.clear()

    for name, tensor in weights:
        if is_writer:
            held[name] = tensor.detach().to("cpu", copy=True)
            num_bytes += tensor.nbytes
            if sum(one.nbytes for one in held.values()) >= FILE_BYTES:
                close()
    if not is_writer:
        return
    if held:
        close()
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("model") and path.suffix != ".safetensors":
            shutil.copy2(path, folder / path.name)
