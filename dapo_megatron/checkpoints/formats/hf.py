"""HF folders: config.json, and one safetensors file or several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.store import (
    FileSlice,
    Store,
    blocks,
    check_mtp,
    checked_tensors,
)
from dapo_megatron.checkpoints.formats.tensor_file import (
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    check_room,
)
from dapo_megatron.checkpoints.formats.weights_folder import HF_INDEX, check_file_name
from dapo_megatron.files import read_json, write_text
from dapo_megatron.model import (
    Architecture,
    architecture,
    mtp_layers,
    text_fields,
    without_mtp,
)
from dapo_megatron.types import CheckpointError, Region, whole

Progress = Callable[[int], object]
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 4 * 2**30
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ONE_DOWNLOAD = "index and files are from different downloads, download the folder again"
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.")
_STACKED_EXPERTS = re.compile(r"^(.+\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_MTP, VISION, _LANGUAGE = "mtp.", "model.visual.", "model.language_model."
"""Prefixes of tensors in models for images and text."""
_BUFFER = ".rotary_emb.inv_freq"
"""Suffix of a buffer that old versions of transformers saved. It is ignored, because it follows
from config.json."""


def open_hf(folder: Path, ignore: Collection[str] = (), *, drop_mtp: bool = False) -> Store:
    """Open an HF folder; `ignore` lists fields of its config.json to ignore. `drop_mtp` leaves out
    layers for multi-token prediction. Of a model for images and text, its text model is opened.

    Raises CheckpointError if the tensors are not exactly the model's in config.json, and
    ConfigError for an unsupported model.
    """
    released = read_json(folder / "config.json")
    arch, config = architecture(released, ignore), text_fields(released)
    files, file_of = _find_tensors(folder)
    _split_experts(files, file_of, arch)
    has_images = config != released
    vision = sorted(key for key in file_of if has_images and key.startswith(VISION))
    prefix = _LANGUAGE if has_images else "model."
    keys: dict[str, str] = {}  # by name in the text model
    for key in sorted(file_of.keys() - vision):
        name = f"model.{key.removeprefix(prefix)}" if key.startswith(prefix) else key
        if keys.setdefault(name, key) != key:
            raise CheckpointError(f"{folder}: has both {keys[name]} and {key}; remove one of them")
    keys = {name: key for name, key in keys.items() if not name.endswith(_BUFFER)}
    infos = {name: files[file_of[key]].tensors[key] for name, key in keys.items()}
    if arch.tie_word_embeddings and {_EMBEDDING, _HEAD} <= infos.keys():
        _check_tied_head(
            *((files[file_of[keys[name]]], keys[name]) for name in (_EMBEDDING, _HEAD))
        )
        del infos[_HEAD]
    if mtp := _mtp_tensors(infos, mtp_layers(config)):
        check_mtp(folder, mtp, drop_mtp=drop_mtp)
        config = without_mtp(config)
        infos = {name: infos[name] for name in infos.keys() - mtp}
    infos = checked_tensors(folder, infos, arch)
    return Store(
        folder=folder,
        format="hf",
        layout={"files": len(files)},
        config=config,
        arch=arch,
        tensors=infos,
        file_slices={
            name: [FileSlice(name, region, file_of[keys[name]], keys[name], region.start)]
            for name, info in infos.items()
            for region in [whole(info.shape)]
        },
        files=files,
        dropped=[*mtp, *vision],
    )


class HfWriter:
    """Writes an HF folder: `model.safetensors`, or several files and their index.

    One process calls `create`. Then many processes may write concurrently. At last one process
    calls `finish`, which makes the files readable. A file has at most `max_file_bytes` of tensors,
    or a single larger tensor. Methods raise CheckpointError, as on a full disk.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorInfo],
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.folder = folder
        self._tensors = tensors
        self._files = {
            name: TensorFileWriter(folder / name, infos, {"format": "pt"})
            for name, infos in _by_file(tensors, max_file_bytes).items()
        }
        self._file_of = {
            name: file for file, writer in self._files.items() for name in writer.tensors
        }
        self.nbytes = sum(file.nbytes for file in self._files.values())
        """Total size of the files in bytes."""

    def create(self) -> None:
        """Create the files in their final size, if the disk has room for them."""
        check_room(self.folder, self.nbytes)
        for file in self._files.values():
            file.create()

    def write(self, name: str, value: Tensor, box: Region) -> None:
        """Write a box of a tensor, converted to the dtype of its file."""
        file = self._files[self._file_of[name]]
        file.write(name, value.to(self._tensors[name].dtype), box)

    def copy(self, source: Store, names: Iterable[str], progress: Progress) -> None:
        """Write these tensors of a store, block by block. `progress` is called with the number
        of bytes read for each block."""
        for name in names:
            info = source.info(name)
            for box in blocks(whole(info.shape), info.dtype.itemsize):
                value = source.read(name, box)
                self.write(name, value, box)
                progress(value.nbytes)

    def finish(self) -> None:
        """Make the files readable, and write the index of several files."""
        for file in self._files.values():
            file.finish()
        if SINGLE in self._files:
            return
        index = {
            "metadata": {"total_size": sum(info.nbytes for info in self._tensors.values())},
            "weight_map": self._file_of,
        }
        text = json.dumps(index, indent=2, sort_keys=True)
        write_text(self.folder / HF_INDEX, text + "\n")


