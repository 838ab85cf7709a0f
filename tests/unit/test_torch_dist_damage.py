"""Damaged and hostile checkpoints of Megatron-core are refused with the reason. Nothing is run, and
nothing is half-written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.types import CheckpointError
from tests.helpers.checkpoints import edit_json, invoke, make_checkpoint
from tests.helpers.torch_dist import (
    HEAD,
    NORM,
    QKV,
    Runs,
    add_tensor,
    archive,
    edit_arguments,
    edit_metadata,
    long_directory,
    replace_record,
    with_name,
)

RAN = "the_pickle_ran"


def chunks_of(content: Any, key: str) -> Any:
    return content.state_dict_metadata[key].chunks


def drop(content: Any, key: str) -> None:
    del content.state_dict_metadata[key]


def storage_of(content: Any, key: str) -> Any:
    return next(info for index, info in content.storage_data.items() if index.fqn == key)


def without_storage(content: Any) -> None:
    content.storage_data = {i: s for i, s in content.storage_data.items() if i.fqn != NORM}


def swap(content: Any) -> None:
    norm, head = storage_of(content, NORM), storage_of(content, HEAD)
    norm.offset, norm.length = head.offset, head.length


def set_size(content: Any, key: str, *size: int) -> None:
    entry = content.state_dict_metadata[key]
    entry.size = entry.chunks[0].sizes = torch.Size(size)


def stack_more(content: Any) -> None:
    content.state_dict_metadata[QKV].size = torch.Size((3, 60, 36))


def retype(content: Any, dtype: torch.dtype) -> None:
    content.state_dict_metadata[NORM].properties.dtype = dtype


def twice(content: Any) -> None:
    """Let the two halves of the head overlap."""
    entry = content.state_dict_metadata[HEAD]
    first = entry.chunks[0]
    second = type(first)(torch.Size((1, 0)), torch.Size((36, 36)))
    index = next(index for index in content.storage_data if index.fqn == HEAD)
    content.storage_data[type(index)(HEAD, second.offsets)] = content.storage_data[index]
    entry.chunks.append(second)


def only_half(content: Any) -> None:
    chunks_of(content, HEAD)[0].sizes = torch.Size((10, 36))


def add_bias(content: Any) -> None:
    add_tensor(content, "decoder.layers.mlp.linear_fc2.bias")


def append_zeros(folder: Path) -> None:
    replace_record(folder, NORM, bytes(1000))


def hostile(folder: Path) -> Runs:
    """Return an object that leaves a file behind when it is unpickled."""
    return Runs(os.system, f"touch {folder.parent / RAN}")


def repeated(name: bytes, opcode: bytes) -> bytes:
    """Return a pickle of 100,000 objects that name the same tuple of 100,000 numbers."""
    numbers = b"(" + b"K\x01" * 100_000 + b"tq\x00"
    return b"\x80\x02" + numbers + b"0](" + (name + b"h\x00" + opcode) * 100_000 + b"e."


def linked(folder: Path) -> None:
    path = folder / "release" / "__0_0.distcp"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def legacy(folder: Path) -> None:
    (folder / "release" / "mp_rank_00").mkdir()
    (folder / "release" / "mp_rank_00" / "model_optim_rng.pt").touch()


def common(folder: Path, content: bytes | None) -> None:
    (folder / "release" / "run_config.yaml").unlink()
    (folder / "release" / "common.pt").unlink()
    if content is not None:
        (folder / "release" / "common.pt").write_bytes(content)


def part(folder: Path, name: str) -> Path:
    return folder / "release" / name


BF16 = torch.zeros(36, dtype=torch.bfloat16)
CONTENT = r"\.metadata: damaged: "
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "metadata cut off": (
        lambda folder: os.truncate(part(folder, ".metadata"), 700),
        CONTENT + "it cannot be unpickled",
    ),
    "metadata empty": (lambda folder: os.truncate(part(folder, ".metadata"), 0), CONTENT),
    "metadata missing": (
        lambda folder: part(folder, ".metadata").unlink(),
        r"\.metadata: cannot be read \(No such file",
    ),
    "metadata of another kind": (
        lambda folder: part(folder, ".metadata").write_bytes(pickle.dumps({"a": 1})),
        CONTENT + "a dict where a Metadata must be",
    ),
    "metadata with a memory bomb": (
        lambda folder: part(folder, ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f."),
        CONTENT + "a NoneType where a Metadata must be",
    ),
    "metadata with an endless string": (
        lambda folder: part(folder, ".metadata").write_bytes(b"\x80\x04\x8d" + b"\xff" * 7 + b"."),
        CONTENT + "it cannot be unpickled",
    ),
    "metadata that copies its arguments": (
        lambda folder: part(folder, ".metadata").write_bytes(
            repeated(b"cargparse\nNamespace\n", pickle.REDUCE)
        ),
        CONTENT + "a list where a Metadata must be",
    ),
    "metadata that copies its items": (
        lambda folder: part(folder, ".metadata").write_bytes(
            repeated(b"ccollections\nOrderedDict\n", pickle.REDUCE)
        ),
        CONTENT + "it cannot be unpickled",
    ),
    "metadata that copies a state": (
        lambda folder: part(folder, ".metadata").write_bytes(
            repeated(b"ccollections\nOrderedDict\n)R", pickle.BUILD)
        ),
        CONTENT + "a list where a Metadata must be",
    ),
    "metadata with a key that takes forever": (
        lambda folder: part(folder, ".metadata").write_bytes(
            b"\x80\x02})" + b"2\x86" * 200 + b"Ns."
        ),
        CONTENT + "it cannot be unpickled",
    ),
    "metadata that runs a program": (
        lambda folder: part(folder, ".metadata").write_bytes(pickle.dumps(hostile(folder))),
        r"\.metadata: refused, because its pickle names posix\.system",
    ),
    "metadata that evaluates code": (
        lambda folder: part(folder, ".metadata").write_bytes(pickle.dumps(Runs(eval, "1"))),
        r"names builtins\.eval",
    ),
    "metadata that hides a program in an allowed object": (
        lambda folder: edit_metadata(
            folder, lambda content: setattr(content, "planner_data", {"x": hostile(folder)})
        ),
        r"names posix\.system",
    ),
    "metadata that imports": (
        lambda folder: part(folder, ".metadata").write_bytes(b"cdapo_megatron.files\nshutil\n."),
        r"names dapo_megatron\.files\.shutil",
    ),
    "a tensor that runs a program": (
        lambda folder: replace_record(folder, NORM, archive([hostile(folder)])),
        rf"__0_0\.distcp: {NORM}\[0:36\]: refused, because its pickle names posix\.system",
    ),
    "arguments that run a program": (
        lambda folder: common(folder, archive({"args": hostile(folder)})),
        r"common\.pt: the arguments: refused, because its pickle names posix\.system",
    ),
    "YAML that runs a program": (
        lambda folder: part(folder, "run_config.yaml").write_text(
            f"model: !!python/object/apply:os.system ['touch {folder.parent / RAN}']"
        ),
        r"run_config\.yaml: cannot be read \(could not determine a constructor",
    ),
    "YAML with merge keys": (
        lambda folder: part(folder, "run_config.yaml").write_text(
            "a: &a {x: 1}\nmodel: {<<: [*a, *a]}"
        ),
        r"run_config\.yaml: cannot be read \(it has merge keys",
    ),
    "YAML cut off": (
        lambda folder: part(folder, "run_config.yaml").write_text("model: {a: [1"),
        r"run_config\.yaml: cannot be read",
    ),
    "YAML without a model": (
        lambda folder: part(folder, "run_config.yaml").write_text("train: {}"),
        r"run_config\.yaml: has no section model",
    ),
    "no arguments": (lambda folder: common(folder, None), r"common\.pt: missing, or not"),
    "arguments are no archive": (
        lambda folder: common(folder, b"PK" + bytes(100)),
        r"common\.pt: the arguments: damaged: not what torch\.save writes",
    ),
    "file cut off": (
        lambda folder: os.truncate(part(folder, "__0_0.distcp"), 9_000),
        r"__0_0\.distcp: cut off: by \.metadata it needs [\d,]+ bytes, but the file has 9,000",
    ),
    "file missing": (
        lambda folder: part(folder, "__0_0.distcp").unlink(),
        r"__0_0\.distcp: missing, though \.metadata lists it",
    ),
    "file outside": (
        lambda folder: edit_metadata(
            folder, lambda c: setattr(storage_of(c, NORM), "relative_path", "../x.distcp")
        ),
        rf"\.metadata: {NORM}: names the file '\.\./x\.distcp'",
    ),
    "file with a long name": (
        lambda folder: edit_metadata(
            folder, lambda c: setattr(storage_of(c, NORM), "relative_path", "x" * 300)
        ),
        rf"\.metadata: {NORM}: names the file 'xxx",
    ),
    "file linked": (linked, r"__0_0\.distcp: a link to"),
    "record without elements": (append_zeros, rf"{NORM}\[0:36\]: damaged: not what torch\.save"),
    "record is no tensor": (
        lambda folder: replace_record(folder, NORM, archive([None] * 9)),
        rf"{NORM}\[0:36\]: is no tensor",
    ),
    "record of another shape": (
        lambda folder: replace_record(folder, NORM, archive(torch.zeros(40, dtype=BF16.dtype))),
        rf"{NORM}\[0:36\]: is bfloat16 \(40,\) in the file, but bfloat16 \(36,\) in \.metadata",
    ),
    "record is transposed": (
        lambda folder: replace_record(
            folder, HEAD, archive(torch.zeros(36, 37, dtype=BF16.dtype).T)
        ),
        "its elements are not contiguous",
    ),
    "record compressed": (
        lambda folder: replace_record(
            folder, NORM, archive(BF16, compression=zipfile.ZIP_DEFLATED)
        ),
        r"is compressed",
    ),
    "record with few elements": (
        lambda folder: replace_record(folder, NORM, archive(BF16, replaced={"data/0": bytes(8)})),
        r"data/0 has 8 bytes instead of 72",
    ),
    "record in another byte order": (
        lambda folder: replace_record(folder, NORM, archive(BF16, replaced={"byteorder": b"big"})),
        r"has the byte order b'big'",
    ),
    "records mixed up": (
        lambda folder: edit_metadata(folder, swap),
        rf"{NORM}\[0:36\]: is bfloat16 \(37, 36\) in the file, but bfloat16 \(36,\) in",
    ),
    "record at a negative offset": (
        lambda folder: edit_metadata(
            folder, lambda c: setattr(storage_of(c, NORM), "offset", -100)
        ),
        CONTENT + rf"{NORM} is at -100",
    ),
    "record at an offset of 2000 digits": (
        lambda folder: edit_metadata(
            folder, lambda c: setattr(storage_of(c, NORM), "offset", 1 << 20_000)
        ),
        CONTENT + rf"{NORM} is at an integer of 20,001 bits in __0_0\.distcp",
    ),
    "tensor of 2**70 rows": (
        lambda folder: edit_metadata(folder, lambda c: set_size(c, NORM, 2**70)),
        CONTENT + rf"{NORM}: size of a TensorStorageMetadata is \(1180591620717411303424,\)",
    ),
    "tensor of 17 axes": (
        lambda folder: edit_metadata(folder, lambda c: set_size(c, NORM, *[1] * 17)),
        CONTENT + rf"{NORM}: size of a TensorStorageMetadata",
    ),
    "metadata too long": (
        lambda folder: os.truncate(part(folder, ".metadata"), 2**31),
        CONTENT + "longer than 1,073,741,824 bytes",
    ),
    "metadata of empty sets": (
        lambda folder: part(folder, ".metadata").write_bytes(b"\x80\x04" + b"\x8f" * 2**16),
        CONTENT + r"it cannot be unpickled \(MemoryError: too many empty containers",
    ),
    "padding of 2000 digits": (
        lambda folder: edit_arguments(
            folder, make_vocab_size_divisible_by=1 << 20_000, tensor_model_parallel_size=1
        ),
        r"common\.pt: make_vocab_size_divisible_by is an integer of 20,001 bits",
    ),
    "norm epsilon of 2000 digits": (
        lambda folder: edit_arguments(folder, norm_epsilon=1 << 20_000),
        r"common\.pt: is of another model[^\n]+\n  norm_epsilon is an integer of 20,001 bits there",
    ),
    "record whose name is a bomb": (
        lambda folder: replace_record(folder, NORM, with_name(BF16, b")" + b"2\x86" * 22)),
        rf"{NORM}\[0:36\]: is no tensor",
    ),
    "record with a long list of files": (
        long_directory,
        rf"{NORM}\[0:36\]: damaged: not what torch\.save writes \(a part has 268,435,456 bytes",
    ),
    "record far too long": (
        lambda folder: edit_metadata(
            folder, lambda c: setattr(storage_of(c, NORM), "length", 2**62)
        ),
        r"__0_0\.distcp: cut off",
    ),
    "record too short": (
        lambda folder: edit_metadata(folder, lambda c: setattr(storage_of(c, NORM), "length", 9)),
        rf"{NORM}\[0:36\] is in only 9 bytes",
    ),
    "record transformed": (
        lambda folder: edit_metadata(
            folder, lambda c: setattr(storage_of(c, NORM), "transform_descriptors", ["zstd"])
        ),
        rf"{NORM} is stored with \['zstd'\], which cannot be read",
    ),
    "chunk without a file": (
        lambda folder: edit_metadata(folder, without_storage),
        CONTENT + rf"no file is named for {NORM}",
    ),
    "chunk missing": (
        lambda folder: edit_metadata(folder, lambda c: chunks_of(c, HEAD).clear()),
        r"the tensor lm_head\.weight is missing",
    ),
    "chunk too small": (
        lambda folder: edit_metadata(folder, only_half),
        r"only 360 of 1,332 elements of lm_head\.weight exist",
    ),
    "chunk outside": (
        lambda folder: edit_metadata(
            folder, lambda c: setattr(chunks_of(c, NORM)[0], "sizes", torch.Size((99,)))
        ),
        CONTENT + rf"{NORM} has the shape \(36,\), but a chunk at \[0:99\]",
    ),
    "chunks overlap": (
        lambda folder: edit_metadata(folder, twice),
        r"contain overlapping parts of lm_head\.weight",
    ),
    "tensor missing": (
        lambda folder: edit_metadata(folder, lambda c: drop(c, NORM)),
        r"the tensor model\.norm\.weight is missing",
    ),
    "tensor too many": (
        lambda folder: edit_metadata(folder, add_bias),
        r"decoder\.layers\.mlp\.linear_fc2\.bias is no tensor of the model in config\.json",
    ),
    "tensor of another shape": (
        lambda folder: edit_metadata(folder, lambda c: set_size(c, NORM, 30)),
        rf"{NORM} has shape \(30,\), but the model in config\.json needs \(36,\)",
    ),
    "tensor of another dtype": (
        lambda folder: edit_metadata(folder, lambda c: retype(c, torch.float16)),
        rf"{NORM}\[0:36\]: is bfloat16 \(36,\) in the file, but float16",
    ),
    "tensor quantized": (
        lambda folder: edit_metadata(folder, lambda c: retype(c, torch.int8)),
        r"model\.norm\.weight is int8; quantized weights cannot be read",
    ),
    "layers too many": (
        lambda folder: edit_metadata(folder, stack_more),
        rf"{QKV} has shape \(3, 60, 36\), but the model in config\.json needs \(2, 60, 36\)",
    ),
    "vocabulary too small": (
        lambda folder: edit_metadata(folder, lambda c: set_size(c, HEAD, 30, 36)),
        rf"{HEAD} has 30 rows, but config\.json has vocab_size 37",
    ),
    "head although tied": (
        lambda folder: edit_json(
            folder / "config.json", lambda c: c.update(tie_word_embeddings=True)
        ),
        r"share_embeddings_and_output_weights is False there, True by config\.json",
    ),
    "other backend": (
        lambda folder: part(folder, "metadata.json").write_text(
            json.dumps({"sharded_backend": "zarr"})
        ),
        r"metadata\.json: the format 'zarr'; only torch_dist is read",
    ),
    "saving did not finish": (
        lambda folder: part(folder, "metadata.json").unlink(),
        r"metadata\.json is missing: its saving did not finish",
    ),
    "old format": (legacy, r"mp_rank_\*.*--ckpt-convert-format torch_dist"),
    "tracker that names another folder": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("../../etc"),
        r"'\.\./\.\./etc' is neither an iteration nor release",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_hostile_checkpoints_are_refused_by_name(
    damage: str, source: Path, tmp_path: Path
) -> None:
    folder = copied(source, tmp_path)
    damaging, expected = DAMAGE[damage]
    damaging(folder)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=expected):
        store = open_store(folder)
        for name in store.tensors:
            store.read(name)
    assert invoke("megatron-to-hf", folder, tmp_path / "target")[0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert not (tmp_path / RAN).exists()


def test_the_hostile_pickles_would_run_elsewhere(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path)
    DAMAGE["metadata that runs a program"][0](folder)
    pickle.loads(part(folder, ".metadata").read_bytes())
    assert (tmp_path / RAN).exists()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Megatron of the model in `hf` next to it."""
    return make_checkpoint(tmp_path_factory.mktemp("torch_dist"))


def copied(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "saved")
