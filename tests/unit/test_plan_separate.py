"""Plans of runs whose policy and engines run on dedicated ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dapo_megatron.config import Config
from dapo_megatron.plan import GIB, forecast
from dapo_megatron.plan.estimate import ENGINE_RANKS, MemoryEstimate, NodeSpec, estimate_memory
from dapo_megatron.plan.phases import PHASES
from dapo_megatron.plan.roles import balanced_split, role_warnings
from dapo_megatron.plan.speed import Speed, estimate_speed
from dapo_megatron.plan.suggestions import problems, suggest
from dapo_megatron.types import ConfigError
from tests.helpers.configs import tiny_config
from tests.helpers.published import PUBLISHED

PARAMETERS, HF = PUBLISHED["Qwen3-8B"]
OF_POLICY = {"policy weights", "gradients", "optimizer", "activations"}
OF_ENGINE = {"engine weights", "engine sampler", "engine workspace", "KV cache"}


def config_of(folder: Path, policy: int, engine: int, **overrides: object) -> Config:
    (folder / "config.json").write_text(json.dumps(HF), encoding="utf-8")
    settings = {
        "model__path": folder,
        "policy__precision": "bfloat16",
        "policy__tensor_parallel": 2,
        "policy__sequence_parallel": True,
        "engine__tensor_parallel": 1,
        "engine__max_sequences": 256,
        "rollout__prompts_per_step": 128,
        "rollout__samples_per_prompt": 16,
        "rollout__max_prompt_tokens": 2048,
        "rollout__max_response_tokens": 8192,
        "rollout__on_policy": False,
        "rollout__deterministic": False,
        "train__max_tokens_per_microbatch": 16384,
        "roles": f"{{policy: {policy}, engine: {engine}}}",
    }
    return tiny_config(**settings | overrides)


def plan_of(config: Config, num: int = 16) -> tuple[MemoryEstimate, Speed]:
    estimate = estimate_memory(config, num, NodeSpec())
    return estimate, estimate_speed(estimate)


def names(estimate: MemoryEstimate, kind: str) -> set[str]:
    phases = estimate.kinds[kind].values()
    return {part.name for moments in phases for moment in moments for part in moment.parts}


def test_a_rank_has_the_memory_of_its_role_only(tmp_path: Path) -> None:
    estimate, _ = plan_of(config_of(tmp_path, 8, 8))
    policy, engine = names(estimate, "every policy rank"), names(estimate, ENGINE_RANKS)
    assert policy >= OF_POLICY and not policy & OF_ENGINE
    assert engine >= OF_ENGINE and not engine & OF_POLICY
    # The policy's part is that of a run without roles on as many GPUs, without an engine.
    alone = estimate_memory(config_of(tmp_path, 0, 0), 8, NodeSpec())
    for name in OF_POLICY:
        with_roles, without = (
            next(p for p in each.fullest("update")[1].parts if p.name == name)
            for each in (estimate, alone)
        )
        assert with_roles.num_bytes == without.num_bytes, name
    assert set(estimate.hosts) == {
        "host memory of a node with 8 policy ranks",
        "host memory of a node with 8 engine ranks",
    }
    by_node = [{part.name for part in parts} for parts in estimate.hosts.values()]
    assert "a checkpoint's copy" in by_node[0] and "grading processes" not in by_node[0]
    assert "a checkpoint's copy" not in by_node[1] and "grading processes" in by_node[1]


def test_an_asynchronous_step_takes_as_long_as_the_slower_side(tmp_path: Path) -> None:
    _, speed = plan_of(config_of(tmp_path, 8, 8))
    generate, training = speed.seconds["generate"], speed.training_seconds
    assert speed.step_seconds == pytest.approx(max(generate, training) + speed.seconds["sync"])
    slower = "policy" if training > generate else "engine"
    assert speed.waiting[slower] == 0
    assert 0 < max(speed.waiting.values()) < 1
    _, serial = plan_of(config_of(tmp_path, 8, 8, rollout__on_policy=True))
    assert serial.step_seconds == pytest.approx(sum(serial.seconds.values()))
    assert sum(serial.waiting.values()) == pytest.approx(
        1 - serial.seconds["sync"] / serial.step_seconds
    )


def test_each_side_is_as_fast_as_its_ranks(tmp_path: Path) -> None:
    _, small = plan_of(config_of(tmp_path, 4, 4), 8)
    _, large = plan_of(config_of(tmp_path, 4, 8), 12)
    assert large.training_seconds == pytest.approx(small.training_seconds)
    assert large.seconds["generate"] < 0.8 * small.seconds["generate"]
    assert large.sync_bytes == 2 * small.sync_bytes
    assert small.sync_bytes == 4 * 2 * PARAMETERS


def test_the_split_that_a_warning_names_is_the_best(tmp_path: Path) -> None:
    estimate, speed = plan_of(config_of(tmp_path, 2, 14), 16)
    nodes = replace(estimate.nodes, gpus_per_node=16)
    estimate = estimate_memory(estimate.config, 16, nodes)
    [warning] = [text for text in role_warnings(estimate, speed) if "of a step" in text]
    split = balanced_split(estimate, speed)
    assert split is not None
    policy, engine, seconds = split
    assert policy + engine == 16
    assert f"roles.policy={policy} roles.engine={engine} is the best split" in warning
    assert warning.startswith("roles.engine: engines wait for")
    others = [plan_of(config_of(tmp_path, n, 16 - n))[1].step_seconds for n in range(2, 16, 2)]
    assert seconds == pytest.approx(min(others))
    best, balanced = plan_of(config_of(tmp_path, policy, engine))
    assert max(balanced.waiting.values()) < 0.5
    assert not [text for text in role_warnings(best, balanced) if "of a step" in text]


def test_the_suggested_share_of_the_memory_fits_without_a_warning(tmp_path: Path) -> None:
    row = {"train__max_tokens_per_microbatch": 10240}
    estimate, _ = plan_of(config_of(tmp_path, 8, 8, engine__memory_fraction=0.5, **row))
    [warning] = role_warnings(estimate, None)
    share = float(warning.split("so ")[1].split(" fits")[0])
    larger, _ = plan_of(config_of(tmp_path, 8, 8, engine__memory_fraction=share, **row))
    assert larger.sequences > estimate.sequences
    assert larger.fits() and not [*larger.gpu_warnings(), *role_warnings(larger, None)]
    free = larger.nodes.gpu_memory_gib - max(
        moment.num_bytes / GIB for phase in PHASES for moment in larger.kinds[ENGINE_RANKS][phase]
    )
    assert 4.0 <= free < 5.0


def test_a_node_with_both_roles_is_a_warning(tmp_path: Path) -> None:
    estimate, speed = plan_of(config_of(tmp_path, 12, 4))
    assert any("roles.policy: 12 is no multiple of the 8 GPUs" in text
               for text in role_warnings(estimate, speed))  # fmt: skip


def test_what_does_not_fit_is_named_with_changes_that_roles_allow(tmp_path: Path) -> None:
    config = config_of(tmp_path, 8, 8, train__max_tokens_per_microbatch=131072)
    estimate, _ = plan_of(config)
    [text] = problems(estimate)
    assert "every policy rank takes" in text
    changes = [item.change for item in suggest(estimate, "update")]
    assert "roles.policy=16 (24 GPUs)" in changes
    assert not [change for change in changes if "offload=[" in change or "sleep" in change]


@pytest.mark.parametrize(
    ("policy", "engine", "reason"),
    [
        (8, 4, "roles.policy + roles.engine = 8 + 4, but there are 16 processes"),
        (9, 7, "2 does not divide the 9 processes (roles.policy)"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_role(
    tmp_path: Path, policy: int, engine: int, reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        forecast.check(config_of(tmp_path, policy, engine), 16, NodeSpec())
    assert reason in str(error.value)
