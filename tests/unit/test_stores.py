"""Weights on disk: every format and layout returns the same bits, and differences are named."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from dapo_megatron.checkpoints.formats.compare import compare, compare_replicas
from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.megatron import MegatronLayout
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import blocks, read_into
from dapo_megatron.checkpoints.formats.tensor_file import TensorFile, TensorFileWriter, TensorInfo
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
    to_megatron,
    training_checkpoint,
    write_random,
)

Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


def split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage: 1 each, and the rest in the first."""
    return (num_layers - num_stages + 1, *[1] * (num_stages - 1))


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


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        name: write_random(folder / name, config, max_file_bytes=2**22)
        for name, config in MODELS.items()
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (1, 2), (3, 2), (3, 3), (1, 3)])
def test_round_trip_of_odd_sizes(
    sources: Mapping[str, Path], tmp_path: Path, name: str, tensor: int, stages: int
) -> None:
    source = open_store(sources[name])
    expert = 2 if source.arch.num_experts else 1
    layout = MegatronLayout(tensor, split(source.arch.num_layers, stages), expert)
    megatron = to_megatron(source, tmp_path / "megatron", layout)
    assert not differences(source, megatron)
    restored = to_hf(megatron, tmp_path / "hf", 2**22)
    assert not differences(source, restored)
    assert not list(compare_replicas(megatron, lambda _: None))
    for file in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (restored.folder / file).read_bytes() == (source.folder / file).read_bytes()
    for file in sorted(path.name for path in source.folder.glob("model*")):
        assert (restored.folder / file).read_bytes() == (source.folder / file).read_bytes()


