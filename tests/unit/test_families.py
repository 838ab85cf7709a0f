"""Model families: the parameters of all ranks, of Megatron and of vLLM, equal the HF checkpoint in
every layout.

Parameters are plain tensors here. tests/parity/test_families.py uses Megatron's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dapo_megatron.files import read_json
from dapo_megatron.model import FAMILIES as model_families
from dapo_megatron.model import (
    Architecture,
    ChunkPlace,
    architecture,
    engine_slices,
    hf_tensors,
    layout_of,
)
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.types import ConfigError, Region, TensorSlice
from tests.helpers.models import FAMILIES, make_random_model
from tests.helpers.published import PUBLISHED, small_config

CASES = [(family, tied) for family in FAMILIES for tied in (False, True)]
VOCABULARIES = ("model.embed_tokens.weight", "lm_head.weight")


# ----------------------------------------------------------------------- models and layouts


@dataclass(frozen=True)
class Layout:
    """Parallel sizes. `first_layers` is the number of layers on the first of two pipeline stages,
    None with one stage. Expert parallelism divides the ranks of a stage independently."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    first_layers: int | None = None
    fused: bool = False  # Transformer Engine's names

    def places(self, arch: Architecture) -> Iterator[ChunkPlace]:
        """Yield each rank's chunk, in Megatron's order of ranks."""
        cuts = sorted({0, self.first_layers or 0, arch.num_layers})
        for first, last in pairwise(cuts):
            for rank in range(self.tp * self.dp):
                yield ChunkPlace(
                    tp_rank=rank % self.tp,
                    tp_size=self.tp,
                    first_layer=first,
                    num_layers=last - first,
                    has_embedding=first == 0,
                    has_head=last == arch.num_layers,
                    ep_rank=rank % self.ep,
                    ep_size=self.ep,
                )


@st.composite
def models(draw: st.DrawFn, family: str, tied: bool, tp: int) -> Architecture:
    """Draw a model of odd sizes that `tp` ranks can divide, also with fewer key-value heads than
    ranks."""
    rules = model_families[family]
    groups = draw(st.sampled_from([1, 2, 3, 4, 6]).filter(lambda n: n % tp == 0 or tp % n == 0))
    per_group = draw(st.integers(1, 4).filter(lambda n: n * groups % tp == 0))
    fields = {
        "num_hidden_layers": draw(st.integers(2, 3)),
        "hidden_size": 6,
        "num_attention_heads": per_group * groups,
        "num_key_value_heads": per_group * groups if rules.has_latent else groups,
        "head_dim": draw(st.sampled_from([8, 16] if rules.has_partial_rotary else [2, 4])),
        "intermediate_size": draw(st.integers(1, 3)) * tp,
        "vocab_size": draw(st.integers(1, 150)),
        "tie_word_embeddings": tied,
        "moe_intermediate_size": 4 * draw(st.integers(1, 2)),
    }
    fields |= {field: draw(st.booleans()) for field in rules.flags.values()}
    if rules.has_latent:
        del fields["head_dim"]
        fields["q_lora_rank"] = draw(st.sampled_from([None, 5]))
    if rules.has_grouped_routing:
        fields["first_k_dense_replace"] = draw(st.integers(0, 2))
    if rules.has_delta:
        keys, per_key = draw(st.integers(1, 3)) * tp, draw(st.integers(1, 3))
        fields["linear_num_key_heads"], fields["linear_num_value_heads"] = keys, keys * per_key
        fields["full_attention_interval"] = draw(st.integers(2, 4))
        if rules.expert:
            fields["shared_expert_intermediate_size"] = draw(st.integers(1, 3)) * tp
    return architecture(small_config(family, **fields))


@st.composite
def layouts(draw: st.DrawFn, arch: Architecture, tp: int) -> Layout:
    dp = draw(st.sampled_from([1, 2]))
    experts = [n for n in (1, 2, 4, 8) if arch.num_experts and tp * dp % n == 0]
    stage = st.integers(1, arch.num_layers - 1)
    ep = draw(st.sampled_from(experts or [1]))
    return Layout(tp, dp, ep, draw(st.none() | stage), draw(st.booleans()))


def checkpoint_of(arch: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(shape, generator=generator) for name, shape in hf_tensors(arch).items()
    }


