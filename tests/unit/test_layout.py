"""Layouts: which are rejected, with which message, and which are proposed instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.model import architecture
from dapo_megatron.plan.layout import (
    changes,
    check_layout,
    layouts,
    policy_problems,
    policy_ranks,
    stage_layers,
)
from dapo_megatron.plan.rows import preferred_multiple, row_multiple, sequence_multiple
from dapo_megatron.types import ConfigError
from tests.helpers.configs import TINY

COMMON = {
    "model_type": "llama",
    "hidden_size": 96,
    "head_dim": 24,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
}
DENSE = {
    **COMMON,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "max_position_embeddings": 112,
}
# intermediate_size need not be divisible: all layers of this model have experts.
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 50,
    "intermediate_size": 97,
}

NARROW = DENSE | {"intermediate_size": 98}
DEEPSEEK = {
    **{name: value for name, value in EXPERTS.items() if name not in ("num_experts", "head_dim")},
    "model_type": "deepseek_v3",
    "intermediate_size": 96,
    "num_key_value_heads": 12,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

# Values that the cases below assume, whatever the file says.
NUMBERS = (
    "rollout.max_prompt_tokens=96",
    "rollout.max_response_tokens=16",
    "overlong.max_tokens=16",
    "overlong.buffer_tokens=8",
    "train.max_tokens_per_microbatch=16384",
    "policy.tensor_parallel=1",
    "engine.tensor_parallel=null",
    "engine.replicas=null",
)

SHORT = {
    "tp": "policy.tensor_parallel",
    "sp": "policy.sequence_parallel",
    "pp": "policy.pipeline_parallel",
    "vpp": "policy.virtual_pipeline_parallel",
    "first": "policy.first_stage_layers",
    "last": "policy.last_stage_layers",
    "cp": "policy.context_parallel",
    "ep": "policy.expert_parallel",
    "aux": "policy.moe_aux_loss",
    "engine": "engine.tensor_parallel",
    "replicas": "engine.replicas",
    "tokens": "train.max_tokens_per_microbatch",
    "prompt": "rollout.max_prompt_tokens",
}


def config_of(text: str) -> Config:
    """Return the config for text like `tp=2 sp=true`, with keys of SHORT or full keys."""
    pairs = [pair.partition("=") for pair in re.split(r" (?=[\w.]+=)", text)]
    overrides = [f"{SHORT.get(key, key)}={value}" for key, _, value in pairs]
    return load_config(TINY, [*NUMBERS, *overrides])


def layout_problems(
    world: int, text: str, model: Mapping[str, Any] = DENSE, **options: bool
) -> list[str]:
    try:
        check_layout(config_of(text), architecture(model), world, **options)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def policy(**keys: Any) -> PolicyConfig:
    return PolicyConfig(precision="float32", **keys)


# ---------------------------------------------------------------------------- rejections

APART = "engine.colocated=false replicas=1"
WHOLE = "engine.expert_parallel=true"
CASES: list[tuple[int, str, dict[str, Any], str]] = [
    # The policy's layout
    (3, "tp=2", DENSE, "policy.tensor_parallel x ... = 2 does not divide the 3 processes"),
    (2, "tp=2 cp=2", DENSE, "policy.tensor_parallel x ... = 4 does not divide the 2 processes"),
    (8, "tp=8", DENSE, "policy.tensor_parallel: 8 does not divide ... 12 attention heads"),
    (3, "tp=3", DENSE, "policy.tensor_parallel: 3 neither divides nor ... 4 key-value heads"),
    (4, "tp=4", NARROW, "policy.tensor_parallel: 4 does not divide the intermediate_size 98"),
    (4, "tp=4 sp=true engine=1", DEEPSEEK | {"moe_intermediate_size": 10},
     "policy.tensor_parallel: 4 does not divide the n_shared_experts x moe_intermediate_size 10"),
    (2, "sp=true", DENSE, "policy.sequence_parallel: splits over the tensor-parallel ranks, but"),
    (4, "pp=4", DENSE, "policy.pipeline_parallel: 4 does not divide the model's 6 layers"),
    (2, "vpp=2", DENSE, "policy.virtual_pipeline_parallel: 2 needs policy.pipeline_parallel"),
    (2, "first=6", DENSE, "policy.first_stage_layers: 6 needs policy.pipeline_parallel above 1"),
    (2, "last=6", DENSE, "policy.last_stage_layers: 6 needs policy.pipeline_parallel above 1"),
    (2, "pp=2 vpp=2 first=1", DENSE, "policy.virtual_pipeline_parallel: 2 does not ... (1, 5)"),
    (2, "pp=2 vpp=3 first=3 last=3", DENSE, "policy.first_stage_layers and last_stage_layers: "),
    (3, "pp=3 first=3", DENSE, "policy.pipeline_parallel: 3 ... 6 layers, first_stage_layers 3"),
    (2, "pp=2 first=2 last=2", DENSE, "policy.pipeline_parallel: 2 ... last_stage_layers 2"),
    (2, "ep=2", DENSE, "policy.expert_parallel: 2, but the model has no experts; use 1"),
    (3, "ep=3", EXPERTS, "policy.expert_parallel: 3 does not divide the model's 8 experts"),
    (4, "pp=2 ep=4", EXPERTS, "policy.expert_parallel: 4 does not divide the 2 processes of a"),
    (2, "tp=2", EXPERTS, "policy.sequence_parallel: must be true for a model with experts"),
    # What no other layout of the policy would fix
    (8, "tokens=111", DENSE, "train.max_tokens_per_microbatch: 111 ... sequence of 112 tokens"),
    (8, "cp=2 tokens=55", DENSE, "train.max_tokens_per_microbatch: 55 on 2 context-parallel ranks "
     "(rows of 108, a multiple of 4) ... use at least 56"),
    (8, "tp=4 sp=true tokens=111 prompt=95", DENSE, "train.max_tokens_per_microbatch: 111 (rows of "
     "108, a multiple of 4) ... use at least 112"),
    (8, "prompt=97", DENSE, "rollout.max_prompt_tokens + max_response_tokens = 113 exceeds the "),
    (8, "cp=8 prompt=97", DENSE | {"max_position_embeddings": 114}, "policy.context_parallel: 8 "
     "pads ... of 16... to 128 tokens, beyond the model's 114 positions; lower ...tokens by 1"),
    (8, "aux=0.01", DENSE, "policy.moe_aux_loss: 0.01, but the model has no experts to balance"),
    # Engines
    (2, "engine=4", DENSE, "engine.tensor_parallel: 4 is more than the 2 ... use 1 or 2"),
    (8, "engine=4 replicas=3", DENSE, "engine.replicas: 3 engines of 4 ... use at most 2, or "),
    (2, f"engine=5 {APART}", DENSE, "engine.tensor_parallel: 5 does not ... use 1 or 2 or 4 or 12"),
    (8, "engine=4 engine.min_replicas=3", DENSE, "engine.min_replicas: 3, but ... for 2 engines"),
    (4, "engine=4", NARROW, "engine.tensor_parallel: 4 does not divide ... 98; use 1 or 2"),
    (4, "tp=4 sp=true", EXPERTS, "engine.tensor_parallel: 4 (null: as policy.tensor_parallel) does "
     "not divide the moe_intermediate_size 50; use 1 or 2"),
    (4, f"engine=4 {WHOLE}", EXPERTS | {"num_experts": 6}, "engine.tensor_parallel: 4 does not "
     "divide the 6 experts; use 1 or 2"),
    (4, f"engine=2 {WHOLE}", DENSE, "engine.expert_parallel: the model has no experts; set it to"),
]  # fmt: skip
"""(processes, layout, model, beginning of the message). Three dots stand for any text."""


@pytest.mark.parametrize(("world", "text", "model", "message"), CASES)
def test_an_invalid_layout_is_rejected(
    world: int, text: str, model: dict[str, Any], message: str
) -> None:
    """Only if the policy's layout is at fault, others are named. Engines can be left out."""
    first, *others = layout_problems(world, text, model)
    assert re.match(re.escape(message).replace(r"\.\.\.", ".*"), first)
    of_policy = any(policy_problems(config_of(text).policy, world, architecture(model)))
    if of_policy:
        assert others[0] == f"layouts that fit {world} processes:"
        assert 1 <= len(others[1:]) <= 3
        assert all(line.startswith("  policy.") for line in others[1:])
    else:
        assert not [line for line in others if not line.startswith("engine.")]
    without = layout_problems(world, text, model, has_engine=False)
    assert (without == []) == message.startswith("engine.")


