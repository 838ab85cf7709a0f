"""`doctor layouts` without ranks: the small model, the mini-batch, the matrix, the differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config import PolicyConfig
from dapo_megatron.doctor.layouts import TOLERANCES, other_losses
from dapo_megatron.doctor.matrix import LayoutCase, matrix, smallest_world
from dapo_megatron.doctor.measure import (
    LENGTHS,
    NO_LOSS,
    Measured,
    compare,
    random_minibatch,
    with_old_logprobs,
)
from dapo_megatron.doctor.shrink import shrink, write_random_model
from dapo_megatron.model import Architecture, architecture
from dapo_megatron.types import ConfigError
from tests.helpers.configs import tiny_config
from tests.helpers.published import PUBLISHED

QWEN3_8B = PUBLISHED["Qwen3-8B"][1]
BIASED_MOE = ("DeepSeek-V3", "Moonlight-16B-A3B", "GLM-4.5", "GLM-4.5-Air", "GLM-4.7-Flash")
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "hidden_size": 2048,  # differs from 32 heads x 128
}


# ------------------------------------------------------------------ the small model


def policy(**changes: Any) -> PolicyConfig:
    return PolicyConfig(precision="float32", **changes)


def small(hf: dict[str, Any]) -> Architecture:
    return shrink(architecture(hf), policy())


@settings(max_examples=200)
@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    ratio=st.sampled_from([1, 4, 7]),
    pipeline=st.sampled_from([1, 2, 4]),
    virtual=st.sampled_from([None, 2, 3]),
    expert=st.sampled_from([None, 1, 2, 8]),
)
def test_the_small_model_accepts_every_layout_of_the_large_one(
    tensor: int, ratio: int, pipeline: int, virtual: int | None, expert: int | None
) -> None:
    large = QWEN3_8B | {"num_attention_heads": 8 * ratio} | (EXPERTS if expert else {})
    policy_config = policy(
        tensor_parallel=tensor,
        sequence_parallel=tensor > 1,
        pipeline_parallel=pipeline,
        virtual_pipeline_parallel=virtual,
        expert_parallel=expert or 1,
    )
    large["num_hidden_layers"] = 48
    arch = architecture(large)
    world = smallest_world(policy_config, arch)
    try:
        check(policy_config, arch, world)
    except ConfigError:
        return
    shrunk = shrink(arch, policy_config)
    check(policy_config, shrunk, world)
    assert smallest_world(policy_config, shrunk) == world


def check(policy_config: PolicyConfig, arch: Architecture, world: int) -> None:
    """Raise ConfigError as check_layout does, for a model without a folder."""
    from dapo_megatron.plan.layout import policy_problems

    problems = list(policy_problems(policy_config, world, arch))
    if problems:
        raise ConfigError("\n".join(problems))


@pytest.mark.parametrize(
    "hf",
    [QWEN3_8B | EXPERTS, *(PUBLISHED[name][1] for name in BIASED_MOE)],
    ids=["qwen3_moe", *BIASED_MOE],
)
def test_a_written_random_model_reads_back_as_the_same_architecture(
    tmp_path: Path, hf: dict[str, Any]
) -> None:
    from safetensors import safe_open

    arch = small(hf)
    write_random_model(arch, tmp_path)
    written = architecture(json.loads((tmp_path / "config.json").read_text()))
    assert written == arch
    assert written.rope == architecture(hf).rope
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            assert torch.equal(weight, weight.bfloat16().float()), name
            assert 0.05 < float(weight.std()) < 0.6, name


# ------------------------------------------------------------------ the mini-batch


def test_the_mini_batch_covers_cases_that_loss_scaling_could_get_wrong() -> None:
    mini = random_minibatch(101, "token")
    assert max(LENGTHS) == 100 * min(LENGTHS)
    parts = mini.loss_mask.split(mini.lengths.tolist())
    assert not parts[NO_LOSS].any()
    assert all(part.any() for number, part in enumerate(parts) if number != NO_LOSS)
    logprobs = torch.full(mini.tokens.shape, -4.0)
    log_ratio = (logprobs - with_old_logprobs(mini, logprobs).old_logprobs)[mini.loss_mask]
    advantages = mini.advantages[mini.loss_mask]
    clipped_high = (log_ratio.exp() > 1.28) & (advantages > 0)
    clipped_low = (log_ratio.exp() < 0.8) & (advantages < 0)
    for tokens in (clipped_high, clipped_low, ~clipped_high & ~clipped_low):
        assert 0.05 < float(tokens.float().mean()) < 0.95


# ------------------------------------------------------------------ the matrix


def layout_names(arch: Architecture, ranks: int, **overrides: Any) -> set[str]:
    return {case.layout for case in matrix(tiny_config(**overrides), arch, ranks, "float64")}


def test_the_matrix_contains_all_kinds_of_parallelism() -> None:
    dense, moe = (
        small(QWEN3_8B),
        small(QWEN3_8B | EXPERTS),
    )
    required = {
        "DP2",
        "TP2",
        "TP2+SP",
        "PP2",
        "PP2 interleaved x2",
        "CP2",
        "TP2 x PP2",
        "TP2 x CP2",
    }
    assert required <= layout_names(dense, 4)
    assert {"EP2", "DP2 x EP2", "EP2, balance loss", "DP2 x EP2, balance loss"} <= layout_names(
        moe, 4
    )
    cases = matrix(tiny_config(), dense, 4, "float64")
    variants = {(case.split, case.packed) for case in cases if case.layout == "TP2 x CP2"}
    assert variants == {
        (split, packed) for split in ("planned", "skewed") for packed in (True, False)
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_case_is_a_valid_layout(ranks: int) -> None:
    for arch in (
        small(QWEN3_8B),
        small(QWEN3_8B | EXPERTS),
    ):
        for case in matrix(tiny_config(), arch, ranks, "float64"):
            assert case.num_ranks <= ranks
            check(case.policy, arch, case.num_ranks)
            if case.policy.tensor_parallel > 1 and arch.num_experts:
                assert case.policy.sequence_parallel


def test_the_users_layout_is_first_if_it_fits() -> None:
    policy_config = {"policy__tensor_parallel": 4, "policy__sequence_parallel": True}
    arch = shrink(architecture(QWEN3_8B), tiny_config(**policy_config).policy)
    first = matrix(tiny_config(**policy_config), arch, 4, "float64")[0]
    assert (first.yours, first.layout, first.num_ranks) == (True, "TP4+SP", 4)
    assert not any(case.yours for case in matrix(tiny_config(**policy_config), arch, 2, "float64"))
    assert smallest_world(tiny_config(**policy_config).policy, arch) == 4


@given(ranks=st.integers(1, 5), lengths=st.lists(st.integers(1, 300), min_size=2, max_size=20))
def test_a_skewed_plan_contains_every_sequence_once(ranks: int, lengths: list[int]) -> None:
    plan = LayoutCase(policy(), ranks, "skewed", packed=True).planner(tiny_config())(lengths, ranks)
    assert {len(micros) for micros in plan} == {2}
    assert sorted(i for micros in plan for micro in micros for i in micro) == list(
        range(len(lengths))
    )
    assert lengths[plan[0][0][0]] == min(lengths)
    assert not any(micro for micros in plan[1:] for micro in micros)


# ------------------------------------------------------------------ differences


def measured(**changes: Any) -> Measured:
    tensors = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.zeros(2).double()}
    same: dict[str, Any] = dict.fromkeys(("gradients", "weights"), tensors)
    same["logprobs"] = torch.tensor([0.0, -1.5]).double()
    numbers: dict[str, Any] = {
        "values": {"": 0.5, "kl": 2.0},
        "losses": [0.5, 0.4],
        "grad_norms": [2.0, 1.0],
    }
    return Measured(**{**same, **numbers, **changes})


def test_equal_measurements_have_no_differences() -> None:
    differences = compare(measured(), measured())
    assert set(differences.values()) == {0.0}
    assert not TOLERANCES["float64"].failures(differences)


@pytest.mark.parametrize(
    ("changes", "failures"),
    [
        ({"logprobs": torch.tensor([0.0, -1.5 + 1e-6])}, ["logprobs"]),
        ({"values": {"": 0.5 + 1e-8, "kl": 2.0}}, ["loss"]),
        ({"values": {"": 0.5, "kl": 2.1}}, ["loss"]),
        ({"losses": [0.5, 0.41]}, ["losses"]),
        ({"grad_norms": [2.0, 1.1]}, ["grad_norm"]),
        ({"values": {"": 0.5, "kl": float("nan")}}, ["loss"]),
        ({"weights": {"a": torch.tensor([3.0, 4.1]), "b": torch.zeros(2)}}, ["weights"]),
        ({"gradients": {"a": torch.tensor([3.0, 4.1]), "b": torch.zeros(2)}}, ["gradient"]),
        # The gradient of an expert without tokens is 0. Any other value fails.
        (
            {"gradients": {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0, 1e-30])}},
            ["gradient"],
        ),
        (
            {"gradients": {"a": torch.tensor([3.0, float("nan")]), "b": torch.zeros(2)}},
            ["gradient"],
        ),
        ({"gradients": {"a": torch.tensor([3.0, 4.0])}}, ["gradient"]),
    ],
)
def test_each_difference_fails_with_its_name(changes: dict[str, Any], failures: list[str]) -> None:
    as_float64 = {
        key: {name: tensor.double() for name, tensor in value.items()}
        if key in ("weights", "gradients")
        else value
        for key, value in changes.items()
    }
    differences = compare(measured(**as_float64), measured())
    assert TOLERANCES["float64"].failures(differences) == failures


# ------------------------------------------------------------------ the command


def test_other_losses_are_the_loss_sections_with_each_overlay_of_the_folders(
    tmp_path: Path,
) -> None:
    config = Path("model_configs/tiny_cpu.yaml")
    (tmp_path / "a.yaml").write_text("loss: {clip_low: 0.1}\n")
    (tmp_path / "b.yaml").write_text(
        "loss: {objective: gspo, aggregation: sequence, tis_cap: null, dual_clip: null}\n"
    )
    losses = other_losses(config, ["loss.clip_high=0.4"], [], [tmp_path])
    assert {
        name: (loss.objective, loss.clip_low, loss.clip_high) for name, loss in losses.items()
    } == {"a": ("dapo", 0.1, 0.4), "b": ("gspo", 0.2, 0.4)}
    with pytest.raises(ConfigError, match=r"--losses: two overlays are named a; rename .*a\.yaml"):
        other_losses(config, [], [], [tmp_path, tmp_path])
    with pytest.raises(ConfigError, match=r"--losses: .*/empty has no \.yaml files"):
        other_losses(config, [], [], [tmp_path / "empty"])