def filled(
    arch: Architecture, place: ChunkPlace, fused: bool, checkpoint: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a chunk's parameters, with NaN where the checkpoint has no value."""
    local_parameters = layout_of(arch, place, fused=fused)
    params = {
        name: torch.full(local_parameter.shape, torch.nan)
        for name, local_parameter in local_parameters.items()
    }
    for shard in shards_of(params, arch, place):
        shard.write(checkpoint[shard.tensor_slice.name][shard.tensor_slice.region.slices])
    return params


# --------------------------------------------------------------------------- HF and Megatron


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_hf_names_and_shapes_equal_those_of_a_saved_checkpoint(
    family: str, tied: bool, tmp_path: Path
) -> None:
    odd = {"vocab_size": 101, "num_hidden_layers": 3, "tie_word_embeddings": tied}
    folder = make_random_model(family, tmp_path, **odd)
    saved = load_file(folder / "model.safetensors")
    arch = architecture(read_json(folder / "config.json"))
    assert hf_tensors(arch) == {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    num_parameters, published = PUBLISHED[name]
    arch = architecture(published)
    assert sum(map(prod, hf_tensors(arch).values())) == num_parameters


@pytest.mark.parametrize(("family", "tied"), CASES)
@settings(max_examples=16)
@given(data=st.data())
def test_all_ranks_together_hold_exactly_the_checkpoint(
    family: str, tied: bool, data: st.DataObject
) -> None:
    tp = data.draw(st.sampled_from([1, 2, 4]))
    arch = data.draw(models(family, tied, tp))
    layout = data.draw(layouts(arch, tp))
    checkpoint = checkpoint_of(arch)
    rebuilt = {name: torch.full_like(tensor, torch.nan) for name, tensor in checkpoint.items()}
    copies = {name: torch.zeros_like(tensor) for name, tensor in checkpoint.items()}
    for place in layout.places(arch):
        params = filled(arch, place, layout.fused, checkpoint)
        shards = shards_of(params, arch, place)
        for shard in shards:
            rebuilt[shard.tensor_slice.name][shard.tensor_slice.region.slices] = shard.read()
            copies[shard.tensor_slice.name][shard.tensor_slice.region.slices] += 1
        for name, param in params.items():
            assert "embedding" in name or "output" in name or not param.isnan().any(), name
        # Each rank has each element once, and every parameter element is used except padding.
        padding = sum(int(param.isnan().sum()) for param in params.values())
        num_elements = sum(shard.tensor_slice.region.numel for shard in shards)
        assert num_elements == sum(param.numel() for param in params.values()) - padding
    for name, tensor in checkpoint.items():
        assert torch.equal(rebuilt[name], tensor), name
        assert copies[name].unique().tolist() == [expected_copies(name, arch, layout)], name


def is_replicated(name: str) -> bool:
    """Return whether every rank holds the whole tensor."""
    return "norm" in name or name.endswith(
        ("gate.weight", "gate.e_score_correction_bias", "q_a_proj.weight", "a_proj_with_mqa.weight")
    )


def expected_copies(name: str, arch: Architecture, layout: Layout) -> int:
    """Return how many ranks hold each element."""
    ranks = layout.tp * layout.dp
    if ".experts." in name:
        return ranks // layout.ep
    if is_replicated(name):
        return ranks
    has_second = name == VOCABULARIES[0] and arch.tie_word_embeddings and layout.first_layers
    return layout.dp * (2 if has_second else 1)


def test_transformer_engine_fuses_norms_into_the_following_linear_layers() -> None:
    place = ChunkPlace(0, 1, 0, 1, False, False)
    names = {
        (family, fused): {
            name.removeprefix("decoder.layers.0.")
            for name in layout_of(architecture(small_config(family)), place, fused=fused)
            if "norm" in name or "experts" in name
        }
        for family in ("llama", "qwen3_moe")
        for fused in (False, True)
    }
    attention = "self_attention."
    in_qkv = f"{attention}linear_qkv.layer_norm_weight"
    qk = {f"{attention}q_layernorm.weight", f"{attention}k_layernorm.weight"}
    assert names["llama", False] == {"input_layernorm.weight", "pre_mlp_layernorm.weight"}
    assert names["llama", True] == {in_qkv, "mlp.linear_fc1.layer_norm_weight"}
    # The norm before experts is not fused, because the router also reads its output.
    experts = {f"mlp.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(8)}
    assert names["qwen3_moe", True] == {in_qkv, "pre_mlp_layernorm.weight", *qk, *experts}


def test_a_missing_or_misshapen_parameter_is_rejected_with_its_name() -> None:
    arch = architecture(small_config())
    [place] = Layout().places(arch)
    params = filled(arch, place, False, checkpoint_of(arch))
    name = "decoder.layers.2.mlp.router.weight"
    with pytest.raises(ConfigError, match=rf"{name} of \S+ is \(8, 4\).*\(8, 6\)"):
        shards_of({**params, name: torch.zeros(8, 4)}, arch, place)
    del params[name]
    with pytest.raises(ConfigError, match=rf"{name} of \S+ is missing, by the rules"):
        shards_of(params, arch, place)


def test_dimensions_that_ranks_cannot_divide_are_rejected() -> None:
    arch = architecture(small_config("llama", num_attention_heads=9, num_key_value_heads=3))
    with pytest.raises(ConfigError, match=r"query-key-value.*by 4"):
        layout_of(arch, ChunkPlace(0, 4, 0, 4, True, True))
    with pytest.raises(ConfigError, match=r"9 \(attention heads\).*by 2"):
        engine_slices(arch, 0, 2, torch.float32)
    hybrid = architecture(small_config("qwen3_5_text"))  # 6 rows of keys, but 2 heads
    with pytest.raises(ConfigError, match=r"2 \(heads of linear_attn.in_proj_qkv.*by 3"):
        layout_of(replace(hybrid, num_layers=1), ChunkPlace(0, 3, 0, 1, True, True))
    with pytest.raises(ConfigError, match=r"8 experts.*by 3"):
        layout_of(architecture(small_config()), ChunkPlace(0, 1, 0, 4, True, True, 0, 3))


# -------------------------------------------------------------------------------- the engine


def engine_regions(
    arch: Architecture, tp: int, expert_parallel: bool = False
) -> list[list[tuple[str, Region]]]:
    """Return names and regions of each rank's slices."""
    ranks = []
    for rank in range(tp):
        tensor_slices: list[TensorSlice] = engine_slices(
            arch, rank, tp, torch.bfloat16, expert_parallel=expert_parallel
        )
        shapes = hf_tensors(arch)
        assert all(
            tensor_slice.global_shape == shapes[tensor_slice.name] for tensor_slice in tensor_slices
        )
        assert all(tensor_slice.dtype == torch.bfloat16 for tensor_slice in tensor_slices)
        ranks.append([(tensor_slice.name, tensor_slice.region) for tensor_slice in tensor_slices])
    return ranks


@pytest.mark.parametrize(("family", "tied"), CASES)
@settings(max_examples=16)
@given(data=st.data())
def test_the_ranks_of_an_engine_hold_every_element_with_the_expected_copies(
    family: str, tied: bool, data: st.DataObject
) -> None:
    tp = data.draw(st.sampled_from([1, 2, 4]))
    arch = data.draw(models(family, tied, tp))
    expert_parallel = data.draw(st.booleans())
    copies = {name: torch.zeros(shape) for name, shape in hf_tensors(arch).items()}
    for tensor_slices in engine_regions(arch, tp, expert_parallel):
        for name, region in tensor_slices:
            copies[name][region.slices] += 1
    for name, count in copies.items():
        if is_replicated(name):
            expected = tp
        elif ".k_proj." in name or ".v_proj." in name:
            expected = max(tp // arch.num_kv_heads, 1)
        else:
            expected = 1
        assert count.unique().tolist() == [expected], name


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"),
    [
        (101, 2, [(0, 64), (64, 37)]),
        (49_153, 2, [(0, 24_608), (24_608, 24_545)]),
        (20, 4, [(0, 16), (16, 4), None, None]),
    ],
)
def test_an_engine_pads_the_vocabulary_to_a_multiple_of_64(
    vocab: int, tp: int, rows: list[Any]
) -> None:
    arch = architecture(small_config("qwen3", vocab_size=vocab))
    for name in VOCABULARIES:
        regions = [dict(rank).get(name) for rank in engine_regions(arch, tp)]
        assert [region and (region.start[0], region.shape[0]) for region in regions] == rows
