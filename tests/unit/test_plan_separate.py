"""Plans of runs whose engines run on other GPUs than the policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dapo_megatron.config import Config
from dapo_megatron.plan import GIB, forecast
from dapo_megatron.plan.estimate import ENGINE_RANKS, MemoryEstimate, NodeSpec, estimate_memory
from dapo_megatron.plan.layout import policy_ranks
from dapo_megatron.plan.phases import PHASES
from dapo_megatron.plan.separate import balanced_split, side_warnings
from dapo_megatron.plan.speed import Speed, estimate_speed
from dapo_megatron.plan.suggestions import problems, suggest
from dapo_megatron.types import ConfigError
from tests.helpers.configs import tiny_config
from tests.helpers.published import PUBLISHED

PARAMETERS, HF = PUBLISHED["Qwen3-8B"]
OF_POLICY = {"policy weights", "gradients", "optimizer", "activations"}
OF_ENGINE = {"engine weights", "engine sampler", "engine workspace", "KV cache"}


def config_of(folder: Path, replicas: int, **overrides: object) -> Config:
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
        "engine__colocated": False,
        "engine__replicas": replicas,
    }
    return tiny_config(**settings | overrides)


def plan_of(config: Config, num_gpus: int = 16) -> tuple[MemoryEstimate, Speed]:
    estimate = estimate_memory(config, policy_ranks(config, num_gpus), NodeSpec())
    return estimate, estimate_speed(estimate)


def names(estimate: MemoryEstimate, kind: str) -> set[str]:
    phases = estimate.kinds[kind].values()
    return {part.name for moments in phases for moment in moments for part in moment.parts}


def test_a_gpu_has_the_memory_of_its_side_only(tmp_path: Path) -> None:
    estimate, _ = plan_of(config_of(tmp_path, 8))
    policy, engine = names(estimate, "every policy rank"), names(estimate, ENGINE_RANKS)
    assert policy >= OF_POLICY and not policy & OF_ENGINE
    assert engine >= OF_ENGINE and not engine & OF_POLICY
    # The policy's part is that of a run with colocated engines on as many GPUs.
    shared = estimate_memory(config_of(tmp_path, 8, engine__colocated=True), 8, NodeSpec())
    for name in OF_POLICY:
        apart, colocated = (
            next(p for p in each.fullest("update")[1].parts if p.name == name)
            for each in (estimate, shared)
        )
        assert apart.num_bytes == colocated.num_bytes, name
    assert set(estimate.hosts) == {
        "host memory of a node with 8 policy ranks",
        "host memory of a node with 8 engine ranks",
    }
    by_node = [{part.name for part in parts} for parts in estimate.hosts.values()]
    assert "a checkpoint's copy" in by_node[0] and "grading processes" not in by_node[0]
    assert "a checkpoint's copy" not in by_node[1] and "grading processes" in by_node[1]


def test_an_asynchronous_step_takes_as_long_as_the_slower_side(tmp_path: Path) -> None:
    _, speed = plan_of(config_of(tmp_path, 8))
    generate, training = speed.seconds["generate"], speed.training_seconds
    assert speed.step_seconds == pytest.approx(max(generate, training) + speed.seconds["sync"])
    slower = "policy" if training > generate else "engine"
    assert speed.waiting[slower] == 0
    assert 0 < max(speed.waiting.values()) < 1
    _, serial = plan_of(config_of(tmp_path, 8, rollout__on_policy=True))
    assert serial.step_seconds == pytest.approx(sum(serial.seconds.values()))
    assert sum(serial.waiting.values()) == pytest.approx(
        1 - serial.seconds["sync"] / serial.step_seconds
    )


def test_each_side_is_as_fast_as_its_gpus(tmp_path: Path) -> None:
    _, small = plan_of(config_of(tmp_path, 4), 8)
    _, large = plan_of(config_of(tmp_path, 8), 12)
    assert large.training_seconds == pytest.approx(small.training_seconds)
    assert large.seconds["generate"] < 0.8 * small.seconds["generate"]
    assert large.sync_bytes == 2 * small.sync_bytes
    assert small.sync_bytes == 4 * 2 * PARAMETERS


def test_the_split_that_a_warning_names_is_the_best(tmp_path: Path) -> None:
    estimate, speed = plan_of(config_of(tmp_path, 14))
    nodes = replace(estimate.nodes, gpus_per_node=16)
    estimate = estimate_memory(estimate.config, 2, nodes)
    [warning] = [text for text in side_warnings(estimate, speed) if "of a step" in text]
    split = balanced_split(estimate, speed)
    assert split is not None
    replicas, policy, seconds = split
    assert policy + replicas == 16
    assert f"engine.replicas={replicas} is the best split of the 16 GPUs ({policy} for" in warning
    assert warning.startswith("engine.replicas: engines wait for")
    others = [plan_of(config_of(tmp_path, n))[1].step_seconds for n in range(2, 16, 2)]
    assert seconds == pytest.approx(min(others))
    best, balanced = plan_of(config_of(tmp_path, replicas))
    assert max(balanced.waiting.values()) < 0.5
    assert not [text for text in side_warnings(best, balanced) if "of a step" in text]


def test_the_suggested_share_of_the_memory_fits_without_a_warning(tmp_path: Path) -> None:
    row = {"train__max_tokens_per_microbatch": 10240}
    estimate, _ = plan_of(config_of(tmp_path, 8, engine__memory_fraction=0.5, **row))
    [warning] = side_warnings(estimate, None)
    share = float(warning.split("so ")[1].split(" fits")[0])
    larger, _ = plan_of(config_of(tmp_path, 8, engine__memory_fraction=share, **row))
    assert larger.sequences > estimate.sequences
    assert larger.fits() and not [*larger.gpu_warnings(), *side_warnings(larger, None)]
    free = larger.nodes.gpu_memory_gib - max(
        moment.num_bytes / GIB for phase in PHASES for moment in larger.kinds[ENGINE_RANKS][phase]
    )
    assert 4.0 <= free < 5.0


def test_a_node_with_policy_and_engines_is_a_warning(tmp_path: Path) -> None:
    estimate, speed = plan_of(config_of(tmp_path, 4))
    assert any("the policy's 12 ranks are no multiple of the 8 GPUs" in text
               for text in side_warnings(estimate, speed))  # fmt: skip


def test_what_does_not_fit_is_named_with_changes_that_are_possible(tmp_path: Path) -> None:
    config = config_of(tmp_path, 8, train__max_tokens_per_microbatch=131072)
    estimate, _ = plan_of(config)
    [text] = problems(estimate)
    assert "every policy rank takes" in text
    changes = [item.change for item in suggest(estimate, "update")]
    assert "16 GPUs for the policy" in changes
    assert not [change for change in changes if "offload=[" in change or "sleep" in change]


def test_a_layout_that_does_not_fit_the_policys_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 does not divide the 9 processes"):
        forecast.check(config_of(tmp_path, 7), 9, NodeSpec())
