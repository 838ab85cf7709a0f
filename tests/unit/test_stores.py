"""Weights on disk: every format and layout returns the same bits, and differences are named."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import blocks, read_into
from dapo_megatron.checkpoints.formats.tensor_file import TensorFile, TensorFileWriter, TensorInfo
from dapo_megatron.checkpoints.formats.weights_folder import copy_companions
from dapo_megatron.model import ChunkPlace, layout_of
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.types import CheckpointError, Region, whole
from tests.helpers.checkpoints import (
    MODELS,
    config_of,
    differences,
    edit_json,
    edit_tensors,
    flip_bit,
    to_hf,
    training_checkpoint,
    write_random,
)
from tests.helpers.torch_dist import to_torch_dist
from tools.converting.compare import compare

Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


# ------------------------------------------------------------------------------- one file


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(draw(st.integers(1, n - first)) for n, first in zip(shape, start, strict=True))
    return shape, Region(start, size)


@given(st.lists(boxes(), min_size=1, max_size=4), st.sampled_from([torch.int8, torch.float32]))
def test_boxes_written_to_a_file_are_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[tuple[int, ...], Region]],
    dtype: torch.dtype,
) -> None:
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    # Two dtypes: the wider tensors come first in the file.
    values = {
        f"t{number}": torch.randint(-100, 100, shape).to(dtype if number % 2 else torch.int64)
        for number, (shape, _) in enumerate(drawn)
    }
    infos = {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in values.items()}
    writer = TensorFileWriter(path, infos, {"note": "x"})
    writer.create()
    for (key, value), (_, box) in zip(values.items(), drawn, strict=True):
        writer.write(key, torch.full_like(value, 7))
        writer.write(key, value[box.slices], box)
    writer.finish()
    assert path.stat().st_size == writer.nbytes
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    for entry in json.loads(content[8 : 8 + header_bytes]).values():
        if "shape" in entry:
            itemsize = {"I64": 8, "F32": 4, "I8": 1}[entry["dtype"]]
            assert (8 + header_bytes + entry["data_offsets"][0]) % itemsize == 0
    read = TensorFile(path)
    assert read.metadata == {"note": "x"} and read.tensors == infos
    for (key, value), (_, box) in zip(values.items(), drawn, strict=True):
        expected = torch.full_like(value, 7)
        expected[box.slices] = value[box.slices]
        assert torch.equal(read.read(key), expected)
        assert torch.equal(read.read(key, box), value[box.slices])
        assert torch.equal(load_file(path)[key], expected)  # as read by the safetensors library


@pytest.mark.parametrize("max_bytes", [1, 40, 10_000])
def test_blocks_cover_a_box_once(max_bytes: int) -> None:
    region = Region((3, 1), (7, 5))
    count = torch.zeros(12, 8, dtype=torch.int64)
    for box in blocks(region, 2, max_bytes):
        assert box.numel * 2 <= max(max_bytes, 10)
        count[box.slices] += 1
    expected = torch.zeros_like(count)
    expected[region.slices] = 1
    assert torch.equal(count, expected)


# ------------------------------------------------------------------------------- round trips


@settings(max_examples=15)
@given(data=st.data())
def test_round_trip_of_any_sizes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any family and sizes, through checkpoints of Megatron and of a training."""
    number = st.integers(1, 4)
    # Latent attention and gated delta nets have other sizes, and are covered by test_torch_dist.
    others = {"deepseek_v3", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe"}
    name = data.draw(st.sampled_from(sorted(MODELS.keys() - others)))
    groups, layers = data.draw(number) * 4, data.draw(st.integers(2, 5))
    config = {
        **MODELS[name],
        "num_attention_heads": groups * data.draw(number),
        "num_key_value_heads": groups,
        "head_dim": 4 * data.draw(number),
        "hidden_size": data.draw(st.integers(1, 20)),
        "intermediate_size": 4 * data.draw(number),
        "moe_intermediate_size": data.draw(number),
        "num_hidden_layers": layers,
        "vocab_size": data.draw(st.integers(1, 40)),
    }
    has_experts = "num_experts_per_tok" in config
    if name == "qwen3_moe":
        config["num_experts"] = 4 * data.draw(number)
    elif has_experts:
        config["n_routed_experts"] = 4 * data.draw(number)
    else:
        del config["moe_intermediate_size"]
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    folder = tmp_path_factory.mktemp("any")
    source = open_store(write_random(folder / "hf", config, dtype))

    written = open_store(to_torch_dist(source, folder / "written"))
    step = training_checkpoint(written, folder / "step", data.draw(st.integers(1, 4)))
    trained = open_store(step)
    assert not differences(source, trained)
    restored = to_hf(trained, folder / "again", data.draw(st.integers(1, 20_000)))
    assert not differences(source, restored)
    shutil.rmtree(folder)


def test_any_slice_can_be_read(tmp_path: Path) -> None:
    source = open_store(write_random(tmp_path / "hf", MODELS["qwen2"]))
    others = (
        open_store(to_torch_dist(source, tmp_path / "written")),
        open_store(training_checkpoint(source, tmp_path / "step", 3)),
    )
    name = "model.layers.5.self_attn.q_proj.weight"
    value = source.read(name)
    for box in (Region((5, 3), (17, 20)), Region((35, 0), (1, 36)), whole((36, 36))):
        for store in (source, *others):
            assert torch.equal(store.read(name, box), value[box.slices])


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_all_shards_of_a_place_are_read_from_any_format(tmp_path: Path, name: str) -> None:
    source = open_store(write_random(tmp_path / "hf", MODELS[name]))
    step = open_store(training_checkpoint(source, tmp_path / "step"))
    place = ChunkPlace(2, 3, 1, 2, False, source.arch.num_layers == 3)
    filled = []
    for store in (source, step):
        local_parameters = layout_of(store.arch, place)
        params = {key: torch.zeros(value.shape) for key, value in local_parameters.items()}
        read_into(store, shards_of(params, store.arch, place))
        assert all(value.any() for value in params.values())
        filled.append(params)
    assert all(torch.equal(value, filled[1][key]) for key, value in filled[0].items())


def test_several_processes_write_one_folder(tmp_path: Path) -> None:
    source = open_store(write_random(tmp_path / "source", config_of("qwen3")))
    (tmp_path / "out").mkdir()
    writer = HfWriter(tmp_path / "out", source.tensors, 5_000)
    writer.create()

    def write_part(rank: int) -> None:
        for number, (name, info) in enumerate(source.tensors.items()):
            if number % 3 == rank:
                for box in blocks(whole(info.shape), info.dtype.itemsize, 100):
                    writer.write(name, source.read(name, box), box)

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=write_part, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    with pytest.raises(CheckpointError, match="half written"):
        TensorFile(next((tmp_path / "out").glob("model-00001*")))  # incomplete until `finish`
    writer.finish()
    copy_companions(source.folder, tmp_path / "out")
    assert not differences(source, open_store(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


# ------------------------------------------------------------------------------- training


# ------------------------------------------------------------------------------- comparing


def test_every_kind_of_difference_is_reported(tmp_path: Path) -> None:
    config = config_of("llama")
    left = open_store(write_random(tmp_path / "a", config))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    flip_bit(tmp_path / "b" / "model.safetensors", left.read(Q))
    edit_tensors(tmp_path / "b" / "model.safetensors", lambda t: t.update({NORM: t[NORM].float()}))
    edit_json(tmp_path / "b" / "config.json", lambda config: config.update(rms_norm_eps=1e-5))
    texts = differences(left, open_store(tmp_path / "b"))
    assert texts[0] == "config.rms_norm_eps: config: 1e-06 and 1e-05"
    assert texts[1].startswith(f"{Q}: value: 1 elements, first at [35, 35]: ")
    assert texts[2] == f"{NORM}: dtype: bfloat16 and float32" and len(texts) == 3
    other = open_store(write_random(tmp_path / "c", config_of("qwen2", vocab_size=38)))
    kinds = {difference.kind for difference in compare(left, other, lambda _: None)}
    assert kinds == {"config", "name", "shape", "value"}


def test_comparison_is_by_bits_so_nan_equals_itself_and_zeros_have_a_sign(tmp_path: Path) -> None:
    write_random(tmp_path / "a", config_of("llama"), torch.float32)
    edit_tensors(tmp_path / "a" / "model.safetensors", lambda t: t[NORM].copy_(odd_numbers()))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    left, right = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    assert not differences(left, right)
    megatron = open_store(to_torch_dist(left, tmp_path / "m"))
    assert not differences(left, megatron)
    edit_tensors(tmp_path / "b" / "model.safetensors", lambda t: t[NORM].copy_(-odd_numbers()))
    [text] = differences(left, open_store(tmp_path / "b"))
    assert text.startswith(f"{NORM}: value: 36 elements")


def odd_numbers() -> torch.Tensor:
    """NaN with two payloads, zero and infinity. Each differs from its negative in the sign bit."""
    values = torch.tensor([0x7FC00000, 0x7FC01234, 0, 0x7F800000], dtype=torch.int32)
    return values.view(torch.float32).repeat(9)
