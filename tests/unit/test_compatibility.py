"""Compatibility rules: each applies to its example, and none to a plain run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.files import read_json
from dapo_megatron.model import FAMILIES, Architecture, Rope, architecture
from dapo_megatron.plan.compatibility import RULES, check, find
from dapo_megatron.plan.compatibility.__main__ import page
from dapo_megatron.plan.compatibility.rule import Action, CompatibilityRule, Machine, RunFacts
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY, TINY
from tests.helpers.published import PUBLISHED

QWEN3_HF: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
QWEN3 = architecture(QWEN3_HF)
YARN = replace(QWEN3, rope=Rope(1e6, "yarn", 4.0))
DEEPSEEK = architecture(PUBLISHED["DeepSeek-V3"][1])
H100 = Machine((9, 0), (13, 0), frozenset({"transformer_engine", "apex", "triton"}))
NO_GPU = Machine()


def config_of(*overrides: str) -> Config:
    return load_config(TINY, ["policy.tensor_parallel=1", *overrides])


def model_of(rule: CompatibilityRule) -> Architecture:
    if rule.name == "rope-yarn":
        return YARN
    models = (QWEN3, architecture(QWEN3_HF | EXPERTS), DEEPSEEK)
    return next(model for model in models if model.family in rule.families)


def rule_names(run: RunFacts) -> set[str]:
    return {finding.rule.name for finding in find(run)}


def by_name(name: str) -> CompatibilityRule:
    return next(rule for rule in RULES if rule.name == name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_applies_to_its_example(rule: CompatibilityRule) -> None:
    config = config_of(*rule.example)
    model = model_of(rule)
    run = RunFacts(config, model, rule.example_machine)
    assert rule.name in rule_names(run)
    (text,) = [str(finding) for finding in find(run) if finding.rule is rule]
    keys = [key for key in rule.keys if "." in key]
    assert keys and text.startswith(f"{', '.join(keys)}: ")
    if rule.action is Action.REFUSED:
        with pytest.raises(ConfigError) as raised:
            check(config, model, rule.example_machine)
        assert text in str(raised.value).splitlines()
    elif not any(finding.rule.action is Action.REFUSED for finding in find(run)):
        assert text in check(config, model, rule.example_machine)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_does_not_apply_to_a_plain_config(rule: CompatibilityRule) -> None:
    assert rule.example
    plain = RunFacts(config_of(), model_of(rule))
    assert rule.name not in rule_names(plain)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_keys_of_rules_exist_in_the_config(rule: CompatibilityRule) -> None:
    for key in (key for key in rule.keys if "." in key):
        section, *path = key.split(".")
        model: Any = Config.model_fields[section].annotation
        for name in path:
            if name in getattr(model, "model_fields", {}):
                model = model.model_fields[name].annotation
            else:  # an optional section
                (model,) = [member for member in model.__args__ if member is not type(None)]
                model = model.model_fields[name].annotation


def test_rules_have_unique_names_known_families_and_a_way_out() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(set(rule.families) <= set(FAMILIES) for rule in RULES)
    for rule in RULES:
        assert (rule.way_out == "") == (rule.action is Action.NOT_RUN), rule.name


@pytest.mark.parametrize("name", ["tiny_cpu", "tiny_moe", "tiny_ladder"])
def test_the_shipped_cpu_configs_have_no_findings(name: str) -> None:
    config = load_config(TINY.parent / f"{name}.yaml", [])
    model = architecture(read_json(REPOSITORY / config.model.path / "config.json"))
    assert check(config, model, NO_GPU) == []


def test_a_valid_fp8_run_on_an_h100_is_allowed_with_notes_on_what_is_untested() -> None:
    config = config_of(
        "policy.precision=bfloat16",
        "policy.fp8={recipe: current, bf16_first_layers: 1, bf16_last_layers: 1}",
        "engine.quantization=fp8",
        "policy.logprob_head=triton",
    )
    lines = check(config, QWEN3, H100)
    assert lines and all("not run on a GPU yet" in line for line in lines)


def test_rules_about_the_machine_do_not_apply_without_one() -> None:
    config = config_of("policy.kernels=transformer_engine", "policy.precision=bfloat16")
    assert check(config, QWEN3)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and the package"):
        check(config, QWEN3, NO_GPU)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and the package"):
        check(config, QWEN3, Machine((9, 0), (13, 0)))


def test_all_refusals_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        check(config_of("policy.fp8={recipe: current}", "policy.kernels=local"), QWEN3)
    assert len(str(raised.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("recipe", "tensor_parallel", "changed", "dimension"),
    [
        ("current", 1, {}, ""),
        ("blockwise", 1, {}, ""),
        ("blockwise", 8, {}, ""),  # 384 columns of the MLP and two heads
        ("blockwise", 16, {}, "intermediate_size 192"),
        ("current", 16, {}, ""),
        ("current", 1, {"hidden_size": 1000}, "hidden_size 1000"),
        ("current", 8, {"head_dim": 8, "num_key_value_heads": 1}, ""),
        ("current", 16, {"head_dim": 8}, "query columns 8"),
        ("current", 1, {**EXPERTS, "intermediate_size": 7}, ""),
        (
            "current",
            1,
            {**EXPERTS, "moe_intermediate_size": 776},
            "moe_intermediate_size 776",
        ),
    ],
)
def test_fp8_needs_dimensions_divisible_by_its_block_size(
    recipe: str, tensor_parallel: int, changed: dict[str, Any], dimension: str
) -> None:
    config = config_of(
        f"policy.fp8={{recipe: {recipe}}}",
        "policy.precision=bfloat16",
        f"policy.tensor_parallel={tensor_parallel}",
    )
    findings = find(RunFacts(config, architecture(QWEN3_HF | changed)))
    texts = [str(finding) for finding in findings if finding.detail]
    assert bool(texts) == bool(dimension)
    assert all(dimension in text for text in texts)


def test_kernels_auto_depends_on_the_installed_packages() -> None:
    rope = config_of("policy.fused_rope=true", "policy.precision=bfloat16")
    assert "rope-kernels" not in rule_names(RunFacts(rope, QWEN3, H100))
    assert "rope-kernels" in rule_names(RunFacts(rope, QWEN3, Machine((9, 0), (13, 0))))
    assert "rope-kernels" in rule_names(RunFacts(rope, QWEN3, NO_GPU))


def test_kernels_auto_means_local_for_latent_attention() -> None:
    latent, auto = DEEPSEEK, config_of("policy.precision=bfloat16")
    assert not RunFacts(auto, latent, H100).fused
    assert check(auto, latent, NO_GPU) == []
    local = config_of("policy.precision=bfloat16", "policy.kernels=local")
    assert check(auto, latent, H100) == check(local, latent, H100) != []
    with pytest.raises(ConfigError, match=r"set policy\.kernels auto or local"):
        check(config_of("policy.precision=bfloat16", "policy.kernels=transformer_engine"), latent)


def test_float64_is_allowed_only_without_an_engine() -> None:
    config = config_of("policy.precision=float64")
    assert check(config, QWEN3, has_engine=False) == []
    with pytest.raises(ConfigError, match="float64 is only for `doctor layouts`"):
        check(config, QWEN3)


def test_the_compatibility_page_is_up_to_date() -> None:
    written = (REPOSITORY / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert written == page(), (
        "run: python -m dapo_megatron.plan.compatibility > docs/compatibility.md"
    )
    assert all(rule.why in written for rule in RULES)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "is_refused"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:512, expandable_segments: true", True),
        ("expandable_segments:1", True),
        ("backend:cudaMallocAsync", True),
        ("", False),
        ("max_split_size_mb:512", False),
        ("expandable_segments:False", False),
        ("backend:native", False),
    ],
)
def test_an_allocator_that_breaks_engine_sleep_is_refused(
    variable: str, value: str, is_refused: bool
) -> None:
    def is_found(config: Config, machine: Machine) -> bool:
        return "engine-sleep-allocator" in rule_names(RunFacts(config, QWEN3, machine))

    machine = replace(H100, environment={variable: value})
    assert is_found(config_of(), machine) == is_refused
    assert not is_found(config_of("engine.sleep=false"), machine)
    assert not is_found(config_of(), replace(machine, capability=None))  # CPU


@pytest.mark.parametrize("machine", [NO_GPU, Machine((9, 0), (13, 0))], ids=["no GPU", "no TE"])
@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        ("kernels-machine", ("policy.kernels=transformer_engine",)),
        ("fp8-machine", ("policy.fp8={recipe: current}",)),
        ("moments-kernels", ("optimizer.moments=bfloat16",)),
        ("head-machine", ("policy.logprob_head=triton",)),
        ("optimizer-machine", ("optimizer.kernels=transformer_engine",)),
    ],
)
def test_features_that_the_machine_lacks_are_refused(
    machine: Machine, rule: str, overrides: tuple[str, ...]
) -> None:
    config = config_of("policy.precision=bfloat16", *overrides)
    assert rule in rule_names(RunFacts(config, QWEN3, machine))
    assert rule not in rule_names(RunFacts(config, QWEN3, H100))
    with pytest.raises(ConfigError):
        check(config, QWEN3, machine)


def test_this_machine_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    here = Machine.here()
    assert here.capability == (9, 0) and here.cuda == (13, 0)
    assert here.environment["TRITON_INTERPRET"] == "1"
    assert "head-machine" not in rule_names(
        RunFacts(config_of("policy.logprob_head=triton"), QWEN3, here)
    )
