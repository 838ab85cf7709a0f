"""Model families: the parameters of all ranks, of Megatron and of vLLM, equal the HF checkpoint in
every layout. Unsupported fields of config.json are rejected by name.

Parameters are plain tensors here. tests/parity/test_families.py uses Megatron's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from transformers import AutoTokenizer

from dapo_megatron.engine.device import check_config, has_cuda
from dapo_megatron.files import read_json
from dapo_megatron.model import FAMILIES as model_families
from dapo_megatron.model import (
    Architecture,
    ChunkPlace,
    GroupedRouting,
    Latent,
    Rope,
    architecture,
    engine_slices,
    hf_tensors,
    layout_of,
)
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.types import ConfigError, Region, TensorSlice
from tests.helpers.configs import tiny_config
from tests.helpers.models import FAMILIES, make_random_model
from tests.helpers.published import PUBLISHED
from tools.make_tiny_model import make_config, make_tokenizer

TINY_MOE = Path(__file__).parents[2] / "model_configs" / "tiny_qwen3_moe"
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
        "head_dim": draw(st.sampled_from([4, 8] if rules.has_partial_rotary else [2, 4])),
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
    return architecture(config(family, **fields))


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


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("family", "tied"), CASES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_all_ranks_together_hold_exactly_the_checkpoint(
    family: str, tied: bool, tp: int, data: st.DataObject
) -> None:
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


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_fused_rows_have_the_order_that_megatron_expects(tp: int, data: st.DataObject) -> None:
    arch = data.draw(models("qwen2", False, tp))
    checkpoint = checkpoint_of(arch)
    prefix = "model.layers.1."

    def heads(part: str, kind: str) -> Tensor:
        rows = checkpoint[f"{prefix}self_attn.{part}_proj.{kind}"]
        return rows.view(arch.num_kv_heads, -1, arch.head_dim, *rows.shape[1:])

    fused = {
        kind: torch.cat([heads(part, kind) for part in "qkv"], dim=1).flatten(0, 2).chunk(tp)
        for kind in ("weight", "bias")
    }
    gate, up = (checkpoint[f"{prefix}mlp.{part}_proj.weight"].chunk(tp) for part in ("gate", "up"))
    out = checkpoint[prefix + "self_attn.o_proj.weight"].chunk(tp, dim=1)
    for place in Layout(tp, first_layers=1).places(arch):
        if place.first_layer == 0:
            continue
        params = filled(arch, place, False, checkpoint)
        rank, layer = place.tp_rank, "decoder.layers.0."
        for kind, rows in fused.items():
            name = f"{layer}self_attention.linear_qkv.{kind}"
            assert torch.equal(params[name], rows[rank]), name
        stacked = torch.cat([gate[rank], up[rank]])
        assert torch.equal(params[layer + "mlp.linear_fc1.weight"], stacked)
        assert torch.equal(params[layer + "self_attention.linear_proj.weight"], out[rank])


def test_fused_heads_may_be_split_within_a_key_value_group() -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 2}
    arch = architecture(config("llama", **heads))
    # Fused heads: q0 q1 q2 q3 k0 v0 | q4 q5 q6 q7 k1 v1; three on each of four ranks.
    [first, second, third, fourth] = (
        [
            (part.name.split(".")[4], part.region.start[0], part.region.shape[0], part.first_row)
            for part in layout_of(arch, place)[
                "decoder.layers.0.self_attention.linear_qkv.weight"
            ].parts
        ]
        for place in Layout(tp=4).places(arch)
    )
    assert first == [("q_proj", 0, 6, 0)]
    assert second == [("q_proj", 6, 2, 0), ("k_proj", 0, 2, 2), ("v_proj", 0, 2, 4)]
    assert third == [("q_proj", 8, 6, 0)]
    assert fourth == [("q_proj", 14, 2, 0), ("k_proj", 2, 2, 2), ("v_proj", 2, 2, 4)]


def test_experts_have_local_numbers_and_are_replicated_over_data_parallel_ranks() -> None:
    arch = architecture(config())
    checkpoint = checkpoint_of(arch)
    hf_name = "model.layers.3.mlp.experts.6.{}_proj.weight"
    fused_fc1 = "decoder.layers.1.mlp.experts.linear_fc1.weight2"
    expected = torch.cat([checkpoint[hf_name.format(part)] for part in ("gate", "up")])
    holders = []
    for place in Layout(tp=2, dp=2, ep=2, first_layers=2, fused=True).places(arch):
        params = filled(arch, place, True, checkpoint)
        if place.first_layer == 2 and torch.equal(params[fused_fc1], expected):
            holders.append((place.tp_rank, place.ep_rank))
    assert holders == [(1, 1), (1, 1)]


def test_transformer_engine_fuses_norms_into_the_following_linear_layers() -> None:
    place = ChunkPlace(0, 1, 0, 1, False, False)
    names = {
        (family, fused): {
            name.removeprefix("decoder.layers.0.")
            for name in layout_of(architecture(config(family)), place, fused=fused)
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


def test_the_committed_moe_model_is_small_and_matches_its_script() -> None:
    assert sum(file.stat().st_size for file in TINY_MOE.iterdir()) < 1.5 * 1000**2
    made = make_config("qwen3_moe").to_dict()
    committed = read_json(TINY_MOE / "config.json")
    of_saving = {"transformers_version", "architectures"}
    assert {key: made[key] for key in committed.keys() - of_saving} == {
        key: value for key, value in committed.items() if key not in of_saving
    }
    assert AutoTokenizer.from_pretrained(TINY_MOE).get_vocab() == make_tokenizer().get_vocab()
    saved = load_file(TINY_MOE / "model.safetensors")
    assert hf_tensors(architecture(committed)) == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())


@pytest.mark.parametrize(
    "name",
    [
        "mlp.experts.weight1",  # Megatron's grouped experts in one tensor
        "mlp.experts.local_experts.0.linear_fc1.bias",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.router.bias",
    ],
)
def test_a_parameter_without_a_rule_is_rejected_with_its_name(name: str) -> None:
    arch = architecture(config())
    [place] = Layout().places(arch)
    params = filled(arch, place, False, checkpoint_of(arch))
    extra = f"decoder.layers.0.{name}"
    with pytest.raises(ConfigError, match=f"no rule for the parameter {extra}"):
        shards_of({**params, extra: torch.zeros(4, 4)}, arch, place)


def test_a_missing_or_misshapen_parameter_is_rejected_with_its_name() -> None:
    arch = architecture(config())
    [place] = Layout().places(arch)
    params = filled(arch, place, False, checkpoint_of(arch))
    name = "decoder.layers.2.mlp.router.weight"
    with pytest.raises(ConfigError, match=rf"{name} has shape \[8, 4\].*\[8, 6\]"):
        shards_of({**params, name: torch.zeros(8, 4)}, arch, place)
    del params[name]
    with pytest.raises(ConfigError, match=f"the parameter {name} is missing"):
        shards_of(params, arch, place)


def test_dimensions_that_ranks_cannot_divide_are_rejected() -> None:
    arch = architecture(config("llama", num_attention_heads=9, num_key_value_heads=3))
    with pytest.raises(ConfigError, match=r"query-key-value.*by 4"):
        layout_of(arch, ChunkPlace(0, 4, 0, 4, True, True))
    with pytest.raises(ConfigError, match=r"9 \(attention heads\).*by 2"):
        engine_slices(arch, 0, 2, torch.float32)
    with pytest.raises(ConfigError, match=r"8 experts.*by 3"):
        layout_of(architecture(config()), ChunkPlace(0, 1, 0, 4, True, True, 0, 3))


# -------------------------------------------------------------------------------- the engine


def engine_regions(
    arch: Architecture, tp: int, expert_parallel: bool = False
) -> list[dict[str, Region]]:
    """Return the region of each tensor, per rank. No rank may list a tensor twice."""
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
        assert max(Counter(tensor_slice.name for tensor_slice in tensor_slices).values()) == 1
        ranks.append({tensor_slice.name: tensor_slice.region for tensor_slice in tensor_slices})
    return ranks


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("family", "tied"), CASES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_ranks_of_an_engine_hold_every_element_with_the_expected_copies(
    family: str, tied: bool, tp: int, data: st.DataObject
) -> None:
    arch = data.draw(models(family, tied, tp))
    expert_parallel = data.draw(st.booleans())
    copies = {name: torch.zeros(shape) for name, shape in hf_tensors(arch).items()}
    for tensor_slices in engine_regions(arch, tp, expert_parallel):
        for name, region in tensor_slices.items():
            copies[name][region.slices] += 1
    for name, count in copies.items():
        if is_replicated(name):
            expected = tp
        elif ".k_proj." in name or ".v_proj." in name:
            expected = max(tp // arch.num_kv_heads, 1)
        else:
            expected = 1
        assert count.unique().tolist() == [expected], name


def test_an_engine_splits_heads_and_replicates_key_value_heads() -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 2}
    arch = architecture(config("qwen2", intermediate_size=12, **heads))
    layer = "model.layers.0."
    ranks = engine_regions(arch, 4)
    assert [rank[layer + "self_attn.q_proj.weight"].start for rank in ranks] == [
        (0, 0),
        (4, 0),
        (8, 0),
        (12, 0),
    ]
    for part in ("k_proj.bias", "v_proj.bias"):
        assert [rank[f"{layer}self_attn.{part}"] for rank in ranks] == [
            *[Region((0,), (2,))] * 2,
            *[Region((2,), (2,))] * 2,
        ]
    last = ranks[3]
    assert last[layer + "self_attn.o_proj.weight"] == Region((0, 12), (6, 4))
    assert last[layer + "mlp.gate_proj.weight"] == Region((9, 0), (3, 6))
    assert last[layer + "mlp.up_proj.weight"] == Region((9, 0), (3, 6))
    assert last[layer + "mlp.down_proj.weight"] == Region((0, 9), (6, 3))


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
    arch = architecture(config("qwen3", vocab_size=vocab))
    for name in VOCABULARIES:
        regions = [rank.get(name) for rank in engine_regions(arch, tp)]
        assert [region and (region.start[0], region.shape[0]) for region in regions] == rows


def test_an_engine_splits_each_expert_or_distributes_whole_experts() -> None:
    arch = architecture(config())
    name = "model.layers.1.mlp.experts.4.{}_proj.weight"
    cut = engine_regions(arch, 2)[1]
    assert cut[name.format("gate")] == cut[name.format("up")] == Region((2, 0), (2, 6))
    assert cut[name.format("down")] == Region((0, 2), (6, 2))
    first, second = engine_regions(arch, 2, expert_parallel=True)
    assert name.format("gate") not in first
    assert second[name.format("gate")] == Region((0, 0), (4, 6))
    assert second[name.format("down")] == Region((0, 0), (6, 4))


# ------------------------------------------------------------------------------- config.json


def config(family: str = "qwen3_moe", **changes: Any) -> dict[str, Any]:
    """Return a published config.json of the family, with small sizes."""
    published = next(fields for _, fields in PUBLISHED.values() if fields["model_type"] == family)
    sizes = {
        "hidden_size": 6,
        "intermediate_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    }
    rules = model_families[family]
    experts: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 4}
    experts |= GROUPED if rules.has_grouped_routing else {"num_experts": 8}
    if not rules.expert:
        experts = {}
        changes.pop("moe_intermediate_size", None)
    if rules.has_partial_rotary:
        sizes["head_dim"] = 4
    if rules.has_latent:
        experts |= LATENT
        del sizes["head_dim"]
        heads = changes.get("num_attention_heads", sizes["num_attention_heads"])
        sizes["num_key_value_heads"] = heads
        changes.setdefault("num_key_value_heads", heads)
    fields = {**published, **sizes, **experts, **changes}
    if rules.has_mlp_types and "mlp_layer_types" not in fields:
        num_dense, num_layers = fields["first_k_dense_replace"], fields["num_hidden_layers"]
        if isinstance(num_dense, int) and isinstance(num_layers, int):
            types = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
            fields["mlp_layer_types"] = types
    return fields


LATENT = {
    "q_lora_rank": 5,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
GROUPED = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_written_by_transformers_are_understood(family: str) -> None:
    needed = {
        "mistral": {"sliding_window": None},
        # Fields that vLLM reads and transformers does not write.
        "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        "glm4_moe_lite": {"first_k_dense_replace": 1},
        "glm4_moe": {"head_dim": 128},  # else 42, of which an odd number would rotate
    }
    written = FAMILIES[family][0](**needed.get(family, {}))
    assert architecture(written.to_dict()).num_layers == written.num_hidden_layers


def test_the_number_of_experts_is_read_under_both_names() -> None:
    arch = architecture(config())
    assert (arch.num_experts, arch.experts_per_token, arch.moe_intermediate_size) == (8, 2, 4)
    assert arch.normalize_topk
    assert arch.qk_norm
    renamed = config(num_local_experts=8)
    del renamed["num_experts"]
    assert architecture(renamed) == arch
    assert not architecture(config(norm_topk_prob=False)).normalize_topk
    # HF's training settings are not part of the model.
    assert architecture(config(router_aux_loss_coef=0.5, output_router_logits=True)) == arch
    with pytest.raises(ConfigError, match=r"num_experts = 8 and num_local_experts = 4"):
        architecture(config(num_local_experts=4))


def test_bias_and_norm_features_follow_from_the_family() -> None:
    assert architecture(config("qwen2")).qkv_bias
    assert not architecture(config("qwen2")).qk_norm
    assert not architecture(config("qwen3")).qkv_bias
    assert not architecture(config("llama")).num_experts


def test_missing_fields_get_the_defaults_of_transformers() -> None:
    for family, key, value in [
        ("llama", "num_key_value_heads", 4),
        ("qwen3", "head_dim", 128),
        ("llama", "tie_word_embeddings", False),
        ("llama", "rope_theta", 10_000.0),
    ]:
        incomplete = config(family)
        incomplete.pop(key, None)
        assert architecture(incomplete) == architecture({**incomplete, key: value}), key
    incomplete = config("llama")
    del incomplete["head_dim"]
    assert architecture({**incomplete, "hidden_size": 12}).head_dim == 3


def test_the_cpu_engine_checks_the_effective_head_dim() -> None:
    if has_cuda():
        pytest.skip("only vLLM on CPU restricts head_dim")
    absent = config("qwen3", hidden_size=64)
    del absent["head_dim"]
    check_config(tiny_config(), architecture(absent))  # head_dim is 128 by default
    with pytest.raises(ConfigError, match="head_dim = 16"):
        check_config(tiny_config(), architecture({**absent, "head_dim": None}))


LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 3.0,
    "low_freq_factor": 1.5,
    "original_max_position_embeddings": 4096,
}


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"attention_factor": 1.25, "mscale": 2.0, "mscale_all_dim": 0.5}, 1.25),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_scales_cosines_and_sines(fields: dict[str, Any], scaling: float) -> None:
    rope = architecture(config("qwen3", rope_scaling={**YARN, **fields})).rope
    assert (rope.kind, rope.beta_fast, rope.beta_slow) == ("yarn", 32.0, 1.0)
    assert rope.attention_scaling == pytest.approx(scaling, rel=1e-15)


def test_yarn_limits_positions_to_those_that_vllm_has_angles_for() -> None:
    assert architecture(config("qwen3", rope_scaling=YARN)).max_positions == 128
    assert architecture(config("qwen3", rope_scaling={**YARN, "factor": 90})).max_positions == 256


def test_rope_is_read_from_all_of_its_fields() -> None:
    new = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    expected = Rope(5e5, "llama3", 32.0, 1.5, 3.0, 4096)
    bare = config("llama")
    bare.pop("rope_theta", None)
    old = {"type": "llama3", **LLAMA3}
    for fields in (
        {"rope_parameters": new},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": old},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": new},
    ):
        assert architecture({**bare, **fields}).rope == expected
    linear = {"type": "linear", "factor": 4}
    assert architecture(config("llama", rope_scaling=linear)).rope == Rope(1e4, "linear", 4.0)
    assert architecture(config("qwen3")).rope == Rope(1e6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "original_max_position_embeddings is missing",
        ),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate = False"),
        ({"rope_scaling": {**YARN, "beta_fast": None}}, "rope_scaling.beta_fast = None"),
        ({"rope_scaling": {**YARN, "attn_factor": 2.0}}, "rope_scaling.attn_factor = 2.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing from rope_scaling"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24]}},
            r"rope_parameters.mrope_section = \[16, 24\]",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 3.0}},
            "low_freq_factor = 3.0 must be below",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta = 10000.0 and"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_parameters and rope_scaling differ",
        ),
    ],
)
def test_unsupported_rope_is_rejected_with_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture(config("llama", **fields))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("qwen3_moe", "shared_expert_intermediate_size", 64),
        ("qwen3_moe", "n_shared_experts", 1),
        ("qwen3_moe", "moe_router_enable_expert_bias", True),
        ("qwen3_moe", "topk_method", "noaux_tc"),
        ("qwen3_moe", "num_experts_per_tok", 9),
        ("qwen3_moe", "num_experts_per_tok", 0),
        ("qwen3_moe", "model_type", "mixtral"),
        ("qwen3", "num_experts", 8),
        ("qwen3", "hidden_act", "gelu"),
        ("qwen3", "attention_bias", True),
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "layer_types", ["sliding_attention"]),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "pretraining_tp", 2),
        ("llama", "attention_dropout", 0.1),
        ("llama", "sliding_window", 4096),  # transformers ignores it for Llama, but vLLM reads it
        ("llama", "rope_interleaved", True),
        ("llama", "is_causal", False),
        ("qwen2", "is_causal", False),
        ("qwen3", "is_causal", 0),
        ("deepseek_v3", "is_encoder_decoder", True),
        ("llama", "qkv_bias", True),
        ("mistral", "bias", True),
        ("qwen2", "use_mrope", True),
        ("qwen3_moe", "use_qk_norm", False),
        ("llama", "num_key_value_heads", 3),
        ("llama", "hidden_size", "large"),
        ("mistral", "sliding_window", 255),
        ("mistral", "auto_map", {"AutoModel": "modeling.Model"}),
        ("llama", "quantization_config", {"quant_method": "fp8"}),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "head_dim", 64),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "scoring_func", None),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "n_group", 8),  # groups of one expert
        ("deepseek_v3", "topk_group", 5),
        ("deepseek_v3", "num_experts_per_tok", 5),  # only two groups of two experts are used
        ("deepseek_v3", "n_shared_experts", None),
        ("glm4_moe_lite", "rope_interleave", False),
        ("glm4_moe_lite", "partial_rotary_factor", 0.5),
        ("glm4_moe_lite", "mlp_layer_types", ["dense", "dense", "sparse", "sparse"]),
        ("glm4_moe", "scoring_func", "softmax"),
        ("glm4_moe", "partial_rotary_factor", 1.5),
        ("glm4_moe", "partial_rotary_factor", 0.3),  # of 4 columns: 1
        ("glm4_moe", "partial_rotary_factor", None),  # 1.0 in transformers, 0.5 in vLLM
        ("glm4_moe", "attention_bias", "yes"),
    ],
)
def test_unsupported_values_are_rejected_with_their_field(
    family: str, field: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=field) as raised:
        architecture(config(family, **{field: value}), ignore=["other"])
    assert str(value).strip("[]") in str(raised.value) or field == "quantization_config"


@pytest.mark.parametrize("value", [None, "x", True, [2], -1, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "key",
    [
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
        *("vocab_size", "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size"),
        *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor"),
        *("first_k_dense_replace", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("v_head_dim", "rms_norm_eps", "rope_scaling.factor", "rope_scaling.beta_fast"),
        *("rope_scaling.original_max_position_embeddings", "rope_scaling.mscale_all_dim"),
    ],
)
def test_invalid_numbers_are_rejected_with_their_field(key: str, value: Any) -> None:
    fields = config("deepseek_v3")
    if key.startswith("rope_scaling."):
        changed = {key.removeprefix("rope_scaling."): value}
        fields["rope_scaling"] = {**fields["rope_scaling"], **changed}
    else:
        fields[key] = value
    with pytest.raises(ConfigError, match=key.removeprefix("rope_scaling.")):
        architecture(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": "x"}, "head_dim = 'x'"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads = 2.0"),
        ({"sliding_window": "x"}, "sliding_window = 'x'"),
        ({"rope_theta": "abc"}, "rope_theta = 'abc'"),
        ({"rope_theta": 0}, "rope_theta = 0; must be a number above 0"),
        ({"rope_theta": 10**400}, "rope_theta = 1000000000.*; must be a number above 0, at most"),
        ({"hidden_size": 2**31}, "hidden_size = 2147483648; must be an integer, at least 1"),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": "x"}},
            "rope_parameters.rope_theta",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'; must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_scaling.factor = 'x'"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "rope type"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'; must be true or false"),
        ({"layer_types": 5}, "layer_types has 5"),
        ({"layer_types": [["full_attention"]]}, "layer_types has"),
        ({"model_type": ["mistral"]}, "model_type"),
    ],
)
def test_values_of_a_wrong_type_are_rejected_with_their_field(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture(config("mistral", **fields))


STRANGE: list[Any] = [None, True, False, 0, -1, 2**31, 10**400, 1.5, 1e308, float("nan"), ""]
STRANGE += ["x", "\ud800", [], [1], ["x"], [[[]]], {}, {"a": 1}, {"rope_type": "default"}]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_strange_value_is_accepted_or_rejected_with_a_config_error(family: str) -> None:
    fields = config(family)
    changes = [{key: value} for key in fields for value in STRANGE]
    changes += [
        {key: {**inner, name: value}}
        for key, inner in fields.items()
        if isinstance(inner, dict)
        for name in inner
        for value in STRANGE
    ]
    for change in changes:
        try:
            architecture({**fields, **change})
        except ConfigError as error:
            assert str(error).startswith("model.path: ")
            assert len(str(error)) < 1000


def test_multi_latent_attention_is_read() -> None:
    arch = architecture(config("deepseek_v3"))
    assert arch.latent == Latent(5, 7, 3, 2, 5)
    assert (arch.head_dim, arch.num_dense_layers, arch.shared_intermediate_size) == (2, 1, 8)
    assert arch.grouped_routing == GroupedRouting(4, 2, 2.5)
    assert arch.rope == Rope(
        1e4,
        "yarn",
        40,
        original_max_positions=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    [names] = [hf_tensors(architecture(config("deepseek_v3", q_lora_rank=None)))]
    assert names["model.layers.0.self_attn.q_proj.weight"] == (20, 6)
    assert not [name for name in names if "q_a" in name or "q_b" in name]


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear", "factor": 2.0}, "rope type 'linear'"),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, "mscale = 0.0"),
        ({"truncate": False}, "truncate"),
        ({"attention_factor": 2.0}, "attention_factor"),
        ({**YARN, "type": "yarn", "mscale": 0.7}, "mscale = 0.7 and mscale_all_dim = None"),
    ],
)
def test_unsupported_rope_of_multi_latent_attention_is_rejected(
    rope: dict[str, Any], message: str
) -> None:
    fields = config("deepseek_v3")
    fields["rope_scaling"] = rope if "type" in rope else {**fields["rope_scaling"], **rope}
    with pytest.raises(ConfigError, match=message):
        architecture(fields)


def test_a_sliding_window_as_long_as_the_model_is_ignored() -> None:
    expected = architecture(config("mistral"))
    assert architecture(config("mistral", sliding_window=256)) == expected
    incomplete = config("mistral", max_position_embeddings=8192)
    del incomplete["sliding_window"]  # transformers defaults to 4096
    with pytest.raises(ConfigError, match="sliding_window = 4096"):
        architecture(incomplete)


def test_unknown_fields_may_be_ignored_by_name() -> None:
    fields = config("llama", attn_scale=0.5, residual_scale=2.0)
    with pytest.raises(ConfigError, match=r"attn_scale = 0.5.*model.ignore_fields"):
        architecture(fields)
    with pytest.raises(ConfigError, match="residual_scale"):
        architecture(fields, ignore=["attn_scale"])
    both = ["attn_scale", "residual_scale"]
    assert architecture(fields, ignore=both) == architecture(config("llama"))


def test_fields_known_to_matter_cannot_be_ignored() -> None:
    for field in ("attention_bias", "quantization_config", "hidden_act"):
        with pytest.raises(ConfigError, match=field):
            architecture(config("llama", **{field: "yes"}), ignore=[field])


def test_empty_values_of_unsupported_fields_are_accepted() -> None:
    for field in ("n_shared_experts", "mlp_only_layers", "no_such_field"):
        for value in (None, [], {}, ""):
            assert architecture(config(**{field: value})) == architecture(config())


@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_false_and_zero_of_an_unknown_field_are_rejected(value: Any) -> None:
    # A missing field may mean true, like is_causal in vLLM.
    with pytest.raises(ConfigError, match=f"no_such_field = {value}.*model.ignore_fields"):
        architecture(config("llama", no_such_field=value))
    rope = {"rope_type": "default", "no_such_field": value}
    with pytest.raises(ConfigError, match=f"rope_parameters.no_such_field = {value}"):
        architecture(config("llama", rope_parameters=rope))


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_written_by_older_versions_of_transformers_are_accepted(family: str) -> None:
    # Older versions wrote all of these fields.
    old = {
        "add_cross_attention": False,
        "chunk_size_feed_forward": 0,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "min_length": 0,
        "output_attentions": False,
        "output_hidden_states": False,
        "pruned_heads": {},
        "remove_invalid_values": False,
        "tie_encoder_decoder": False,
        "torchscript": False,
        "use_bfloat16": False,
    }
    assert architecture(config(family, is_causal=True, **old)) == architecture(config(family))


def test_extra_fields_of_qwen3_coder_are_accepted() -> None:
    extra = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert architecture(config(**extra)) == architecture(config())


@pytest.mark.parametrize(
    "field",
    [
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "hidden_size",
        "rms_norm_eps",
        "num_key_value_heads",
    ],
)
def test_a_missing_size_is_rejected_with_its_name(field: str) -> None:
    incomplete = config()
    del incomplete[field]
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        architecture(incomplete)


@pytest.mark.parametrize(
    ("fields", "rotated"),
    [
        ({}, 0.5),
        ({"partial_rotary_factor": 0.25}, 0.25),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, 1.0),
    ],
)
def test_the_share_of_rotated_columns_is_read(fields: dict[str, Any], rotated: float) -> None:
    published = config("glm4_moe", head_dim=8)
    del published["partial_rotary_factor"], published["rope_theta"]
    arch = architecture({**published, **fields})
    assert (arch.rope.partial_rotary_factor, arch.rotary_dim) == (rotated, 8 * rotated)


def test_the_number_of_dense_layers_is_that_of_transformers_and_of_vllm() -> None:
    published = config("glm4_moe_lite", first_k_dense_replace=2)
    assert architecture(published).num_dense_layers == 2
    del published["mlp_layer_types"]  # transformers then assumes one
    with pytest.raises(ConfigError, match="first_k_dense_replace = 2, but mlp_layer_types"):
        architecture(published)
    assert architecture({**published, "first_k_dense_replace": 1}).num_dense_layers == 1
    del published["first_k_dense_replace"]
    with pytest.raises(ConfigError, match="first_k_dense_replace is missing"):
        architecture(published)


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    fields = config("deepseek_v3")
    assert architecture({**fields, "model_type": "kimi_k2"}) == architecture(fields)


def test_features_that_differ_between_checkpoints_are_read() -> None:
    for bias in (False, True):
        for norm in (False, True):
            arch = architecture(config("glm4_moe", attention_bias=bias, use_qk_norm=norm))
            names = hf_tensors(arch)
            assert (arch.qkv_bias, arch.qk_norm) == (bias, norm)
            assert ("model.layers.0.self_attn.q_proj.bias" in names) == bias
            assert ("model.layers.3.self_attn.k_norm.weight" in names) == norm
