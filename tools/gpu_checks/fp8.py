"""Training steps in FP8, every recipe, against float32 on CPU. Lengths are no multiples of 16."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from gpu_checks.figures import Figure
from gpu_checks.rig import REPOSITORY, Setting, one_rank
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
    """As an override."""
    return f"policy.fp8={yaml.safe_dump({'recipe': recipe, **more}, default_flow_style=True)}"


def shipped_settings() -> dict[str, object]:
    """Those of the config for FP8 that comes with the project."""
    found: dict[str, object] = yaml.safe_load(SHIPPED.read_text("utf-8"))["policy"]["fp8"]
    return found


def current(setting: Setting) -> Iterator[Figure]:
    """Steps in FP8, scales from each tensor, against float32 on CPU."""
    yield from _steps(setting, fp8("current"))


def delayed(setting: Setting) -> Iterator[Figure]:
    """Steps in FP8, scales from a history, against float32 on CPU."""
    yield from _steps(setting, fp8("delayed"), moves=True)


def blockwise(setting: Setting) -> Iterator[Figure]:
    """Steps in FP8, scales of blocks, against float32 on CPU."""
    yield from _steps(setting, fp8("blockwise"))


def shipped(setting: Setting) -> Iterator[Figure]:
    """FP8 as in model_configs/qwen3_8b_fp8.yaml, blockwise between bfloat16 ends."""
    yield from _steps(setting, fp8(**shipped_settings()))  # type: ignore[arg-type]


def shipped_parameters(setting: Setting) -> Iterator[Figure]:
    """The same with weights in FP8 alone, beside their float32 copies."""
    yield from _steps(setting, fp8(**{**shipped_settings(), "parameters": True}))  # type: ignore[arg-type]


def ends(setting: Setting) -> Iterator[Figure]:
    """FP8, scales from each tensor, with two layers at either end in bfloat16."""
    yield from _steps(setting, fp8("current", bf16_first_layers=2, bf16_last_layers=2))


def parameters(setting: Setting) -> Iterator[Figure]:
    """Weights in FP8 alone, scales from each tensor, beside their float32 copies."""
    yield from _steps(setting, fp8("current", parameters=True))


def padded(setting: Setting) -> Iterator[Figure]:
    """Steps in FP8 on padded rows."""
    yield from _steps(setting, fp8("current"), "train.packing=false")


def experts(setting: Setting) -> Iterator[Figure]:
    """FP8 in a mixture of experts: each expert's tokens are padded; the router stays float32."""
    ranks, wanted = one_rank(), reference_of(setting, EXPERTS)
    for recipe in ("current", "blockwise"):
        found = run(setting, ranks, FUSED, SHORT, fp8(recipe), model=EXPERTS)
        yield from compared(found, wanted, FP8_LIMITS, f"{recipe}: ")
        yield from ratios(found, f"{recipe}: ")


def _steps(setting: Setting, *overrides: str, moves: bool = False) -> Iterator[Figure]:
    found = run(setting, one_rank(), FUSED, SHORT, *overrides)
    yield from compared(found, reference_of(setting), FP8_LIMITS)
    yield from ratios(found, moves=moves)
