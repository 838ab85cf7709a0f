"""Checkpoints of Megatron as a `Store`: opened, and written."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.store import (
    FileSlice,
    Store,
    blocks,
    check_mtp,
    checked_tensors,
    disjoint,
    dtype_of,
    read_parameter,
)
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo, cannot_write, check_room
from dapo_megatron.checkpoints.formats.torch_dist.boxes import (
    METADATA,
    Box,
    write_boxes,
    write_metadata,
)
from dapo_megatron.checkpoints.formats.torch_dist.model_config import (
    SavedConfig,
    check_config,
    megatron_fields,
    read_config,
    write_config,
)
from dapo_megatron.checkpoints.formats.torch_dist.names import (
    CENTERED,
    KeyEntry,
    Name,
    key_entry,
    keys_of,
    parameters_of,
    parse_key,
    part_keys,
    stacks_layers,
    state_keys,
)
from dapo_megatron.checkpoints.formats.torch_dist.reading import (
    Chunk,
    ChunkEntry,
    Contents,
    RecordFile,
    plus_one,
    read_contents,
)
from dapo_megatron.checkpoints.formats.torch_dist.records import naming
from dapo_megatron.checkpoints.formats.weights_folder import (
    RELEASE,
    TRACKER,
    check_links,
    declare_written_here,
)
from dapo_megatron.files import read_file, read_json
from dapo_megatron.model import Architecture, LocalParameter, architecture, without_mtp
from dapo_megatron.types import CheckpointError, Region, dtype_name

FORMAT = "torch_dist"
_ABOUT = "metadata.json"
_MAX_PADDING = 128 * 128
"""Maximum padding of the vocabulary: Megatron-LM pads to 128 rows for each tensor-parallel rank."""
_MTP = "mtp."
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


# ------------------------------------------------------------------------------- reading


def find_iteration(folder: Path) -> Path | None:
    """Return the folder of the checkpoint in `folder`: itself, or the one that the tracker file
    names. Return None if it is no folder of Megatron.

    Raises CheckpointError for a checkpoint that is missing, or in a format that is not read.
    """
    tracker = folder / TRACKER
    if tracker.exists():
        name = _newest(tracker)
        if not (folder / name).is_dir():
            raise CheckpointError(f"{folder / name}: missing, though {TRACKER} names it")
        folder = folder / name
    if any(folder.glob("mp_rank_*")):
        raise CheckpointError(
            f"{folder}: has the old format `torch` of Megatron-LM (mp_rank_*), whose files can run "
            "programs when they are loaded. Convert it with Megatron-LM, in the layout and with "
            "the arguments of its training: torchrun ... pretrain_gpt.py ... --use-checkpoint-args "
            "--no-load-optim --no-load-rng --load FOLDER --ckpt-format torch "
            "--ckpt-convert-format torch_dist --ckpt-convert-save OTHER_FOLDER"
        )
    has_metadata, has_about = (folder / METADATA).exists(), (folder / _ABOUT).exists()
    if not (has_metadata or tracker.exists()) and (folder / "config.json").exists():
        return None  # a metadata.json of something else
    if has_metadata and not has_about:
        raise CheckpointError(
            f"{folder}: {_ABOUT} is missing: its saving did not finish, or it was not saved by "
            "Megatron-core in the format torch_dist"
        )
    if not has_about and not tracker.exists():
        return None
    backend = read_json(folder / _ABOUT).get("sharded_backend")
    if backend != FORMAT:
        raise CheckpointError(
            f"{folder / _ABOUT}: the format {backend!r:.40}; only {FORMAT} is read. Load the "
            "checkpoint in Megatron and save it with --ckpt-format torch_dist"
        )
    return folder


def _newest(tracker: Path) -> str:
    """Return the name of the folder that a tracker file names. Raises CheckpointError."""
    try:
        text = read_file(tracker, 100).decode().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tracker}: cannot be read ({error})") from None
    if text == RELEASE:
        return text
    if not re.fullmatch("[0-9]{1,9}", text):
        raise CheckpointError(f"{tracker}: {text!r:.40} is neither an iteration nor {RELEASE}")
    return f"iter_{int(text):07d}"


def open_torch_dist(
    folder: Path,
    iteration: Path,
    ignore: Collection[str] = (),
    hf: Path | None = None,
    *,
    drop_mtp: bool = False,
) -> Store:
    """Open the checkpoint `iteration`, which was found for `folder`.

    `hf` is a folder with config.json and tokenizer. By default they are in the checkpoint, or next
    to it. `drop_mtp` leaves out layers for multi-token prediction. Raises CheckpointError naming
    the faulty file, tensor or value, and ConfigError for an unsupported model.
    """
    check_links(iteration)
    homes = [hf] if hf else [iteration, folder, iteration.parent]
    home = next((path for path in homes if (path / "config.json").exists()), None)
    if home is None:
        raise CheckpointError(
            f"{hf or folder}: has no config.json, which Megatron does not write. Name the HF model "
            "from which the checkpoint was made with --hf-config, or copy its config.json and "
            f"tokenizer into {folder}"
        )
    config = read_json(home / "config.json")
    arch = architecture(config, ignore)
    contents = read_contents(iteration)
    saved = read_config(iteration)
    with naming(saved.path if saved else iteration):  # its numbers may be of any size
        if saved:
            check_config(iteration, saved, arch)
        _check_vocabulary(iteration, contents, saved, arch)
    contents, dropped = _without_mtp(iteration, contents, drop_mtp)
    if dropped:
        config = without_mtp(config)
    # A run of this project saves HF's values.
    items, file_slices, tensors = _tensors(iteration, contents, arch, centered=saved is not None)
    tensors = checked_tensors(iteration, tensors, arch)
    by_name, copies = disjoint(iteration, file_slices, tensors)
    store = Store(
        folder=iteration,
        format=FORMAT,
        layout={"files": len(items), "checkpoint": iteration.name},
        config=config,
        arch=arch,
        tensors=tensors,
        file_slices=by_name,
        files={name: RecordFile(iteration / name, of_file) for name, of_file in items.items()},
        companions=home,
        dropped=dropped,
    )
    for first, second in copies:
        _check_copies(store, first, second)
    return store


def _check_copies(store: Store, first: FileSlice, second: FileSlice) -> None:
    """Raise CheckpointError unless two copies of a box, such as a norm under the names of
    Megatron's own layers and of Transformer Engine's, have the same bits."""
    for box in blocks(first.region, store.tensors[first.name].dtype.itemsize):
        values, copy = (store.read_slice(each, box).view(torch.uint8) for each in (first, second))
        if not torch.equal(values, copy):
            raise CheckpointError(
                f"{store.folder}: {first.key} and {second.key} are copies of {first.name} and "
                "differ, so one of them is wrong; take another checkpoint"
            )


def _without_mtp(folder: Path, contents: Contents, drop_mtp: bool) -> tuple[Contents, list[str]]:
    """Return the contents without layers for multi-token prediction, and the tensors of these."""
    dropped = sorted(key for key in contents.tensors if key.startswith(_MTP))
    check_mtp(folder, dropped, drop_mtp=drop_mtp)
    left_out = set(dropped)
    tensors = {key: info for key, info in contents.tensors.items() if key not in left_out}
    chunks = [chunk for chunk in contents.chunks if chunk.key in tensors]
    return Contents(tensors, chunks, contents.objects), dropped


def _tensors(
    folder: Path, contents: Contents, arch: Architecture, *, centered: bool
) -> tuple[dict[str, dict[str, ChunkEntry]], list[FileSlice], dict[str, TensorInfo]]:
    """Return items by file and key, the slices in them, and the HF tensors. `centered`: whether
    `CENTERED` is stored minus 1."""
    parameters = parameters_of(arch)
    items: dict[str, dict[str, ChunkEntry]] = {}
    file_slices: list[FileSlice] = []
    tensors: dict[str, TensorInfo] = {}
    seen = set()
    names = {key: parse_key(key) for key in contents.tensors}
    for key, name in names.items():
        _check_shape(folder, key, name, contents.tensors[key], parameters, arch)
    for chunk in contents.chunks:
        name = names[chunk.key]
        start, sizes = chunk.region.start, chunk.region.shape
        for index in product(*map(range, sizes[: name.num_leading])):
            at = tuple(a + b for a, b in zip(start, index, strict=False))
            entry = name.entry(at)
            # A tensor with two names; one is an alias.
            identity = (entry.local, chunk.region, chunk.record)
            if identity in seen:
                continue
            seen.add(identity)
            inside = Region((*at, *start[len(at) :]), (*(1 for _ in at), *sizes[len(at) :]))
            item_key, item = f"{chunk.key}{inside}", ChunkEntry(chunk, index)
            if centered and entry.rest == CENTERED:
                item = plus_one(folder, item)
            items.setdefault(chunk.record.file, {})[item_key] = item
            parameter = parameters.get(entry.local)
            if parameter is None:
                raise _no_tensor(folder, entry.local, arch)
            for file_slice, shape in _slices(chunk, name, item_key, parameter):
                info = TensorInfo(shape, item.info.dtype)
                if tensors.setdefault(file_slice.name, info) != info:
                    raise CheckpointError(
                        f"{folder}: {chunk.key}: {file_slice.name} is {info.dtype} here and "
                        f"{tensors[file_slice.name].dtype} elsewhere"
                    )
                file_slices.append(file_slice)
    return items, file_slices, tensors


def _check_shape(
    folder: Path,
    key: str,
    name: Name,
    info: TensorInfo,
    parameters: Mapping[str, LocalParameter],
    arch: Architecture,
) -> None:
    """Raise CheckpointError unless a tensor of the checkpoint is one of the model's."""
    sizes = [
        *([arch.num_layers] if name.stacks_layers else []),
        *([arch.num_experts] if name.stacks_experts else []),
    ]
    parameter = parameters.get(name.entry((0,) * name.num_leading).local)
    if name.stacks_layers and parameter is None:  # tensors that the first layers do not have
        parameter = parameters.get(name.entry((arch.num_layers - 1, 0)[: name.num_leading]).local)
    if key == "output_layer.weight" and arch.tie_word_embeddings:
        raise CheckpointError(
            f"{folder}: has {key}, but config.json ties the head to the embedding "
            "(tie_word_embeddings = true)"
        )
    if parameter is None:
        raise _no_tensor(folder, key, arch)
    rows, *columns = parameter.shape
    if name.part is not None:
        rows = parameter.parts[name.part].region.shape[0]
    wanted = (*sizes, rows, *columns)
    if key in _VOCABULARY:
        wanted = (info.shape[0] if info.shape else 0, *columns)  # `_check_vocabulary`
    if info.shape != wanted:
        raise CheckpointError(
            f"{folder}: {key} has shape {info.shape}, but the model in config.json needs {wanted}"
        )


