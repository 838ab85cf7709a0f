"""The list of checks, the most important first, what each needs, and the figures they yield."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

TE, VLLM = "transformer_engine", "vllm"
HOPPER = (9, 0)

# ---------------------------------------------------------------------------- figures

Verdict = Literal["ok", "short", "not judged", "failed", "skipped"]
WORST: tuple[Verdict, ...] = ("failed", "short", "ok", "not judged", "skipped")


@dataclass(frozen=True)
class Figure:
    """A measured value. `target` is in words, and empty if there is none."""

    name: str
    value: float
    unit: str = ""
    target: str = ""
    verdict: Verdict = "ok"


def reported(name: str, value: float, unit: str = "") -> Figure:
    """Return a figure without a target."""
    return Figure(name, float(value), unit)


def at_most(
    name: str, value: float, limit: float, unit: str = "", *, binding: bool = True
) -> Figure:
    """Return a figure that should not exceed a limit. It is not judged if the limit is stated for
    other hardware or models (`binding` false)."""
    return Figure(name, float(value), unit, f"<= {limit:g}", _verdict(value <= limit, binding))


def at_least(
    name: str, value: float, limit: float, unit: str = "", *, binding: bool = True
) -> Figure:
    """Return a figure that should not be below a limit. See `at_most`."""
    return Figure(name, float(value), unit, f">= {limit:g}", _verdict(value >= limit, binding))


def _verdict(is_met: bool, binding: bool) -> Verdict:
    if not binding:
        return "not judged"
    return "ok" if is_met else "short"


def holds(name: str, is_so: bool) -> Figure:
    """Return a figure for a condition that must hold."""
    return Figure(name, float(is_so), "", "yes", "ok" if is_so else "short")


# ---------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Check:
    """A check and its requirements. `where` is `module:function` in this folder."""

    name: str
    where: str
    seconds: int
    """Time limit."""
    guess: int
    """Estimated duration in seconds, not measured yet. A check is skipped if less is left."""
    gib: float = 8.0
    """GPU memory that it needs, in GiB."""
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] = (7, 0)
    on_cpu: bool = True
    """Whether it also runs on CPU, in a tiny shape."""

    def run(self) -> Callable[..., Iterator[Figure]]:
        """Return the function that generates its figures. Importing it may take seconds."""
        module, function = self.where.split(":")
        generate: Callable[..., Iterator[Figure]] = getattr(
            import_module(f"gpu_checks.{module}"), function
        )
        return generate

    def title(self) -> str:
        """Return the function's docstring. It is read from the file, because imports are slow."""
        module, function = self.where.split(":")
        text = (Path(__file__).parent / f"{module}.py").read_text("utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return " ".join((ast.get_docstring(node) or "").split())
        return ""

    def needs(self) -> str:
        """Return the requirements as text."""
        parts = [f"an NVIDIA GPU with {self.gib:g} GiB"]
        if self.capability > (7, 0):
            parts[0] += " of compute capability {}.{}".format(*self.capability)
        return ", ".join([*parts, *self.packages])

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]


_FP8: dict[str, Any] = {"gib": 16.0, "packages": (TE,), "capability": HOPPER, "on_cpu": False}
_FUSED = _FP8 | {"capability": (8, 0)}

CHECKS = (
    # Needed by every run with the shipped configs.
    Check("bf16", "training:bfloat16", 240, 90, 16),
    Check("te", "training:transformer_engine", 240, 60, **_FUSED),
    Check("sync_0.6b", "engines:sync_06b", 180, 70, 30, (VLLM,)),
    Check("tokens_graphs", "engines:tokens_graphs", 240, 120, 40, (VLLM,), on_cpu=False),
    Check("head", "speed:head", 120, 40, 60),
    Check("fp8_shipped", "training:fp8_shipped", 240, 80, **_FP8),
    Check("mfu_4b", "speed:mfu_4b", 240, 110, 70),
    Check("checkpoint", "states:checkpoint", 180, 60, 20),
    Check("moe", "training:experts", 180, 60, 16),
    Check("moe_repeats", "training:experts_repeat", 120, 30, 16),
    Check("sync_4b", "engines:sync_4b", 300, 130, 70, (VLLM,)),
    Check("optimizers", "training:optimizers", 240, 80, 20),
    Check("quickstart", "engines:quickstart", 300, 120, 20, (VLLM,)),
    Check("plan", "engines:plan", 180, 80, 40, (VLLM,)),
    # Other settings.
    Check("recompute", "states:recompute", 180, 50, 16),
    Check("padded", "training:padded", 180, 40, 16),
    Check("fp8_recipes", "training:fp8_recipes", 480, 200, **_FP8),
    Check("checkpoint_fp8", "states:checkpoint_fp8", 180, 60, **(_FP8 | {"gib": 20.0})),
    Check("recompute_fp8", "states:recompute_fp8", 180, 50, **_FP8),
    Check("moe_fp8", "training:fp8_experts", 180, 50, **_FP8),
    Check("offload", "states:offload", 120, 40, 20),
    Check("offload_fp8", "states:offload_fp8", 180, 60, **(_FP8 | {"gib": 20.0})),
    Check("engine_fp8", "engines:engine_fp8", 240, 80, 30, (VLLM,), (8, 9), on_cpu=False),
    Check("mfu_fp8", "speed:mfu_fp8", 240, 100, **(_FP8 | {"gib": 70.0})),
    Check("rope", "training:rope", 120, 50, **_FUSED),
)
BY_NAME = {check.name: check for check in CHECKS}
QUICK = ("te", "head", "mfu_4b", "sync_0.6b", "tokens_graphs", "quickstart")
"""Checks of `--quick`, in this order: the policy first, which needs no vLLM."""
QUICK_MINUTES = 10.0
