"""Layouts: which are rejected, with which message, and which are proposed instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.model import architecture
from dapo_megatron.plan.layout import (
    check_layout,
    data_parallel,
    describe,
    nearest_layouts,
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

BEYOND_FOUR = "policy.tensor_parallel: 8 does not divide the model's 12 attention heads"


@pytest.mark.parametrize(
    ("world", "text", "message"),
    [
        (1, "tp=1", None),
        (8, "tp=2 sp=true pp=2 vpp=3 cp=2", None),
        (12, "tp=2 pp=3 first=1 last=1", None),
        (12, "tp=4 engine=12", None),  # the engine replicates key-value heads
        (12, "tp=12", None),  # Megatron gathers the rows of heads that ranks share
        (3, "tp=2", "policy.tensor_parallel x pipeline_parallel x context_parallel = 2 does not"),
        (2, "tp=2 cp=2", "policy.tensor_parallel x pipeline_parallel x context_parallel = 4 does"),
        (8, "tp=8", BEYOND_FOUR),
        (3, "tp=3", "policy.tensor_parallel: 3 neither divides nor is a multiple of the model's "),
        (2, "sp=true", "policy.sequence_parallel: splits over the tensor-parallel ranks, but "),
        (4, "pp=4", "policy.pipeline_parallel: 4 does not divide the model's 6 layers"),
        (8, "pp=8", "policy.pipeline_parallel: 8 does not divide the model's 6 layers"),
        (2, "vpp=2", "policy.virtual_pipeline_parallel: 2 needs policy.pipeline_parallel above 1"),
        (2, "first=6", "policy.first_stage_layers: 6 needs policy.pipeline_parallel above 1"),
        (2, "last=6", "policy.last_stage_layers: 6 needs policy.pipeline_parallel above 1"),
        (2, "pp=2 vpp=2", "policy.virtual_pipeline_parallel: 2 does not divide the layers of each "
                          "pipeline stage (3, 3)"),
        (2, "pp=2 vpp=2 first=1", "policy.virtual_pipeline_parallel: 2 does not divide the layers "
                                  "of each pipeline stage (1, 5)"),
        (2, "pp=2 vpp=3 first=3 last=3", "policy.first_stage_layers and last_stage_layers: Mega"),
        (3, "pp=3 first=3", "policy.first_stage_layers = 3 of the model's 6 layers leaves 3 to 2 "),
        (2, "pp=2 last=6", "policy.last_stage_layers = 6 of the model's 6 layers leaves 0 to 1 "),
        (3, "pp=3 first=4 last=4", "policy.first_stage_layers + last_stage_layers = 8 of the model"
                                   "'s 6 layers leaves -2 to 1 equal stages"),
        (2, "pp=2 first=2 last=2", "policy.first_stage_layers + last_stage_layers = 4 must be "),
        (2, "ep=2", "policy.expert_parallel: 2, but the model has no experts; use 1"),
    ],
)  # fmt: skip
def test_an_invalid_layout_is_rejected_with_the_nearest_valid_ones(
    world: int, text: str, message: str | None
) -> None:
    problems = layout_problems(world, text)
    if message is None:
        assert problems == []
        return
    assert problems[0].startswith(message)
    assert problems[1] == f"layouts that fit {world} processes:"
    assert 1 <= len(problems[2:]) <= 3
    assert all(line.startswith("  policy.") for line in problems[2:])


APART = "engine.colocated=false replicas=1"
TOO_FEW = (
    "engine.tensor_parallel: 4 is more than the 2 processes (run.processes, or the launcher's)"
)


@pytest.mark.parametrize(
    ("world", "text", "message"),
    [
        (8, "engine=4 replicas=2", None),
        (8, "engine=4 replicas=1", None),
        (6, "engine=4", None),  # two ranks share no GPU with an engine
        (2, f"engine=4 {APART}", None),
        (2, "tp=2 sp=true replicas=3 engine.colocated=false", None),
        (2, "engine=4", f"{TOO_FEW}; use 1 or 2"),
        (8, "engine=4 replicas=3", "engine.replicas: 3 engines of 4 ranks (engine.tensor_parallel) "
            "do not fit the 8 processes (run.processes, or the launcher's); use at most 2, or "
            "engine.colocated=false"),
        (2, f"engine=5 {APART}", "engine.tensor_parallel: 5 does not divide the model's 12 attent"
            "ion heads, or neither divides nor is a multiple of its 4 key-value heads; use 1 or 2 "
            "or 4 or 12"),
        (8, "engine=4 engine.min_replicas=3", "engine.min_replicas: 3, but the 8 processes (run.pr"
            "ocesses, or the launcher's) have room for 2 engines; use at most that many"),
    ],
)  # fmt: skip
def test_engines_must_fit_the_policys_ranks_or_run_on_other_gpus(
    world: int, text: str, message: str | None
) -> None:
    assert layout_problems(world, text)[:1] == ([] if message is None else [message])
    assert not layout_problems(world, text, has_engine=False)


def test_engines_on_other_gpus_leave_the_rest_to_the_policy() -> None:
    config = config_of("engine=2 engine.colocated=false replicas=3")
    assert policy_ranks(config, 16) == 10
    assert policy_ranks(config_of("engine=2"), 16) == 16
    with pytest.raises(ConfigError, match="3 engines of 2 GPUs leave none of 6 to the policy"):
        policy_ranks(config, 6)


@pytest.mark.parametrize(
    ("world", "text", "message"),
    [
        (8, "tp=2 sp=true ep=8 engine=1 aux=0.01", None),
        (8, "tp=2 sp=true pp=2 ep=4 cp=2", None),
        (3, "ep=3", "policy.expert_parallel: 3 does not divide the model's 8 experts"),
        (4, "pp=2 ep=4", "policy.expert_parallel: 4 does not divide the 2 processes of a pipeline"),
        (2, "tp=2", "policy.sequence_parallel: must be true for a model with experts at policy.t"),
    ],
)
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_layouts_of_a_model_with_experts(
    world: int, text: str, message: str | None, key: str
) -> None:
    model = {**EXPERTS, key: 8}
    problems = layout_problems(world, text, model)
    assert [line for line in problems if not line.startswith(("layouts", " "))] == problems[
        : bool(message)
    ]
    assert message is None or problems[0].startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens=112", None),
        ("tokens=111", "train.max_tokens_per_microbatch: 111 cannot hold one sequence of 112 t"),
        ("cp=2 tokens=56", None),  # the longest sequence has 112 tokens, 28 chunks of 4
        ("cp=2 tokens=55", "on 2 context-parallel ranks (rows of 108, a multiple of 4) cannot"),
        ("cp=2 tokens=55", "tokens (max_prompt_tokens + max_response_tokens); use at least 56"),
        ("tp=4 sp=true tokens=111 prompt=95", "(rows of 108, a multiple of 4) cannot hold one seq"),
        ("tp=4 sp=true tokens=111 prompt=95", "use at least 112"),
        ("prompt=97", "rollout.max_prompt_tokens + max_response_tokens = 113 exceeds the model's "),
        ("cp=8", None),
        ("aux=0.01", "policy.moe_aux_loss: 0.01, but the model has no experts to balance; use 0"),
        ("engine=12", "engine.tensor_parallel: 12 is more than the 8 processes (run.processes, or "
                      "the launcher's); use 1 or 2 or 4"),
        ("engine=8", "engine.tensor_parallel: 8 does not divide the model's 12 attention heads,"),
    ],
)  # fmt: skip
def test_no_layouts_are_proposed_for_problems_they_cannot_fix(
    text: str, message: str | None
) -> None:
    problems = layout_problems(8, text)
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def test_padding_beyond_the_models_positions_is_rejected() -> None:
    model = {**DENSE, "max_position_embeddings": 114}
    [message] = layout_problems(8, "cp=8 prompt=97", model)
    assert message.startswith(
        "policy.context_parallel: 8 pads sequences to multiples of 16, the long"
    )
    assert message.endswith("to 128 tokens, beyond the model's 114 positions; "
                         "lower rollout.max_response_tokens by 1")  # fmt: skip
    assert layout_problems(8, "cp=8 prompt=96", model) == []


def test_without_an_engine_its_layout_is_not_checked() -> None:
    text = "engine=12"
    assert len(layout_problems(8, text)) == 1
    assert layout_problems(8, text, has_engine=False) == []
    assert layout_problems(8, f"{text} tp=8", has_engine=False)[0].startswith(BEYOND_FOUR)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2", []),
        ("tp=4", ["policy.tensor_parallel: 4 does not divide the intermediate_size 98"]),
        ("engine=4", ["engine.tensor_parallel: 4 does not divide the intermediate_size 98; use "
                      "1 or 2"]),
    ],
)  # fmt: skip
def test_tensor_parallel_must_divide_the_mlp(text: str, message: list[str]) -> None:
    problems = layout_problems(4, text, {**DENSE, "intermediate_size": 98})
    assert problems[:1] == message


def test_the_policys_tensor_parallel_size_may_not_fit_the_engine() -> None:
    # The policy does not split an expert; the engine does.
    text = "tp=4 sp=true"
    [message] = layout_problems(4, text, EXPERTS)
    assert message == (
        "engine.tensor_parallel: 4 (null: as policy.tensor_parallel) does not divide the "
        "moe_intermediate_size 50; use 1 or 2"
    )
    assert layout_problems(4, f"{text} engine=2", EXPERTS) == []


def test_engine_expert_parallel_needs_experts_divisible_by_its_ranks() -> None:
    whole = "engine.expert_parallel=true"
    assert layout_problems(4, f"engine=4 {whole}", EXPERTS) == []
    assert layout_problems(4, f"engine=4 {whole}", {**EXPERTS, "num_experts": 6}) == [
        "engine.tensor_parallel: 4 does not divide the 6 experts; use 1 or 2"
    ]
    assert layout_problems(4, f"engine=2 {whole}", DENSE) == [
        "engine.expert_parallel: the model has no experts; set it to false"
    ]


def test_missing_key_value_heads_mean_as_many_as_attention_heads() -> None:
    model = {**DENSE, "num_attention_heads": 4, "num_key_value_heads": None}
    assert layout_problems(4, "tp=4", model) == []


@pytest.mark.parametrize(
    ("fields", "text", "message"),
    [
        ({}, "tp=4 sp=true", []),
        ({"num_hidden_layers": 1, "first_k_dense_replace": 1}, "tp=4 sp=true", []),
        (
            {"intermediate_size": 98},
            "tp=4 sp=true engine=1",
            ["policy.tensor_parallel: 4 does not divide the intermediate_size 98"],
        ),
        ({"intermediate_size": 98, "first_k_dense_replace": 0}, "tp=4 sp=true", []),
        (
            {"moe_intermediate_size": 10},
            "tp=4 sp=true engine=1",
            [
                "policy.tensor_parallel: 4 does not divide the n_shared_experts x "
                "moe_intermediate_size 10"
            ],
        ),
        (
            {"moe_intermediate_size": 10},
            "engine=4",
            [
                "engine.tensor_parallel: 4 does not divide the n_shared_experts x "
                "moe_intermediate_size 10; use 1 or 2"
            ],
        ),
    ],
)
def test_tensor_parallel_must_divide_dense_layers_and_shared_experts(
    fields: dict[str, Any], text: str, message: list[str]
) -> None:
    assert layout_problems(4, text, DEEPSEEK | fields)[:1] == message


def test_all_problems_are_reported_at_once() -> None:
    problems = layout_problems(6, "tp=8 sp=true pp=5 ep=2 tokens=1 prompt=97 engine=5")
    assert [line.partition(":")[0].partition(" ")[0] for line in problems] == [
        *("policy.tensor_parallel", "policy.tensor_parallel", "policy.pipeline_parallel"),
        *("policy.expert_parallel", "train.max_tokens_per_microbatch"),
        *("rollout.max_prompt_tokens", "engine.tensor_parallel", "engine.tensor_parallel", "no"),
    ]
    assert problems[-1] == (
        "no layout of 6 processes fits this model and train.max_tokens_per_microbatch = 1"
    )


# ---------------------------------------------------------------------------- nearest layouts


@pytest.mark.parametrize(
    ("world", "text", "model", "expected_layouts"),
    [
        (8, "tp=8", DENSE, [  # of two at the same distance, the smaller change comes first
            "policy.tensor_parallel=4",
            "policy.tensor_parallel=2",
            "policy.tensor_parallel=4 policy.context_parallel=2",
        ]),
        (8, "tp=2 cp=8", DENSE, [
            "policy.tensor_parallel=1",
            "policy.context_parallel=4",
            "policy.context_parallel=2",
        ]),
        (4, "tp=4", EXPERTS, [  # with 4, the engine could not divide the experts
            "policy.tensor_parallel=2 policy.sequence_parallel=true",
            "policy.tensor_parallel=1",
            "policy.tensor_parallel=2 policy.sequence_parallel=true policy.expert_parallel=2",
        ]),
        (4, "pp=4", DENSE, [
            "policy.pipeline_parallel=2",
            "policy.pipeline_parallel=1",
            "policy.pipeline_parallel=2 policy.context_parallel=2",
        ]),
        (2, "tp=2", EXPERTS, [
            "policy.sequence_parallel=true",
            "policy.tensor_parallel=1",
            "policy.sequence_parallel=true policy.expert_parallel=2",
        ]),
        (1, "tp=2 sp=true", DENSE, [
            "policy.tensor_parallel=1 policy.sequence_parallel=false",
        ]),
        (2, "pp=2 vpp=2", DENSE, [
            "policy.virtual_pipeline_parallel=3",
            "policy.virtual_pipeline_parallel=null",
            "policy.pipeline_parallel=1 policy.virtual_pipeline_parallel=null",
        ]),
        (2, "pp=2 vpp=3 first=3 last=3", DENSE, [
            "policy.first_stage_layers=null",
            "policy.last_stage_layers=null",
            "policy.virtual_pipeline_parallel=null",
        ]),
        (8, "ep=16 cp=2 tokens=60", EXPERTS, [  # without context parallelism, rows are too short
            "policy.expert_parallel=8",
            "policy.expert_parallel=4",
            "policy.context_parallel=4 policy.expert_parallel=8",
        ]),
    ],
)  # fmt: skip
def test_the_nearest_layouts(
    world: int, text: str, model: dict[str, Any], expected_layouts: list[str]
) -> None:
    assert nearest_layouts(config_of(text), world, architecture(model)) == expected_layouts


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


@settings(deadline=None)
@given(world=st.integers(1, 24), text=LAYOUTS, model=MODELS)
def test_proposed_layouts_are_valid(world: int, text: str, model: dict[str, Any]) -> None:
    proposals = nearest_layouts(config_of(text), world, architecture(model))
    assert len(set(proposals)) == len(proposals) <= 3
    for changes in proposals:
        assert layout_problems(world, f"{text} {changes}", model) == []
    # The nearest layout of a valid one is itself, so the proposal changes nothing.
    problems = layout_problems(world, text, model)
    if not problems:
        assert proposals[0] == ""
    # Pure data parallelism always fits if rows are long enough.
    if "tokens=112" in text or "tokens=200" in text:
        assert proposals


# ---------------------------------------------------------------------------- stages and multiples


@settings(deadline=None)  # the first call imports Megatron
@given(
    num_layers=st.integers(1, 24),
    stages=st.integers(2, 6),
    chunks=st.one_of(st.none(), st.integers(2, 4)),
    first=st.one_of(st.none(), st.integers(1, 8)),
    last=st.one_of(st.none(), st.integers(1, 8)),
)
def test_stage_layers_equal_those_of_megatron(
    num_layers: int, stages: int, chunks: int | None, first: int | None, last: int | None
) -> None:
    policy_config = policy(
        pipeline_parallel=stages,
        virtual_pipeline_parallel=chunks,
        first_stage_layers=first,
        last_stage_layers=last,
    )
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


@settings(deadline=None)
@given(
    stages=st.integers(2, 6),
    chunks=st.integers(1, 4),
    first=st.one_of(st.none(), st.integers(1, 3)),
    middle=st.integers(1, 3),
    last=st.one_of(st.none(), st.integers(1, 3)),
)
def test_stage_layers_equal_those_of_megatron_for_divisible_sizes(
    stages: int, chunks: int, first: int | None, middle: int, last: int | None
) -> None:
    """Like the test above, with sizes that fit, which random sizes seldom do."""
    end_sizes = [size for size in (first, last) if size]
    num_middle = stages - len(end_sizes)
    assume(num_middle > 0)
    policy_config = policy(
        pipeline_parallel=stages,
        virtual_pipeline_parallel=chunks if chunks > 1 else None,
        first_stage_layers=first and first * chunks,
        last_stage_layers=last and last * chunks,
    )
    num_layers = (num_middle * middle + sum(end_sizes)) * chunks
    assert stage_layers(policy_config, num_layers) == megatron_layers(policy_config, num_layers)


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


def test_one_stage_has_all_layers() -> None:
    assert stage_layers(policy(), 5) == [[range(5)]]


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


def test_data_parallel_size_is_what_remains() -> None:
    assert data_parallel(policy(), 8) == 8
    keys = {"tensor_parallel": 2, "pipeline_parallel": 3, "context_parallel": 2}
    assert data_parallel(policy(**keys, expert_parallel=2), 24) == 2


@pytest.mark.parametrize(
    ("keys", "world", "message"),
    [
        ({}, 1, "data 1, float32"),
        ({"tensor_parallel": 2}, 2, "tensor 2 x data 1, float32"),
        (
            {
                "tensor_parallel": 2,
                "sequence_parallel": True,
                "pipeline_parallel": 2,
                "virtual_pipeline_parallel": 2,
                "context_parallel": 2,
                "expert_parallel": 2,
            },
            32,
            "tensor 2 (sequence) x pipeline 2 (x2 interleaved) x context 2 x data 4, expert 2, "
            "float32",
        ),
        (
            {"pipeline_parallel": 3, "first_stage_layers": 4, "last_stage_layers": 1},
            3,
            "pipeline 3 (4 layers first, 1 layers last) x data 1, float32",
        ),
    ],
)
def test_the_description_of_a_layout(keys: dict[str, Any], world: int, message: str) -> None:
    assert describe(policy(**keys), world) == message
