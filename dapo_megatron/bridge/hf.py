"""Reading HF checkpoints: each rank takes from the safetensors files just the slices it holds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dapo_megatron.bridge.shards import Shard
from dapo_megatron.types import CheckpointError


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


def read_into(folder: Path, shards: Sequence[Shard], ignore: Sequence[str] = ()) -> None:
    """Fill the shards from an HF checkpoint.

    Raises CheckpointError naming a tensor that is missing or misshapen, or (over all ranks a
    caller's business) left unread by nobody's rule; names in `ignore` may be absent or unread.
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
