"""Damaged, foreign and half-written checkpoints, and full disks, are reported with a file name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import read_into
from dapo_megatron.checkpoints.formats.tensor_file import TensorFile, TensorFileWriter, TensorInfo
from dapo_megatron.types import CheckpointError, ConfigError, Shard, TensorSlice, whole
from tests.helpers.checkpoints import (
    config_of,
    differences,
    edit_json,
    edit_tensors,
    to_hf,
    write_random,
)
from tests.helpers.torch_dist import to_torch_dist

SHARD = "model-00002-of-00004.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def move_and_link(path: Path, to: Path) -> None:
    path.rename(to)
    path.symlink_to(to)


HF_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "entry missing": (
        lambda folder: edit_json(folder / INDEX, lambda index: index["weight_map"].pop(NORM)),
        f"{INDEX}: names no file for {NORM}",
    ),
    "tensor in two files": (
        lambda folder: edit_tensors(folder / SHARD, lambda t: t.update({NORM: torch.ones(36)})),
        rf"{INDEX}: names model-00004-of-00004.safetensors for {NORM}, which is in {SHARD}",
    ),
    "index of a file elsewhere": (
        lambda folder: edit_json(
            folder / INDEX, lambda index: index["weight_map"].update({NORM: f"../hf/{SHARD}"})
        ),
        rf"{INDEX}: names the file '\.\./hf/{SHARD}'; weights must be in the same folder",
    ),
    "shard is a link": (
        lambda folder: move_and_link(folder / SHARD, folder.parent / "w"),
        rf"{SHARD}: a link to .*/w, which is outside of .*cp -rL",
    ),
    "not finished": (
        lambda folder: (folder / SHARD).write_bytes(bytes(8) + (folder / SHARD).read_bytes()[8:]),
        f"{SHARD}: half written",
    ),
}


@pytest.mark.parametrize("fault", HF_DAMAGE)
def test_a_folder_that_contradicts_itself_is_refused(tmp_path: Path, fault: str) -> None:
    folder = write_random(tmp_path / "hf", config_of("llama"), max_file_bytes=15_000)
    assert len(list(folder.glob("*.safetensors"))) == 4
    open_store(folder)
    damage, message = HF_DAMAGE[fault]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        open_store(folder)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact") / "hf"
    return write_random(folder, config_of("llama"), max_file_bytes=15_000)


@settings(max_examples=80)
@given(
    st.sampled_from(["config.json", INDEX, SHARD]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["cut", "removed", "brackets", *range(8)]),
)
def test_any_damage_is_refused_by_name_or_changes_values_only(
    intact: Path,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    where: float,
    damage: str | int,
) -> None:
    folder = shutil.copytree(intact, tmp_path_factory.mktemp("damaged") / "hf")
    path = folder / name
    content = bytearray(path.read_bytes().rstrip())  # a cut must not be of white space only
    at = int(where * len(content))
    if damage == "removed":
        path.unlink()
    elif damage == "brackets":
        path.write_bytes(bytes(content[:at]) + b"[" * 200_000)
    elif damage == "cut":
        path.write_bytes(bytes(content[:at]))
    else:
        content[at] ^= 1 << int(damage)
        path.write_bytes(content)
    source = open_store(intact)
    try:
        store = open_store(folder)
        for tensor in store.tensors:
            store.read(tensor)
        assert store.tensors == source.tensors or name == "config.json"
        assert damage not in ("removed", "cut")
    except (CheckpointError, ConfigError) as error:
        assert str(folder) in str(error) or isinstance(error, ConfigError)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F99", 3]),
        "shape": st.one_of(
            st.lists(st.integers(-1, 4), max_size=3), st.just("3"), st.just([2**80])
        ),
        "data_offsets": st.one_of(
            st.lists(st.integers(-1, 24), min_size=2, max_size=2), st.just([2**80, 2**80 + 12])
        ),
    }
)


@settings(max_examples=200)
@given(
    st.dictionaries(st.sampled_from("abc"), st.one_of(ENTRY, st.just([1])), max_size=3),
    st.sampled_from([{}, {"__metadata__": 3}, {"__metadata__": {"format": "pt"}}]),
    st.integers(0, 24),
)
def test_a_header_is_accepted_only_if_the_safetensors_library_accepts_it(
    tmp_path_factory: pytest.TempPathFactory,
    entries: dict[str, Any],
    metadata: dict[str, Any],
    num_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("header") / "a.safetensors"
    text = json.dumps({**metadata, **entries}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    try:
        file = TensorFile(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        with safe_open(path, "pt") as library:
            assert set(library.keys()) == set(file.tensors)
            for key, info in file.tensors.items():
                assert tuple(library.get_slice(key).get_shape()) == info.shape


Q = "model.layers.0.self_attn.q_proj.weight"
TENSOR_DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(Q), f"the tensor {Q} is missing"),
    "misshapen": (
        lambda tensors: tensors.update({Q: tensors[Q][:-1].contiguous()}),
        rf"{Q} has shape \(35, 36\), but the model in config.json needs \(36, 36\)",
    ),
    "quantized": (lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}), f"{Q} is int8"),
    "foreign": (lambda tensors: tensors.update(spare=torch.ones(2)), "spare is no tensor of this"),
    "tied head alone": (
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}
        ),
        "the tensor model.embed_tokens.weight is missing",
    ),
    "tied head differs": (
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()}
        ),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_DAMAGE)
def test_wrong_tensors_are_refused(tmp_path: Path, fault: str) -> None:
    folder = write_random(tmp_path / "hf", config_of("llama_tied"))
    damage, message = TENSOR_DAMAGE[fault]
    edit_tensors(folder / "model.safetensors", damage)
    with pytest.raises(CheckpointError, match=message):
        open_store(folder)


def test_a_tied_head_that_was_saved_is_not_listed_as_a_tensor(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "hf", config_of("llama_tied"))
    before = open_store(folder).tensors
    edit_tensors(
        folder / "model.safetensors",
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    assert open_store(folder).tensors == before


def test_folders_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "hf", config_of("llama"))
    with pytest.raises(CheckpointError, match="no such folder"):
        open_store(tmp_path / "nothing")
    edit_json(folder / "config.json", lambda config: config.update(model_type="gpt2"))
    with pytest.raises(ConfigError, match=r"'gpt2' is not supported; known: .*qwen3"):
        open_store(folder)
    edit_json(folder / "config.json", lambda config: config.update(model_type="llama"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model.bin\)"):
        open_store(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        open_store(folder)
    (tmp_path / "run" / "checkpoints" / "step_000040").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"did you mean .*step_000040"):
        open_store(tmp_path / "run")


def test_read_into_names_a_missing_or_misshapen_tensor(tmp_path: Path) -> None:
    store = open_store(write_random(tmp_path / "hf", config_of("llama")))
    for name, shape, message in (
        ("model.norm.bias", (36,), "the tensor model.norm.bias is missing"),
        (NORM, (40,), rf"{NORM} has shape \(36,\), but the model in config.json needs \(40,\)"),
    ):
        shard = Shard(TensorSlice(name, shape, torch.float32, whole(shape)), torch.zeros(shape))
        with pytest.raises(CheckpointError, match=message):
            read_into(store, [shard])


def test_mixed_dtypes_are_kept_and_refused_where_tensors_are_merged(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "hf", config_of("llama"))
    path = folder / "model.safetensors"
    edit_tensors(path, lambda tensors: tensors.update({NORM: tensors[NORM].float()}))
    store = open_store(folder)
    written = open_store(to_torch_dist(store, tmp_path / "m"))
    assert not differences(store, written) and written.tensors[NORM].dtype == torch.float32
    edit_tensors(path, lambda tensors: tensors.update({Q: tensors[Q].float()}))
    with pytest.raises(
        CheckpointError, match=r"linear_qkv.weight holds tensors of different dtypes"
    ):
        to_torch_dist(open_store(folder), tmp_path / "n")


def test_formats_of_earlier_versions_are_refused_with_the_command(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "hf", config_of("llama"))
    for name in ("megatron.json", "rank_00000.safetensors"):
        (folder / name).touch()
        with pytest.raises(CheckpointError, match=r"earlier version. Export it with commit \w+"):
            open_store(folder)
        (folder / name).unlink()


# ------------------------------------------------------------------------------- a full disk


def test_a_full_disk_is_reported_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_store(write_random(tmp_path / "hf", config_of("llama")))
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"no room: [\d,]+ bytes are needed, 10,000"):
        to_hf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_disk_that_fills_up_while_writing_is_reported(tmp_path: Path) -> None:
    writer = TensorFileWriter(
        tmp_path / "a.safetensors", {"x": TensorInfo((3,), torch.float32)}, {}
    )
    (tmp_path / "a.safetensors").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)) as raised:
        writer.write("x", torch.ones(3))
    assert "a.safetensors: no room" in str(raised.value)
    assert f"needs {writer.nbytes:,} bytes" in str(raised.value) and " free" in str(raised.value)
