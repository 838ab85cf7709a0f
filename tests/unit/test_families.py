"""The bridge's table: each family's parameters, as Megatron names and cuts them, are its HF
checkpoint, whatever the layout; and what is not understood is refused by name.

The parameters of all ranks are plain tensors here, filled from and compared with a real checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from dapo_megatron.bridge.families import Architecture, Place, architecture, shards_of
from dapo_megatron.bridge.hf import read_into
from dapo_megatron.bridge.shards import check_coverage
from dapo_megatron.types import ConfigError
from tests.helpers.models import FAMILIES, make_random_model
from tools.make_tiny_model import make_config, make_tokenizer

TINY_MOE = Path(__file__).parents[2] / "model_configs" / "tiny_qwen3_moe"
CASES = [(family, tied) for family in FAMILIES for tied in (False, True)]


@dataclass(frozen=True)
class Layout:
    """Axes of Megatron's default rank order: tensor, then data, then pipeline parallel."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    fused: bool = False  # Transformer Engine's names

    def places(self, arch: Architecture) -> Iterator[tuple[Place, int]]:
        """Each rank's place and stage. Expert parallelism splits the ranks of a stage anew."""
        for stage in range(self.pp):
            for rank in range(self.tp * self.dp):
                place = Place(
                    tp_rank=rank % self.tp,
                    tp_size=self.tp,
                    first_layer=stage * arch.num_layers // self.pp,
                    is_data_parallel_first=rank // self.tp == 0,
                    ep_rank=rank % self.ep,
                    ep_size=self.ep,
                    is_expert_data_parallel_first=rank // self.ep == 0,
                )
                yield place, stage


@st.composite
def layouts(draw: st.DrawFn, *, experts: bool) -> Layout:
    tp, dp, pp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2, 4), (1, 2)))
    fitting = [size for size in (1, 2, 4, 8) if experts and (tp * dp) % size == 0]
    return Layout(tp, dp, draw(st.sampled_from(fitting or [1])), pp, draw(st.booleans()))


# ------------------------------------------------------- parameters as Megatron 0.16.1 names them