def _check_vocabulary(
    folder: Path, contents: Contents, saved: SavedConfig | None, arch: Architecture
) -> None:
    """Raise CheckpointError unless embedding and head have the rows of the vocabulary, padded or
    not."""
    padded = None if saved is None else saved.padded_vocabulary(arch.vocab_size)
    for key in filter(contents.tensors.__contains__, _VOCABULARY):
        rows = next(iter(contents.tensors[key].shape), 0)
        if padded is None:
            is_right = arch.vocab_size <= rows <= arch.vocab_size + _MAX_PADDING
            limit = f"padding adds 0 to {_MAX_PADDING:,} rows"
        else:
            is_right = rows in (arch.vocab_size, padded)
            limit = (
                f"padded to {padded:,} by make_vocab_size_divisible_by x "
                f"tensor_model_parallel_size in {saved.path.name if saved else folder}"
            )
        if not is_right:
            raise CheckpointError(
                f"{folder}: {key} has {rows:,} rows, but config.json has vocab_size "
                f"{arch.vocab_size:,}; {limit}. If the tokenizer has no more tokens than rows, use "
                f"a copy of the HF model with vocab_size {rows} in config.json"
            )


def _no_tensor(folder: Path, key: str, arch: Architecture) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {key} is no tensor of the model in config.json ({arch.family}, "
        f"{arch.num_layers} layers)"
    )


