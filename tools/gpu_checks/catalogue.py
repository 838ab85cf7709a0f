"""The checks there are, the most important first, and what each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

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
        """What it does, in a sentence."""
        return " ".join((self.run().__doc__ or "").split())

    def needs(self) -> str:
        """For people."""
        parts = [f"an NVIDIA GPU with {self.gib:g} GiB"]
        if self.capability > (7, 0):
            parts[0] += " of compute capability {}.{}".format(*self.capability)
        return ", ".join([*parts, *self.packages])

    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]


CHECKS = (
    Check("bf16", "training:bfloat16", 200, 16),
    Check("head", "speed:head", 120, 60),
    Check("sync_0.6b", "engines:sync_06b", 150, 30, (VLLM,)),
    Check("te", "training:transformer_engine", 120, 16, (TE,), (8, 0), on_cpu=False),
    Check("fp8_current", "training:fp8_current", 120, 16, (TE,), HOPPER, on_cpu=False),
    Check("mfu_4b", "speed:mfu_4b", 180, 70),
    Check("sync_4b", "engines:sync_4b", 240, 70, (VLLM,)),
    Check("optimizers", "training:optimizers", 180, 20),
    Check("plan", "engines:plan", 150, 40, (VLLM,)),
    Check("mfu_0.6b", "speed:mfu_06b", 150, 70),
    Check("offload", "training:offload", 120, 20),
    Check("tokens_eager", "engines:tokens_eager", 150, 40, (VLLM,)),
    Check("tokens_graphs", "engines:tokens_graphs", 200, 40, (VLLM,), on_cpu=False),
    Check("engine_fp8", "engines:engine_fp8", 200, 30, (VLLM,), (8, 9), on_cpu=False),
    Check("end_to_end", "machine:end_to_end", 180, 20, (VLLM,)),
    Check("rope", "training:rope", 120, 16, (TE,), (8, 0), on_cpu=False),
    Check("fp8_delayed", "training:fp8_delayed", 120, 16, (TE,), HOPPER, on_cpu=False),
    Check("fp8_blockwise", "training:fp8_blockwise", 120, 16, (TE,), HOPPER, on_cpu=False),
    Check("fp8_ends", "training:fp8_ends", 120, 16, (TE,), HOPPER, on_cpu=False),
    Check("fp8_parameters", "training:fp8_parameters", 120, 16, (TE,), HOPPER, on_cpu=False),
    Check("mfu_fp8", "speed:mfu_fp8", 180, 70, (TE,), HOPPER, on_cpu=False),
    Check("mfu_triton", "speed:mfu_triton", 120, 60, (TRITON,), (8, 0), on_cpu=False),
    Check("smi", "machine:smi", 60, 0, on_cpu=False),
    Check("preflight", "machine:preflight", 120, 8),
    Check("reference", "training:reference", 300, hidden=True),
)
BY_NAME = {check.name: check for check in CHECKS}
SHOWN = tuple(check for check in CHECKS if not check.hidden)