@settings(max_examples=15)
@given(data=st.data())
def test_round_trip_of_any_sizes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any family, sizes and layout, with one resharding in between."""
    number = st.integers(1, 4)
    # Latent attention has other sizes, and is covered by the round trips above.
    name = data.draw(st.sampled_from(sorted(MODELS.keys() - {"deepseek_v3", "glm4_moe_lite"})))
    sizes = st.sampled_from([1, 2, 4])
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

    def layout() -> MegatronLayout:
        cuts = data.draw(st.sets(st.integers(1, layers - 1), max_size=3))
        ends = [0, *sorted(cuts), layers]
        stages = tuple(b - a for a, b in pairwise(ends))
        expert = data.draw(sizes) if has_experts else 1
        return MegatronLayout(data.draw(sizes), stages, expert)

    first = to_megatron(source, folder / "first", layout())
    second = to_megatron(first, folder / "second", layout())
    restored = to_hf(second, folder / "again", data.draw(st.integers(1, 20_000)))
    assert not differences(source, restored)
    shutil.rmtree(folder)


def test_any_slice_can_be_read(sources: Mapping[str, Path], tmp_path: Path) -> None:
    source = open_store(sources["qwen2"])
    megatron = to_megatron(source, tmp_path / "megatron", MegatronLayout(3, (4, 3)))
    name = "model.layers.5.self_attn.q_proj.weight"
    value = source.read(name)
    for box in (Region((5, 3), (17, 20)), Region((35, 0), (1, 36)), whole((36, 36))):
        assert torch.equal(megatron.read(name, box), value[box.slices])
        assert torch.equal(source.read(name, box), value[box.slices])


def test_padding_of_the_vocabulary_is_zero(sources: Mapping[str, Path], tmp_path: Path) -> None:
    to_megatron(open_store(sources["llama"]), tmp_path / "megatron", MegatronLayout(3, (7,)))
    last = load_file(tmp_path / "megatron" / "stage_00_tensor_02.safetensors")
    for key in ("model/embedding.word_embeddings.weight", "model/output_layer.weight"):
        assert last[key].shape[0] * 3 == 49_155
        assert not last[key][-2:].any() and last[key][-3].any()


def test_a_megatron_file_records_its_layout_and_its_experts(
    sources: Mapping[str, Path], tmp_path: Path
) -> None:
    layout = MegatronLayout(3, (2, 1), 2)
    to_megatron(open_store(sources["qwen3_moe"]), tmp_path / "megatron", layout)
    path = tmp_path / "megatron" / "stage_01_tensor_02.safetensors"
    with safe_open(path, "pt") as file:
        [place] = json.loads(file.metadata()["places"])
        keys = set(file.keys())
    assert place["tp_rank"] == 2 and place["first_layer"] == 2 and place["has_head"]
    assert "model/decoder.layers.0.mlp.router.weight" in keys
    assert not any(".experts." in key for key in keys)
    experts = load_file(tmp_path / "megatron" / "stage_01_experts_01.safetensors")
    assert len(experts) == 3 * 2 and all(".experts.local_experts." in key for key in experts)
    about = json.loads((tmp_path / "megatron" / "megatron.json").read_text())
    assert about["layers_per_stage"] == [2, 1] and about["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_all_shards_of_a_place_are_read_from_either_format(
    sources: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    source = open_store(sources[name])
    megatron = to_megatron(
        source, tmp_path / "m", MegatronLayout(1, (1, source.arch.num_layers - 1))
    )
    place = ChunkPlace(2, 3, 1, 2, False, source.arch.num_layers == 3)
    filled = []
    for store in (source, megatron):
        local_parameters = layout_of(store.arch, place)
        params = {
            key: torch.zeros(local_parameter.shape)
            for key, local_parameter in local_parameters.items()
        }
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
    writer.finish(source.folder)
    assert not differences(source, open_store(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


# ------------------------------------------------------------------------------- training


def replicated() -> dict[int, list[ChunkPlace]]:
    """TP 3 x PP 2 x DP 2, with experts sharded two ways over the six ranks of a stage."""
    return {
        rank: [
            ChunkPlace(
                rank % 3, 3, 2 * (rank // 6), 2 - rank // 6, rank < 6, rank >= 6, rank % 2, 2
            )
        ]
        for rank in range(12)
    }


def test_a_training_checkpoint_holds_the_same_weights(
    sources: Mapping[str, Path], tmp_path: Path
) -> None:
    source = open_store(write_random(tmp_path / "hf", MODELS["qwen3_moe"], torch.float32))
    for fused in (False, True):
        folder = training_checkpoint(source, tmp_path / f"{fused}", replicated(), fused=fused)
        store = open_store(folder)
        assert store.format == "training"
        assert not differences(source, store)
        assert not list(compare_replicas(store, lambda _: None))
        assert not differences(source, to_hf(store, tmp_path / "again"))


def test_an_interleaved_training_checkpoint_holds_the_same_weights(tmp_path: Path) -> None:
    config = config_of("qwen2_tied", num_hidden_layers=4)
    source = open_store(write_random(tmp_path / "hf", config, torch.float32))
    places = {
        stage: [
            ChunkPlace(0, 1, 2 * chunk + stage, 1, stage + chunk == 0, stage + chunk == 2)
            for chunk in range(2)
        ]
        for stage in range(2)
    }
    assert not differences(
        source, open_store(training_checkpoint(source, tmp_path / "step", places))
    )


def test_differing_replicas_are_reported(tmp_path: Path) -> None:
    source = open_store(write_random(tmp_path / "hf", config_of("llama"), torch.float32))
    places = {rank: [ChunkPlace(0, 1, 0, 2, True, True)] for rank in range(2)}
    folder = training_checkpoint(source, tmp_path / "step", places)
    key = "model/decoder.layers.1.mlp.linear_fc2.weight"
    flip_bit(folder / "rank_00001.safetensors", key)
    [difference] = compare_replicas(open_store(folder), lambda _: None)
    assert difference.name == "model.layers.1.mlp.down_proj.weight"
    assert (
        "rank_00000" in difference.text
        and "rank_00001" in difference.text
        and "1 elements" in difference.text
    )


def test_ranks_of_two_layouts_are_refused(tmp_path: Path) -> None:
    source = open_store(write_random(tmp_path / "hf", config_of("llama"), torch.float32))
    places = {0: [ChunkPlace(0, 1, 0, 2, True, True)], 1: [ChunkPlace(1, 3, 0, 2, True, True)]}
    folder = training_checkpoint(source, tmp_path / "step", places)
    with pytest.raises(CheckpointError, match=r"rank_00000.* and rank_00001.* contain overlapping"):
        open_store(folder)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    source = open_store(write_random(tmp_path / "hf", config_of("llama"), torch.float32))
    places = {rank: [ChunkPlace(rank, 3, 0, 2, True, True)] for rank in range(2)}
    folder = training_checkpoint(source, tmp_path / "step", places)
    with pytest.raises(
        CheckpointError, match=r"only [\d,]+ of [\d,]+ elements of .* exist; a file of"
    ):
        open_store(folder)


# ------------------------------------------------------------------------------- comparing


def test_every_kind_of_difference_is_reported(tmp_path: Path) -> None:
    config = config_of("llama")
    left = open_store(write_random(tmp_path / "a", config))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    flip_bit(tmp_path / "b" / "model.safetensors", Q)
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
    megatron = to_megatron(left, tmp_path / "m", MegatronLayout(3, (2,)))
    assert not differences(left, megatron)
    edit_tensors(tmp_path / "b" / "model.safetensors", lambda t: t[NORM].copy_(-odd_numbers()))
    [text] = differences(left, open_store(tmp_path / "b"))
    assert text.startswith(f"{NORM}: value: 36 elements")


def odd_numbers() -> torch.Tensor:
    """NaN with two payloads, zero and infinity. Each differs from its negative in the sign bit."""
    values = torch.tensor([0x7FC00000, 0x7FC01234, 0, 0x7F800000], dtype=torch.int32)
    return values.view(torch.float32).repeat(9)
