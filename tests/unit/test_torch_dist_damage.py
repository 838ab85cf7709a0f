"""Damaged and hostile checkpoints of Megatron-core: nothing that they name is run, nothing is
half-written, and the error names the file."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box, Reading, read_metadata
from dapo_megatron.types import CheckpointError, ConfigError
from tests.helpers.checkpoints import invoke, make_checkpoint
from tests.helpers.torch_dist import (
    HEAD,
    NORM,
    QKV,
    Runs,
    add_tensor,
    archive,
    edit_arguments,
    edit_metadata,
    replace_record,
)

RAN = "the_pickle_ran"
BF16 = torch.zeros(36, dtype=torch.bfloat16)


def part(folder: Path, name: str) -> Path:
    return folder / "release" / name


def storage_of(content: Any, key: str) -> Any:
    return next(info for index, info in content.storage_data.items() if index.fqn == key)


def only_common(folder: Path, value: Any) -> None:
    """Let `common.pt` be the only file with a configuration."""
    part(folder, "run_config.yaml").unlink()
    torch.save(value, part(folder, "common.pt"))


def twice(content: Any) -> None:
    """Let the two halves of the head overlap."""
    entry = content.state_dict_metadata[HEAD]
    second = type(entry.chunks[0])(torch.Size((1, 0)), torch.Size((36, 36)))
    index = next(index for index in content.storage_data if index.fqn == HEAD)
    content.storage_data[type(index)(HEAD, second.offsets)] = content.storage_data[index]
    entry.chunks.append(second)


def linked(folder: Path) -> None:
    path = part(folder, "__0_0.distcp")
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def legacy(folder: Path) -> None:
    (folder / "release" / "mp_rank_00").mkdir()
    (folder / "release" / "mp_rank_00" / "model_optim_rng.pt").touch()


def metadata(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_metadata(folder, change)


def place(**values: Any) -> Callable[[Path], None]:
    """Change where the last norm is stored."""
    return metadata(lambda c: [setattr(storage_of(c, NORM), *each) for each in values.items()])


def tensor(key: str, **values: Any) -> Callable[[Path], None]:
    """Change what `.metadata` says about a tensor."""
    return metadata(
        lambda c: [setattr(c.state_dict_metadata[key], *each) for each in values.items()]
    )


def record(data: bytes) -> Callable[[Path], None]:
    """Store other bytes as the last norm."""
    return lambda folder: replace_record(folder, NORM, data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an argument of 6000 digits": (
        lambda folder: edit_arguments(folder, norm_epsilon=1 << 20_000),
        r"common\.pt: cannot be read \(int too large to convert to float",
    ),
    "file outside": (
        place(relative_path="../x.distcp"),
        rf"\.metadata: {NORM}: names the file '\.\./x\.distcp'",
    ),
    "file linked": (linked, r"__0_0\.distcp: a link to"),
    "record transformed": (place(transform_descriptors=["zstd"]), rf"{NORM} is stored with \['zs"),
    "record is not contiguous": (
        record(archive(torch.zeros(72, dtype=BF16.dtype)[::2])),
        rf"{NORM} is no contiguous",
    ),
    "record compressed": (
        record(archive(BF16, compression=zipfile.ZIP_DEFLATED)),
        rf"{NORM} is compressed",
    ),
    "chunks overlap": (metadata(twice), r"contain overlapping parts of lm_head\.weight"),
    "tensor too many": (
        metadata(lambda c: add_tensor(c, "decoder.layers.mlp.linear_fc2.bias")),
        r"decoder\.layers\.mlp\.linear_fc2\.bias is no tensor of the model in config\.json",
    ),
    "tensor of another shape": (
        tensor(QKV, size=torch.Size((3, 60, 36))),
        rf"{QKV} has shape \(3, 60, 36\), but the model in config\.json needs \(2, 60, 36\)",
    ),
    "vocabulary too small": (
        metadata(
            lambda c: setattr(c.state_dict_metadata[HEAD].chunks[0], "sizes", torch.Size((30, 36)))
        ),
        r"only 1,080 of 1,332 elements of lm_head\.weight exist",
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


def read(folder: Path) -> dict[str, torch.Tensor]:
    store = open_store(folder)
    return {name: store.read(name) for name in store.tensors}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_supported_is_refused_by_name(
    damage: str, source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(source, tmp_path / "saved")
    damaging, expected = DAMAGE[damage]
    damaging(folder)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=expected):
        read(folder)
    assert invoke("megatron-to-hf", folder, tmp_path / "target")[0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let at most 2 GiB be allocated: a pickle may ask for more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**31, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


FILES = (
    *("config.json", "latest_checkpointed_iteration.txt", "release/.metadata"),
    *("release/metadata.json", "release/common.pt", "release/__0_0.distcp"),
)


@settings(max_examples=150)
@given(
    st.sampled_from(FILES),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["cut", "removed", *range(8)]),
)
def test_any_damage_is_refused_by_name_or_changes_values_only(
    source: Path, victim: Path, name: str, where: float, damage: str | int
) -> None:
    """Damage of weights or of their places may change values, as training's checksums detect. It
    never changes which tensors there are, or their shapes."""
    path, intact = victim / name, (source / name).read_bytes()
    at = int(where * len(intact))
    changed = bytearray(intact)
    if isinstance(damage, int):
        changed[at] ^= 1 << damage
    else:
        del changed[at:]
    path.write_bytes(changed)
    if damage == "removed":
        path.unlink()
    values = torch.zeros(37, 36, dtype=torch.bfloat16)
    try:
        with limited_memory():
            values_read = read(victim)
        expected = read(source)
        has_values = name in ("release/.metadata", "release/__0_0.distcp")
        assert shapes(values_read) == shapes(expected)
        assert has_values or same(values_read, expected)
        with limited_memory():
            Reading(victim / "release", [Box(HEAD, (0, 0), (37, 36), values)]).run()
    except CheckpointError as error:
        assert str(victim) in str(error)
    except ConfigError as error:  # a model that is not supported, or another one
        assert name == "config.json" and str(error)
    finally:
        path.write_bytes(intact)


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items()}


# ------------------------------------------------------------------------------- hostile


def hostile(folder: Path) -> Runs:
    """Return an object that leaves a file behind when it is unpickled."""
    return Runs(os.system, f"touch {folder.parent / RAN}")


def poison_common_state(folder: Path) -> None:
    """Newer versions of Megatron have no `common.pt`."""
    for name in ("run_config.yaml", "common.pt"):
        part(folder, name).unlink()
    replace_record(folder, "common_state/shard_0_1", archive([{"args": hostile(folder)}]))


def poison_extra_state(folder: Path) -> None:
    keys = read_metadata(folder / "release").state_dict_metadata
    key = next(key for key in keys if "_extra_state" in key)
    replace_record(folder, key, archive([hostile(folder)]))


POISON: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "metadata": (
        metadata(lambda c: setattr(c, "planner_data", [Runs(os.system, f"touch {RAN}")])),
        r"\.metadata: cannot be read \(it names posix\.system",
    ),
    "tensor": (
        lambda folder: replace_record(folder, NORM, archive([hostile(folder)])),
        rf"__0_0\.distcp: {NORM}: cannot be read \(Weights only load failed",
    ),
    "common.pt": (lambda folder: only_common(folder, {"args": hostile(folder)}), None),
    "common state": (poison_common_state, None),
    "extra state": (poison_extra_state, None),
}
"""Place of the pickle -> how to put it there, and the error, if it is read at all."""


@pytest.mark.parametrize("where", POISON)
def test_no_pickle_is_run(
    where: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(source, tmp_path / "saved")
    poison, expected = POISON[where]
    poison(folder)
    box = Box(NORM, (0,), (36,), BF16.clone())
    if expected is None:
        assert same(read(folder), read(source))
        Reading(folder / "release", [box]).run()
    else:
        with pytest.raises(CheckpointError, match=expected):
            read(folder)
        with pytest.raises(CheckpointError, match=r"posix\.system"):
            Reading(folder / "release", [box]).run()
    code, _ = invoke("megatron-to-hf", folder, tmp_path / "target")
    assert code == (2 if expected else 0)
    assert not (tmp_path / RAN).exists()
    if where == "metadata":  # but in pickle itself
        pickle.loads(part(folder, ".metadata").read_bytes())
        assert (tmp_path / RAN).exists()


def test_a_pickle_cannot_change_an_allowed_class(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "saved")
    before = dict(vars(Metadata))
    # The instruction BUILD sets attributes of the object, here of the class itself.
    state = b"N}X\x08\x00\x00\x00__init__ctorch\nSize\nsX\x04\x00\x00\x00moreK\x01s\x86b."
    named = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    part(folder, ".metadata").write_bytes(named + state)
    with pytest.raises(CheckpointError, match="it changes a class"):
        open_store(folder)
    assert dict(vars(Metadata)) == before


def test_arguments_without_a_value_are_no_contradiction(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "saved")
    only_common(folder, {"args": argparse.Namespace()})
    assert same(read(folder), read(source))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Megatron of the model in `hf` next to it."""
    return make_checkpoint(tmp_path_factory.mktemp("torch_dist"))


@pytest.fixture(scope="module")
def victim(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose configuration is in `common.pt`."""
    folder = shutil.copytree(source, tmp_path_factory.mktemp("victim") / "saved")
    part(folder, "run_config.yaml").unlink()
    return folder