def stage_params(arch: Architecture, layout: Layout, stage: int) -> dict[str, Tensor]:
    """The parameters of one rank of a stage, not a number yet."""
    shapes: dict[str, tuple[int, ...]] = {}
    vocab_rows = -(-arch.vocab // layout.tp)
    if stage == 0:
        shapes["embedding.word_embeddings.weight"] = (vocab_rows, arch.hidden)
    for layer in range(arch.num_layers // layout.pp):
        prefix = f"decoder.layers.{layer}."
        parts = {**attention_shapes(arch, layout), **mlp_shapes(arch, layout)}
        shapes |= {prefix + name: shape for name, shape in parts.items()}
    if stage == layout.pp - 1:
        shapes["decoder.final_layernorm.weight"] = (arch.hidden,)
        if not arch.tied or stage > 0:
            shapes["output_layer.weight"] = (vocab_rows, arch.hidden)
    return {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}


def attention_shapes(arch: Architecture, layout: Layout) -> dict[str, tuple[int, ...]]:
    heads, groups = arch.num_heads // layout.tp, arch.num_groups // layout.tp
    rows = (heads + 2 * groups) * arch.head_dim
    norm = (
        "self_attention.linear_qkv.layer_norm_weight" if layout.fused else "input_layernorm.weight"
    )
    shapes: dict[str, tuple[int, ...]] = {
        norm: (arch.hidden,),
        "self_attention.linear_qkv.weight": (rows, arch.hidden),
        "self_attention.linear_proj.weight": (arch.hidden, heads * arch.head_dim),
    }
    if arch.qkv_bias:
        shapes["self_attention.linear_qkv.bias"] = (rows,)
    if arch.qk_norm:
        shapes["self_attention.q_layernorm.weight"] = (arch.head_dim,)
        shapes["self_attention.k_layernorm.weight"] = (arch.head_dim,)
    return shapes


def mlp_shapes(arch: Architecture, layout: Layout) -> dict[str, tuple[int, ...]]:
    if not arch.num_experts:
        norm = "mlp.linear_fc1.layer_norm_weight" if layout.fused else "pre_mlp_layernorm.weight"
        return {
            norm: (arch.hidden,),
            "mlp.linear_fc1.weight": (2 * arch.ffn // layout.tp, arch.hidden),
            "mlp.linear_fc2.weight": (arch.hidden, arch.ffn // layout.tp),
        }
    name = (
        "mlp.experts.{fc}.weight{e}"
        if layout.fused
        else "mlp.experts.local_experts.{e}.{fc}.weight"
    )
    shapes: dict[str, tuple[int, ...]] = {
        "pre_mlp_layernorm.weight": (arch.hidden,),
        "mlp.router.weight": (arch.num_experts, arch.hidden),
    }
    for e in range(arch.num_experts // layout.ep):
        shapes[name.format(e=e, fc="linear_fc1")] = (2 * arch.expert_ffn, arch.hidden)
        shapes[name.format(e=e, fc="linear_fc2")] = (arch.hidden, arch.expert_ffn)
    return shapes


# ------------------------------------------------------------------------- checkpoints and ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("families")
    size = {"vocab_size": 101}  # two ranks must pad it
    return {
        (family, tied): make_random_model(
            family, root / f"{family}{tied}", tie_word_embeddings=tied, **size
        )
        for family, tied in CASES
    }


def hf_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("family", "tied"), CASES)
@settings(max_examples=15, deadline=None)  # cores are shared
@given(data=st.data())
def test_all_ranks_together_are_the_checkpoint(
    family: str, tied: bool, folders: dict[tuple[str, bool], Path], data: st.DataObject
) -> None:
    folder = folders[family, tied]
    saved = load_file(folder / "model.safetensors")
    arch = architecture(hf_config(folder))
    layout = data.draw(layouts(experts=arch.num_experts > 0))

    params = [stage_params(arch, layout, stage) for _, stage in layout.places(arch)]
    by_rank = [
        shards_of(mine, arch, place)
        for mine, (place, _) in zip(params, layout.places(arch), strict=True)
    ]
    owned = [shard for shards in by_rank for shard in shards if shard.is_owner]
    assert {shard.name: shard.global_shape for shard in owned} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    check_coverage((shard.name, shard.global_shape, shard.region) for shard in owned)

    for shards in by_rank:
        read_into(folder, shards)
    for name, param in [item for mine in params for item in mine.items()]:
        is_padded = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        assert is_padded or not param.isnan().any(), name
    again = {name: torch.full_like(tensor, torch.nan) for name, tensor in saved.items()}
    for shard in owned:
        again[shard.name][shard.region.slices] = shard.read()
    for name, tensor in saved.items():
        assert torch.equal(again[name], tensor), name


def test_copies_of_an_expert_are_filled_and_not_answered_for(
    folders: dict[tuple[str, bool], Path],
) -> None:
    folder = folders["qwen3_moe", False]
    saved = load_file(folder / "model.safetensors")
    arch = architecture(hf_config(folder))
    name = "model.layers.1.mlp.experts.5.up_proj.weight"  # of the second half
    holders = []
    layout = Layout(tp=2, dp=2, ep=2)
    for place, stage in layout.places(arch):
        shards = shards_of(stage_params(arch, layout, stage), arch, place)
        read_into(folder, shards)
        for shard in shards:
            if shard.name == name:
                assert torch.equal(shard.read(), saved[name])
                holders.append((place.tp_rank, place.is_data_parallel_first, shard.is_owner))
    # The ranks of ep_rank 1: tensor-parallel rank 1 of both data-parallel ranks.
    assert holders == [(1, True, True), (1, False, False)]


def test_gate_is_stacked_over_up_and_experts_are_numbered_from_zero_on_each_rank() -> None:
    arch = architecture(config())
    place = Place(0, 1, 2, True, ep_rank=1, ep_size=2)
    fc1 = torch.arange(4.0)[:, None].expand(4, arch.hidden).clone()
    [gate, up] = shards_of({"decoder.layers.1.mlp.experts.linear_fc1.weight3": fc1}, arch, place)
    assert gate.name == "model.layers.3.mlp.experts.7.gate_proj.weight"
    assert up.name == "model.layers.3.mlp.experts.7.up_proj.weight"
    assert gate.read()[:, 0].tolist() == [0.0, 1.0]
    assert up.read()[:, 0].tolist() == [2.0, 3.0]


def test_the_committed_model_with_experts_is_small_and_what_its_script_makes() -> None:
    assert sum(file.stat().st_size for file in TINY_MOE.iterdir()) < 1.5 * 1000**2
    made = make_config("qwen3_moe").to_dict()
    committed = hf_config(TINY_MOE)
    of_saving = {"transformers_version", "architectures"}
    assert {key: made[key] for key in committed.keys() - of_saving} == {
        key: value for key, value in committed.items() if key not in of_saving
    }
    assert AutoTokenizer.from_pretrained(TINY_MOE).get_vocab() == make_tokenizer().get_vocab()

    arch, place = architecture(committed), Place(0, 1, 0, True)
    saved = load_file(TINY_MOE / "model.safetensors")
    shards = shards_of(stage_params(arch, Layout(), 0), arch, place)
    assert {shard.name: shard.global_shape for shard in shards} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())


# ---------------------------------------------------------------------------- config.json


def config(**changes: Any) -> dict[str, Any]:
    """The fields of a published Qwen3-MoE (Qwen3-30B-A3B), at the committed model's sizes."""
    published = {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 100,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
    }
    return {**published, **sizes, **changes}


def test_experts_are_read_from_both_spellings() -> None:
    arch = architecture(config())
    assert (arch.num_experts, arch.experts_per_token, arch.expert_ffn) == (8, 2, 32)
    assert arch.normalize_topk
    assert arch.qk_norm
    renamed = config(num_local_experts=8)
    del renamed["num_experts"]
    assert architecture(renamed) == arch
    assert not architecture(config(norm_topk_prob=False)).normalize_topk
    # HF's own training settings are no part of the model.
    assert architecture(config(router_aux_loss_coef=0.5, output_router_logits=True)) == arch


def test_a_dense_model_has_no_experts(folders: dict[tuple[str, bool], Path]) -> None:
    arch = architecture(hf_config(folders["qwen3", False]))
    assert (arch.num_experts, arch.experts_per_token, arch.expert_ffn) == (0, 0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
        ("shared_expert_intermediate_size", 64),
        ("n_shared_experts", 1),
        ("moe_router_enable_expert_bias", True),
        ("topk_method", "noaux_tc"),
        ("num_experts_per_tok", 9),
        ("num_experts_per_tok", 0),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("model_type", "mixtral"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        architecture(config(**{field: value}))
    assert str(value).strip("[]") in str(caught.value)


def test_a_field_that_says_none_is_no_reason_to_refuse() -> None:
    for field in ("shared_expert_intermediate_size", "n_shared_experts", "mlp_only_layers"):
        for value in (None, 0, []):
            assert architecture(config(**{field: value})) == architecture(config())


@pytest.mark.parametrize("field", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_size_is_named(field: str) -> None:
    incomplete = config()
    del incomplete[field]
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        architecture(incomplete)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.experts.weight1",  # Megatron's own grouped experts: all in one tensor
        "mlp.experts.local_experts.0.linear_fc1.bias",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.router.bias",
    ],
)
def test_a_parameter_without_a_rule_is_named(name: str) -> None:
    params = {f"decoder.layers.0.{name}": torch.zeros(4, 4)}
    with pytest.raises(ConfigError, match=f"no rule for the parameter decoder.layers.0.{name}"):
        shards_of(params, architecture(config()), Place(0, 1, 0, True))
