"""Training steps in FP8, with all recipes, compared to float32 on CPU. FP8 has to pad."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from gpu_checks.figures import Figure
from gpu_checks.rig import REPOSITORY, Setting, join_ranks
from gpu_checks.steps import (
    EXPERTS,
    FP8_LIMITS,
    FUSED,
    SHORT,
    compared,
    ratios,
    reference_of,
    run,
)

SHIPPED = REPOSITORY / "model_configs" / "qwen3_8b_fp8.yaml"


def fp8(recipe: str, **more: object) -> str:
    """Return an override that selects this recipe."""
    return f"policy.fp8={yaml.safe_dump({'recipe': recipe, **more}, default_flow_style=True)}"


def shipped_settings() -> dict[str, object]:
    """Return the FP8 settings of the shipped config."""
    settings: dict[str, object] = yaml.safe_load(SHIPPED.read_text("utf-8"))["policy"]["fp8"]
    return settings


def current(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 steps with scales from each tensor to float32 on CPU."""
    yield from _steps(setting, fp8("current"))


def delayed(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 steps with scales from a history to float32 on CPU."""
    yield from _steps(setting, fp8("delayed"), moves=True)


def blockwise(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 steps with scales of blocks to float32 on CPU."""
    yield from _steps(setting, fp8("blockwise"))


def shipped(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 as in model_configs/qwen3_8b_fp8.yaml to float32 on CPU."""
    yield from _steps(setting, fp8(**shipped_settings()))  # type: ignore[arg-type]


def shipped_parameters(setting: Setting) -> Iterator[Figure]:
    """Compare fp8_shipped with FP8 weights and float32 main copies to float32 on CPU."""
    yield from _steps(setting, fp8(**{**shipped_settings(), "parameters": True}))  # type: ignore[arg-type]


def ends(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 between two first and two last layers in bfloat16 to float32 on CPU."""
    yield from _steps(setting, fp8("current", bf16_first_layers=2, bf16_last_layers=2))


def parameters(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 weights with scales from each tensor to float32 on CPU."""
    yield from _steps(setting, fp8("current", parameters=True))


def padded(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 steps on padded rows to float32 on CPU."""
    yield from _steps(setting, fp8("current"), "train.packing=false")


def experts(setting: Setting) -> Iterator[Figure]:
    """Compare FP8 in a mixture of experts, which pads per expert, to float32 on CPU."""
    ranks, wanted = join_ranks(setting), reference_of(setting, EXPERTS)
    for recipe in ("current", "blockwise"):
        result = run(setting, ranks, FUSED, SHORT, fp8(recipe), model=EXPERTS)
        yield from compared(result, wanted, FP8_LIMITS, f"{recipe}: ")
        yield from ratios(result, f"{recipe}: ")


def _steps(setting: Setting, *overrides: str, moves: bool = False) -> Iterator[Figure]:
    result = run(setting, join_ranks(setting), FUSED, SHORT, *overrides)
    yield from compared(result, reference_of(setting), FP8_LIMITS)
    yield from ratios(result, moves=moves)