def _slices(
    chunk: Chunk, name: Name, item_key: str, parameter: LocalParameter
) -> Iterator[tuple[FileSlice, tuple[int, ...]]]:
    """Yield the boxes of HF tensors in a chunk, and the shapes of these tensors."""
    start = chunk.region.start[name.num_leading :]
    if name.part is not None:
        start = (start[0] + parameter.parts[name.part].first_row, *start[1:])
    box = Region(start, chunk.region.shape[name.num_leading :])
    for part in parameter.parts:
        # The box of the part in the parameter. A part fills full rows of it.
        inside = Region((part.first_row, *(0 for _ in start[1:])), part.region.shape)
        if shared := inside.intersect(box):
            offset = shared.within(inside).start
            at = tuple(a + b for a, b in zip(part.region.start, offset, strict=True))
            region = Region(at, shared.shape)
            stored = shared.within(box).start
            file_slice = FileSlice(part.name, region, chunk.record.file, item_key, stored)
            yield file_slice, part.global_shape


# ------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter, or a part of one, that is written as Megatron's tensor `key`."""

    key: str
    entry: KeyEntry
    parameter: LocalParameter
    dtype: torch.dtype

    def box(self, source: Store, progress: Callable[[int], object]) -> Box:
        """Read the values, and return their box in the tensor."""
        values = read_parameter(source, self.parameter)
        progress(values.nbytes)
        values = values.to(self.dtype)
        if self.entry.name.rest == CENTERED:
            values = _minus_one(self.parameter.parts[0].name, values)
        offset = (*self.entry.index, *(0 for _ in values.shape))
        shape = (*self.entry.sizes, *values.shape)
        return Box(self.key, offset, shape, values[(None,) * len(self.entry.index)])