def _by_file(
    tensors: Mapping[str, TensorInfo], max_file_bytes: int
) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each file."""
    files, room = [dict[str, TensorInfo]()], max_file_bytes
    for name, info in tensors.items():
        if info.nbytes > room and files[-1]:
            files.append({})
            room = max_file_bytes
        files[-1][name] = info
        room -= info.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": infos
        for number, infos in enumerate(files, start=1)
    }


def _split_experts(
    files: Mapping[str, TensorFile], file_of: dict[str, str], arch: Architecture
) -> None:
    """Replace tensors of all experts of a layer, which releases of Qwen3.5 have, by the tensors of
    each expert. Raises CheckpointError for another shape."""
    rows, hidden = arch.moe_intermediate_size, arch.hidden_size
    parts = {
        "gate_up_proj": {"gate_proj": (rows, hidden), "up_proj": (rows, hidden)},
        "down_proj": {"down_proj": (hidden, rows)},
    }
    stacked = {"gate_up_proj": (2 * rows, hidden), "down_proj": (hidden, rows)}
    for match in [match for match in map(_STACKED_EXPERTS.match, [*file_of]) if match]:
        key, prefix, projection = match[0], match[1], match[2]
        name = file_of.pop(key)
        wanted = (arch.num_experts, *stacked[projection])
        if (shape := files[name].tensors[key].shape) != wanted:
            raise CheckpointError(
                f"{files[name].path}: {key} has shape {shape}, but the model in config.json needs "
                f"{wanted}"
            )
        shapes = {
            f"{prefix}.{expert}.{part}.weight": shape
            for expert in range(arch.num_experts)
            for part, shape in parts[projection].items()
        }
        if twice := shapes.keys() & file_of.keys():
            raise CheckpointError(
                f"{files[name].path}: has {key}, and {min(twice)} of it apart; remove one of them"
            )
        files[name].split(key, shapes)
        file_of |= dict.fromkeys(shapes, name)


def _find_tensors(folder: Path) -> tuple[dict[str, TensorFile], dict[str, str]]:
    """Return files by name, and the file name of each tensor. Raises CheckpointError."""
    index = folder / HF_INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(_why_no_weights(folder))
        file = TensorFile(folder / SINGLE)
        return {SINGLE: file}, dict.fromkeys(file.tensors, SINGLE)
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
        raise CheckpointError(f"{index}: has no weight_map of tensors to file names")
    if (folder / SINGLE).exists() and SINGLE not in file_of.values():
        # transformers would load the single file, vLLM the others.
        raise CheckpointError(
            f"{folder}: has two forms of weights, {SINGLE} and the files of {HF_INDEX}, which may "
            "be of different trainings; remove one of them"
        )
    files = {}
    for name in sorted(set(file_of.values())):
        check_file_name(name, index)
        if not (folder / name).exists():
            raise CheckpointError(
                f"{folder / name}: missing, though {HF_INDEX} names it; download it again"
            )
        files[name] = TensorFile(folder / name)
    for name, file_name in file_of.items():
        if name not in files[file_name].tensors:
            raise CheckpointError(
                f"{folder / file_name}: the tensor {name} is missing, though {HF_INDEX} lists it; "
                f"{_ONE_DOWNLOAD}"
            )
    for file_name, file in files.items():
        for name in file.tensors:
            if (listed := file_of.get(name, "no file")) != file_name:
                raise CheckpointError(
                    f"{index}: names {listed} for {name}, which is in {file_name}; {_ONE_DOWNLOAD}"
                )
    return files, file_of


def _mtp_tensors(names: Iterable[str], layers: range) -> list[str]:
    """Return the names of tensors for multi-token prediction, of these layers or apart, sorted."""
    matches = {name: _LAYER.match(name) for name in names}
    return sorted(
        name
        for name, match in matches.items()
        if name.startswith(_MTP) or (match and int(match[1]) in layers)
    )


def _why_no_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        return (
            f"{folder}: only pickled weights ({pickled[0]}), which can run code when they are "
            "loaded; get this model in safetensors format, or convert it in an isolated place: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER)"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return f"{folder}: {HF_INDEX} is missing next to {others[0]}; download it again"
    return f"{folder}: has neither {SINGLE} nor {HF_INDEX}"


def _check_tied_head(embedding: tuple[TensorFile, str], head: tuple[TensorFile, str]) -> None:
    """Check that the head of a tied checkpoint, which some contain, equals the embedding bit by
    bit. Raises CheckpointError if not."""
    infos = [file.tensors[key] for file, key in (embedding, head)]
    boxes = blocks(whole(infos[0].shape), infos[0].dtype.itemsize)
    if infos[0] != infos[1] or not all(
        torch.equal(*(file.read(key, box).view(torch.uint8) for file, key in (embedding, head)))
        for box in boxes
    ):
        raise CheckpointError(
            f"{head[0].path}: {_HEAD} differs from {_EMBEDDING}, though config.json ties them "
            "(tie_word_embeddings)"
        )