@pytest.mark.parametrize(
    ("world", "text", "model"),
    [
        (8, "tp=2 sp=true pp=2 vpp=3 cp=2", DENSE),
        (12, "tp=2 pp=3 first=1 last=1", DENSE),
        (12, "tp=4 engine=12", DENSE),  # the engine replicates key-value heads
        (12, "tp=12", DENSE),  # Megatron gathers the rows of heads that ranks share
        (4, "tp=4", DENSE | {"num_attention_heads": 4, "num_key_value_heads": None}),
        (6, "engine=4", DENSE),  # two ranks share no GPU with an engine
        (2, f"engine=4 {APART}", DENSE),
        (8, "tp=2 sp=true ep=8 engine=1 aux=0.01", EXPERTS),
        (8, "tp=2 sp=true pp=2 ep=4 cp=2", EXPERTS),
        (4, f"engine=4 {WHOLE}", EXPERTS),
        (4, "tp=4 sp=true", DEEPSEEK),
        # No layer is dense, so their columns do not matter.
        (4, "tp=4 sp=true", DEEPSEEK | {"intermediate_size": 98, "first_k_dense_replace": 0}),
        (8, "cp=2 tokens=56", DENSE),  # the longest sequence has 112 tokens, 28 chunks of 4
        (8, "cp=8 prompt=96", DENSE | {"max_position_embeddings": 114}),
    ],
)
def test_a_valid_layout_is_accepted(world: int, text: str, model: dict[str, Any]) -> None:
    assert layout_problems(world, text, model) == []


