"""The checks there are, the most important first, and what each needs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_checks.figures import Figure

TE, VLLM, TRITON = "transformer_engine", "vllm", "triton"
HOPPER = (9, 0)


@dataclass(frozen=True)
class Check:
    """`where` is `module:function` in this folder. `on_cpu`: it runs there too, in a tiny shape."""

    name: str
    where: str
    seconds: int
    """It is ended after these."""
    guess: int
    """Seconds that it takes, not measured yet: by these a session is planned."""
    gib: float = 8.0
    """Of GPU memory."""
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] = (7, 0)
    on_cpu: bool = True
    hidden: bool = False

    def run(self) -> Callable[..., Iterator[Figure]]:
        """The generator of its figures; imports what it needs."""
        module, function = self.where.split(":")
        found: Callable[..., Iterator[Figure]] = getattr(
            import_module(f"gpu_checks.{module}"), function
        )
        return found

    def title(self) -> str:
        """What it does, in a sentence: read, for what it imports is heavy."""
        module, function = self.where.split(":")
        text = (Path(__file__).parent / f"{module}.py").read_text("utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return " ".join((ast.get_docstring(node) or "").split())
        return ""

    def needs(self) -> str:
        """For people."""
        parts = [f"an NVIDIA GPU with {self.gib:g} GiB"]
        if self.capability > (7, 0):
            parts[0] += " of compute capability {}.{}".format(*self.capability)
        return ", ".join([*parts, *self.packages])

    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]


_FP8: dict[str, Any] = {"gib": 16.0, "packages": (TE,), "capability": HOPPER, "on_cpu": False}
_FUSED = _FP8 | {"capability": (8, 0)}

CHECKS = (
    # What a run with the shipped configs rests on.
    Check("bf16", "training:bfloat16", 240, 90, 16),
    Check("te", "training:transformer_engine", 240, 60, **_FUSED),
    Check("sync_0.6b", "engines:sync_06b", 180, 70, 30, (VLLM,)),
    Check("head", "speed:head", 120, 40, 60),
    Check("fp8_shipped", "fp8:shipped", 180, 40, **_FP8),
    Check("mfu_4b", "speed:mfu_4b", 240, 110, 70),
    Check("checkpoint", "states:checkpoint", 180, 60, 20),
    Check("moe", "training:experts", 180, 60, 16),
    Check("sync_4b", "engines:sync_4b", 300, 130, 70, (VLLM,)),
    Check("optimizers", "training:optimizers", 240, 80, 20),
    Check("end_to_end", "machine:end_to_end", 240, 90, 20, (VLLM,)),
    Check("quickstart", "machine:quickstart", 300, 120, 20, (VLLM,)),
    Check("plan", "engines:plan", 180, 80, 40, (VLLM,)),
    # What else can be configured.
    Check("fp8_current", "fp8:current", 180, 40, **_FP8),
    Check("fp8_parameters", "fp8:shipped_parameters", 180, 40, **_FP8),
    Check("recompute", "states:recompute", 180, 50, 16),
    Check("padded", "training:padded", 180, 40, 16),
    Check("checkpoint_fp8", "states:checkpoint_fp8", 180, 60, **(_FP8 | {"gib": 20.0})),
    Check("recompute_fp8", "states:recompute_fp8", 180, 60, **_FP8),
    Check("moe_fp8", "fp8:experts", 180, 50, **_FP8),
    Check("offload", "states:offload", 120, 40, 20),
    Check("offload_fp8", "states:offload_fp8", 180, 60, **(_FP8 | {"gib": 20.0})),
    Check("tokens_graphs", "engines:tokens_graphs", 240, 120, 40, (VLLM,), on_cpu=False),
    Check("engine_fp8", "engines:engine_fp8", 240, 80, 30, (VLLM,), (8, 9), on_cpu=False),
    Check("mfu_fp8", "speed:mfu_fp8", 240, 100, **(_FP8 | {"gib": 70.0})),
    Check("fp8_padded", "fp8:padded", 120, 40, **_FP8),
    Check("fp8_delayed", "fp8:delayed", 120, 40, **_FP8),
    Check("fp8_current_parameters", "fp8:parameters", 120, 40, **_FP8),
    Check("fp8_blockwise", "fp8:blockwise", 120, 40, **_FP8),
    Check("fp8_ends", "fp8:ends", 120, 40, **_FP8),
    # What is only of interest.
    Check("mfu_0.6b", "speed:mfu_06b", 180, 60, 70),
    Check("rope", "training:rope", 120, 50, **_FUSED),
    Check("tokens_eager", "engines:tokens_eager", 180, 70, 40, (VLLM,)),
    Check("mfu_triton", "speed:mfu_triton", 120, 50, 60, (TRITON,), (8, 0), on_cpu=False),
    Check("smi", "machine:smi", 60, 10, 0, on_cpu=False),
    Check("preflight", "machine:preflight", 120, 40, 8),
    Check("reference", "steps:reference", 300, 60, hidden=True),
    Check("reference_moe", "steps:reference_moe", 300, 30, hidden=True),
)
BY_NAME = {check.name: check for check in CHECKS}
SHOWN = tuple(check for check in CHECKS if not check.hidden)
QUICK = ("te", "head", "mfu_4b", "sync_0.6b", "tokens_graphs", "quickstart")
"""Checks of `--quick`, in this order: the policy first, which needs no vLLM."""
QUICK_MINUTES = 10.0
