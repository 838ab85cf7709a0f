"""Optimizer state read from checkpoints of any layout: every field, by HF name, equals what was
saved, and damage is reported."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.checkpoints.formats.moments import open_state, read_range
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import Store, read_into
from dapo_megatron.checkpoints.formats.weights_folder import copy_companions
from dapo_megatron.model import ChunkPlace, layout_of
from dapo_megatron.policy.checkpoint import reshard
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.types import CheckpointError
from tests.helpers.checkpoints import config_of, differences, write_random

FIELDS = ("model", "exp_avg", "exp_avg_sq", "param")
MODELS = ("llama_tied", "qwen2", "qwen3_moe", "deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class Layout:
    """Parallel sizes. `stages` lists the layers of each chunk of each pipeline stage. `expert`
    divides tensor x data."""

    tensor: int
    data: int
    stages: tuple[tuple[range, ...], ...]
    expert: int = 1

    def places(self, num_layers: int) -> list[list[ChunkPlace]]:
        """Return the chunks of each rank. Ranks are ordered by tensor, then data, then stage."""
        return [
            [
                ChunkPlace(
                    tp_rank=index % self.tensor,
                    tp_size=self.tensor,
                    first_layer=layers.start,
                    num_layers=len(layers),
                    has_embedding=layers.start == 0,
                    has_head=layers.stop == num_layers,
                    ep_rank=index % self.expert,
                    ep_size=self.expert,
                )
                for layers in chunks
            ]
            for chunks in self.stages
            for index in range(self.tensor * self.data)
        ]

    def metadata(self) -> str:
        return json.dumps(
            {
                "tensor_parallel": self.tensor,
                "pipeline_parallel": len(self.stages),
                "context_parallel": 1,
                "data_parallel": self.data,
            }
        )


PLAIN_LAYOUT = Layout(3, 2, ((range(2),),))


@st.composite
def layouts(draw: st.DrawFn, has_experts: bool) -> Layout:
    tensor, data = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 2, 3]))
    stages = draw(
        st.sampled_from(
            [
                ((range(2),),),
                ((range(1),), (range(1, 2),)),
                ((range(1), range(1, 2)),),  # two chunks on one rank
            ]
        )
    )
    sizes = [size for size in (1, 2, 3, 6) if tensor * data % size == 0]
    return Layout(tensor, data, stages, draw(st.sampled_from(sizes)) if has_experts else 1)


@pytest.fixture(scope="module")
def stores_by_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Store]]:
    """Return a store with different numbers for each field of each model."""
    root = tmp_path_factory.mktemp("truths")
    return {
        name: {
            field: open_store(
                write_random(root / name / field, config_of(name), torch.float32, seed=seed)
            )
            for seed, field in enumerate(FIELDS)
        }
        for name in MODELS
    }


def local_tensors(store: Store, place: ChunkPlace) -> dict[str, Tensor]:
    """Return the parameters of one chunk, read from the store of one field."""
    local_parameters = layout_of(store.arch, place)
    params = {
        name: torch.zeros(local_parameter.shape)
        for name, local_parameter in local_parameters.items()
    }
    read_into(store, shards_of(params, store.arch, place))
    return params


def write(
    folder: Path,
    stores: Mapping[str, Store],
    layout: Layout,
    split: Callable[[int, int], list[int]],
) -> Path:
    """Write a training checkpoint. `split(elements, ranks)` returns the ranks' boundaries."""
    arch = stores["model"].arch
    folder.mkdir()
    copy_companions(stores["model"].folder, folder)
    ranks = layout.places(arch.num_layers)
    files: list[dict[str, Tensor]] = [{} for _ in ranks]
    splits: dict[Any, tuple[list[int], itertools.count[int]]] = {}
    for rank, (places, tensors) in enumerate(zip(ranks, files, strict=True)):
        for number, place in enumerate(places):
            prefix = f"chunk_{number}." if len(places) > 1 else ""
            fields = {field: local_tensors(stores[field], place) for field in stores}
            for name, weight in fields["model"].items():
                tensors[f"model/{prefix}{name}"] = weight
                if name.endswith("expert_bias"):
                    continue  # not trained
                is_expert = ".mlp.experts." in name
                group_rank = place.ep_rank if is_expert else place.tp_rank
                size = layout.expert if is_expert else layout.tensor
                sharing = layout.tensor * layout.data // size
                sharing_group = (rank // (layout.tensor * layout.data), number, name, group_rank)
                ends, turn = splits.setdefault(
                    sharing_group, (split(weight.numel(), sharing), itertools.count())
                )
                share = next(turn)
                start, stop = ends[share], ends[share + 1]
                if start == stop:
                    continue
                key = f"optimizer/{prefix}{name}[{start}:{stop}]"
                tensors[f"{key}/step"] = torch.tensor(5.0)
                for field in fields.keys() - {"model"}:
                    flat = fields[field][name].reshape(-1)
                    tensors[f"{key}/{field}"] = flat[start:stop].clone()
    for rank, (places, tensors) in enumerate(zip(ranks, files, strict=True)):
        metadata = {
            "layout": layout.metadata(),
            "places": json.dumps([asdict(place) for place in places]),
        }
        save_file(tensors, folder / f"rank_{rank:05d}.safetensors", metadata=metadata)
    return folder


def evenly(elements: int, ranks: int) -> list[int]:
    return [elements * rank // ranks for rank in range(ranks + 1)]


# ------------------------------------------------------------------------------- reading


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_field_is_read_from_checkpoints_of_any_layout(
    stores_by_model: dict[str, dict[str, Store]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(MODELS))
    has_experts = name in ("qwen3_moe", "deepseek_v3", "glm4_moe")
    layout = data.draw(layouts(has_experts))
    random = data.draw(st.randoms(use_true_random=False))

    def split(elements: int, ranks: int) -> list[int]:
        return [0, *sorted(random.randint(0, elements) for _ in range(ranks - 1)), elements]

    root = tmp_path_factory.mktemp("checkpoint")
    stores = stores_by_model[name]
    state = open_state(write(root / "step", stores, layout, split))
    assert state.step == 5.0
    assert not differences(state.weights, stores["model"])
    for field in FIELDS[1:]:
        store = state.fields[field]
        missing = stores[field].tensors.keys() - store.tensors.keys()
        assert all(tensor.endswith("e_score_correction_bias") for tensor in missing)
        for tensor in store.tensors:
            assert torch.equal(store.read(tensor), stores[field].read(tensor))
    # The reverse: any range of any parameter in any layout.
    place = random.choice(random.choice(data.draw(layouts(has_experts)).places(2)))
    for parameter, value in local_tensors(stores["exp_avg"], place).items():
        if parameter.endswith("expert_bias"):
            continue
        start, stop = sorted(random.randint(0, value.numel()) for _ in range(2))
        local_parameter = layout_of(state.weights.arch, place)[parameter]
        flat_range = read_range(state.fields["exp_avg"], local_parameter, start, stop)
        assert torch.equal(flat_range, value.reshape(-1)[start:stop]), parameter
    shutil.rmtree(root)


# ------------------------------------------------------------------------------- damage


def edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def move_range(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    """Return a change that moves a key to another range and resizes its tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if old in key]:
            start, stop = map(int, new[new.index("[") + 1 : new.index("]")].split(":"))
            value = tensors.pop(key)
            fits = value if not value.dim() else value.new_ones(stop - start)
            tensors[key.replace(old, new)] = fits

    return change


def drop_keys(word: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if word in key]:
            del tensors[key]

    return change


NORM = "decoder.final_layernorm.weight"
DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "overlap": (
        "rank_00003",
        move_range(f"{NORM}[18:36]", f"{NORM}[17:36]"),
        rf"rank_00003.*optimizer/{NORM}\[17:36\]/exp_avg overlaps its range in .*rank_00000",
    ),
    "gap": (
        "rank_00003",
        move_range(f"{NORM}[18:36]", f"{NORM}[19:36]"),
        rf"rank_00000.*optimizer/{NORM}/exp_avg: elements from 18 of 36 are in no file",
    ),
    "end": (
        "rank_00003",
        drop_keys(f"{NORM}[18:36]/exp_avg_sq"),
        rf"rank_00000.*optimizer/{NORM}/exp_avg_sq: elements from 18 of 36 are in no file",
    ),
    "start": (
        "rank_00000",
        drop_keys(f"{NORM}[0:18]/exp_avg_sq"),
        rf"optimizer/{NORM}/exp_avg_sq: elements from 0 of 36 are in no file",
    ),
    "shape": (
        "rank_00004",
        lambda tensors: tensors.update({f"optimizer/{NORM}[18:36]/exp_avg": torch.ones(3)}),
        rf"rank_00004.*optimizer/{NORM}\[18:36\]/exp_avg has shape \(3,\)",
    ),
    "stranger": (
        "rank_00004",
        lambda tensors: tensors.update({"optimizer/x[0:3]/exp_avg": torch.ones(3)}),
        r"rank_00004.*optimizer/x\[0:3\]/exp_avg is no parameter of this rank",
    ),
    "step": (
        "rank_00002",
        lambda tensors: tensors.update(
            {key: torch.tensor(6.0) for key in tensors if key.endswith("/step")}
        ),
        r"rank_00002.*: of update 6, but .*rank_00000.* is of update 5",
    ),
    "dtype": (
        "rank_00003",
        lambda tensors: tensors.update(
            {key: value.double() for key, value in tensors.items() if NORM in key and "avg" in key}
        ),
        rf"optimizer/{NORM}/exp_avg has other dtypes in other files",
    ),
}


@pytest.fixture
def checkpoint(stores_by_model: dict[str, dict[str, Store]], tmp_path: Path) -> Path:
    return write(tmp_path / "step", stores_by_model["llama_tied"], PLAIN_LAYOUT, evenly)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_reported_with_file_and_tensor(kind: str, checkpoint: Path) -> None:
    file, change, message = DAMAGES[kind]
    edit(checkpoint / f"{file}.safetensors", change)
    with pytest.raises(CheckpointError, match=message):
        open_state(checkpoint)


@pytest.mark.parametrize("rank", [0, 4, 5])
def test_a_missing_rank_file_is_reported(rank: int, checkpoint: Path) -> None:
    name = f"rank_{rank:05d}.safetensors"
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: missing; 6 ranks saved"):
        open_state(checkpoint)


# ------------------------------------------------------------------------------- resharding


def targets(dtype: torch.dtype, moments: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a norm that a rank with two pipeline stages loads."""
    return {
        f"model/{NORM}": torch.zeros(36, dtype=dtype),
        f"optimizer/{NORM}[0:20]/exp_avg": torch.zeros(20, dtype=moments),
        f"optimizer/{NORM}[0:20]/step": torch.tensor(0.0),
    }


LAST = ChunkPlace(0, 1, 1, 1, has_embedding=False, has_head=True)


def test_a_rank_gets_its_share_of_a_checkpoint_of_another_layout(
    checkpoint: Path, stores_by_model: dict[str, dict[str, Store]]
) -> None:
    targets_of_rank, stores = targets(torch.float32, torch.float32), stores_by_model["llama_tied"]
    targets_of_rank["model/output_layer.weight"] = torch.full((37, 36), torch.nan)
    reshard(checkpoint, targets_of_rank, [LAST], stores["model"].arch, ())
    norm, moment, step, head = targets_of_rank.values()
    assert torch.equal(norm, stores["model"].read("model.norm.weight"))
    assert torch.equal(moment, stores["exp_avg"].read("model.norm.weight")[:20])
    assert step == 5.0
    assert torch.equal(head, stores["model"].read("model.embed_tokens.weight"))


def test_vocabulary_padding_is_zero(
    checkpoint: Path, stores_by_model: dict[str, dict[str, Store]]
) -> None:
    arch = stores_by_model["llama_tied"]["model"].arch
    last = ChunkPlace(2, 3, 0, 2, has_embedding=True, has_head=True)  # rows 26 to 38 of 37
    targets_of_rank = {"model/embedding.word_embeddings.weight": torch.full((13, 36), torch.nan)}
    reshard(checkpoint, targets_of_rank, [last], arch, ())
    [value] = targets_of_rank.values()
    assert torch.equal(value[11:], torch.zeros(2, 36))
    assert value[:11].all()


def test_loading_into_a_lower_precision_is_rejected(
    checkpoint: Path, stores_by_model: dict[str, dict[str, Store]]
) -> None:
    arch = stores_by_model["llama_tied"]["model"].arch
    targets_of_rank = targets(torch.bfloat16, torch.bfloat16)
    message = (
        r"model.norm.weight \(exp_avg\) was saved in float32 .* bfloat16\. .*optimizer.moments"
    )
    with pytest.raises(CheckpointError, match=message):
        reshard(checkpoint, targets_of_rank, [LAST], arch, ())
    # Nothing was loaded.
    assert not any(value.any() for value in targets_of_rank.values())


def test_a_checkpoint_of_another_model_is_rejected(
    checkpoint: Path, stores_by_model: dict[str, dict[str, Store]]
) -> None:
    arch = stores_by_model["qwen2"]["model"].arch
    with pytest.raises(CheckpointError, match=r"of another model than model.path: family llama"):
        reshard(checkpoint, {}, [LAST], arch, ())


def test_a_checkpoint_without_optimizer_state_of_a_tensor_is_rejected(
    checkpoint: Path, stores_by_model: dict[str, dict[str, Store]]
) -> None:
    for path in checkpoint.glob("rank_*"):
        edit(path, drop_keys(f"optimizer/{NORM}"))
    arch = stores_by_model["llama_tied"]["model"].arch
    with pytest.raises(CheckpointError, match=r"optimizer state \(exp_avg\) of model.norm.weight"):
        reshard(checkpoint, targets(torch.float32, torch.float32), [LAST], arch, ())