def test_engines_on_other_gpus_leave_the_rest_to_the_policy() -> None:
    config = config_of("engine=2 engine.colocated=false replicas=3")
    assert policy_ranks(config, 16) == 10
    assert policy_ranks(config_of("engine=2"), 16) == 16
    with pytest.raises(ConfigError, match="3 engines of 2 GPUs leave none of 6 to the policy"):
        policy_ranks(config, 6)


def test_all_problems_are_reported_at_once() -> None:
    problems = layout_problems(6, "tp=8 sp=true pp=5 ep=2 prompt=97 engine=5")
    keys = [re.split("[: ]", line)[0] for line in problems]
    assert list(dict.fromkeys(keys))[:6] == [
        *("policy.tensor_parallel", "policy.pipeline_parallel", "policy.expert_parallel"),
        *("rollout.max_prompt_tokens", "engine.tensor_parallel", "layouts"),
    ]


# ---------------------------------------------------------------------------- layouts that fit


@pytest.mark.parametrize(
    ("world", "text", "model", "expected"),
    [
        (8, "tp=8", DENSE, ["policy.tensor_parallel=4", "policy.tensor_parallel=2"]),
        (8, "tp=2 cp=8", DENSE, ["policy.tensor_parallel=1", "policy.context_parallel=4 "
                                 "train.max_tokens_per_microbatch=32768"]),
        (4, "tp=4", EXPERTS, [  # with 4, the engine could not divide the experts
            "policy.tensor_parallel=2 policy.sequence_parallel=true",
            "policy.tensor_parallel=1",
        ]),
        (1, "tp=2 sp=true", DENSE, ["policy.tensor_parallel=1 policy.sequence_parallel=false"]),
        (2, "pp=2 vpp=3 first=3 last=3", DENSE, [
            "policy.virtual_pipeline_parallel=null policy.first_stage_layers=null "
            "policy.last_stage_layers=null",
        ]),
    ],
)  # fmt: skip
def test_the_nearest_layouts(
    world: int, text: str, model: dict[str, Any], expected: list[str]
) -> None:
    config = config_of(text)
    near = layouts(config, world, architecture(model))[: len(expected)]
    assert [changes(config, other) for other in near] == expected


def dense(model: dict[str, Any]) -> dict[str, Any]:
    experts = EXPERTS.keys() - DENSE.keys()
    return {name: value for name, value in model.items() if name not in experts}


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
OPTIONAL_SIZES = st.one_of(st.none(), st.integers(2, 6))
MODELS = st.fixed_dictionaries(
    {
        **{name: st.just(value) for name, value in COMMON.items()},
        "num_attention_heads": st.sampled_from([4, 8, 12]),
        "num_key_value_heads": st.sampled_from([1, 2, 4, None]),
        "num_hidden_layers": st.integers(1, 16),
        "intermediate_size": st.sampled_from([96, 98, 100]),
        "moe_intermediate_size": st.sampled_from([96, 98, 100]),
        "num_experts": st.sampled_from([0, 4, 6, 8]),
        "num_experts_per_tok": st.just(2),
        "max_position_embeddings": st.integers(112, 130),
    }
).map(lambda model: model | {"model_type": "qwen3_moe"} if model["num_experts"] else dense(model))
LAYOUTS = st.fixed_dictionaries(
    {
        "tp": SIZES,
        "sp": st.sampled_from(["true", "false"]),
        "pp": SIZES,
        "vpp": OPTIONAL_SIZES,
        "first": OPTIONAL_SIZES,
        "last": OPTIONAL_SIZES,
        "cp": SIZES,
        "ep": SIZES,
        "engine": st.sampled_from([None, 1]),
        "tokens": st.sampled_from([20, 60, 112, 200]),
    }
).map(lambda keys: " ".join(f"{key}={_yaml(value)}" for key, value in keys.items()))


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)