def _minus_one(name: str, weight: Tensor) -> Tensor:
    """Return `weight` - 1. Raises CheckpointError if it is rounded."""
    centered = weight - 1
    rounded = int((centered + 1 != weight).sum())
    if rounded:
        advice = "; use --dtype float32" if weight.itemsize < 4 else ""
        raise CheckpointError(
            f"{name}: Megatron stores weight - 1 of this norm, which {dtype_name(weight.dtype)} "
            f"would round in {rounded} of {weight.numel()} elements{advice}"
        )
    return centered


def write_torch_dist(
    source: Store,
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    progress: Callable[[int], object],
) -> int:
    """Write a checkpoint that Megatron loads in any layout, as `release` in a folder with
    config.json and tokenizer. Return the number of bytes.

    tensors   dtypes to write, by HF name
    progress  called with the number of bytes read for each parameter

    Raises ConfigError for a model that Megatron does not have, and CheckpointError if HF tensors
    that are merged or stacked into one tensor have different dtypes, or a norm would be rounded.
    """
    arch = source.arch
    megatron_fields(arch)  # raises
    pieces: list[_Piece] = []
    first_of: dict[str, tuple[str, torch.dtype]] = {}
    for local, parameter in parameters_of(arch).items():
        dtype = dtype_of(local, parameter.parts, tensors)
        entry = key_entry(local, arch)
        first, first_dtype = first_of.setdefault(entry.name.key, (local, dtype))
        if dtype != first_dtype:
            raise CheckpointError(
                f"{entry.name.key}: Megatron has one tensor for {first} ({dtype_name(first_dtype)})"
                f" and {local} ({dtype_name(dtype)}), so their dtypes must be equal; use --dtype"
            )
        if keys := part_keys(entry.name):
            for key, part in zip(keys, parameter.parts, strict=False):
                alone = LocalParameter(part.region.shape, (replace(part, first_row=0),))
                pieces.append(_Piece(key, entry, alone, dtype))
        else:
            pieces += [_Piece(key, entry, parameter, dtype) for key in keys_of(entry.name, arch)]
        if entry.name.rest == CENTERED:  # before anything is written
            _minus_one(parameter.parts[0].name, read_parameter(source, parameter).to(dtype))
    nbytes = sum(prod(piece.parameter.shape) * piece.dtype.itemsize for piece in pieces)
    check_room(folder, nbytes)
    release = folder / RELEASE
    release.mkdir()
    buffer = io.BytesIO()
    torch.save([None], buffer)
    objects = dict.fromkeys(state_keys(arch), buffer.getvalue())
    try:
        boxes = (piece.box(source, progress) for piece in pieces)
        stored, _ = write_boxes(release, 0, boxes, objects)
    except OSError as error:
        raise cannot_write(release, nbytes, error) from error
    write_metadata(release, stored)
    [(dtype, _)] = Counter(info.dtype for info in tensors.values()).most_common(1)
    write_config(release, arch, dtype, stacks_layers(arch))
    write_about(release)
    declare_written_here(release)
    (folder / TRACKER).write_text(RELEASE, encoding="utf-8")
    return sum(box.num_bytes for box in stored)


def write_about(folder: Path) -> None:
    """Write the file by which Megatron knows the format."""
    about = {
        "sharded_backend": FORMAT,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
