"""Compatibility: every rule fires on its example and on no plain run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.model import Rope, architecture
from dapo_megatron.plan import compatibility
from dapo_megatron.plan.compatibility import Machine, RunFacts, check, refusals, warnings
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY, TINY
from tests.helpers.published import PUBLISHED

QWEN3_HF: dict[str, Any] = PUBLISHED["Qwen3-8B"][1]
QWEN3 = architecture(QWEN3_HF)
EXPERTS = architecture(PUBLISHED["Qwen3-30B-A3B"][1])
YARN = replace(QWEN3, rope=Rope(1e6, "yarn", 4.0))
LATENT = architecture(PUBLISHED["DeepSeek-V3"][1])
EVERYTHING = frozenset({"transformer_engine", "triton"})
H100, NO_GPU = Machine((9, 0), (13, 0), EVERYTHING), Machine()
NO_TE = Machine((9, 0), (13, 0))

BF16, FP32, FP64 = (f"policy.precision={name}" for name in ("bfloat16", "float32", "float64"))
TE, LOCAL = "policy.kernels=transformer_engine", "policy.kernels=local"
TRITON, ROPE = "policy.logprob_head=triton", "policy.fused_rope=true"
HALF, ON_HOST = "optimizer.moments=bfloat16", "optimizer.cpu_offload=0.5"


def fp8(recipe: str, more: str = "") -> str:
    return f"policy.fp8={{recipe: {recipe}{more}}}"


def lora(targets: str) -> str:
    return f"policy.lora={{rank: 8, alpha: 8, targets: [{targets}]}}"


CASES: list[tuple[Any, Machine | None, str, str]] = [
    (QWEN3, None, f"{TE} {FP32}", "policy.kernels, policy.precision: transformer_engine needs"),
    (LATENT, None, f"{TE} {BF16}", "policy.kernels: models with latent attention or gated"),
    (QWEN3, NO_GPU, f"{TE} {BF16}", "policy.kernels: transformer_engine needs an NVIDIA GPU"),
    (QWEN3, NO_TE, f"{TE} {BF16}", "policy.kernels: transformer_engine needs an NVIDIA GPU"),
    (QWEN3, None, f"{TE} {BF16} policy.context_parallel=2 train.packing=false", "train.packing: "),
    (QWEN3, None, f"{ROPE} {LOCAL} {BF16}", "policy.fused_rope: it is a kernel of Transformer "),
    (QWEN3, NO_TE, f"{ROPE} {BF16}", "policy.fused_rope: it is a kernel of Transformer Engine"),
    (LATENT, None, f"{ROPE} {BF16}", "policy.fused_rope: it is a kernel of Transformer Engine"),
    (YARN, None, f"{ROPE} {TE} {BF16}", "policy.fused_rope: the fused kernel cannot scale"),
    (QWEN3, None, "policy.router_replay=policy", "policy.router_replay: the model has no experts"),
    (QWEN3, None, f"{fp8('current')} {LOCAL} {BF16}", "policy.fp8, policy.kernels: only Transf"),
    (LATENT, None, f"{fp8('current')} {BF16}", "policy.fp8, policy.kernels: only Transformer E"),
    (QWEN3, None, f"{fp8('current')} {FP32}", "policy.fp8, policy.precision: FP8 layers need bf"),
    (QWEN3, NO_GPU, f"{fp8('current')} {BF16}", "12.9), but there is no GPU; set policy.fp8"),
    (QWEN3, NO_TE, f"{fp8('current')} {BF16}", "but transformer_engine is not installed"),
    (QWEN3, replace(H100, capability=(8, 9)), f"{fp8('current')} {BF16}", "this GPU has 8.9"),
    (QWEN3, replace(H100, cuda=(12, 8)), f"{fp8('blockwise')} {BF16}", "built with CUDA 12.8"),
    (QWEN3, None, f"{fp8('blockwise')} {BF16} policy.tensor_parallel=64", "policy.tensor_parallel: "
     "FP8 matmuls need dimensions of a rank that are multiples of 128, unlike query columns 64, "),
    (QWEN3, None, f"{fp8('delayed', ', parameters: true')} {BF16}", "policy.fp8.parameters, pol"),
    (
        QWEN3,
        None,
        f"{fp8('delayed')} {BF16} loss.old_logprobs=engine loss.tis_cap=null",
        "policy.fp8.recipe, loss.old_logprobs: the first delayed scales",
    ),
    (QWEN3, None, f"{fp8('current', ', parameters: true')} {BF16} {ON_HOST}", "only in FP8; set"),
    (QWEN3, None, f"{fp8('delayed')} {BF16}", "policy.fp8.recipe: warned: delayed scales change"),
    (QWEN3, None, f"{TRITON} {FP64}", "policy.logprob_head, policy.precision: the Triton kernels"),
    (QWEN3, None, f"{TRITON} loss.entropy_coefficient=0.001", "loss.entropy_coefficient: the Tr"),
    (
        QWEN3,
        None,
        f"{TRITON} loss.distill={{teacher: models/m, coefficient: 1.0, top_k: 8}}",
        "policy.logprob_head, loss.distill.top_k: the Triton kernels",
    ),
    (QWEN3, NO_GPU, TRITON, "policy.logprob_head: triton needs an NVIDIA GPU and the package"),
    (QWEN3, None, f"{lora('mlp')} {fp8('current')} {BF16}", "policy.lora, policy.fp8: merged wei"),
    (LATENT, None, lora("attention"), "policy.lora.targets: the projections of latent attention"),
    (QWEN3, None, lora("experts"), "policy.lora.targets: the model has no such layers, so noth"),
    (EXPERTS, None, lora("mlp"), "policy.lora.targets: the model has no such layers, so nothing"),
    (QWEN3, None, f"optimizer.kernels=apex {FP64}", "optimizer.kernels, policy.precision: fused"),
    (QWEN3, None, f"{HALF} optimizer.kernels=torch {BF16}", "optimizer.moments, optimizer.kernel"),
    (QWEN3, NO_TE, f"{HALF} {BF16}", "optimizer.moments, optimizer.kernels: only Transformer En"),
    (QWEN3, None, f"{HALF} {FP32}", "optimizer.moments, policy.precision: bfloat16 moments woul"),
    (QWEN3, None, f"{HALF} {BF16} {ON_HOST}", "optimizer.moments, optimizer.cpu_offload: optimi"),
    (QWEN3, None, f"{ON_HOST} {FP32}", "optimizer.cpu_offload, policy.precision: for float32 or"),
    (QWEN3, None, FP64, "policy.precision: float64 is only for `doctor layouts`; engines do not"),
    (LATENT, None, f"engine.quantization=fp8 {BF16}", "engine.quantization: vLLM merges the proj"),
    (QWEN3, None, f"engine.quantization=fp8 {BF16} loss.tis_cap=null", "engine.quantization, loss"),
]  # fmt: skip
"""(model, machine, overrides, part of the message)."""


def config_of(text: str = "") -> Config:
    overrides = re.split(r" (?=[\w.]+=)", text)
    return load_config(TINY, ["policy.tensor_parallel=1", *filter(None, overrides)])


def messages(config: Config, arch: Any, machine: Machine | None) -> str:
    """Return the refusals as one text; the warnings if there are none."""
    try:
        return "\n".join(check(config, arch, machine))
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("arch", "machine", "text", "message"), CASES)
def test_a_rule_fires(arch: Any, machine: Machine | None, text: str, message: str) -> None:
    assert message in messages(config_of(text), arch, machine)


def test_every_rule_has_a_case_and_a_key_of_the_config() -> None:
    fired, known = set[str](), set[str]()
    for arch, machine, text, _ in CASES:
        run = RunFacts(config_of(text), arch, machine)
        for applies, message in (*refusals(run), *warnings(run)):
            rule = message[:60]  # what comes later depends on the run
            known.add(rule)
            fired |= {rule} if applies else set()
    assert fired == known and len(known) > 20
    for rule in known:
        section, *path = rule.split(":")[0].split(",")[0].split(".")
        fields: Any = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        assert path[0] in fields


@pytest.mark.parametrize("arch", [QWEN3, EXPERTS, YARN, LATENT])
@pytest.mark.parametrize("machine", [None, NO_GPU, NO_TE, H100])
@pytest.mark.parametrize("precision", [BF16, FP32])
def test_no_rule_fires_on_a_plain_run(arch: Any, machine: Machine | None, precision: str) -> None:
    assert check(config_of(precision), arch, machine) == []


def test_all_features_together_are_allowed_on_an_h100() -> None:
    keys = f"{BF16} {TRITON} {HALF} {ROPE} policy.router_replay=engine engine.quantization=fp8"
    config = config_of(f"{keys} {fp8('current', ', parameters: true')} loss.tis_cap=2.0")
    assert check(config, EXPERTS, H100) == []


@pytest.mark.parametrize(
    ("recipe", "tensor_parallel", "changed", "dimension"),
    [
        ("blockwise", 8, {}, ""),
        ("current", 16, {}, ""),
        ("current", 1, {"hidden_size": 1000}, "hidden_size 1000"),
        ("current", 8, {"head_dim": 8, "num_key_value_heads": 1}, ""),
        ("current", 32, {"head_dim": 8}, "query columns 8"),
        ("current", 1, {"intermediate_size": 12296}, "intermediate_size 12296"),
    ],
)
def test_fp8_needs_dimensions_divisible_by_its_block_size(
    recipe: str, tensor_parallel: int, changed: dict[str, Any], dimension: str
) -> None:
    config = config_of(f"{fp8(recipe)} {BF16} policy.tensor_parallel={tensor_parallel}")
    text = messages(config, architecture(QWEN3_HF | changed), None)
    assert dimension in text and bool(text) == bool(dimension)


def test_float64_is_allowed_only_without_an_engine() -> None:
    assert check(config_of(FP64), QWEN3, has_engine=False) == []


def test_this_machine_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "find_spec", lambda _: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Machine.here().packages == {"triton"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    here = Machine.here()
    assert here == Machine((9, 0), (13, 0), EVERYTHING)


def test_the_page_names_the_keys_of_every_rule() -> None:
    page = (REPOSITORY / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for arch, machine, text, _ in CASES:
        for line in messages(config_of(text), arch, machine).splitlines():
            for key in line.split(":")[0].split(", "):
                assert f"`{key}`" in page, line