@given(world=st.integers(1, 24), text=LAYOUTS, model=MODELS)
def test_layouts_that_fit_are_valid(world: int, text: str, model: dict[str, Any]) -> None:
    config = config_of(text)
    proposals = [changes(config, other) for other in layouts(config, world, architecture(model))]
    assert len(set(proposals)) == len(proposals)
    for overrides in proposals[:5]:
        assert layout_problems(world, f"{text} {overrides}", model) == []
    # The nearest layout of a valid one is itself, so nothing changes.
    if not layout_problems(world, text, model):
        assert proposals[0] == ""
    # Pure data parallelism always fits, because rows keep their tokens.
    if "tokens=112" in text or "tokens=200" in text:
        assert proposals


# ---------------------------------------------------------------------------- stages and multiples


@given(
    stages=st.integers(2, 6),
    chunks=st.integers(1, 4),
    first=st.none() | st.integers(1, 3),
    middle=st.integers(1, 3),
    last=st.none() | st.integers(1, 3),
    surplus=st.sampled_from([0, 0, 0, 1, -1]),
)
def test_stage_layers_equal_those_of_megatron(
    stages: int, chunks: int, first: int | None, middle: int, last: int | None, surplus: int
) -> None:
    policy_config = policy(
        pipeline_parallel=stages,
        virtual_pipeline_parallel=chunks if chunks > 1 else None,
        first_stage_layers=first and first * chunks,
        last_stage_layers=last and last * chunks,
    )
    end_sizes = [size for size in (first, last) if size]
    num_layers = ((stages - len(end_sizes)) * middle + sum(end_sizes)) * chunks + surplus
    try:
        expected = megatron_layers(policy_config, num_layers)
        # Megatron does not check for a stage with a negative number of layers.
        assert all(chunk for stage in expected for chunk in stage)
    except (ValueError, AssertionError, ZeroDivisionError):
        with pytest.raises(ConfigError):
            stage_layers(policy_config, num_layers)
        return
    assert stage_layers(policy_config, num_layers) == expected
    numbers = [number for stage in expected for chunk in stage for number in chunk]
    assert sorted(numbers) == list(range(num_layers))


def megatron_layers(policy_config: PolicyConfig, num_layers: int) -> list[list[range]]:
    """Return the layers of each chunk of each stage as Megatron-core computes them, or raise its
    error."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=policy_config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=policy_config.virtual_pipeline_parallel,
        num_layers_in_first_pipeline_stage=policy_config.first_stage_layers,
        num_layers_in_last_pipeline_stage=policy_config.last_stage_layers,
        pipeline_dtype=torch.float32,
    )
    chunks = policy_config.virtual_pipeline_parallel
    stages: list[list[range]] = []
    for stage in range(policy_config.pipeline_parallel):
        stages.append([])
        for chunk in range(chunks) if chunks else [None]:
            size = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
            first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
            stages[-1].append(range(first, first + size))
    return stages


@pytest.mark.parametrize(
    ("keys", "sequence", "row"),
    [
        ({}, 1, 1),
        ({"tensor_parallel": 4}, 1, 1),
        ({"tensor_parallel": 4, "sequence_parallel": True}, 1, 4),
        ({"context_parallel": 2}, 4, 4),
        ({"context_parallel": 3, "tensor_parallel": 4, "sequence_parallel": True}, 6, 12),
        ({"context_parallel": 2, "tensor_parallel": 8, "sequence_parallel": True}, 4, 16),
        ({"fp8": {"recipe": "current"}}, 1, 16),
        ({"fp8": {"recipe": "blockwise"}, "tensor_parallel": 4}, 1, 16),
        ({"fp8": {"recipe": "delayed"}, "context_parallel": 3}, 6, 48),
        ({"fp8": {"recipe": "current"}, "tensor_parallel": 4, "sequence_parallel": True}, 1, 64),
        ({"fp8": {"recipe": "blockwise"}, "tensor_parallel": 4, "sequence_parallel": True}, 1, 512),
        ({"context_parallel": 2, "tensor_parallel": 3, "sequence_parallel": True}, 4, 12),
    ],
)
def test_padding_multiples_of_sequences_and_rows(
    keys: dict[str, Any], sequence: int, row: int
) -> None:
    assert sequence_multiple(policy(**keys)) == sequence
    assert row_multiple(policy(**keys)) == row


def test_gpus_prefer_rows_of_few_lengths() -> None:
    """512 tokens for each context-parallel rank, and a multiple that the layout accepts."""
    assert preferred_multiple(policy(), on_gpu=False) == 1
    assert preferred_multiple(policy(), on_gpu=True) == 512
    shared = policy(context_parallel=3, tensor_parallel=4, sequence_parallel=True)
    assert preferred_multiple(shared, on_gpu=False) == row_multiple(shared) == 12
    assert preferred_multiple(shared, on_gpu=True) == 1536
