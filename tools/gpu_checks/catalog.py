"""The list of checks, the most important first, and what each needs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gpu_checks.figures import Figure

TE, VLLM, TRITON = "transformer_engine", "vllm", "triton"
HOPPER = (9, 0)


@dataclass(frozen=True)
class Check:
    """A check and its requirements. `where` is `module:function` in this folder."""

    name: str
    where: str
    seconds: int
    """Time limit."""
    guess: int
    """Estimated duration in seconds, not measured yet. Sessions are planned with it."""
    gib: float = 8.0
    """GPU memory that it needs, in GiB."""
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] = (7, 0)
    on_cpu: bool = True
    """Whether it also runs on CPU, in a tiny shape."""
    hidden: bool = False
    processes: Literal["ranks", "own", "one"] = "ranks"
    """Processes under --tp: one per GPU ("ranks"), those that the check's command starts ("own"),
    or only one, because nothing is split ("one"). The last kind does not run under --tp."""

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
    Check("head", "speed:head", 120, 40, 60, processes="one"),
    Check("fp8_shipped", "fp8:shipped", 180, 40, **_FP8),
    Check("mfu_4b", "speed:mfu_4b", 240, 110, 70),
    Check("checkpoint", "states:checkpoint", 180, 60, 20),
    Check("moe", "training:experts", 180, 60, 16),
    Check("moe_repeats", "training:experts_repeat", 120, 30, 16),
    Check("sync_4b", "engines:sync_4b", 300, 130, 70, (VLLM,)),
    Check("optimizers", "training:optimizers", 240, 80, 20),
    Check("end_to_end", "machine:end_to_end", 240, 90, 20, (VLLM,), processes="own"),
    Check("quickstart", "machine:quickstart", 300, 120, 20, (VLLM,), processes="own"),
    Check("plan", "engines:plan", 180, 80, 40, (VLLM,)),
    # Other settings.
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
    # For information.
    Check("mfu_0.6b", "speed:mfu_06b", 180, 60, 70),
    Check("rope", "training:rope", 120, 50, **_FUSED),
    Check("tokens_eager", "engines:tokens_eager", 180, 70, 40, (VLLM,)),
    Check("mfu_triton", "speed:mfu_triton", 120, 50, 60, (TRITON,), (8, 0), on_cpu=False),
    Check("smi", "machine:smi", 60, 10, 0, on_cpu=False, processes="own"),
    Check("preflight", "machine:preflight", 120, 40, 8, processes="own"),
    Check("reference", "steps:reference", 300, 60, hidden=True, processes="one"),
    Check("reference_06b", "steps:reference_06b", 300, 80, hidden=True, processes="one"),
    Check("reference_moe", "steps:reference_moe", 300, 30, hidden=True, processes="one"),
)
BY_NAME = {check.name: check for check in CHECKS}
SHOWN = tuple(check for check in CHECKS if not check.hidden)
QUICK = ("te", "head", "mfu_4b", "sync_0.6b", "tokens_graphs", "quickstart")
"""Checks of `--quick`, in this order: the policy first, which needs no vLLM."""
QUICK_MINUTES = 10.0
