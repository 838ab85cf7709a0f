"""Compare names and shapes of parameters in `layout_of` and in Megatron-core's modules.

tests/gpu_stack/test_te_meta.py compares the names of Transformer Engine's layers.
"""

from __future__ import annotations

from typing import Any

from dapo_megatron.model import FAMILIES as model_families
from tests.helpers.models import FAMILIES
from tests.helpers.published import PUBLISHED
from tests.helpers.ranks import run_ranks

ODD = {"num_attention_heads": 9, "num_key_value_heads": 3}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp4": ({}, {}),
    "tp2": ({"tensor_parallel": 2}, {}),
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
WITH_EXPERTS = [family for family in FAMILIES if model_families[family].expert]
EXPERTS = {
    "ep2": ({"expert_parallel": 2}, {}),
    "tp2_ep4": ({"tensor_parallel": 2, "expert_parallel": 4}, {}),
}


def differences(rank: int, cases: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]) -> Any:
    """Return (layout, model, parameters on which Megatron and `layout_of` differ, number of
    parameters) for each layout and each of its models."""
    from megatron.core import parallel_state

    from dapo_megatron.config import PolicyConfig
    from dapo_megatron.model import architecture, layout_of
    from dapo_megatron.policy.device import megatron_device
    from dapo_megatron.policy.model import build_model, initialize_parallel, place

    results = []
    for layout, configs in cases:
        with megatron_device():
            initialize_parallel(PolicyConfig(**layout, precision="float32"), seed=0)
        for model, hf in configs.items():
            sequence = "num_experts_per_tok" in hf and layout.get("tensor_parallel", 1) > 1
            arch = architecture(hf)
            with megatron_device():
                policy = PolicyConfig(**layout, sequence_parallel=sequence, precision="float32")
                chunks = build_model(arch, policy)
            actual, expected = set(), set()
            for number, chunk in enumerate(chunks):
                local_parameters = layout_of(arch, place(chunk))
                actual |= {(number, name, tuple(p.shape)) for name, p in chunk.named_parameters()}
                expected |= {
                    (number, name, local_parameter.shape)
                    for name, local_parameter in local_parameters.items()
                }
            results.append((layout, model, sorted(actual ^ expected), len(actual)))
        parallel_state.destroy_model_parallel()
    return results


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
    if "kv_lora_rank" in published:
        experts |= LATENT
        del shared["head_dim"]
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 8)
    fields = {**published, **shared, **experts, **sizes}
    if model_families[family].has_mlp_types:
        fields["mlp_layer_types"] = ["dense"] + ["sparse"] * (fields["num_hidden_layers"] - 1)
    return fields


def test_names_and_shapes_equal_those_of_megatron_in_every_layout() -> None:
    cases = []
    for name, (layout, sizes) in (LAYOUTS | EXPERTS).items():
        models = {
            f"{family} tied={tied}": small(family, tied, **sizes)
            for family in (WITH_EXPERTS if name in EXPERTS else FAMILIES)
            for tied in (False, True)
        }
        cases.append((layout, models))
    for rank, results in enumerate(run_ranks(differences, 4, cases)):
        assert len(results) == sum(len(models) for _, models in cases)
        for layout, model, mismatches, num_parameters in results:
            assert not mismatches, (rank, layout, model, mismatches)
            assert num_parameters > 10
