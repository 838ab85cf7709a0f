"""Compare `layout_of`, and the parameters that `plan` counts, with Megatron-core's modules: every
family with small, odd sizes, and published models in their layouts.

Models are built on the meta device by single ranks of fake groups. tests/gpu_stack/test_te_meta.py
does the same with Transformer Engine's layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_megatron.config import PolicyConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.model import FAMILIES as model_families
from dapo_megatron.model import architecture
from dapo_megatron.plan.stage import Stage
from tests.helpers.configs import REPOSITORY, tiny_config
from tests.helpers.meta import Case, differences, world_size
from tests.helpers.models import FAMILIES
from tests.helpers.published import PUBLISHED
from tests.helpers.ranks import run_ranks

ODD = {"num_attention_heads": 9, "num_key_value_heads": 3}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp4_two_groups": ({"tensor_parallel": 4}, {}),
    "tp4_one_group": ({"tensor_parallel": 4}, {"num_key_value_heads": 1}),
    "pp2_odd": ({"pipeline_parallel": 2, "first_stage_layers": 4}, ODD),
    "tp2_pp2": ({"tensor_parallel": 2, "pipeline_parallel": 2, "first_stage_layers": 4}, {}),
    "pp2_interleaved": (
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "first_stage_layers": 4},
        {"num_hidden_layers": 6},
    ),
}
"""Name -> (layout of the policy, sizes of the model)."""
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT = {
    "q_lora_rank": 5,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
WITH_EXPERTS = [family for family in FAMILIES if model_families[family].expert]
EXPERTS = {
    "ep2": ({"expert_parallel": 2}, {}),
    "tp2_ep4": ({"tensor_parallel": 2, "expert_parallel": 4}, {}),
}


PUBLISHED_LAYOUTS: dict[str, dict[str, int | bool]] = {
    "Qwen2.5-0.5B": {},
    "Qwen2.5-32B": {
        "tensor_parallel": 8,
        "sequence_parallel": True,
        "pipeline_parallel": 4,
        "context_parallel": 2,
    },
    "Qwen3-8B": {"tensor_parallel": 4, "sequence_parallel": True},
    "Qwen3-30B-A3B": {
        "tensor_parallel": 4,
        "sequence_parallel": True,
        "pipeline_parallel": 2,
        "expert_parallel": 8,
    },
    "Qwen3.5-35B-A3B": {
        "tensor_parallel": 4,
        "sequence_parallel": True,
        "pipeline_parallel": 2,
        "context_parallel": 2,
        "expert_parallel": 8,
    },
    "Llama-3.1-8B-Instruct": {"pipeline_parallel": 4, "virtual_pipeline_parallel": 2},
    "GLM-4.5": {
        "tensor_parallel": 8,
        "sequence_parallel": True,
        "pipeline_parallel": 23,
        "expert_parallel": 32,
    },
    "DeepSeek-V3": {
        "tensor_parallel": 8,
        "sequence_parallel": True,
        "pipeline_parallel": 16,
        "first_stage_layers": 4,
        "last_stage_layers": 1,
        "expert_parallel": 64,
    },
}


def published_cases() -> dict[str, Case]:
    """Return the layouts above, and those of the files in model_configs with a published model."""
    cases = {
        model: (PUBLISHED[model][1], PolicyConfig(**layout, precision="bfloat16"))
        for model, layout in PUBLISHED_LAYOUTS.items()
    }
    for path in sorted((REPOSITORY / "model_configs").glob("*.yaml")):
        config = load_config(path)
        model = Path(config.model.path).name
        if model in PUBLISHED:
            cases[path.name] = (PUBLISHED[model][1], config.policy)
    assert len(cases) > len(PUBLISHED_LAYOUTS) + 4
    return cases


def small(family: str, tied: bool, **sizes: Any) -> dict[str, Any]:
    """Return a published config.json of the family with small, odd sizes."""
    published = next(hf for _, hf in PUBLISHED.values() if hf["model_type"] == family)
    shared = {
        "hidden_size": 36,
        "intermediate_size": 44,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 1_001,
        "tie_word_embeddings": tied,
    }
    experts: dict[str, Any] = {}
    if "num_experts_per_tok" in published:
        experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
    if "num_experts" in published:
        experts["num_experts"] = 8
    if "n_routed_experts" in published:
        experts |= GROUPED
    if model_families[family].has_delta:
        experts |= {**DELTA, "head_dim": 8}
    if "shared_expert_intermediate_size" in published:
        experts["shared_expert_intermediate_size"] = 8
    if "kv_lora_rank" in published:
        experts |= LATENT
        del shared["head_dim"]
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 8)
    fields = {**published, **shared, **experts, **sizes}
    if model_families[family].has_mlp_types:
        fields["mlp_layer_types"] = ["dense"] + ["sparse"] * (fields["num_hidden_layers"] - 1)
    return fields


def small_cases() -> dict[str, Case]:
    """Return every family in LAYOUTS and EXPERTS, with a tied head in every other of them."""
    cases = {}
    for number, (name, (layout, sizes)) in enumerate((LAYOUTS | EXPERTS).items()):
        for family in WITH_EXPERTS if name in EXPERTS else FAMILIES:
            sequence = family in WITH_EXPERTS and layout.get("tensor_parallel", 1) > 1
            keys = {**layout, "sequence_parallel": sequence, "precision": "float32"}
            hf = small(family, tied=number % 2 == 1, **sizes)
            cases[f"{family} {name}"] = hf, PolicyConfig(**keys)
    return cases


def test_names_and_shapes_equal_those_of_megatron_in_every_family_and_layout() -> None:
    cases = small_cases()
    [results] = run_ranks(differences, 1, list(cases.values()), False)
    for name, by_rank in zip(cases, results, strict=True):
        for rank, (mismatches, num_parameters, _) in by_rank.items():
            assert not mismatches, (name, rank, mismatches)
            assert num_parameters > 10


def test_names_shapes_and_counts_equal_those_of_megatron_at_published_sizes() -> None:
    cases = published_cases()
    local = {"kernels": "local", "fp8": None}
    changed = [(hf, policy.model_copy(update=local)) for hf, policy in cases.values()]
    [results] = run_ranks(differences, 1, changed, False)
    for name, by_rank in zip(cases, results, strict=True):
        hf, policy = cases[name]
        config = tiny_config().model_copy(update={"policy": policy})
        world = world_size(policy)
        for rank, (mismatches, num_parameters, num_elements) in by_rank.items():
            assert not mismatches, (name, rank, mismatches)
            assert num_parameters > 10
            number = rank * policy.pipeline_parallel // world
            stage = Stage(config, architecture(hf), "local", world, number, on_gpu=False)
            assert stage.num_parameters == num_elements, (name, rank)
